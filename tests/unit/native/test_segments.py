from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import neo_native as nn
from neo_native import segments as sg
from tests.unit.native.rig import ROOT, geometry


@pytest.fixture(params=["posix", "directory"])
def shm_dir(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return None if request.param == "posix" else str(tmp_path)


@pytest.fixture
def segs(shm_dir: str | None) -> Iterator[sg.SegmentSet]:
    made = sg.create_all(geometry(), shm_dir=shm_dir)
    yield made
    sg.unlink_all(made)
    made.close()


def exists(location: sg.Location, kind: str) -> bool:
    try:
        os.close(location.open(kind))
    except FileNotFoundError:
        return False
    return True


def test_who_attaches_sees_the_geometry_and_the_same_memory(segs: sg.SegmentSet) -> None:
    other = sg.attach_all(segs.location.instance_id, segs.location.shm_dir)
    assert other.geometry == segs.geometry
    nn.Sequences(segs.sequences, segs.geometry).page_table[3, 5] = 42
    assert nn.Sequences(other.sequences, other.geometry).page_table[3, 5] == 42
    other.close()


def test_closing_an_attachment_removes_no_name(segs: sg.SegmentSet) -> None:
    sg.attach_all(segs.location.instance_id, segs.location.shm_dir).close()
    assert all(exists(segs.location, kind) for kind in sg.KINDS)


def test_unlinking_removes_every_name_and_no_mapping(segs: sg.SegmentSet) -> None:
    table = nn.Sequences(segs.sequences, segs.geometry).page_table
    sg.unlink_all(segs)
    assert not any(exists(segs.location, kind) for kind in sg.KINDS)
    table[0, 0] = 1
    sg.unlink_all(segs)


def test_segments_are_private_and_another_mode_is_refused(segs: sg.SegmentSet) -> None:
    fd = segs.location.open("work")
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    os.fchmod(fd, 0o644)
    os.close(fd)
    with pytest.raises(sg.SegmentsError, match="mode 644; it must be 600"):
        sg.attach_all(segs.location.instance_id, segs.location.shm_dir)


def test_the_cpu_cache_of_a_reader_cannot_be_written(segs: sg.SegmentSet) -> None:
    reader = sg.attach_all(
        segs.location.instance_id, segs.location.shm_dir, cpu_cache_writable=False
    )
    sequences = nn.Sequences(reader.sequences, reader.geometry)
    cache = nn.CpuCache(reader.cpu_cache, sequences, reader.geometry)
    assert not reader.cpu_cache.writable
    row = np.zeros((1, 2, 64), np.float32)
    with pytest.raises(ValueError, match="read-only"):
        cache.store_span(0, 0, 0, row, row)
    reader.close()


def test_a_second_instance_of_one_id_is_refused_and_harms_nothing(segs: sg.SegmentSet) -> None:
    with pytest.raises(FileExistsError):
        sg.create_all(geometry(), segs.location.instance_id, segs.location.shm_dir)
    assert all(exists(segs.location, kind) for kind in sg.KINDS)
    assert segs.is_locked(sg.SERVER_BYTE)


@pytest.mark.parametrize(
    ("offset", "match"),
    [
        (0, "magic is 0x.*this build has 0x"),
        (8, "layout hash is 0x.*this build has 0x"),
        (16, "its header says"),
        (24, "segment kind is"),
        (36, "version is 0x.*this build has 0x3"),
    ],
)
def test_a_segment_of_another_build_is_refused_with_both_values(
    segs: sg.SegmentSet, offset: int, match: str
) -> None:
    fd = segs.location.open("work")
    os.pwrite(fd, b"\x7f", offset)
    os.close(fd)
    with pytest.raises(nn.LayoutMismatchError, match=match):
        sg.attach_all(segs.location.instance_id, segs.location.shm_dir)


def test_a_half_made_segment_is_refused(shm_dir: str | None) -> None:
    location = sg.Location("unfinished" + str(os.getpid()), shm_dir)
    fd = location.open("control", create=True)
    try:
        for size in (0, 4096):
            os.ftruncate(fd, size)
            with pytest.raises(nn.LayoutMismatchError, match="not finished"):
                nn.Segment.attach(fd, nn.SegmentKind.CONTROL)
    finally:
        location.unlink("control")
        os.close(fd)


def test_a_segment_of_another_geometry_is_refused(segs: sg.SegmentSet) -> None:
    with pytest.raises(nn.LayoutMismatchError, match="bytes, this geometry needs"):
        nn.Sequences(segs.sequences, geometry(max_slots=9))
    with pytest.raises(nn.LayoutMismatchError, match="kind"):
        nn.Sequences(segs.work, segs.geometry)


def test_too_little_room_is_an_error_that_says_both_sizes_and_leaves_nothing(
    shm_dir: str | None,
) -> None:
    huge = geometry(n_layers=4096, n_pages=1 << 24)
    with pytest.raises(nn.SharedMemoryError, match=r"needs \d+ bytes of shared memory, has \d+"):
        sg.create_all(huge, "toolarge" + str(os.getpid()), shm_dir)
    location = sg.Location("toolarge" + str(os.getpid()), shm_dir)
    assert not any(exists(location, kind) for kind in sg.KINDS)


HOLDER = """
import sys, time
from neo_native import segments as sg, make_geometry
import numpy as np
from tests.unit.native.rig import geometry
s = sg.create_all(geometry(), sys.argv[1], sys.argv[2] or None)
print(s.location.instance_id, flush=True)
time.sleep(600)
"""


@pytest.fixture
def server(shm_dir: str | None) -> Iterator[tuple[subprocess.Popen[str], sg.Location]]:
    location = sg.Location(f"srv{os.getpid()}", shm_dir)
    path = os.pathsep.join(entry for entry in [str(ROOT), *sys.path] if entry)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, location.instance_id, shm_dir or ""],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == location.instance_id
    yield process, location
    process.kill()
    process.wait()
    process.stdout.close()
    for kind in sg.KINDS:
        location.unlink(kind)


def test_segments_of_a_living_server_are_not_reclaimed_and_those_of_a_killed_one_are(
    server: tuple[subprocess.Popen[str], sg.Location],
) -> None:
    process, location = server
    assert location.instance_id not in sg.reclaim_dead(location.shm_dir)
    worker = sg.attach_all(location.instance_id, location.shm_dir)
    assert worker.is_locked(sg.SERVER_BYTE)
    process.send_signal(signal.SIGSTOP)
    assert location.instance_id not in sg.reclaim_dead(location.shm_dir)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not worker.is_locked(sg.SERVER_BYTE)
    assert location.instance_id in sg.reclaim_dead(location.shm_dir)
    assert not any(exists(location, kind) for kind in sg.KINDS)
    worker.close()


def test_a_worker_row_is_locked_by_one_process_and_cleared_only_when_its_lock_is_free(
    segs: sg.SegmentSet,
) -> None:
    control = nn.Control(segs.control)
    worker = sg.attach_all(segs.location.instance_id, segs.location.shm_dir)
    rival = sg.attach_all(segs.location.instance_id, segs.location.shm_dir)
    byte = sg.cpu_worker_byte(2)
    assert worker.try_lock(byte)
    assert not rival.try_lock(byte)
    control.take_row(2, 4711, 3)
    assert control.lease_core(5, 2)
    assert not control.lease_core(5, 1)
    assert sg.clear_dead_workers(segs, control) == []
    worker.close()
    assert sg.clear_dead_workers(segs, control) == [2]
    assert int(control.worker_rows()["pid"][2]) == 0
    assert control.lease_core(5, 1)
    rival.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 72}, "head_dim is 72; it must be a multiple of the vector width, 16"),
        ({"head_dim": 272}, "head_dim is 272; it must be from 16 to 256"),
        ({"n_heads": 9}, "n_heads is 9; it must be a multiple of n_kv_heads, 2"),
        ({"n_heads": 34}, "n_heads / n_kv_heads is 17; it must be from 1 to 16"),
        ({"page_size": 4}, "page_size is 4; it must be from 8 to 256"),
        ({"kv_dtype": 4}, "kv_dtype is 4; it must be 0"),
        ({"max_tasks": 15}, "max_tasks is 15; it must be from 16 to"),
        ({"max_workers": 513}, "max_workers is 513; it must be from 1 to 512"),
        ({"rank": 1}, "rank is 1; it must be from 0 to 0"),
        ({"n_pages": (1 << 28) + 1}, "n_pages is 268435457; it must be from 0 to 268435456"),
        (
            {"n_pages": 1 << 28, "n_layers": 4096, "n_heads": 16, "n_kv_heads": 16},
            "n_pages * n_layers * n_kv_heads is 17592186044416; it must be from 0 to",
        ),
        ({"ride_groups": 2, "ride_capacity": 8}, "ride_groups is 2; it must be from 3 to 3"),
        ({"ride_groups": 3}, "ride_capacity is 0; it must be from 1 to 4096"),
        ({"ride_capacity": 8}, "ride_capacity is 8; it must be from 0 to 0"),
        ({"n_layers": -1}, "n_layers is -1; it must be from 0"),
        ({"n_wheels": 4}, "n_wheels is not a field"),
    ],
)
def test_a_bad_geometry_names_field_value_and_limit(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace("*", "[*]")):
        geometry(**changes)


def test_a_tiny_model_may_have_hundreds_of_gibibytes_of_pages() -> None:
    tiny = geometry(n_layers=1, n_heads=1, n_kv_heads=1, head_dim=16, page_size=64, n_pages=1 << 26)
    size = nn.segment_bytes(tiny, nn.SegmentKind.CPU_CACHE)
    assert size == 4096 + (1 << 26) * 2 * 64 * 16 * 4
