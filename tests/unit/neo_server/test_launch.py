from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.cuda.buckets import Buckets
from neo_native import make_geometry
from neo_server import launch
from neo_server.banner import rows
from neo_server.errors import ConfigurationError
from neo_server.geometry import SPARE_WORKERS, geometry_fields, num_cpu_pages
from neo_server.host_memory import FreeMemory
from neo_server.launch import Options, resolve
from neo_server.policies import load_policy
from protos.config import DType
from tests.unit.neo_server.conftest import CONFIG


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
    fields = {"max_model_len": 64, "dtype": "bfloat16", "num_gpu_blocks_override": 9}
    given = options(tiny_model, **fields, cpu_attn_timeout=2.5)
    resolved = resolve(given, lambda: False)
    assert resolved.config.worker.cpu_attn_timeout_s == 2.5
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
    with pytest.raises(ConfigurationError) as caught:
        resolve(options(tiny_model, **fields), lambda: False)
    assert all(word in str(caught.value) for word in words)
    sized = options(tiny_model, **fields, kv_offloading_size=1.0)
    resolved = resolve(sized, lambda: False)
    with pytest.raises(ConfigurationError) as caught:
        geometry_fields(resolved.config, resolved.model, 4)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"shm_dir": Path("/no/such/tmpfs")}, ["--shm-dir", "/no/such/tmpfs"]),
        ({"address_file": Path("/no/such/folder/address")}, ["--address-file", "/no/such/folder"]),
        ({"kv_offloading_size": math.inf}, ["kv_offloading_size", "inf", "finite"]),
        ({"kv_offloading_size": math.nan}, ["kv_offloading_size", "nan"]),
        ({"cpu_attn_workers": 1000}, ["--cpu-attn-workers", "1000", "496"]),
        ({"cpu_attn_workers": -1}, ["--cpu-attn-workers", "-1"]),
        ({"cpu_attn_threads": 513}, ["--cpu-attn-threads", "513", "512"]),
        ({"cpu_attn_threads": 0}, ["--cpu-attn-threads", "0", "1"]),
        ({"reserved_cores": -1}, ["--reserved-cores", "-1"]),
        ({"max_num_queued_reqs": -1}, ["--max-num-queued-reqs", "-1"]),
        ({"max_num_queued_tokens": -1}, ["--max-num-queued-tokens", "-1"]),
        ({"http_port": 70000}, ["--http-port", "70000", "65535"]),
        ({"http_host": "::1"}, ["--http-host", "::1", "--http-port"]),
        ({"api_key": ""}, ["--api-key", "empty"]),
        ({"plan_timeout": math.nan}, ["--plan-timeout", "nan"]),
        ({"cpu_attn_timeout": 0.0}, ["--cpu-attn-timeout", "0.0"]),
    ],
)
def test_an_impossible_flag_is_one_line_that_names_it(
    tiny_model: Path, fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve(options(tiny_model, **fields), lambda: False)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_the_most_workers_that_are_allowed_fit_into_the_worker_table(tiny_model: Path) -> None:
    resolved = resolve(options(tiny_model, cpu_attn_workers=496), lambda: False)
    make_geometry(**geometry_fields(resolved.config, resolved.model, 496 + SPARE_WORKERS))


def test_a_relative_shm_dir_is_resolved(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shm").mkdir()
    monkeypatch.chdir(tmp_path)
    resolved = resolve(options(tiny_model, shm_dir=Path("shm")), lambda: False)
    assert resolved.config.cache.shm_dir == str((tmp_path / "shm").resolve())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps({key: CONFIG[key] for key in CONFIG if key != "vocab_size"}), ["vocab_size"]),
        (json.dumps({**CONFIG, "vocab_size": "wide"}), ["vocab_size", "wide"]),
        (json.dumps({**CONFIG, "dtype": "float8"}), ["float8"]),
        ("{", ["config.json"]),
    ],
)
def test_a_config_json_that_is_wrong_is_one_line_that_says_where(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        resolve(options(tmp_path), lambda: False)
    assert all(word in str(caught.value) for word in (str(tmp_path), *words))
    assert "\n" not in str(caught.value)


def test_gpu_only_starts_no_cpu_workers_and_no_cpu_cache_unless_asked(tiny_model: Path) -> None:
    given = options(tiny_model, scheduling_policy="gpu-only")
    resolved = resolve(given, lambda: False)
    assert resolved.config.worker.cpu_attn_workers == 0
    fields = geometry_fields(resolved.config, resolved.model, 4)
    assert int(make_geometry(**fields)["n_pages"]) == 1  # for the profile
    assert num_cpu_pages(resolved.config.cache, resolved.model, DType.FLOAT32) == 0
    lines = {setting: (value, why) for setting, value, why in rows(given, resolved)}
    assert lines["CPU-cache"][1] == "gpu-only has no CPU-requests"
    assert lines["cpu-attention workers"][1] == "gpu-only has no CPU-requests"
    asked = replace(given, cpu_attn_workers=1, kv_offloading_size=0.5)
    config = resolve(asked, lambda: False).config
    assert (config.worker.cpu_attn_workers, config.cache.kv_offloading_size) == (1, 0.5)
    config = resolve(options(tiny_model), lambda: False).config
    assert config.worker.cpu_attn_workers == 2
    assert config.cache.kv_offloading_size > 0.0


def test_the_default_cpu_cache_is_sized_by_what_is_free(tiny_model: Path) -> None:
    gib = 1 << 30

    def free(shm_dir: Path | None) -> FreeMemory:
        assert shm_dir is None
        return FreeMemory(64 * gib, "MemAvailable", 32 * gib, "/dev/shm")

    given = options(tiny_model, dtype="float16")
    resolved = resolve(given, lambda: True, free)
    # 256 sequences of 256 tokens, four pages each of 16 KiB.
    assert resolved.config.cache.kv_offloading_size == 256 * 4 * 16 / 2**20
    lines = {setting: (value, why) for setting, value, why in rows(given, resolved)}
    assert lines["CPU-cache"][0].startswith("1024 pages of 64 tokens, float16")
    assert "256 sequences of 256 tokens" in lines["CPU-cache"][1]
    tight = resolve(given, lambda: True, lambda _: FreeMemory(1 << 20, "MemAvailable", None, ""))
    assert num_cpu_pages(tight.config.cache, tight.model, DType.FLOAT16) == 32
    assert "50% of 0.00 GiB of memory, MemAvailable" in tight.reasons["kv_offloading_size"]
    asked = resolve(replace(given, kv_offloading_size=3.5), lambda: True, _must_not_measure)
    assert asked.config.cache.kv_offloading_size == 3.5
    assert "kv_offloading_size" not in asked.reasons
    none = replace(given, scheduling_policy="gpu-only")
    assert resolve(none, lambda: True, _must_not_measure).config.cache.kv_offloading_size == 0.0


@pytest.mark.parametrize(
    ("policy", "count"),
    [("gpu-only", 50), ("simple-offload", 50), ("symmetric", 123), ("piggyback", 127),
     ("mixed", 173), ("neo", 250), ("tests.helpers.policies:churn", 250)],
)  # fmt: skip
def test_a_policy_has_the_graphs_of_the_plans_that_it_makes(
    policy: str, count: int, tiny_model: Path
) -> None:
    given = Options(model=str(tiny_model), scheduling_policy=policy, kv_offloading_size=0.5)
    scheduler = resolve(given, lambda: True).config.scheduler
    chosen = Buckets(256, 2048, scheduler.ride_capacity)
    assert len(set(chosen.keys(scheduler.plan_modes))) == count
    assert (scheduler.ride_capacity > 0) == ("piggyback" in scheduler.plan_modes)


def _must_not_measure(_shm_dir: Path | None) -> FreeMemory:
    raise AssertionError("measured")


@pytest.mark.parametrize(
    ("visible", "build", "usable"),
    [
        (None, "'12.8'", True),
        ("0,1", "'12.8'", True),
        ("", "'12.8'", False),
        ("-1", "'12.8'", False),
        (None, "None", False),
    ],
)
def test_a_gpu_that_is_hidden_or_that_pytorch_cannot_use_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, build: str, usable: bool
) -> None:
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("raise AssertionError('imported')")
    (torch / "version.py").write_text(
        f"__all__ = ['cuda']\ndebug = False\ncuda: Optional[str] = {build}\n"
    )
    spec = importlib.util.spec_from_file_location("torch", torch / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(launch, "_DEVICES", tmp_path)
    (tmp_path / "nvidia0").touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert launch.has_cuda_device() is usable
    (tmp_path / "nvidia0").unlink()
    assert not launch.has_cuda_device()


def test_a_policy_of_the_working_directory_is_found_and_nothing_else_there_is_importable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_policy.py").write_text("def plan(view, cost): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = list(sys.path)
    assert load_policy("my_own_policy:plan").name == "my_own_policy:plan"
    assert sys.path == before
    with pytest.raises(ConfigurationError, match="no_such_policy"):
        load_policy("no_such_policy:plan")
    assert sys.path == before


def test_a_missing_directory_is_named() -> None:
    with pytest.raises(ConfigurationError, match="/no/such/model"):
        resolve(Options(model="/no/such/model"))


def test_an_unsupported_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ConfigurationError, match="GPT2LMHeadModel"):
        resolve(options(tmp_path))


@pytest.mark.parametrize(
    ("kind", "pages", "code"),
    [
        ("auto", 32, 0),
        ("float32", 32, 0),
        ("bfloat16", 64, 2),
        ("float16", 64, 1),
        ("int8", 102, 3),
    ],
)
def test_a_smaller_cpu_cache_dtype_buys_more_pages(
    tiny_model: Path, kind: str, pages: int, code: int
) -> None:
    given = options(tiny_model, kv_offloading_size=2**-10, cpu_kv_cache_dtype=kind)
    resolved = resolve(given, lambda: False)
    # int8: 2 x 2 layers x 2 heads x (16 + 4) bytes = 160 a token, 10 KiB a page.
    geometry = make_geometry(**geometry_fields(resolved.config, resolved.model, 4))
    assert (int(geometry["n_pages"]), int(geometry["kv_dtype"])) == (pages, code)
    assert int(geometry["act_dtype"]) == 0
    lines = {setting: value for setting, value, _ in rows(given, resolved)}
    assert lines["CPU-cache"].startswith(f"{pages} pages of 64 tokens")


def test_an_unknown_cpu_cache_dtype_is_refused_by_name_and_value(tiny_model: Path) -> None:
    with pytest.raises(ConfigurationError, match="cpu_kv_cache_dtype is 'fp8'"):
        resolve(options(tiny_model, cpu_kv_cache_dtype="fp8"), lambda: False)


def test_pages_are_what_kv_offloading_size_pays_for(tiny_model: Path) -> None:
    resolved = resolve(options(tiny_model, kv_offloading_size=2**-10), lambda: False)
    # 2 (K, V) x 2 layers x 2 heads x 16 x 4 bytes = 512 a token, 32 KiB a page of 64.
    assert num_cpu_pages(resolved.config.cache, resolved.model, DType.FLOAT32) == 32
    fields = geometry_fields(resolved.config, resolved.model, 4)
    geometry = make_geometry(**fields)
    assert int(geometry["n_pages"]) == 32
    assert int(geometry["max_blocks"]) == 16
