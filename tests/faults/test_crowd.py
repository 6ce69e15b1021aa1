"""Many real ranks connect and save: the sockets of each stay few."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megackpt.distributed.messages import children_of
from tests.faults.share import SHARE

ROOT = Path(__file__).parents[2]
OF_A_RANK = 17 << 20
"""Bytes of memory, with what the kernel keeps for it."""
OWN = 5  # the listener, two of the event loop, and two for what a save itself opens


def crowd(ranks: int, *options: str) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "tools/crowd.py", "--ranks", str(ranks), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def check(report: dict[str, Any]) -> None:
    ranks = report["ranks"]
    most = max(len(children_of(rank, ranks)) + (rank > 0) for rank in range(ranks))
    assert most <= report["sockets, most"] <= most + OWN, report
    assert report["sockets, all"] <= 2 * (ranks - 1) + ranks * OWN, report


@pytest.mark.slow
def test_the_sockets_of_forty_ranks() -> None:
    check(crowd(40))


def available_memory() -> int:
    (line,) = (
        line
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    return int(line.split()[1]) << 10


@pytest.mark.campaign
@pytest.mark.parametrize("ranks", [32, 64, 128, 256, 512] + [1024] * (SHARE == 1))
def test_the_sockets_of_many_ranks(note: Any, ranks: int) -> None:
    if available_memory() < ranks * OF_A_RANK:
        pytest.skip(f"{ranks} ranks need {ranks * OF_A_RANK >> 30} GiB")
    report = crowd(ranks)
    check(report)
    gloo = crowd(ranks, "--gloo") if ranks <= 256 else {}
    note(
        ("ranks", "sockets of rank 0", "of all", "a gloo group: of rank 0", "of all"),
        ranks,
        report["sockets of rank 0"],
        report["sockets, all"],
        gloo.get("sockets of rank 0", "-"),
        gloo.get("sockets, all", "-"),
    )
