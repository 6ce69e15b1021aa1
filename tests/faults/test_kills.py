"""Saving jobs killed before each system call that changes a file: readers see the old or the new, bit for bit."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import megackpt
from tests.faults.share import part, sampled

pytestmark = pytest.mark.slow

OLD, NEW, NEXT = 1, 2, 3
FOREIGN = {
    "notes.txt": "what somebody else has put there",
    "integrity.json": '{"checked": "yesterday"}',
    "pytorch_model.bin": "no archive",
    "reference.safetensors": "no tensors",
    "dataset/zarr.json": '{"zarr_format": 3}',
    "dataset/README": "how it was measured",
}
"""Of which some look as if they belonged to a checkpoint."""
FORMATS = ("torch_dist", "zarr", "safetensors")
MAIN = FORMATS[:2]


@dataclass
class Killing:
    """Saves of one kind, each killed somewhere."""

    jobs: Any
    nursery: Any
    states: Any
    folder: Path
    format: str
    before: str
    """What is in the directory before: "nothing", "foreign", "checkpoint", "without index"."""
    options: dict[str, Any]

    def __post_init__(self) -> None:
        self.prepare(self.folder / "old")
        megackpt.save(self.states.declared(NEXT), self.folder / "clean", self.format)
        self.expected = _files(self.folder / "clean")
        if self.before != "nothing":
            self.expected.update(FOREIGN)

    @property
    def overwrites(self) -> bool:
        return self.before in ("checkpoint", "without index")

    def prepare(self, where: Path) -> None:
        if self.overwrites:
            megackpt.save(self.states.declared(OLD), where, self.format)
        if self.before == "without index":
            (where / "megackpt.index").unlink()
        if self.before != "nothing":
            for name, text in FOREIGN.items():
                (where / name).parent.mkdir(parents=True, exist_ok=True)
                (where / name).write_text(text)

    def order(self, where: Path, **more: Any) -> Any:
        told = self.options | more
        return self.nursery.Order(
            str(where), self.format, NEW, str(where.parent), **told
        )

    def calls(self) -> list[tuple[str, str]]:
        """What a save that nobody disturbs does, and of that what counts."""
        outcome = self.jobs(self.order(self.place("whole")))
        assert set(outcome.codes) == {0}, outcome.story
        return list(outcome.counted)

    def place(self, name: str) -> Path:
        where = self.folder / name / "ckpt"
        where.parent.mkdir()
        if self.before != "nothing":
            shutil.copytree(self.folder / "old", where)
        return where

    def at(self, point: int, *, name: str = "", **more: Any) -> str:
        """Kill one save; what a reader then finds. The next save must clear up."""
        where = self.place(name or str(point))
        foreign = _inodes(where) if self.before != "nothing" else {}
        outcome = self.jobs(self.order(where, at=point, **more))
        found = self.states.seen(where)
        told = (point, more, outcome, found)
        if self.overwrites:
            assert found in (OLD, NEW), told
        else:
            assert found in (None, NEW), told
        assert found == NEW or set(outcome.codes) != {0}, told
        if outcome.died and self.options.get("writer") == "dies":
            assert set(outcome.codes) == {self.nursery.REFUSED}, told
            assert outcome.story.count("was killed by SIGKILL") >= len(outcome.codes), (
                told
            )
        megackpt.save(self.states.declared(NEXT), where, self.format)
        assert self.states.seen(where) == NEXT, told
        assert _files(where) == self.expected, told
        assert os.listdir(where.parent) == ["ckpt"], told
        if self.before != "nothing":
            assert _inodes(where) == foreign, told
            assert all(
                (where / name).read_text() == text for name, text in FOREIGN.items()
            ), told
        shutil.rmtree(where.parent)
        if not outcome.died:
            return "alive"
        return "old" if found == OLD else "new" if found == NEW else "none"


def _inodes(where: Path) -> dict[str, int]:
    return {name: (where / name).stat().st_ino for name in FOREIGN}


def _files(where: Path) -> set[str]:
    """All names below; of a folder that is empty its own."""
    return {
        str(path.relative_to(where))
        for path in where.rglob("*")
        if not path.is_dir() or not any(path.iterdir())
    }


@pytest.fixture
def killing(jobs, nursery, states, tmp_path):
    def begin(name: str, before: str, **options: Any) -> Killing:
        return Killing(jobs, nursery, states, tmp_path, name, before, options)

    return begin


HEAD = ("killed by SIGKILL", "points", "old", "none", "new")


def counted(kind: str, outcomes: list[str]) -> tuple[object, ...]:
    count = Counter(outcomes)
    return (
        kind,
        len(outcomes) - count["alive"],
        count["old"],
        count["none"],
        count["new"],
    )


def tried(
    killing: Killing,
    kind: str,
    note: Any,
    *,
    stride: int = 1,
    syncs: bool = True,
    at_once: int = 2,
    fewest: int = 11,
) -> None:
    """Kill at every call (or some), and keep the figures. Without ``syncs`` not at those that show in no file.

    ``fewest``: points before the commit that there must be, or the calls have not been seen.
    """
    calls = killing.calls()
    points = [n for n, (name, _) in enumerate(calls, 1) if syncs or name not in SYNCS][
        ::stride
    ]
    chosen = sampled(points) if stride == 1 else points
    outcomes = killing.jobs.each(killing.at, chosen, at_once)
    note(HEAD, *counted(f"{killing.format}, {kind}", outcomes))
    needed = (fewest - 1) // stride
    if len(chosen) < len(points):
        needed = needed * len(chosen) // len(points) // 2
    assert outcomes.count("old" if killing.overwrites else "none") > needed


SYNCS = ("fsync", "fdatasync", "syncfs", "sync_file_range")
NO_EXCHANGE = {"answers": {"renameat2": errno.ENOSYS}}


@pytest.mark.parametrize(
    ("name", "before", "options"),
    [
        ("torch_dist", "foreign", {}), ("torch_dist", "checkpoint", {}), ("torch_dist", "checkpoint", NO_EXCHANGE),
        ("zarr", "nothing", {}), ("zarr", "checkpoint", {}),
    ],
)  # fmt: skip
def test_one_rank_before_changes(killing, note, name, before, options) -> None:
    kind = f"1 rank, {before}{', no exchange' if options else ''}"
    tried(
        killing(name, before, **options), kind, note, syncs=False, stride=4
    )  # all of them in the campaign


@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.campaign)])
@pytest.mark.parametrize(
    ("name", "before"), [("torch_dist", "checkpoint"), ("zarr", "nothing")]
)
def test_one_rank_of_an_asynchronous_save(killing, note, name, before, stride) -> None:
    """The thread that writes, and the one that trains, wherever either is."""
    tried(
        killing(name, before, later="thread"),
        f"1 rank, {before}, asynchronous",
        note,
        stride=stride,
    )


@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("writer", ["dies", "dies with its rank"])
@pytest.mark.parametrize("name", MAIN)
def test_the_writer_process_of_one_rank(killing, note, name, writer, stride) -> None:
    """Wherever it is; training goes on where it dies alone."""
    doomed = killing(name, "checkpoint", later="process", writer=writer)
    tried(
        doomed,
        f"1 rank, checkpoint, its writer process {writer}",
        note,
        stride=stride,
        fewest=9,
    )


@pytest.mark.campaign
@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("writer", ["", "dies"])
@pytest.mark.parametrize("victims", [(0, 1), (0,), (1,)])
def test_two_ranks_with_writer_processes(killing, note, name, writer, victims) -> None:
    doomed = killing(
        name,
        "checkpoint",
        ranks=2,
        victims=victims,
        timeout=2,
        later="process",
        writer=writer,
    )
    kind = f"2 ranks, checkpoint, written by processes, {'writer of ' * bool(writer)}{victims} dies"
    tried(doomed, kind, note, at_once=4, fewest=9)


@pytest.mark.campaign
@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("victims", [(0, 1), (0,), (1,)])
def test_two_ranks_of_an_asynchronous_save(killing, note, name, victims) -> None:
    doomed = killing(
        name, "checkpoint", ranks=2, victims=victims, timeout=2, later="thread"
    )
    tried(
        doomed,
        f"2 ranks, checkpoint, asynchronous, {victims} die",
        note,
        at_once=4,
        fewest=9,
    )


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "before", "options"),
    [(name, before, {}) for name in FORMATS for before in ("nothing", "checkpoint")]
    + [(name, "checkpoint", NO_EXCHANGE) for name in MAIN]
    + [
        *((name, "foreign", {}) for name in FORMATS),
        ("torch_dist", "without index", {}),
    ],
)
def test_one_rank_at_every_call(killing, note, name, before, options) -> None:
    kind = f"1 rank, {before}{', no exchange' if options else ''}"
    tried(killing(name, before, **options), kind, note)


@pytest.mark.campaign
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("before", ["nothing", "checkpoint"])
def test_all_of_two_ranks_at_every_call(killing, note, name, before) -> None:
    tried(
        killing(name, before, ranks=2, victims=(0, 1)),
        f"2 ranks, {before}, all die",
        note,
    )


@pytest.mark.campaign
@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("before", ["nothing", "checkpoint"])
def test_all_of_four_ranks_at_every_third_call(killing, note, name, before) -> None:
    doomed = killing(name, before, ranks=4, victims=(0, 1, 2, 3))
    tried(doomed, f"4 ranks, {before}, all die", note, stride=3)


@pytest.mark.campaign
@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("before", ["nothing", "checkpoint"])
@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_ranks_at_every_call(killing, note, name, before, victim) -> None:
    """The other one is told, clears up where it is the coordinator, and leaves."""
    doomed = killing(name, before, ranks=2, victims=(victim,), timeout=2)
    who = "the coordinator dies" if victim == 0 else "the other rank dies"
    # A rank that only writes its two files asks the kernel for nine changes in torch_dist.
    tried(doomed, f"2 ranks, {before}, {who}", note, at_once=8, fewest=9)


@pytest.mark.parametrize(
    "count", [4, pytest.param(part(40), marks=pytest.mark.campaign)]
)
@pytest.mark.parametrize("name", MAIN)
def test_a_sample_of_several_ranks(killing, note, name, count) -> None:
    """All ranks, the coordinator or another one; at any call."""
    doomed = killing(name, "checkpoint", ranks=2, timeout=2)
    total, dice = len(doomed.calls()), random.Random(count)
    points = dice.sample(range(1, total + 1), count)

    def work(point: int) -> str:
        return doomed.at(point, victims=dice.choice([(0, 1), (0,), (1,)]))

    outcomes = doomed.jobs.each(work, points, 4)
    note(HEAD, *counted(f"{name}, sample of 2 ranks", outcomes))
    assert outcomes.count("alive") < count


@pytest.mark.strace
@pytest.mark.parametrize(
    ("name", "count"),
    [
        (MAIN[0], 4),
        *(pytest.param(name, part(60), marks=pytest.mark.campaign) for name in MAIN),
    ],
)
def test_a_sample_killed_by_strace(killing, note, name, count) -> None:
    """Another way of doing the same, which counts the calls of each thread by itself."""
    doomed = killing(name, "checkpoint", ranks=2, timeout=2)
    totals, dice = Counter(name for name, _ in doomed.calls()), random.Random(count)

    def work(point: int) -> str:
        syscall = dice.choice(sorted(set(totals) - {"openat"}))
        number = dice.randint(1, -(-totals[syscall] // 8))  # of one thread
        return doomed.at(
            0,
            victims=(dice.choice([0, 0, 1]),),
            strace=f"{syscall}:{number}",
            name=f"s{point}",
        )

    outcomes = doomed.jobs.each(work, range(count), 4)
    note(HEAD, *counted(f"{name}, strace, sample of 2 ranks", outcomes))
    assert outcomes.count("alive") < count
