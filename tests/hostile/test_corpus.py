"""Hostile and broken checkpoints through every reader: nothing runs, nothing leads out, errors tell, memory is bounded.

See corpus.py for what is broken, readers.py for who reads and who watches. Each directory is tried in a process of
its own. The whole corpus is a campaign; every run has a part of it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import corpus
from tests.hostile.cases.place import CASES, STEP, build
from tests.hostile.pickles import RUNNING, whole

ROOT = Path(__file__).resolve().parent.parent.parent
MEMORY = 512 << 20
WARM = "dcp"  # a kind that is read without tensorstore
SHORT = corpus.in_every_run()
QUICK = {*SHORT[::2], *corpus.WENT_WRONG}
METADATA = ("load_sharded_metadata", "load_tensors_metadata")
TOLD = re.compile(rf"{STEP}|'|for key|the common state|checkpoint")
"""An error tells of a file, a key, or the whole."""

Outcome = Mapping[str, Any]


class Server:
    """A process that tries one directory after the other."""

    def __init__(self, warm: Mapping[str, Any]) -> None:
        command = [sys.executable, "-m", "tests.hostile.readers"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        self._tell(warm)

    def _tell(self, trial: Mapping[str, Any]) -> None:
        print(json.dumps(trial), file=self.process.stdin, flush=True)

    def run(
        self, trials: Iterator[tuple[str, Mapping[str, Any]]], into: dict[str, Outcome]
    ) -> None:
        for name, trial in trials:
            self._tell(trial)
            into[name] = json.loads(self.process.stdout.readline())
        self.process.communicate()


def tried(base: Path, names: list[str]) -> dict[str, Outcome]:
    """What came of each of these cases, and of the healthy checkpoints that they are made from."""
    trials = build(base, names)
    waiting, lock, found = iter(trials.items()), threading.Lock(), dict[str, Outcome]()

    def taken() -> Iterator[tuple[str, Mapping[str, Any]]]:
        while True:
            with lock:
                trial = next(waiting, None)
            if trial is None:
                return
            yield trial

    servers = [Server(trials[WARM]) for _ in range(2)]
    threads = [
        threading.Thread(target=server.run, args=(taken(), found)) for server in servers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for server in servers:
        server.process.kill()
        server.process.wait()
    return {
        name: {
            **outcome,
            "witness": (Path(trials[name]["outside"]).parent / "witness").exists(),
        }
        for name, outcome in found.items()
    }


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """The first of several pytest processes tries the corpus, the others wait for its results."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    results = shared / "corpus.json"
    with open(shared / "corpus.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not results.exists():
            results.write_text(
                json.dumps(_tried(request, tmp_path_factory.mktemp("corpus")))
            )
    found: dict[str, Outcome] = json.loads(results.read_text())
    return found


def _tried(request: pytest.FixtureRequest, folder: Path) -> dict[str, Outcome]:
    items = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    ]
    chosen = [
        item.callspec.params["name"] for item in items if hasattr(item, "callspec")
    ]
    warm = next(name for name, case in CASES.items() if case.kind == WARM)
    found = tried(folder, list(dict.fromkeys([warm, *chosen])))
    told(found)
    return found


def told(found: Mapping[str, Outcome]) -> None:
    """The figures, for whoever runs with -s."""
    readings = [
        reading for outcome in found.values() for reading in outcome["readers"].values()
    ]
    errors = sum("error" in reading for reading in readings)
    print(
        f"\n{len(found)} directories, {len(readings)} readings: {errors} refused, {len(readings) - errors} right; "
        f"at most {max(outcome['memory'] for outcome in found.values()) >> 20} MiB and "
        f"{max(reading['seconds'] for reading in readings):.1f} s"
    )


def marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
    if name in QUICK:
        return ()
    return (pytest.mark.slow,) if name in SHORT else (pytest.mark.campaign,)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=marks(name)) for name in CASES],
)
def test_broken_checkpoints(name: str, outcomes: dict[str, Outcome]) -> None:
    case, outcome = CASES[name], outcomes[name]
    healthy = outcomes[case.kind]["readers"]
    assert not [
        event
        for event in outcome["events"]
        if not (case.linked and event.startswith("opened outside"))
    ]
    assert not outcome["witness"]
    assert outcome["memory"] < MEMORY
    readers = outcome["readers"]
    assert readers.keys() == healthy.keys()
    for reader, reading in readers.items():
        assert "foreign" not in reading, f"{reader}: {reading['message']}"
        if "error" in reading:
            assert TOLD.search(reading["message"]), f"{reader}: {reading['message']}"
            assert len(reading["message"]) < 10_000, (
                f"{reader}: {reading['message'][:2000]}"
            )
            assert "failed at reading" not in reading["message"], (
                "this is not said of formats of our own"
            )
        elif not (reader in METADATA and "error" in readers["load_plain_tensors"]):
            # What a table of contents lists is what it lists, even where the data are not what it says.
            assert reading["value"] == healthy[reader]["value"], (
                f"{reader} gives something else"
            )
    messages = [
        reading["message"] for reading in readers.values() if "error" in reading
    ]
    if case.tells:
        assert any(re.search(case.tells, message, re.DOTALL) for message in messages), (
            messages
        )
    else:
        assert not messages


def test_healthy_checkpoints_are_read_by_all(outcomes: dict[str, Outcome]) -> None:
    for kind in {CASES[name].kind for name in outcomes if name in CASES}:
        assert not outcomes[kind]["events"], kind
        assert all(
            "value" in reading for reading in outcomes[kind]["readers"].values()
        ), outcomes[kind]


def test_the_corpus_is_large_enough() -> None:
    assert len(SHORT) >= 90
    assert len({CASES[name].kind for name in SHORT}) >= 12
    assert not corpus.WENT_WRONG - {*SHORT}


def test_pickles_of_the_corpus_run_code_in_plain_pickle(tmp_path: Path) -> None:
    """Otherwise it would prove nothing that they do not run in our hands."""
    for number, make in enumerate(RUNNING.values()):
        (tmp_path / f"{number}.pkl").write_bytes(
            whole(make(f"touch {tmp_path}/{number}.ran"))
        )
    script = "import pickle, pathlib\nfor p in pathlib.Path().glob('*.pkl'): pickle.loads(p.read_bytes())"
    subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, cwd=tmp_path
    )
    assert len(list(tmp_path.glob("*.ran"))) == len(RUNNING)
