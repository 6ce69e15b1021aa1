"""A rank is killed at a random moment of saves: every survivor names it, and no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.share import part

ROOT = Path(__file__).parents[2]


def kill(kind: str, count: int, seed: int, folder: Path) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("random_kills.py")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(script), kind, str(count), str(seed), str(folder)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(report: dict[str, Any]) -> float:
    """The seconds after which the last survivor raised."""
    assert "broken" not in report, report
    assert len(report["told"]) == 6, report
    for told in report["told"].values():
        assert told["failures"] == [report["victim"]], report
        assert f"rank {report['victim']} did not answer" in told["text"], report
    return float(max(told["at"] for told in report["told"].values()))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "kind",
    [pytest.param("sync", marks=SLOW), pytest.param("thread", marks=SLOW), "process"],
)
def test_a_killed_rank_is_named_by_all(tmp_path: Path, kind: str) -> None:
    for report in kill(kind, 2, 1, tmp_path):
        check(report)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["sync", "thread", "process"])
def test_killed_at_random(tmp_path: Path, note: Any, kind: str) -> None:
    count = part(100)
    seconds = [check(report) for report in kill(kind, count, 2, tmp_path)]
    note(
        (
            "one rank of seven killed",
            "kills",
            "named alone by all six others",
            "slowest",
        ),
        kind,
        count,
        len(seconds),
        f"{max(seconds):.1f} s",
    )
