"""Two hosts in namespaces: one is cut off or dies silently. All waits end in time, and the run goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.faults.share import sampled

ROOT = Path(__file__).parents[2]
TIMEOUT = 5.0
BOUND = 2 * TIMEOUT + 5
KINDS = ["sync", "thread", "process"]
FAULTS = [
    ("cut", "one"),
    ("cut", "two"),
    ("one dies", "one"),
    ("two dies", "one"),
    ("worker", "one"),
]
# Of these, which take a minute each, a sample has a few.
CUTS = sampled([*product(KINDS, ["one", "two"])], least=1)
ENDS = sampled([*product(KINDS, FAULTS)], least=3)


def run(script: str, *words: str, cut: float = 50) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *words],
        env={**os.environ, "PYTHONPATH": path, "CUT_SECONDS": f"{cut:g}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def apart(kind: str, fault: str, store: str, folder: Path) -> dict[str, Any]:
    """One case with processes that go on after a cut, checked."""
    report = run("hosts_apart.py", kind, fault, store, str(folder))
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
    assert max(report["waited"].values()) < BOUND + 2, (
        report
    )  # a save and its last wait
    return report


@pytest.mark.root
@pytest.mark.slow
def test_a_host_falls_silent(tmp_path: Path) -> None:
    apart("thread", "one dies", "one", tmp_path)


@pytest.mark.root
@pytest.mark.campaign
@pytest.mark.parametrize(("kind", "store"), CUTS)
def test_the_same_processes_go_on(
    tmp_path: Path, note: Any, kind: str, store: str
) -> None:
    report = apart(kind, "cut", store, tmp_path)

    def of(ranks: str, field: str) -> str:
        return f"{max(report[field][rank] for rank in ranks):.1f} s"

    note(
        (
            "two hosts, cut for 50 s",
            "job's store on",
            "host one raised after",
            "waited",
            "host two",
            "waited",
            "then saved again",
        ),
        kind,
        store,
        *(of(ranks, field) for ranks in ("01", "23") for field in ("raised", "waited")),
        f"{len(report['went on'])} of 4 ranks, attempt {report['attempts']}",
    )


def side(report: dict[str, Any], host: str) -> str:
    entries = [entry for entry in report["raised"] if entry["host"] == host]
    if not entries:
        return "-"
    last = max(entries, key=lambda entry: entry["after"])
    return f"{last['after']:.1f} s: {last['text']}"


@pytest.mark.root
@pytest.mark.campaign
@pytest.mark.parametrize(("kind", "ending"), ENDS)
def test_torchrun_goes_on(
    tmp_path: Path, note: Any, kind: str, ending: tuple[str, str]
) -> None:
    fault, store = ending
    report = run("elastic_hosts.py", "host", kind, fault, store, str(tmp_path))
    restored = ", ".join(f"step {step}" for step in report["restored"])
    again = ", ".join(f"{name} ({code})" for name, code in report["agents"]) or "no"
    failed = len(report["failed again"])
    note(
        (
            "under torchrun",
            "saves",
            "rendezvous on",
            "host one raised after",
            "host two raised after",
            "restored",
            "first save after",
            "of this the fault",
            "failed saves of the restarted",
            "agents that ended",
        ),
        fault,
        kind,
        store,
        side(report, "one"),
        side(report, "two"),
        restored,
        f"{report['first save']:.1f} s",
        f"{report['back']:.1f} s",
        failed,
        again,
    )
    assert report["went on"], report
    # After the end of a worker, agents end the other ones, which may be before these can raise.
    assert fault == "worker" or not report["silent"], report
    assert not report["committed while cut"], report
    assert not report["bad"], report
    assert report["right"], report
    (restored,) = report["restored"]
    assert 0 <= restored - report["last"] <= 1, report
    for entry in report["raised"]:
        assert entry["waited"] < BOUND, report
        assert "did not answer" in entry["text"], report
        if fault == "worker":
            assert {3} <= set(entry["named"]) <= {2, 3}, report
        elif entry["host"] == "one":
            assert set(entry["named"]) <= {2, 3}, report
        else:
            assert entry["named"] == [0], report


@pytest.mark.root
@pytest.mark.campaign
@pytest.mark.parametrize("fault", ["one dies", "two dies", "worker"])
def test_torchrun_goes_on_from_local_steps(
    tmp_path: Path, note: Any, fault: str
) -> None:
    """Nothing is in the storage. The host that is replaced has an empty /dev/shm."""
    store = "two" if fault == "one dies" else "one"
    report = run("elastic_hosts.py", "host", "local", fault, store, str(tmp_path))
    heads = (
        "local steps under torchrun",
        "last complete step",
        "restored",
        "first save after",
    )
    (restored,) = report["restored"]
    note(heads, fault, report["last"], restored, f"{report['first save']:.1f} s")
    assert report["went on"], report
    assert report["right"], report
    assert report["sources"] == ["local"], report
    assert 0 <= restored - report["last"] <= 1, report


LOST = [
    ("publish", "kill"),
    ("write", "stop"),
    ("publish", "stop"),
    ("write", "cut"),
    ("publish", "cut"),
]


@pytest.mark.root
@pytest.mark.campaign
@pytest.mark.parametrize(
    ("lost", "place"), sampled([*product(LOST, ["directory", "bucket"])], least=3)
)
def test_the_coordinators_host_is_lost(
    tmp_path: Path, note: Any, lost: tuple[str, str], place: str
) -> None:
    point, fault = lost
    report = run("elastic_hosts.py", "coordinator", point, fault, place, str(tmp_path))
    told = [entry["text"].splitlines()[0] for entry in report["coordinator raised"]]
    note(
        (
            "the coordinator's host",
            "in the stage",
            "target",
            "host two raised after",
            "restarted job saved after",
            "that save took",
            "the coordinator raised",
        ),
        fault,
        point,
        place,
        f"{max(entry['after'] for entry in report['others raised']):.1f} s",
        f"{report['first save']:.1f} s",
        f"{report['first save took']:.1f} s",
        told[0] if told else "-",
    )
    assert report["went on"], report
    assert report["went further"], report
    assert not report["failed again"], report
    assert report["restored"] == [3], report
    # A stopped process may hold the lock on the directory, for which a save waits three times.
    assert report["first save took"] < 10, report
    assert not report["coordinator saved"], report
    assert report["winner"]["ok"], report
    assert report["stands"] == report["winner"], report
    assert not report["bad"], report
    for entry in report["others raised"]:
        assert entry["after"] < BOUND + 2, report
    if fault != "kill":
        (text,) = [entry["text"] for entry in report["coordinator raised"]]
        assert text.startswith(("RankLost", "SaveInProgress")), report
