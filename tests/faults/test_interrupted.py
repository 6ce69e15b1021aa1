"""A rank is disturbed at any moment of a save: at most the calls in flight fail, and the next one works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults.share import part

ROOT = Path(__file__).parents[2]
EVENTS = 300
IN_A_JOB = 50
SHORT = 3.0  # the timeout of a save that is disturbed
BOUND = 2 * SHORT + 20
"""Seconds. A rank waits twice the timeout for its parent, and a machine at work is slow."""


def job(mode: str, seed: int, count: int, folder: Path) -> list[dict[str, Any]]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    script = Path(__file__).with_name("interrupted.py")
    done = subprocess.run(
        [sys.executable, str(script), mode, str(seed), str(count), str(folder)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(li) for li in done.stdout.splitlines() if li.startswith("{")]
    assert len(told) == count * (2 + seed % 3), done.stderr
    return told


def check(mode: str, count: int, folder: Path) -> int:
    """The number of saves that failed of those that were disturbed."""
    jobs = -(-count // IN_A_JOB)
    counts = [count * (n + 1) // jobs - count * n // jobs for n in range(jobs)]

    def run(n: int) -> list[dict[str, Any]]:
        return job(mode, n + 1, counts[n], folder / str(n))

    with ThreadPoolExecutor(2) as pool:
        told = [one for each in pool.map(run, range(jobs)) for one in each]
    bad = [one for one in told if not one["right"]]
    assert not bad, "\n".join(json.dumps(one) for one in bad[:8])
    assert max(one["waited"] for one in told) < BOUND
    return len([one for one in told if one["said"] and one["rank"] == one["victim"]])


@pytest.mark.slow
def test_the_next_save_works_after_each_of_some_disturbances(tmp_path: Path) -> None:
    check("thread", 12, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("mode", ["sync", "thread", "process", "manager"])
def test_the_next_save_works_after_each_disturbance(
    tmp_path: Path, note: Any, mode: str
) -> None:
    count = part(EVENTS)
    failed = check(mode, count, tmp_path)
    note(
        (
            "one rank is disturbed",
            "times",
            "saves that failed on it",
            "next saves that failed",
        ),
        mode,
        count,
        failed,
        0,
    )
