"""Saves that die twice in a row. Those that die once, of every format and at every system call: tests/faults."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megackpt.errors import NotACheckpoint
from megackpt.storage import kernel
from tests.children import died

FOREIGN = {"notes.txt": "mine", "logs/run": "mine too", "rank1.bin.log": "and this"}
STEPS = (
    "fsync",
    "rename",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
    "writev",
    "chmod",
    "chown",
)
LIMIT = 500


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch):
    """The processes die, the machine does not: what is written is there."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def die_at(step: int) -> None:
    """From here on, end this process without a word before its ``step``-th change of the disk."""
    left = [step]

    def counting(real):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
            return real(*args, **kwargs)

        return call

    for name in STEPS:
        setattr(os, name, counting(getattr(os, name)))
    kernel.exchange = counting(kernel.exchange)


def saved_by_a_child_that_dies(saves, where: Path, value: int, step: int) -> bool:
    """True if it died, False if it was done before."""

    def work():
        die_at(step)
        saves.save(where, value)

    return died(work)


def make_foreign(where: Path) -> None:
    for name, text in FOREIGN.items():
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_text(text)


def check_foreign(where: Path) -> None:
    for name, text in FOREIGN.items():
        assert (where / name).read_text() == text, name


def outcome(saves, where: Path) -> int | None:
    try:
        return saves.load(where)
    except NotACheckpoint:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [True, False])
def test_dying_again_while_clearing_up(tmp_path, saves, monkeypatch, exchange):
    """Two deaths in a row: in the publication, then anywhere in the save that finds it."""
    if not exchange:
        monkeypatch.setattr(kernel, "libc_function", lambda *_: None)
    for first in range(1, LIMIT, 5):
        for second in (1, 3, 8):
            run = tmp_path / f"{first}-{second}"
            where = run / "ckpt"
            where.mkdir(parents=True)
            make_foreign(where)
            saves.save(where, 1)
            died = saved_by_a_child_that_dies(saves, where, 2, first)
            if not died:
                return
            saved_by_a_child_that_dies(saves, where, 4, second)
            assert outcome(saves, where) in (1, 2)
            saves.save(where, 3)
            assert saves.load(where) == 3
            check_foreign(where)
            assert os.listdir(run) == ["ckpt"]


def test_the_trainer_makes_the_directory_again(tmp_path, saves, monkeypatch):
    """Died between the two renames; then somebody makes an empty directory, or puts a file into one."""
    monkeypatch.setattr(kernel, "libc_function", lambda *_: None)
    where = tmp_path / "ckpt"
    saves.save(where, 1)
    make_foreign(where)
    os.rename(where, tmp_path / ".ckpt.megackpt-aa.old")
    assert saves.load(where) == 1
    where.mkdir()
    assert saves.load(where) == 1
    (where / "args.yaml").write_text("new")
    assert saves.load(where) == 1
    saves.save(where, 3)
    assert saves.load(where) == 3
    check_foreign(where)
    assert (where / "args.yaml").read_text() == "new"
    assert os.listdir(tmp_path) == ["ckpt"]
