from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_worker.weights import load_weights
from protos.config import DType, KvCacheDType
from protos.model_config import ModelConfig
from scripts.perplexity import Run, mean_loss
from tests.helpers.tiny_llama import make_checkpoint

ROWS, LENGTH = 2, 40


@pytest.mark.parametrize(
    ("run", "tolerance"),
    [
        (Run(0.0, KvCacheDType.FLOAT32), 1e-5),
        (Run(1.0, KvCacheDType.FLOAT32), 1e-5),
        (Run(0.5, KvCacheDType.FLOAT32), 1e-5),
        (Run(0.5, KvCacheDType.FLOAT32, batches=2), 1e-5),
        (Run(1.0, KvCacheDType.FLOAT32, batches=2), 1e-5),
        (Run(1.0, KvCacheDType.INT8), 0.02),
    ],
)
def test_the_loss_is_that_of_transformers(tmp_path: Path, run: Run, tolerance: float) -> None:
    model = make_checkpoint(tmp_path)
    tokens = torch.randint(3, 320, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        right = float(model(tokens, labels=tokens).loss)
    config = ModelConfig.from_pretrained(tmp_path)
    weights = load_weights(tmp_path, config, torch.float32, torch.device("cpu"))
    found = mean_loss(weights, config, tokens.numpy().astype(np.int32), DType.FLOAT32, run, 1)
    assert math.isclose(found, right, abs_tol=tolerance)
    if run.kv_dtype is KvCacheDType.INT8:
        assert found != pytest.approx(right, abs=1e-6)
