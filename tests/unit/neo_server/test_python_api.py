from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

import neo_server
from neo_server import errors
from neo_server.async_llm import AsyncLLM
from neo_server.engine_options import engine_options
from neo_server.errors import ConfigurationError, NeoError, NotReadyError, from_status, to_status


def test_importing_the_package_imports_nothing_heavy() -> None:
    script = "import sys, neo_server; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout
    for heavy in ("grpc", "numpy", "torch", "pydantic", "rich", "typer", "neo_native"):
        assert f"'{heavy}'" not in loaded


def test_every_public_name_is_there_and_others_are_not() -> None:
    for name in neo_server.__all__:
        assert getattr(neo_server, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        _ = neo_server.LLMs


def test_a_status_becomes_the_error_that_it_was() -> None:
    for kind in vars(errors).values():
        if isinstance(kind, type) and NeoError in kind.__bases__:
            error = from_status(*to_status(kind("why")))
            expected = kind if kind.code is not grpc.StatusCode.INTERNAL else NeoError
            assert (type(error), str(error)) == (expected, "why")
    unknown = from_status(grpc.StatusCode.DATA_LOSS, "gone")
    assert (type(unknown), str(unknown)) == (NeoError, "DATA_LOSS: gone")


def test_options_are_those_of_the_engine() -> None:
    options = engine_options("m", {"max_model_len": 64, "shm_dir": "/x", "kv_offloading_size": 1})
    assert (options.model, options.max_model_len, options.kv_offloading_size) == ("m", 64, 1.0)
    assert options.shm_dir == Path("/x")
    assert (options.port, options.control_port) == (0, 0)
    assert engine_options("m", {"kv_offloading_size": "auto"}).kv_offloading_size is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_modellen": 4}, "unknown option 'max_modellen'; did you mean max_model_len"),
        ({"port": 4}, "unknown option 'port'"),
        ({"api_key": "k"}, "unknown option 'api_key'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"dtype": "float64"}, "dtype is 'float64'"),
        ({"max_num_seqs": "many"}, "max_num_seqs is 'many'"),
    ],
)
def test_a_wrong_option_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        engine_options("m", given)


async def test_an_engine_that_was_not_started_says_so(tiny_model: Path) -> None:
    llm = AsyncLLM(str(tiny_model), device="cpu")
    with pytest.raises(NotReadyError, match="not been started"):
        await llm.tokenize("a")
    await llm.close()


def test_what_is_impossible_is_refused_before_anything_starts(tiny_model: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such directory"):
        AsyncLLM("./no/such/model")
    with pytest.raises(ConfigurationError, match="max_num_seqs is 0"):
        AsyncLLM(str(tiny_model), max_num_seqs=0)
