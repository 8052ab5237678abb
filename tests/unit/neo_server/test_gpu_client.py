from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from neo_server import gpu_client as module
from neo_server.errors import GpuWorkerDiedError, GpuWorkerHungError
from neo_server.gpu_client import GpuClient


class Rings:
    """Both rings; the worker at their end never answers."""

    def __init__(self) -> None:
        self.waits = 0

    def acquire(self) -> object:
        return object()

    def publish(self) -> None:
        pass

    def wait(self, timeout_s: float) -> bool:
        self.waits += 1
        return False


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GpuClient, Rings, list[Any]]]:
    monkeypatch.setattr(module, "write_step", lambda *_: None)
    rings, told = Rings(), []
    client = GpuClient(
        rings,  # type: ignore[arg-type]
        rings,  # type: ignore[arg-type]
        told.append,
        lambda: told.append("hangs"),
        plan_timeout_s=20 * module._WAIT_SLICE_S,
    )
    yield client, rings, told
    client.close()


async def test_a_worker_that_does_not_answer_is_given_up_with_all_its_plans(
    hung: tuple[GpuClient, Rings, list[Any]],
) -> None:
    client, rings, told = hung
    client.report_ready(8, "fake")
    await client.recovered()
    step: Any = None
    outcomes = await asyncio.gather(
        client.execute(step), client.execute(step), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [GpuWorkerHungError, GpuWorkerDiedError]
    assert "--plan-timeout" in str(outcomes[0])
    assert told == [True, False, "hangs"]
    assert not client.is_ready
    assert rings.waits <= 21 + 1  # the second did not wait as long again
    with pytest.raises(GpuWorkerDiedError):
        await client.execute(step)
