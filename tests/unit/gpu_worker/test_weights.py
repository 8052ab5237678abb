from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.errors import CheckpointError
from gpu_worker.weights import LlamaWeights, destinations, dummy_weights, load_weights
from protos.model_config import ModelConfig
from tests.helpers.tiny_llama import make_checkpoint

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaWeights:
    return load_weights(folder, ModelConfig.from_pretrained(folder), dtype, CPU)


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replaces, adds or (None) drops tensors of the single file."""
    tensors = load_file(folder / "model.safetensors") | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


@pytest.mark.parametrize("style", ["llama2", "llama3.2"])
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_every_tensor_lands_in_its_part_in_the_wanted_dtype(
    tmp_path: Path, style: str, stored: torch.dtype, wanted: torch.dtype
) -> None:
    model = make_checkpoint(tmp_path, style, dtype=stored)
    weights = load(tmp_path, wanted)
    config = ModelConfig.from_pretrained(tmp_path)
    parameters = dict(model.named_parameters())
    views = destinations(weights, config)
    assert views.keys() == parameters.keys()
    for name, view in views.items():
        assert view.dtype is wanted
        assert torch.equal(view, parameters[name].detach().to(wanted)), name


def test_a_sharded_checkpoint_loads_as_a_single_file_does(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "one")
    make_checkpoint(tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    assert torch.equal(one.layers[2].qkv, many.layers[2].qkv)
    assert torch.equal(one.head, many.head)


@pytest.mark.parametrize(("style", "tied"), [("llama3", False), ("llama3.2", True)])
def test_a_tied_head_is_the_embedding_itself(tmp_path: Path, style: str, tied: bool) -> None:
    make_checkpoint(tmp_path, style)
    weights = load(tmp_path)
    assert (weights.head is weights.embedding) is tied


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    rewrite(tmp_path, {"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(CheckpointError, match=r"missing.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)
    make_checkpoint(tmp_path)
    rewrite(tmp_path, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(CheckpointError, match=r"unexpected.*layers\.0\.self_attn\.q_proj\.bias"):
        load(tmp_path)


def test_an_ill_shaped_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    rewrite(tmp_path, {"model.layers.2.self_attn.k_proj.weight": torch.zeros(64, 64)})
    with pytest.raises(CheckpointError, match=r"layers\.2.*k_proj.*\[64, 64\].*\[32, 64\]"):
        load(tmp_path)


def test_a_quantised_tensor_is_named_with_its_type(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    rewrite(tmp_path, {"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: dtype is torch\.int8"):
        load(tmp_path)


def test_a_weight_beyond_float16_is_refused_by_name(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    rewrite(tmp_path, {"model.norm.weight": torch.full((64,), 1e6)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: does not fit into float16"):
        load(tmp_path, torch.float16)
    assert load(tmp_path, torch.bfloat16).norm.isfinite().all()


def test_a_redundant_head_of_a_tied_checkpoint_is_ignored(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama3.2")
    rewrite(tmp_path, {"lm_head.weight": torch.zeros(320, 96)})
    assert load(tmp_path).head.abs().sum() > 0


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, max_shard_size="60KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    victim = index["weight_map"]["model.norm.weight"]
    (tmp_path / victim).unlink()
    with pytest.raises(CheckpointError, match=victim):
        load(tmp_path)


def test_a_folder_without_weights_and_a_torn_file_say_so(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match="neither"):
        load(tmp_path)


def test_dummy_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    config = ModelConfig.from_pretrained(tmp_path)
    a, b, c = (dummy_weights(config, torch.float16, CPU, seed) for seed in (1, 1, 2))
    assert torch.equal(a.layers[1].gate_up, b.layers[1].gate_up)
    assert not torch.equal(a.layers[1].gate_up, c.layers[1].gate_up)
    assert a.norm.eq(1).all()
