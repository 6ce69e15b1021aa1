"""Goodput: the schedule, what is counted from a log, and a short run under one fault."""

from __future__ import annotations

import errno
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def goodput(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    names = "counting", "report", "schedule", "storage"
    return SimpleNamespace(
        **{name: import_module(f"goodput_runs.{name}") for name in names}
    )


def stepped(*steps: int, seconds: float = 0.5, wrong: int = 0) -> list[dict[str, Any]]:
    """The entries of these steps; the loss of step ``wrong`` differs by its last bit."""
    return [
        {
            "step": step,
            "loss": 1 / step + (2.0**-53 if step == wrong else 0.0),
            "seconds": seconds,
        }
        for step in steps
    ]


RIGHT = stepped(*range(1, 11))


def test_a_step_that_was_run_twice_is_useful_once(goodput: SimpleNamespace) -> None:
    entries = [
        *stepped(*range(1, 8)),
        {"raised": "killed"},
        {"restored": 5},
        *stepped(*range(6, 11)),
    ]
    found = goodput.counting.count(entries, RIGHT, 10, 20.0, 1, [])
    assert (found.useful, found.run, found.lost) == (10, 12, 2)
    assert found.useful_share == 10 / 12
    assert found.finished
    assert found.wrong == 0
    assert (found.restarts, found.actions) == (1, ())


def test_paid_seconds_are_compared_with_steps_of_the_undisturbed_run(
    goodput: SimpleNamespace,
) -> None:
    slow = stepped(*range(1, 11), seconds=30.0)
    found = goodput.counting.count(slow, RIGHT, 10, 20.0, 0, [])
    assert found.seconds_of_training == 10 * 0.5
    assert found.time_share == 0.25


def test_a_loss_that_differs_in_its_last_bit_is_wrong(goodput: SimpleNamespace) -> None:
    """Also if the step is run again, and then right."""
    entries = [*stepped(1, 2, 3, wrong=3), *stepped(3, *range(4, 11))]
    found = goodput.counting.count(entries, RIGHT, 10, 20.0, 1, [])
    assert found.wrong == 1


def test_a_run_that_does_not_reach_its_end_is_not_finished(
    goodput: SimpleNamespace,
) -> None:
    found = goodput.counting.count(stepped(1, 2), RIGHT, 10, 20.0, 0, ["a", "b", "c"])
    assert not found.finished
    assert "given up" in goodput.report.table({"peer": found})
    skipped = goodput.counting.count(stepped(1, 2, 10), RIGHT, 10, 20.0, 0, [])
    assert not skipped.finished


def test_restarts_without_a_new_step_need_a_person(goodput: SimpleNamespace) -> None:
    """Who first waits until the storage is well, and then removes the newest step."""
    watch = goodput.counting.Watch()
    assert watch.restarted(50) is None
    assert [watch.restarted(50) for _ in range(3)] == [None, None, "wait"]
    assert [watch.restarted(50) for _ in range(2)] == [None, None]
    assert watch.restarted(51) is None
    assert [watch.restarted(51) for _ in range(3)] == [None, None, "wait"]
    assert len(watch.actions) == 2
    assert not watch.gives_up
    assert [watch.restarted(51) for _ in range(3)] == [None, None, "remove"]
    assert watch.gives_up


def test_a_silent_job_needs_a_person(goodput: SimpleNamespace) -> None:
    watch = goodput.counting.Watch()
    assert not watch.silent(goodput.counting.SILENCE - 1, 7)
    assert not watch.actions
    assert watch.silent(goodput.counting.SILENCE, 7)
    assert "step 7" in watch.actions[0]


def test_a_schedule_depends_on_its_seed_alone(goodput: SimpleNamespace) -> None:
    make = goodput.schedule.schedule
    assert make(3) == make(3)
    assert make(3) != make(4)
    plan = make(3, every=50, count=14)
    assert plan.steps == 700
    assert Counter(fault.kind for fault in plan.faults) == dict.fromkeys(
        goodput.schedule.KINDS, 2
    )
    windows = [fault.step // 50 for fault in plan.faults]
    assert windows == list(range(14))
    assert {fault.host for fault in plan.faults} == {"one", "two"}


def test_the_picture_has_a_bar_for_each_contestant(goodput: SimpleNamespace) -> None:
    ours = goodput.counting.count(RIGHT, RIGHT, 10, 10.0, 0, [])
    peer = goodput.counting.count([*RIGHT, *RIGHT], RIGHT, 10, 20.0, 1, [])
    where = {
        "date": "2026-11-29",
        "cores": 2,
        "load_at_start": 1.0,
        "load_at_end": 2.0,
        "torch": "2.13.0",
    }
    report = {"where": where, "options": {"every": "50"}, "faults": [1, 2]}
    picture = ET.fromstring(
        goodput.report.draw({"megackpt": ours, "peer": peer}, report)
    )
    bars = [
        (element.get("class"), float(element.get("width", 0)))
        for element in picture.iter()
        if element.get("class") in ("ours", "peer")
    ]
    assert [kind for kind, _ in bars] == ["ours", "peer"] * 2
    assert bars[0][1] == pytest.approx(2 * bars[1][1], rel=0.01)


def test_the_page_shows_how_each_contestant_is_driven(
    goodput: SimpleNamespace,
) -> None:
    assert goodput.schedule  # its fixture makes the tools importable
    page = (ROOT / "docs" / "goodput.md").read_text(encoding="utf-8")
    contestants = import_module("goodput_runs.contestants")
    for kind in contestants.CONTESTANTS.values():
        assert inspect.getsource(kind) in page, kind.__name__
    for shown in (contestants.AppState, contestants.newest):
        assert inspect.getsource(shown) in page


def test_the_page_states_the_rule_with_its_numbers(goodput: SimpleNamespace) -> None:
    page = (ROOT / "docs" / "goodput.md").read_text(encoding="utf-8")
    counting = goodput.counting
    assert f"{counting.RESTARTS} restarts in a row" in page
    assert f"{counting.SILENCE:.0f} seconds" in page
    assert f"{counting.ACTIONS} actions" in page
    for what in goodput.schedule.KINDS.values():
        assert what in page


@pytest.mark.root
@pytest.mark.parametrize(
    ("kind", "number"), [("full", errno.ENOSPC), ("quota", errno.EDQUOT)]
)
def test_a_storage_refuses_and_is_well_again(
    goodput: SimpleNamespace, tmp_path: Path, kind: str, number: int
) -> None:
    """ext4 has no quota that binds root: then the tool says which package is missing."""
    storage = goodput.storage
    if kind == "quota" and shutil.which("mkfs.btrfs") is None:
        assert "btrfs-progs" in storage.missing(kind)
        return

    def written(live: Path, name: str) -> int:
        folder = live / name
        try:
            folder.mkdir()
            with (folder / "file").open("wb") as file:
                file.write(bytes(1 << 20))
                os.fsync(file.fileno())
        except OSError as error:
            return error.errno or -1
        return 0

    with storage.Storage(tmp_path / "storage", mib=128) as made:
        assert written(made.path, "before") == 0
        made.begin(kind)
        assert written(made.path, "during") == number
        made.end()
        assert written(made.path, "after") == 0


@pytest.mark.slow
@pytest.mark.root
def test_a_killed_rank_costs_steps_and_no_losses_change(tmp_path: Path) -> None:
    """Ours and stock DCP, 40 steps on two hosts, and one kill."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, "tools/goodput.py", "--json", figures]
    command += ["--only", "megackpt", "torch DCP"]
    command += ["--kinds", "kill", "--every", "40", "--faults", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=600)
    report = json.loads(figures.read_text())
    assert len(report["faults"]) == 1
    for name, found in report["contestants"].items():
        assert found["finished"], name
        assert found["useful"] == 40, name
        assert found["run"] >= 40, name
        assert found["wrong"] == 0, name
        assert found["restarts"] == 1, name
        assert found["actions"] == [], name
