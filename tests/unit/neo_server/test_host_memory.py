from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from neo_native import segments
from neo_server.errors import ConfigurationError
from neo_server.host_memory import (
    FreeMemory,
    Need,
    auto_size,
    cgroup_free,
    free_memory,
    parse_size,
)

GIB = 1 << 30
FREE = FreeMemory(100 * GIB, "MemAvailable", 80 * GIB, "/dev/shm")
NEED = Need("cuda", 3 << 20, 1 << 20, "many sequences", 10 * GIB)


def pages(size_gib: float, page: int) -> float:
    return size_gib * GIB / page


@pytest.mark.parametrize(
    ("free", "need", "most_gib", "why"),
    [
        ({}, {}, 50.0, "50% of 100.00 GiB of memory, MemAvailable"),
        ({"shared": 50 * GIB}, {}, 36.0, "90% of 40.00 GiB that /dev/shm has left"),
        ({"shared": None}, {}, 50.0, "MemAvailable"),
        ({"shared": 5 * GIB}, {}, 0.0, "90% of 0.00 GiB"),
        ({}, {"pages": 1024}, 3.0, "all that many sequences can fill"),
        ({}, {"device": "cpu"}, 1.0, "at most 1.00 GiB with --device cpu"),
        ({"memory": GIB}, {"device": "cpu"}, 0.5, "50% of 1.00 GiB"),
    ],
)
def test_the_tightest_limit_decides_and_is_named(
    free: dict[str, Any], need: dict[str, Any], most_gib: float, why: str
) -> None:
    wanted = replace(NEED, **need)
    size, reason = auto_size(replace(FREE, **free), wanted)
    assert reason.startswith("auto: ")
    assert why in reason
    count = pages(size, wanted.page)
    assert count == int(count)
    assert size <= most_gib < size + wanted.page / GIB


@pytest.mark.parametrize(("text", "size"), [("auto", None), ("2.5", 2.5), ("0", 0.0)])
def test_a_size_is_a_number_or_auto(text: str, size: float | None) -> None:
    assert parse_size(text) == size


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="much"):
        parse_size("much")


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_tightest_ancestor_of_a_v2_cgroup_counts_without_reclaimable_file_pages(
    tmp_path: Path,
) -> None:
    cgroup = "sys/fs/cgroup"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            f"{cgroup}/a/b/memory.max": "max\n",
            f"{cgroup}/a/b/memory.current": "5\n",
            f"{cgroup}/a/memory.max": "1000\n",
            f"{cgroup}/a/memory.current": "700\n",
            f"{cgroup}/a/memory.stat": "anon 400\ninactive_file 250\n",
        },
    )
    assert cgroup_free(root) == 1000 - 700 + 250


def test_a_v1_memory_cgroup_counts_by_its_own_names(tmp_path: Path) -> None:
    cgroup = "sys/fs/cgroup/memory"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/host/path\n1:cpu:/\n",
            f"{cgroup}/memory.limit_in_bytes": "900\n",
            f"{cgroup}/memory.usage_in_bytes": "1000\n",
            f"{cgroup}/memory.stat": "total_inactive_file 40\n",
        },
    )
    assert cgroup_free(root) == 0


def test_without_a_limit_there_is_none(tmp_path: Path) -> None:
    assert cgroup_free(tree(tmp_path, {"proc/self/cgroup": "0::/\n"})) is None
    assert cgroup_free(tmp_path / "nothing") is None


def test_free_memory_is_the_lesser_of_machine_and_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(segments, "reclaim_dead", lambda shm_dir: asked.append(shm_dir) or [])
    root = tree(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   2048 kB\n"})
    shm = tmp_path / "shm"
    shm.mkdir()
    free = free_memory(shm, root)
    assert (free.memory, free.memory_source, free.shared_source) == (
        2 << 20,
        "MemAvailable",
        str(shm),
    )
    stat = os.statvfs(shm)
    assert free.shared is not None
    assert abs(free.shared - stat.f_bavail * stat.f_frsize) < 1 << 30
    assert asked == [str(shm)]
    tree(root, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "4096\n"})
    limited = free_memory(None, root)
    assert (limited.memory, limited.shared) == (4096, None)  # there is no root/dev/shm
    assert "cgroup" in limited.memory_source


def test_a_system_that_does_not_tell_wants_a_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="kv-offloading-size"):
        free_memory(tmp_path, tmp_path)
