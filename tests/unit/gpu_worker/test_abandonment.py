from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import neo_native as native
from gpu_worker.abandonment import STATUS, is_abandoned
from neo_native import segments as shm
from protos.config import DType
from protos.model_config import ModelConfig
from tests.helpers.engine_rig import make_geometry
from tests.helpers.tiny_llama import make_checkpoint

REPO = Path(__file__).resolve().parents[3]
HANGING = """
import sys, time
from gpu_worker.abandonment import end_when_abandoned
from neo_native import segments
end_when_abandoned(segments.attach_all(sys.argv[1]), 0, look_s=0.01, leave_s=0.05)
print("watching", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def geometry(tmp_path_factory: pytest.TempPathFactory) -> native.Array:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder)
    return make_geometry(ModelConfig.from_pretrained(folder), DType.FLOAT32)


@pytest.fixture
def segments(geometry: native.Array) -> Iterator[shm.SegmentSet]:
    made = shm.create_all(geometry)
    yield made
    shm.unlink_all(made)
    made.close()


def give_up(segments: shm.SegmentSet) -> None:
    segments.try_lock(shm.gpu_given_up_byte(0))


def stop(segments: shm.SegmentSet) -> None:
    native.Control(segments.control).set_stopping()


def die(segments: shm.SegmentSet) -> None:
    shm.unlock(segments.fd, shm.SERVER_BYTE)


HOW = pytest.mark.parametrize("how", [give_up, stop, die])


@HOW
def test_a_worker_is_abandoned(
    segments: shm.SegmentSet, how: Callable[[shm.SegmentSet], None]
) -> None:
    worker = shm.attach_all(segments.location.instance_id)
    control = native.Control(worker.control)
    assert not is_abandoned(worker, control, 0)
    how(segments)
    assert is_abandoned(worker, control, 0)
    worker.close()


def test_of_another_rank_does_not_matter(segments: shm.SegmentSet) -> None:
    worker = shm.attach_all(segments.location.instance_id)
    give_up(segments)
    assert not is_abandoned(worker, native.Control(worker.control), 1)
    worker.close()


@HOW
def test_a_main_thread_that_hangs_is_ended(
    segments: shm.SegmentSet, how: Callable[[shm.SegmentSet], None]
) -> None:
    path = os.pathsep.join([str(REPO), str(Path(native.__file__).parent.parent)])
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, segments.location.instance_id],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "watching\n"
        assert process.poll() is None
        how(segments)
        assert process.wait(60.0) == STATUS
    finally:
        process.kill()
        process.communicate()
