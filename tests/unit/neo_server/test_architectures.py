from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from neo_server import architectures
from neo_server.errors import ConfigurationError
from neo_server.launch import Options, resolve
from neo_server.roofline import SHAPES
from protos.config import DType
from protos.model_config import ModelConfig


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("Llama-2-7B", "Llama-2-7B"),
        ("llama-2-7b", "Llama-2-7B"),
        ("meta-llama/Llama-2-7b-hf", "Llama-2-7B"),
        ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7B"),
        ("Llama-3.1-8B", "Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("Meta-Llama-3.1-70B", "Llama-3.1-70B"),
    ],
)
def test_an_architecture_is_found_however_users_spell_it(name: str, folder: str) -> None:
    found = architectures.find(name)
    assert found is not None
    assert found.name == folder


@pytest.mark.parametrize("name", ["Llama-3.1-405B", "Llama-3-8B", "other/Llama-2-7B", ""])
def test_another_model_is_none(name: str) -> None:
    assert architectures.find(name) is None


@pytest.mark.parametrize(
    ("name", "billions"), [("Llama-2-7B", 6.74), ("Llama-3.1-8B", 8.03), ("Llama-3.1-70B", 70.55)]
)
def test_the_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    folder = architectures.find(name)
    assert folder is not None
    model = ModelConfig.from_pretrained(folder)
    width = model.q_size + 2 * model.kv_size
    layer = model.hidden_size * (width + model.q_size + 3 * model.intermediate_size)
    total = model.num_hidden_layers * layer + 2 * model.vocab_size * model.hidden_size
    assert round(total / 1e9, 2) == billions
    shape = SHAPES[name.lower()]  # the simulator's
    assert shape.parameters == total
    assert shape.kv_bytes * shape.layers == model.kv_bytes_per_token(2)


def test_random_weights_of_a_name_need_neither_the_hub_nor_a_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _unreachable)
    named = Options(model="meta-llama/Llama-3.1-8B", load_format="dummy", max_model_len=2048)
    resolved = resolve(named, lambda: True)
    assert not resolved.has_tokenizer
    assert "random weights" in resolved.reasons["skip_tokenizer_init"]
    assert (resolved.model.num_key_value_heads, resolved.model.dtype) == (8, DType.BFLOAT16)
    assert Path(resolved.config.model_path, "config.json").exists()


def test_a_name_without_dummy_weights_is_the_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _unreachable)
    with pytest.raises(ConfigurationError, match="no network"):
        resolve(Options(model="meta-llama/Llama-3.1-8B"), lambda: False)
    with pytest.raises(ConfigurationError, match=r"none of Llama-2-7B.*no network"):
        resolve(Options(model="meta-llama/Llama-4", load_format="dummy"), lambda: False)


def test_random_weights_of_a_directory_keep_its_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    dummy: dict[str, Any] = {"load_format": "dummy"}
    assert resolve(Options(model=str(tiny_model), **dummy), lambda: False).has_tokenizer
    skipped = Options(model=str(tiny_model), skip_tokenizer_init=True)
    assert not resolve(skipped, lambda: False).has_tokenizer
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    assert not resolve(Options(model=str(tmp_path), **dummy), lambda: False).has_tokenizer
    assert resolve(Options(model=str(tmp_path)), lambda: False).has_tokenizer  # and refused later


def _unreachable(*_args: object, **_named: object) -> str:
    raise OSError("no network")
