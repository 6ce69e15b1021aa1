"""How much host memory copies of saves may take in this process."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from pathlib import Path

from megackpt import limits

# The number of ranks on this host, as their launcher sets it; the innermost launcher first.
_LOCAL_RANKS = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "SLURM_NTASKS_PER_NODE",
)


@cache
def default_cap() -> int:
    """The bytes that copies of saves may take in this process without Strategy(staging_memory=...).

    This is half of the host memory that is available at the first call, divided by the ranks of
    this host (set by torchrun, Open MPI or Slurm; else 1), and at least 256 MiB.
    """
    ranks = 1
    for name in _LOCAL_RANKS:
        number = re.match(r"[1-9]\d*", os.environ.get(name, ""))
        if number:
            ranks = int(number[0])
            break
    return max(available_memory() // 2 // ranks, limits.STAGING_BYTES_MIN)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: the host's, within its control groups' limits."""
    try:
        meminfo = (root / "proc/meminfo").read_text()
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        found = [int(meminfo.partition("MemAvailable:")[2].split()[0]) << 10]
    except (OSError, IndexError, ValueError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in groups:
        _, controllers, path = line.split(":", 2)
        v1 = "memory" in controllers.split(",")
        if controllers and not v1:
            continue
        base = root / "sys/fs/cgroup"
        if v1:
            base /= "memory"
        group = base / path.lstrip("/")
        # A limit of any parent counts. A container may see its group as the root.
        while group.is_relative_to(base):
            found.append(_left_in_group(group, v1))
            group = group.parent
    return max(0, min(found))


def _left_in_group(group: Path, v1: bool) -> int:
    """Bytes below a control group's limit; its cached files do not count as used."""
    names = ("memory.max", "memory.current", "inactive_file")
    if v1:
        names = (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        )
    try:
        limit = int((group / names[0]).read_text())
        used = int((group / names[1]).read_text())
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == names[2]:
                used -= int(count)
        return limit - used
    except (OSError, ValueError):  # no such file, or "max": no limit
        return sys.maxsize
