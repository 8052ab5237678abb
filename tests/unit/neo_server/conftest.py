from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.server_process import Process
from tests.unit.neo_server.test_tokenizer import byte_level

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 399,
    "dtype": "float16",
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory without weights: the server reads none."""
    folder = tmp_path_factory.mktemp("tiny-model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    byte_level()._rust.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def starting(tiny_model: Path, tmp_path: Path) -> Iterator[Process]:
    """A server that has no gpu worker yet."""
    process = Process(tiny_model, tmp_path)
    yield process
    process.close()


@pytest.fixture
def server(starting: Process) -> Process:
    """One that serves, with a fake gpu worker."""
    starting.worker()
    starting.until(starting.address_file.exists)
    return starting
