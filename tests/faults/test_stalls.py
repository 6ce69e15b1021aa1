"""A rank that is stopped for less than the timeout fails no save."""

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
STALLS = 300
IN_A_JOB = 25


def job(seed: int, count: int, loss: int, folder: Path) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    script = Path(__file__).with_name("stalled.py")
    done = subprocess.run(
        [sys.executable, str(script), str(seed), str(count), str(loss), str(folder)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def check(count: int, loss: int, folder: Path) -> int:
    """The number of saves."""
    jobs = max(2, -(-count // IN_A_JOB))
    counts = [count * (n + 1) // jobs - count * n // jobs for n in range(jobs)]
    with ThreadPoolExecutor(6) as pool:
        reports = list(
            pool.map(
                lambda n: job(n, counts[n], loss, folder / f"{loss}-{n}"), range(jobs)
            )
        )
    assert not [text for report in reports for text in report["failed"]], reports
    return sum(report["saves"] for report in reports)


@pytest.mark.campaign
@pytest.mark.parametrize("loss", [0, 20])
def test_a_stall_shorter_than_the_timeout_is_no_failure(
    tmp_path: Path, note: Any, loss: int
) -> None:
    count = part(STALLS // 2)
    saves = check(count, loss, tmp_path)
    note(
        ("stalls of 0.5 to 10 s, timeout 60 s", "packets lost", "saves", "failed"),
        count,
        f"{loss} %",
        saves,
        0,
    )
