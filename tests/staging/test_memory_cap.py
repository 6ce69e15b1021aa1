"""The memory that copies of saves may take: what the host and its control groups leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from megackpt.staging import buffers
from megackpt.staging.buffers import available_memory, default_cap


def proc(root: Path, available_kib: int, cgroup: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 99 kB\nMemAvailable:  {available_kib} kB\n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def group(
    folder: Path, limit: str, usage: int, inactive: int, v1: bool = False
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if v1
        else ("memory.max", "memory.current")
    )
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    total = f"total_inactive_file {inactive}\n" if v1 else ""
    (folder / "memory.stat").write_text(
        f"anon 5\ninactive_file {0 if v1 else inactive}\n{total}"
    )


def test_available_memory_is_what_the_host_and_all_limits_leave(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "nowhere") > 0
    assert available_memory(proc(tmp_path / "bare", 1000, "")) == 1000 << 10
    v2 = proc(tmp_path / "v2", 1 << 20, "0::/job/rank\n")
    group(v2 / "sys/fs/cgroup/job/rank", "max", 700, 0)
    assert available_memory(v2) == 1 << 30
    group(v2 / "sys/fs/cgroup/job", "10000", 7000, 500)  # the parent
    assert available_memory(v2) == 3500
    group(v2 / "sys/fs/cgroup/job/rank", "900", 1000, 0)
    assert available_memory(v2) == 0
    v1 = proc(tmp_path / "v1", 1 << 20, "4:cpu,memory:/not/to/be/seen\n0::/\n")
    group(v1 / "sys/fs/cgroup/memory", "10000", 7000, 1000, v1=True)
    assert available_memory(v1) == 4000


def test_the_default_cap_is_half_of_it_shared_by_the_ranks_of_a_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffers, "available_memory", lambda: 64 << 30)
    for name in buffers._LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    assert default_cap.__wrapped__() == 32 << 30
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "16(x2),3")
    assert default_cap.__wrapped__() == 2 << 30
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    assert default_cap.__wrapped__() == 16 << 30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "none")
    assert default_cap.__wrapped__() == 16 << 30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_cap.__wrapped__() == 8 << 30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert default_cap.__wrapped__() == 256 << 20
