from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.server import REPO


@pytest.fixture(scope="session")
def demo_model() -> Path:
    path = Path(
        os.environ.get("NEO_TEST_MODEL", REPO / ".cache" / "models" / "SmolLM2-135M-Instruct")
    )
    if not (path / "model.safetensors").exists():
        pytest.fail(f"no demo model at {path}; `make model` puts it there")
    return path
