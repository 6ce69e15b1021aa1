"""What a trainer sees of its drains, and what it keeps: a storage that is slow, full or hangs."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from megackpt import BackendError, CheckpointManager, LocalTier, StorageError, Strategy
from megackpt.backends.torch_dist import TorchDist
from megackpt.manager.local import agent, drain
from megackpt.manager.local.drain import DrainStatus, HostDrain
from megackpt.manager.local.pieces import HostPieces
from megackpt.testing import ThreadedGroup
from tests.manager.drain_job import DrainJob, without_processes


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DrainJob:
    without_processes(monkeypatch)
    return DrainJob(tmp_path)


def statuses(job: DrainJob) -> list[tuple[int | None, list[int], int]]:
    """On all ranks: the durable step, the steps that wait, and the lag in steps."""

    def rank(group: ThreadedGroup) -> tuple[int | None, list[int], int]:
        with job.manager(group) as manager:
            status = manager.drain_status
            assert manager.durable_step == status.durable_step
            assert (status.lag_seconds > 0) == bool(status.waiting)
            return status.durable_step, status.waiting, status.lag_steps

    return ThreadedGroup.run(job.ranks, rank)


def test_the_trainer_sees_what_is_durable(job: DrainJob) -> None:
    job.train(10)
    job.drain(0, 1)
    job.train(20)
    job.agent(0).work()
    job.agent(1).fail("as if")
    assert statuses(job)[0] == (10, [20], 10)
    job.drain(0, 1)
    assert statuses(job) == [(20, [], 0), (20, [], 0)]


def test_no_progress_is_a_reason(
    job: DrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No agent runs, or the agent hangs in the storage."""
    job.train(10)
    job.agent(0).work()
    monkeypatch.setattr(drain, "LEASE_SECONDS", -1.0)

    def rank(group: ThreadedGroup) -> str:
        with job.manager(group) as manager:
            return manager.drain_status.reason

    reason = ThreadedGroup.run(2, rank)[0]
    assert "the agent has made no progress for 0 s" in reason
    assert "step 10 waits for other hosts to write rank 1" in reason


def test_steps_stay_on_the_hosts_until_they_are_durable(job: DrainJob) -> None:
    job.train(10, 11, 12, 13)
    assert {name.split(":")[0] for name in job.pieces(0)} == {"10", "12", "13"}
    job.drain(0, 1)
    job.train(14)
    assert {name.split(":")[0] for name in job.pieces(0)} == {"13", "14"}


def test_a_storage_that_is_behind(
    job: DrainJob, caplog: pytest.LogCaptureFixture
) -> None:
    """The step that is being drained and the newest ones stay; a WARNING says what does not."""
    job.train(10)
    job.agent(0).work()
    with caplog.at_level(logging.WARNING):
        job.train(20, 30)
        assert "is behind" not in caplog.text
        job.train(40)
    assert "step 20 is removed from the hosts before it is durable" in caplog.text
    assert "as step 10 is still being drained. step 10 waits for other" in caplog.text
    assert {name.split(":")[0] for name in job.pieces(0)} == {"10", "30", "40"}
    job.drain(0, 1)
    assert job.durable() == [10, 30, 40]


def test_the_first_save_asks_for_one_more_generation(job: DrainJob) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostPieces, "free_bytes", lambda *_: 5 << 20)
        with pytest.raises(StorageError, match=r"5,242,880 bytes free, and local"):
            job.train(10)  # 3 generations of 2 pieces, each of 1 MiB and more
        plain = DrainJob(job.folder / "plain", drain=False)
        plain.train(10)


def test_a_full_storage_is_asked_again(
    job: DrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.train(10)
    job.agent(1).work()
    host = job.agent(0)
    write = os.writev
    refusals = [errno.ENOSPC, errno.EDQUOT]
    pauses: list[float] = []
    reasons: list[str] = []

    def full(descriptor: int, buffers: Any) -> int:
        if drain.AREA in os.readlink(f"/proc/self/fd/{descriptor}") and refusals:
            raise OSError(refusals[0], os.strerror(refusals[0]))
        return write(descriptor, buffers)

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        reasons.append(host.status.reason)
        if refusals:
            refusals.pop(0)
        elif job.durable():
            monkeypatch.setattr(agent, "_IDLE_SECONDS", -1.0)

    monkeypatch.setattr(os, "writev", full)
    monkeypatch.setattr(agent.time, "sleep", sleep)
    agent.serve(host)
    assert job.durable() == [10]
    assert pauses[:3] == [1.0, 2.0, 0.5]
    assert "No space left" in reasons[0]
    assert "quota" in reasons[1]
    assert reasons[-1] == ""


def test_a_storage_that_hangs_stops_no_training(
    job: DrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.train(10)
    job.drain(0, 1)
    answers, hangs = threading.Event(), threading.Event()
    write = TorchDist.write

    def hang(*arguments: Any) -> Any:
        where = arguments[1].location
        if "rank_0" in where and drain.AREA in where:
            hangs.set()
            answers.wait()
        return write(*arguments)

    monkeypatch.setattr(TorchDist, "write", hang)
    job.train(20)
    host = job.agent(0)
    working = threading.Thread(target=host.work)
    working.start()
    hangs.wait()
    job.train(21, 30, 31)
    host.fail("the storage has not answered")
    assert statuses(job)[0] == (10, [20], 10)
    assert job.durable() == [10]
    answers.set()
    working.join()
    job.drain(0, 1)
    assert job.durable() == [10, 20, 30]


def test_drain_bytes_per_second(job: DrainJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses are as long as the bytes need, and no bytes wait without a limit."""
    job.options["drain_bytes_per_second"] = 1024.0
    job.train(10)
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(drain.time, "sleep", sleep)
    monkeypatch.setattr(drain.time, "monotonic", lambda: clock[0])
    hosts = [job.agent(0), job.agent(1)]
    for host in hosts:
        host._advance(2048)
        host._advance(1024)
        host._advance(0)
    assert clock == [6.0]


def test_retention_removes_older_drained_steps(job: DrainJob) -> None:
    for step in (10, 20, 30):
        job.train(step, keep_last=2)
        job.drain(0, 1)
    assert job.durable() == [20, 30]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"strategy": "zarr"}, "torch_dist"),
        ({"root": "s3://bucket/run"}, "file system"),
        ({"strategy": Strategy(audit="full")}, "compares no replicas"),
        ({"strategy": Strategy(check_values="note")}, "notes no values"),
        ({"strategy": Strategy(reuse_unchanged=True)}, "links no files"),
        ({"keep_last": 1, "keep_fn": bool}, "keep_fn is a function"),
    ],
)
def test_what_an_agent_cannot_do_is_refused(
    tmp_path: Path, options: dict[str, Any], what: str
) -> None:
    tier = LocalTier(tmp_path / "memory", every=1, drain=True)
    arguments = {"root": tmp_path / "run", "local": tier} | options
    with pytest.raises((BackendError, ValueError), match=what):
        CheckpointManager(**arguments)


def test_a_rate_needs_a_drain() -> None:
    with pytest.raises(ValueError, match="needs drain=True"):
        LocalTier("memory", every=1, drain_bytes_per_second=1.0)


def test_a_manager_that_drains_nothing_has_no_durable_step(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        assert manager.durable_step is None
        assert manager.drain_status == DrainStatus()


def test_a_damaged_mark_is_written_again(job: DrainJob) -> None:
    job.train(10)
    job.agent(1).work()
    (mark,) = (job.folder / "run").glob(f"{drain.AREA}/step_*/rank_1")
    mark.write_bytes(mark.read_bytes()[:-1])
    with pytest.raises(Exception, match="is damaged"):
        job.agent(0).work()
    job.drain(0, 1)
    job.check_storage(10)


def test_a_storage_that_is_not_mounted_is_a_reason(job: DrainJob) -> None:
    job.train(10)
    (job.folder / "run").rename(job.folder / "unmounted")
    with pytest.raises(StorageError, match="is its file system mounted"):
        job.agent(0).work()
    (job.folder / "unmounted").rename(job.folder / "run")
    job.drain(0, 1)
    assert job.durable() == [10]


def test_an_agent_works_on_what_it_finds_alone(job: DrainJob) -> None:
    """Pieces without the last file of the step, as after a kill in the save."""
    job.train(10)
    for ready in (job.folder / "hosts").glob("*/*/step_*/ready"):
        ready.unlink()
    hosts: list[HostDrain] = job.drain(0, 1)
    assert job.durable() == []
    assert [host.status.waiting for host in hosts] == [[], []]
    assert not any(host.has_news() for host in hosts)


def test_without_drain_nothing_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_processes(monkeypatch)
    job = DrainJob(tmp_path)
    job.train(10)
    job.drain(0, 1)
    local = LocalTier(tmp_path / "hosts" / "host0", every=1, host="host0")
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        assert manager.durable_step is None
