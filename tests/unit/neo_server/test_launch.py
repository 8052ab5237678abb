from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neo_native import make_geometry
from neo_server.banner import rows
from neo_server.errors import ConfigurationError
from neo_server.geometry import geometry_fields, num_cpu_pages
from neo_server.launch import Options, resolve
from protos.config import DType


def options(model: Path, **fields: Any) -> Options:
    return Options(model=str(model), **fields)


@pytest.mark.parametrize(
    ("has_cuda", "device", "dtype"),
    [(False, "cpu", DType.FLOAT32), (True, "cuda", DType.FLOAT16)],
)
def test_auto_takes_the_gpu_and_the_checkpoints_dtype_if_there_is_one(
    tiny_model: Path, has_cuda: bool, device: str, dtype: DType
) -> None:
    resolved = resolve(options(tiny_model), lambda: has_cuda)
    assert (resolved.config.worker.device, resolved.config.worker.dtype) == (device, dtype)
    assert {"device", "dtype", "max_model_len"} <= set(resolved.reasons)
    assert resolved.config.scheduler.max_model_len == 256


def test_what_was_given_is_taken_and_the_banner_says_so(tiny_model: Path) -> None:
    given = options(tiny_model, max_model_len=64, dtype="bfloat16", num_gpu_blocks_override=9)
    resolved = resolve(given, lambda: False)
    lines = {setting: (value, why) for setting, value, why in rows(given, resolved)}
    assert lines["max_model_len"] == ("64", "as given")
    assert lines["dtype"] == ("bfloat16", "as given")
    assert lines["GPU-cache"][0].startswith("9 blocks")


def test_the_number_of_sequences_follows_a_small_budget(tiny_model: Path) -> None:
    resolved = resolve(options(tiny_model, max_num_batched_tokens=96), lambda: False)
    assert resolved.config.scheduler.max_num_seqs == 96


def test_whole_prompts_get_a_budget_that_holds_them(tiny_model: Path) -> None:
    resolved = resolve(options(tiny_model, enable_chunked_prefill=False), lambda: False)
    assert resolved.config.scheduler.max_num_batched_tokens >= 256


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"block_size": 0}, ["block_size", "0"]),
        ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization", "1.5"]),
        (
            {"max_num_batched_tokens": 64, "enable_chunked_prefill": False},
            ["max_num_batched_tokens", "64", "256"],
        ),
    ],
)
def test_a_bad_flag_is_refused_by_name_and_value(
    tiny_model: Path, fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve(options(tiny_model, **fields), lambda: False)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_model_len": 512}, ["max_model_len", "512", "256"]),
        (
            {"max_num_batched_tokens": 8, "max_num_seqs": 9},
            ["max_num_batched_tokens", "8", "max_num_seqs", "9"],
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tiny_model: Path, fields: dict[str, Any], words: list[str]
) -> None:
    resolved = resolve(options(tiny_model, **fields), lambda: False)
    with pytest.raises(ConfigurationError) as caught:
        geometry_fields(resolved.config, resolved.model, 4)
    assert all(word in str(caught.value) for word in words)


def test_a_missing_directory_is_named() -> None:
    with pytest.raises(ConfigurationError, match="/no/such/model"):
        resolve(Options(model="/no/such/model"))


def test_an_unsupported_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ConfigurationError, match="GPT2LMHeadModel"):
        resolve(options(tmp_path))


def test_pages_are_what_kv_offloading_size_pays_for(tiny_model: Path) -> None:
    resolved = resolve(options(tiny_model, kv_offloading_size=2**-10), lambda: False)
    # 2 (K, V) x 2 layers x 2 heads x 16 x 4 bytes = 512 a token, 32 KiB a page of 64.
    assert num_cpu_pages(resolved.config.cache, resolved.model, DType.FLOAT32) == 32
    fields = geometry_fields(resolved.config, resolved.model, 4)
    geometry = make_geometry(**fields)
    assert int(geometry["n_pages"]) == 32
    assert int(geometry["max_blocks"]) == 16
