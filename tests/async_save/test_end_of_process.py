"""A process ends while its asynchronous save is in flight: the save is committed, or its loss is an ERROR."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megackpt.manager import CheckpointManager
from tests.async_save.processes import PATIENCE
from tests.conftest import Ranks

SCRIPT = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
SCRIPT += """
import os
import threading
import time
import torch
import torch.distributed as dist
from megackpt import CheckpointManager, limits

real = os.fsync
def refuse(fd):
    if ".distcp" in os.readlink(f"/proc/self/fd/{fd}"):
        raise OSError(28, os.strerror(28))
    real(fd)

def no_thread(*_):
    raise RuntimeError("can't create new thread at interpreter shutdown")

def forbid_threads(checkpoints):
    # As Python 3.12.0 to 3.12.2 do. The writing needs threads, and the commit does not.
    while "writing" in checkpoints._queue.status():
        time.sleep(0.01)
    threading._register_atexit(setattr, threading.Thread, "start", no_thread)

def train(keep_last=None):
    checkpoints = CheckpointManager("run", asynchronous=True, keep_last=keep_last)
    for step in (1, 2):
        weights = torch.full((1 << 16,), float(step))
        checkpoints.save(step, extra={"w": weights}, metrics={"loss": 0.5})
    return checkpoints
"""


def steps(run: Path) -> list[int | None]:
    return [step.step for step in CheckpointManager(run).steps() if step.complete]


@pytest.mark.parametrize(
    ("end", "code"),
    [("train()", 0), ("checkpoints = train(); forbid_threads(checkpoints)", 0),
     ("train(keep_last=1); raise ValueError('end')", 1), ("with train(): sys.exit(3)", 3)],
)  # fmt: skip
def test_one_process_finalizes_its_saves(tmp_path: Path, end: str, code: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT + end)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == code
    assert ("ValueError: end" in done.stderr) is (code == 1)
    assert "before these saves" not in done.stderr
    assert steps(tmp_path / "run")[-1] == 2
    tracker = tmp_path / "run/latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "2"


def test_a_loss_is_an_error_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT + "os.fsync = refuse; train()")
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert "Traceback" not in done.stderr
    assert "the process ends (StorageError(" in done.stderr
    assert "No space left" in done.stderr
    assert "iter_0000002" in done.stderr
    assert steps(tmp_path / "run") == []


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_that_all_end_finalize_their_saves(
    tmp_path: Path, ranks: Ranks, fails: bool
) -> None:
    """After an exception of one rank no rank waits for it."""
    text = f"""
dist.init_process_group("gloo")
checkpoints = train()
if {fails} and dist.get_rank() == 1:
    raise ValueError("end")
dist.destroy_process_group()
"""
    (tmp_path / "script.py").write_text(SCRIPT + text)
    done = ranks(tmp_path / "script.py", 2, cwd=tmp_path, check=False)
    assert [each.returncode for each in done] == [0, int(fails)]
    assert steps(tmp_path / "run") == ([] if fails else [1, 2])
    if not fails:
        assert [each.stderr for each in done] == ["", ""]
        return
    lost = "before these saves are committed on all ranks: iter_0000001"
    assert "the process ends (RankLost(" in done[0].stderr
    assert "the process ends (ValueError('end'))" in done[1].stderr
    assert all(lost in each.stderr for each in done)
