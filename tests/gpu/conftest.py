from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import demo_model as demo_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
