"""Who may change what while a save is drained: the table of docs/design/0066-drained-saves.md."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megackpt import (
    CheckpointManager,
    CorruptCheckpoint,
    SaveInProgress,
    StorageError,
)
from megackpt.backends.torch_dist import TorchDist
from megackpt.checkpoint import SaveSession, clear, open_checkpoint
from megackpt.manager.local import drain
from megackpt.manager.local.drain import AREA, HostDrain
from megackpt.storage import LocalStorage
from megackpt.testing import ThreadedGroup
from tests.children import died
from tests.manager.drain_job import DrainJob, without_processes
from tests.manager.local_job import state

STEP = "iter_0000010"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DrainJob:
    without_processes(monkeypatch)
    return DrainJob(tmp_path)


def save_directly(job: DrainJob, step: int, **options: Any) -> str:
    """Save a step without a tier; returns the id of the save."""

    def rank(group: ThreadedGroup) -> None:
        with CheckpointManager(
            job.folder / "run", process_group=group, **options
        ) as manager:
            manager.save(step, state(group, step))

    ThreadedGroup.run(job.ranks, rank)
    return save_id(job)


def save_id(job: DrainJob) -> str:
    return open_checkpoint(job.folder / "run" / STEP).manifest.save_id


def areas(job: DrainJob) -> list[str]:
    """The steps with a work area."""
    names = os.listdir(job.folder / "run" / AREA)
    return sorted(name.split("_")[1] for name in names if name.startswith("step_"))


def left(job: DrainJob) -> list[str]:
    """Entries in the directory of the run that are no step and no file of the run."""
    names = os.listdir(job.folder / "run")
    return [name for name in names if name.startswith(f".{STEP}")]


def without_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "LEASE_SECONDS", -1.0)


def test_no_checkpoint_has_the_name(job: DrainJob) -> None:
    job.train(10)
    job.drain(0, 1)
    assert job.durable() == [10]
    assert areas(job) == []
    assert [job.agent(host).status.durable_step for host in (0, 1)] == [10, 10]


def test_an_agent_that_died_after_the_commit(
    job: DrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.train(10)
    job.agent(1).work()
    put = LocalStorage.put

    def refuse(self: LocalStorage, name: str, data: bytes) -> None:
        if name == "durable":
            raise StorageError("as if the agent had died")
        put(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "put", refuse)
        with pytest.raises(StorageError, match="as if"):
            job.agent(0).work()
    committed = save_id(job)
    assert areas(job) == ["10"]
    job.drain(1)
    assert save_id(job) == committed
    assert areas(job) == []


def test_two_agents_that_find_all_marks(
    job: DrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.train(10)
    job.agent(1).work()
    slow, fast = job.agent(0), job.agent(1)
    link = drain._link

    def overtaken(*arguments: Any) -> None:
        monkeypatch.setattr(drain, "_link", link)
        link(*arguments)
        fast.work()

    monkeypatch.setattr(drain, "_link", overtaken)
    with pytest.raises((SaveInProgress, StorageError)):
        slow.work()
    committed = save_id(job)
    assert not slow.work()
    assert save_id(job) == committed
    job.check_storage(10)
    assert left(job) == areas(job) == []


def test_an_agent_that_died_during_the_commit(
    job: DrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.train(10)
    job.agent(1).work()
    with monkeypatch.context() as patch:
        patch.setattr(HostDrain, "_confirm", lambda *_: os._exit(9))
        assert died(job.agent(0).work)
    assert job.durable() == []
    job.drain(1)
    job.check_storage(10)
    assert left(job) == areas(job) == []


def test_an_older_checkpoint_is_replaced(job: DrainJob) -> None:
    old = save_directly(job, 10)
    job.train(10)
    job.drain(0, 1)
    assert save_id(job) != old
    job.check_storage(10)


def test_an_older_checkpoint_stays_without_overwrite(job: DrainJob) -> None:
    old = save_directly(job, 10)
    job.train(10, overwrite=False)
    agents = job.drain(0, 1)
    assert save_id(job) == old
    assert any("holds a complete checkpoint" in agent.status.reason for agent in agents)
    assert not job.agent(0).work()


def test_a_later_direct_save_stays(job: DrainJob) -> None:
    job.train(10)
    new = save_directly(job, 10)
    agents = job.drain(0, 1)
    assert save_id(job) == new
    assert any("was saved after the local step" in a.status.reason for a in agents)
    assert not job.agent(0).work()


def test_a_step_that_is_saved_again(job: DrainJob) -> None:
    job.train(10)
    job.agent(0).work()
    job.train(10)
    agents = job.drain(0, 1)
    assert job.durable() == [10]
    assert save_id(job)[8:] == max(a.status.durable for a in agents)[8:]
    assert areas(job) == []


def test_a_later_save_that_is_durable_first(job: DrainJob) -> None:
    job.train(10, 20)
    for piece in (job.folder / "hosts").glob("*/*/step_10_*/rank_1_*"):
        shutil.rmtree(piece)
    job.drain(0, 1)
    assert job.durable() == [20]
    assert areas(job) == []


def test_a_run_that_went_back_and_has_saved(job: DrainJob) -> None:
    job.train(10, 20)
    job.agent(0).work()
    job.continue_from(10, 11)
    job.drain(0, 1)
    assert job.durable() == [10]
    assert areas(job) == []


def test_a_run_that_went_back_and_has_not_saved(job: DrainJob) -> None:
    job.train(10, 20)
    assert job.restore(step=10) == (10, "local")
    job.drain(0, 1)
    assert job.durable() == [10, 20]


def test_a_lost_host(job: DrainJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job.train(10)
    job.lose(1)
    assert job.agent(0).work()
    assert job.durable() == []
    without_lease(monkeypatch)
    job.drain(0)
    job.check_storage(10)


def test_two_of_three_hosts_are_lost(
    job: DrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two copies; one of the lost hosts had begun to drain."""
    job.options["copies"] = 2
    job.ranks = 3
    job.train(10)
    job.agent(1).work()
    job.lose(1)
    job.lose(2)
    assert job.agent(0).work()
    assert job.durable() == []
    without_lease(monkeypatch)
    job.drain(0)
    job.check_storage(10)
    assert left(job) == areas(job) == []


def test_a_damaged_piece(job: DrainJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job.train(10)
    (piece,) = (job.folder / "hosts/host1").glob("*/step_10_*/rank_1_*")
    place = open_checkpoint(piece).manifest.chunks_of("w")[0].location
    data = bytearray((piece / place.file).read_bytes())
    data[place.start] ^= 1
    (piece / place.file).write_bytes(data)
    agent = job.agent(1)
    assert agent.work()
    assert "cannot be drained" in agent.status.reason
    without_lease(monkeypatch)
    job.agent(0).work()
    job.check_storage(10)


def test_an_agent_that_was_paused(
    job: DrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.train(10)
    without_lease(monkeypatch)
    paused, other = job.agent(1), job.agent(0)
    write = TorchDist.write

    def late(*arguments: Any) -> Any:
        monkeypatch.setattr(TorchDist, "write", write)
        other.work()
        return write(*arguments)

    monkeypatch.setattr(TorchDist, "write", late)
    with pytest.raises((StorageError, FileNotFoundError)):
        paused.work()
    committed = save_id(job)
    assert not paused.work()
    assert save_id(job) == committed
    job.check_storage(10)
    assert areas(job) == []


def test_all_copies_are_lost(job: DrainJob) -> None:
    job.options["copies"] = 0
    job.train(10)
    job.lose(1)
    job.agent(0).work()
    assert areas(job) == ["10"]
    job.train(20)
    job.drain(0, 1)
    assert job.durable() == [20]
    assert areas(job) == []


def keep_one(job: DrainJob) -> None:
    def rank(group: ThreadedGroup) -> None:
        run = job.folder / "run"
        with CheckpointManager(run, keep_last=1, process_group=group) as manager:
            for step in (10, 11, 12):
                manager.save(step, state(group, step))

    ThreadedGroup.run(job.ranks, rank)
    assert job.durable() == [12]


def clear_step(job: DrainJob) -> None:
    clear(job.folder / "run" / "iter_0000020")


@pytest.mark.parametrize("act", [keep_one, clear_step])
def test_retention_does_not_look_into_work_areas(
    job: DrainJob, act: Callable[[DrainJob], None]
) -> None:
    job.train(20)
    job.agent(0).work()
    act(job)
    assert areas(job) == ["20"]
    job.drain(0, 1)
    job.check_storage(20)


def test_an_agent_that_was_paused_between_its_commit_and_its_notes(
    job: DrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not set the tracker and the durable step back."""
    job.train(10, 20)
    job.agent(1).work()
    commit = SaveSession.commit

    def paused(session: SaveSession, *arguments: Any) -> int:
        monkeypatch.setattr(SaveSession, "commit", commit)
        nbytes = session.commit(*arguments)
        job.drain(0, 1)
        return nbytes

    monkeypatch.setattr(SaveSession, "commit", paused)
    late = job.agent(0)
    late.work()
    assert job.durable() == [10, 20]
    assert late.status.durable_step == 20
    tracker = job.folder / "run/latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "20"


def test_an_agent_takes_the_settings_of_a_later_job(job: DrainJob) -> None:
    job.train(10)
    agents = job.drain(0, 1)
    location = agents[0]._location
    settings = replace(agents[0]._settings, bytes_per_second=1 << 40)
    settings.write(location)
    agents[0].work()
    assert agents[0]._settings.bytes_per_second == 1 << 40


def test_a_link_in_a_work_area_is_refused(job: DrainJob, tmp_path: Path) -> None:
    """The agent has the rights of its user: it must not link the files that another user names."""
    job.train(10)
    job.agent(1).work()
    private = tmp_path / "private"
    private.write_bytes(b"secret")
    written, *_ = (job.folder / "run" / AREA).glob("step_*/rank_1.*/*.distcp")
    written.unlink()
    written.symlink_to(private)
    with pytest.raises(CorruptCheckpoint, match="is not a file"):
        job.agent(0).work()
    assert job.durable() == []
    assert private.stat().st_nlink == 1
