"""A save that is stopped before one of its changes, and wakes up after another save has committed."""

from __future__ import annotations

import os
import shutil
import signal
import time
import traceback
from pathlib import Path

import pytest

from megackpt.checkpoint import directory_target, open_checkpoint, verify
from megackpt.errors import CheckpointingException
from megackpt.storage import LocalStorage, kernel
from tests.checkpoint.test_kill_points import (
    FOREIGN,
    STEPS,
    check_foreign,
    make_foreign,
)

LOST, OTHER = 3, 4
LATEST = 400
OWN = {"rank0.bin", "rank1.bin", "toc", "metadata.json", "megackpt.index"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Without waiting for the disk; and a stopped process may hold the lock."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(directory_target, "PATIENCE", 0.02)


def stop_at(step: int) -> None:
    """Stop this process before its ``step``-th change of the disk."""
    left = [step]

    def counting(real):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
            return real(*args, **kwargs)

        return call

    for name in STEPS:
        setattr(os, name, counting(getattr(os, name)))
    kernel.exchange = counting(kernel.exchange)
    kernel.rename_folder = counting(kernel.rename_folder)


def save_in_child(saves, where: Path, value: int, step: int) -> int:
    pid = os.fork()
    if pid == 0:
        code = OTHER
        try:
            stop_at(step)
            saves.save(where, value)
            code = 0
        except (CheckpointingException, FileNotFoundError):
            code = LOST
        except BaseException:  # noqa: BLE001 - shown, and told by the code
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def wake(pid: int) -> int:
    os.kill(pid, signal.SIGCONT)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


SLOW = pytest.mark.slow


@pytest.mark.parametrize("other", ["native", pytest.param("tiny", marks=SLOW)])
@pytest.mark.parametrize(
    "before",
    [
        "nothing",
        *(pytest.param(b, marks=SLOW) for b in ("empty", "foreign", "checkpoint")),
    ],
)
@pytest.mark.parametrize("exchange", [True, pytest.param(False, marks=SLOW)])
def test_exactly_one_wins(
    tmp_path, saves, monkeypatch, tiny_formats, exchange, before, other
):
    if not exchange:
        monkeypatch.setattr(kernel, "libc_function", lambda *_: None)
    stops = 0
    for step in range(1, LATEST):
        run = tmp_path / str(step)
        where = run / "ckpt"
        run.mkdir()
        if before == "checkpoint":
            saves.save(where, 1)
        elif before != "nothing":
            where.mkdir()
        if before in ("foreign", "checkpoint"):
            make_foreign(where)
            inodes = {name: (where / name).stat().st_ino for name in FOREIGN}
        pid = save_in_child(saves, where, 2, step)
        _, status = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            break
        stops += 1
        begun = time.monotonic()
        saves.save(where, 3, backend=tiny_formats[other]())
        assert time.monotonic() - begun < 5
        assert saves.load(where) == 3
        saved = open_checkpoint(where).manifest.save_id
        code = wake(pid)
        assert code == LOST, (step, code)
        assert open_checkpoint(where).manifest.save_id == saved
        assert saves.load(where) == 3
        assert verify(where).ok
        if before in ("foreign", "checkpoint"):
            check_foreign(where)
            assert inodes == {name: (where / name).stat().st_ino for name in FOREIGN}
        saves.save(where, 4)
        assert os.listdir(run) == ["ckpt"], step
        foreign = {"notes.txt", "logs", "rank1.bin.log"}
        own = OWN | (foreign if before in ("foreign", "checkpoint") else set())
        assert set(os.listdir(where)) == own, step
        shutil.rmtree(run)
    assert 20 < stops < LATEST - 1


def test_a_save_waits_once_for_a_lock(tmp_path, saves, monkeypatch):
    """Its holder may be stopped. The later steps try it, and go on without."""
    tries = []
    monkeypatch.setattr(LocalStorage, "lock", lambda _: tries.append(1))
    monkeypatch.setattr(directory_target, "PATIENCE", 0.2)
    saves.save(tmp_path / "c", 1)
    assert 3 < len(tries) < 2 + 0.2 / 0.01 + 4
