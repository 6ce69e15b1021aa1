"""Hosts are lost with what is in their memory: the run goes on from the newest step that others have."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("local_hosts.py")


def lives(count: int, lost: int, seed: int, folder: Path) -> list[dict[str, Any]]:
    """In a network of their own, and with a tmpfs."""
    memory = folder / "memory"
    memory.mkdir()
    program = [
        sys.executable,
        PROGRAM,
        *map(str, (count, lost, seed)),
        folder / "job",
        memory,
    ]
    inside = 'ip link set lo up; mount -t tmpfs -o size=2g tmpfs "$1"; shift; exec "$@"'
    done = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", inside, "sh", memory, *program],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
            ),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("count", [3, pytest.param(200, marks=pytest.mark.campaign)])
def test_one_host_is_lost(tmp_path: Path, note: Any, count: int) -> None:
    told = lives(count, 1, count, tmp_path)
    assert len(told) == count
    for one in told:
        assert one["right"], one
        assert one["sources"] == ["local"], one
        assert one["steps"] == one["expected"]["local"][-1:], one
    # TCP sends some packets again where the machine is busy.
    wire = statistics.median(one["wire"] for one in told)
    memory = max(one["memory"] for one in told)
    assert wire <= 1.05
    assert memory <= 1.05
    heads = (
        "hosts lost",
        "lives",
        "went on from the newest step",
        "wire / lost (median)",
        "memory / promised",
    )
    note(heads, 1, count, len(told), f"{wire:.3f}", f"{memory:.3f}")


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.campaign)])
def test_two_neighbouring_hosts_are_lost(tmp_path: Path, note: Any, count: int) -> None:
    """One of them had the other's copies."""
    told = lives(count, 2, count, tmp_path)
    assert len(told) == count
    for one in told:
        assert one["right"], one
        assert not one["expected"]["local"], one
        newest = one["expected"]["stored"][-1:]
        assert one["steps"] == (newest or [0]), one
        assert one["sources"] == (["storage"] if newest else [""]), one
    heads = "hosts lost", "lives", "went on from the storage"
    note(heads, 2, count, len(told))
