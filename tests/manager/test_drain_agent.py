"""The agent as a process: it outlives the trainer, and dies at any moment."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megackpt import CheckpointManager, LocalTier
from megackpt.manager.local.drain import read_status
from megackpt.manager.local.pieces import AGENT
from megackpt.storage import LocalStorage
from tests.checkpoint.test_kill_points import die_at
from tests.children import died
from tests.manager.drain_job import DrainJob, without_processes
from tests.manager.test_drain_ownership import areas, left

TRAINER = """
import os, signal, sys, torch
from megackpt import CheckpointManager, LocalTier
from megackpt.manager.local import saves

folder, starts, async_ = sys.argv[1], sys.argv[2] == "agent", sys.argv[3] == "async"
if not starts:
    saves.ensure_agent = lambda _: None
tier = LocalTier(folder + "/memory", every=1, copies=0, drain=True)
manager = CheckpointManager(folder + "/run", save_interval=10, local=tier)
request = manager.save(10, {"w": torch.arange(1000.0)})
os.kill(os.getpid(), signal.SIGKILL)
"""


def is_running(location: str) -> bool:
    folder = LocalStorage(f"{location}/{AGENT}")
    is_free = folder.lock()
    folder.close()
    return not is_free


def train_and_die(folder: Path, agent: str) -> None:
    command = [sys.executable, "-c", TRAINER, str(folder), agent, "sync"]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


def manager(folder: Path) -> CheckpointManager:
    tier = LocalTier(folder / "memory", every=1, copies=0, drain=True)
    return CheckpointManager(folder / "run", save_interval=10, local=tier)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 25
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail("the agent has not done it in time")
        time.sleep(0.1)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for location in (tmp_path / "memory").iterdir():
        if is_running(str(location)):
            os.kill(read_status(str(location)).pid, signal.SIGTERM)


def check(folder: Path) -> None:
    with CheckpointManager(folder / "run") as plain:
        found = plain.restore({"w": torch.zeros(1000)}, step=10)
    assert found is not None
    assert torch.equal(found.state["w"], torch.arange(1000.0))


def test_the_agent_outlives_the_trainer(folder: Path) -> None:
    train_and_die(folder, "agent")
    wait_for((folder / "run/iter_0000010").exists)
    with manager(folder) as again:
        wait_for(lambda: again.durable_step == 10)
        assert again.drain_status.waiting == []
    check(folder)


def test_the_next_manager_starts_an_agent(folder: Path) -> None:
    """As after the whole process tree was killed."""
    train_and_die(folder, "no agent")
    assert not (folder / "run/iter_0000010").exists()
    with manager(folder) as again:
        found = again.restore({"w": torch.zeros(1000)})
        assert found is not None
        assert found.source == "local"
        wait_for(lambda: again.durable_step == 10)
    check(folder)


def test_a_killed_agent_is_started_by_the_next_save(folder: Path) -> None:
    with manager(folder) as trainer:
        trainer.save(10, {"w": torch.arange(1000.0)})
        wait_for(lambda: trainer.durable_step == 10)
        (location,) = map(str, (folder / "memory").iterdir())
        os.kill(read_status(location).pid, signal.SIGKILL)
        wait_for(lambda: not is_running(location))
        trainer.save(20, {"w": torch.arange(1000.0)})
        wait_for(lambda: trainer.durable_step == 20)
    check(folder)


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 2, 3])
def test_an_agent_that_dies_at_any_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Both agents are one process that dies; the next agents finish."""
    without_processes(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    job = DrainJob(tmp_path / "job")
    job.train(10)
    shutil.copytree(job.folder, tmp_path / "before")
    for change in range(first, 500, 3):
        shutil.rmtree(job.folder)
        shutil.copytree(tmp_path / "before", job.folder)

        def work(change: int = change) -> None:
            die_at(change)
            job.drain(0, 1)

        is_dead = died(work)
        assert job.durable() in ([], [10])
        job.drain(1, 0)
        assert job.durable() == [10], change
        job.check_storage(10)
        assert left(job) == areas(job) == [], change
        if not is_dead:
            return
    pytest.fail("it never was done")


def test_an_agent_needs_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts in less time and memory, and takes none of a device."""
    without_processes(monkeypatch)
    job = DrainJob(tmp_path)
    job.train(10)
    job.drain(1)
    (location,) = (tmp_path / "hosts/host0").iterdir()
    code = (
        "import sys; from megackpt.manager.local.drain import HostDrain; "
        f"HostDrain({str(location)!r}).work(); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert job.durable() == [10]
