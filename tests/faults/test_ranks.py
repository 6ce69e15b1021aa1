"""A rank that raises, dies or stops in each phase of a save and of a load: the others are told, and go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STEPS = {
    "save": ["declare", "vote", "gather plan", "scatter plan", "write", "written", "gather write", "broadcast write"],
    "load": [
        "broadcast open", "compare", "gather compare", "broadcast compare", "read", "gather read", "broadcast read",
    ],
}  # fmt: skip
OWN_WORK = {
    "declare",
    "begin",
    "write",
    "written",
    "commit",
    "compare",
    "read",
}  # where an error can be raised
COORDINATORS = ["begin", "commit"]
TOLD = {("save", "broadcast write"), ("load", "broadcast read")}
"""Here the outcome stands already, and all that is left is to hear of it."""


def order(
    action: str, job: str, point: str, victim: int, strategy: str = "torch_dist", **more: Any
) -> dict[str, Any]:
    told = {"action": action, "job": job, "point": point, "victim": victim, "strategy": strategy}
    return {**told, "before": True, **more}


def every_order(strategy: str, actions: tuple[str, ...] = ("raise", "die", "stop")) -> list[dict[str, Any]]:
    found = []
    for action in actions:
        for job, points in STEPS.items():
            found += [order(action, job, point, victim, strategy) for point in points for victim in (0, 2)]
        found += [order(action, "save", point, 0, strategy) for point in COORDINATORS]
    return [one for one in found if one["action"] != "raise" or one["point"] in OWN_WORK]


def check(report: dict[str, Any]) -> None:
    """Every rank was told; what stood there stands; the trainer's groups and the next save work."""
    assert "hung" not in report, report
    asked = report["order"]
    victim, outcome_stands = asked["victim"], (asked["job"], asked["point"]) in TOLD
    assert not any(
        "crashed" in one for heard in report.values() if isinstance(heard, list) for one in heard
    ), report
    for told in report["told"]:
        if outcome_stands:
            assert told["error"] in (None, "RankLost"), report
        elif asked["action"] == "raise":
            assert told["error"] == "StorageError", report
            assert "it was to fail here" in told["text"], report
        else:
            assert told["error"] == "RankLost", report
            assert victim in told["failures"], report
            assert f"rank {victim} did not answer" in told["text"], report
    for late in report.get("late", ()):
        assert late["error"] == "RankLost" or outcome_stands, report
    value = 2.0 if asked["job"] == "save" and outcome_stands else 1.0
    if asked.get("meanwhile"):
        value = 3.0
    assert all(one["found"] == value for one in report.get("found", ())), report
    living = 2 if asked["action"] == "die" else 3
    assert report["after"] == [{"ones": living, "found": 3.0}] * living, report
    assert report["left"] == ["c", "rendezvous"], report


SAMPLE = [
    order("raise", "save", "commit", 0),
    order("die", "save", "scatter plan", 2),
    order("die", "save", "written", 0, "zarr"),
    order("stop", "save", "commit", 0),
    order("stop", "save", "write", 2, "zarr", before=False, meanwhile=True),
    order("die", "load", "read", 2),
    order("stop", "load", "gather compare", 0),
    order("raise", "load", "read", 2),
]


def test_the_others_are_told_and_go_on(tmp_path: Path, worlds: Any) -> None:
    reports = worlds(SAMPLE, tmp_path)
    assert len(reports) == len(SAMPLE)
    for report in reports:
        check(report)


@pytest.mark.campaign
@pytest.mark.parametrize("strategy", ["torch_dist", "zarr"])
def test_in_every_phase(tmp_path: Path, worlds: Any, note: Callable[[str], None], strategy: str) -> None:
    orders = every_order(strategy)
    orders += [
        order("stop", "save", point, victim, strategy, before=before, meanwhile=True)
        for before in (True, False)
        for point, victim in (("write", 2), ("written", 2))
    ]
    reports = worlds(orders, tmp_path)
    assert len(reports) == len(orders)
    for report in reports:
        check(report)
    note(f"{strategy}: {len(reports)} worlds of 3 ranks in which one raised, died or stopped")
