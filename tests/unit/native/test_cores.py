from __future__ import annotations

import os
from pathlib import Path

import pytest

from neo_native import cores


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        # The path is the host's, of which a container sees only its own root.
        ({"proc/self/cgroup": "0::/../x\n", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
        (
            {
                "proc/self/cgroup": "12:cpu:/old\n0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "800000 100000",
                "sys/fs/cgroup/a/cpu.max": "300000 100000",
                "sys/fs/cgroup/c/cpu.max": "100000 100000",
            },
            3.0,
        ),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
    ],
)
def test_the_tightest_quota_counts(
    tmp_path: Path, files: dict[str, str], limit: float | None
) -> None:
    assert cores.cgroup_limit(write(tmp_path, files)) == limit


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2, 18)))


@pytest.mark.usefixtures("sixteen")
@pytest.mark.parametrize(
    ("quota", "reserved", "leasable"),
    [
        ("max", 2, list(range(4, 18))),
        ("400000 100000", 0, [2, 3, 4, 5]),
        ("450000 100000", 1, [3, 4, 5]),
        ("50000 100000", 0, [2]),
        ("50000 100000", 1, []),
    ],
)
def test_no_more_cores_are_leased_than_mask_and_quota_allow(
    tmp_path: Path, quota: str, reserved: int, leasable: list[int]
) -> None:
    root = write(tmp_path, {"sys/fs/cgroup/cpu.max": quota})
    assert cores.leasable(reserved, root) == leasable


def test_cores_are_grouped_by_node_in_numeric_order(tmp_path: Path) -> None:
    lists = {0: "0-3,16-19", 2: "4-7", 10: "8-11"}
    files = {f"sys/devices/system/node/node{n}/cpulist": f"{c}\n" for n, c in lists.items()}
    root = write(tmp_path, files)
    assert cores.by_node([2, 3, 5, 8, 17, 40], root) == [[2, 3, 17], [5], [8], [40]]
    assert cores.by_node([1, 2], tmp_path / "nothing") == [[1, 2]]
    assert cores.by_node([], root) == []
