"""Two hosts in namespaces: one is cut off or dies silently. All waits end in time, and the run goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT = 5.0
BOUND = 2 * TIMEOUT + 5
FAULTS = [
    ("cut", "one"),
    ("cut", "two"),
    ("one dies", "one"),
    ("two dies", "two"),
    ("two dies", "one"),
    ("worker", "one"),
]


def run(
    kind: str, fault: str, store: str, folder: Path, cut: float = 50
) -> dict[str, Any]:
    script = Path(__file__).with_name("hosts_apart.py")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(script), kind, fault, store, str(folder)],
        env={**os.environ, "PYTHONPATH": path, "CUT_SECONDS": f"{cut:g}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def check(report: dict[str, Any]) -> float:
    """The longest wait of any call that failed."""
    assert not report["silent"], report
    assert not report["crashed"], report
    assert not report["committed while cut"], report
    assert report["went on"] == [0, 1, 2, 3], report
    for rank, named in report["named"].items():
        if report["fault"] == "worker":
            assert named == [3], report
        elif rank in "01":
            assert set(named) <= {2, 3}, report
            assert named == report["named"]["0"], report
        else:  # they know only their parent
            assert named == [0], report
        assert "did not answer" in report["text"][rank], report
    longest = max(report["waited"].values())
    assert longest < BOUND + 2, report  # of a save and its last wait
    return float(longest)


@pytest.mark.root
@pytest.mark.slow
def test_a_host_falls_silent(tmp_path: Path) -> None:
    check(run("thread", "one dies", "one", tmp_path))


@pytest.mark.root
@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["sync", "thread", "process"])
@pytest.mark.parametrize(("fault", "store"), FAULTS)
def test_hosts_apart(
    tmp_path: Path, note: Any, kind: str, fault: str, store: str
) -> None:
    report = run(kind, fault, store, tmp_path)
    check(report)

    def of(ranks: str, field: str) -> str:
        values = [report[field][rank] for rank in ranks if rank in report[field]]
        return f"{max(values):.1f} s" if values else "-"

    note(
        (
            "two hosts",
            "saves",
            "store on",
            "host one raised after",
            "host two",
            "said",
            "went on",
        ),
        fault,
        kind,
        store,
        of("01", "raised"),
        of("23", "raised"),
        " / ".join(sorted(set(report["text"].values()))),
        f"{len(report['went on'])} of 4 ranks",
    )
