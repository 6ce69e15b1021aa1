"""Local saves that are copied into the storage later: agents are functions here."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megackpt import CoverageError, NonfiniteValues, Strategy
from megackpt.checkpoint import open_checkpoint
from megackpt.testing import ThreadedGroup
from tests.manager.drain_job import DrainJob, files, without_processes
from tests.manager.local_job import state


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DrainJob:
    without_processes(monkeypatch)
    return DrainJob(tmp_path)


def test_a_drained_checkpoint_equals_a_direct_one(
    job: DrainJob, tmp_path: Path
) -> None:
    job.train(10)
    assert job.durable() == []
    job.drain(0, 1)
    assert job.durable() == [10]
    job.check_storage(10)
    direct = DrainJob(tmp_path / "direct", drain=False)
    direct.train(10)
    name = "run/iter_0000010"
    assert files(tmp_path / name) == files(tmp_path / "direct" / name)
    assert (tmp_path / "run/latest_checkpointed_iteration.txt").read_text() == "10"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_dcp_reads_a_drained_checkpoint(job: DrainJob, tmp_path: Path) -> None:
    job.train(10)
    job.drain(0, 1)
    asked = {"w": torch.zeros(128), "b": torch.zeros(5)}
    dcp.load(asked, checkpoint_id=tmp_path / "run/iter_0000010", no_dist=True)
    own = torch.arange(64.0) + 10
    assert torch.equal(asked["w"], torch.cat([own, own + 1000]))
    assert torch.equal(asked["b"], torch.full((5,), 10.0))


def test_a_step_that_every_does_not_divide_is_saved_on_the_hosts(job: DrainJob) -> None:
    job.options["every"] = 7
    job.train(7, 10)
    assert job.pieces(0) == ["10:0", "10:1", "7:0", "7:1"]
    job.drain(0, 1)
    assert job.durable() == [10]
    assert job.restore() == (10, "local")


def test_asynchronous_saves_are_drained(job: DrainJob) -> None:
    # Ranks that are threads have one group, which a save in flight would use, too.
    job.ranks = 1
    job.train(10, asynchronous=True)
    job.train(20, asynchronous=True)
    job.drain(0)
    assert job.durable() == [10, 20]
    job.check_storage(10)
    job.check_storage(20)


def test_ranks_that_write_nothing_and_plans_that_are_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_processes(monkeypatch)
    job = DrainJob(tmp_path)
    job.ranks = 4
    job.per_host = 2
    job.train(10, 20, 30)
    job.drain(0, 1)
    job.check_storage(30)


def test_the_index_equals_the_index_of_a_direct_save(
    job: DrainJob, tmp_path: Path
) -> None:
    reference = DrainJob(tmp_path / "direct", drain=False)
    for each in (job, reference):
        each.train(10)
    job.drain(0, 1)
    drained = open_checkpoint(tmp_path / "run/iter_0000010").manifest
    direct = open_checkpoint(tmp_path / "direct/run/iter_0000010").manifest
    assert drained.tensors == direct.tensors
    assert drained.files == direct.files
    for column in ("tensor", "writer", "file", "start", "length", "digests"):
        mine, theirs = getattr(drained.chunks, column), getattr(direct.chunks, column)
        assert mine.tolist() == theirs.tolist(), column


def test_nonfinite_values_are_refused(job: DrainJob) -> None:
    """By the local save, on all ranks."""

    def rank(group: ThreadedGroup) -> str:
        options = {"strategy": Strategy(check_values="raise")}
        with job.manager(group, **options) as manager:
            given = state(group, 10)
            if group.rank:
                given["w"].data[3] = math.nan
            with pytest.raises(NonfiniteValues) as caught:
                manager.save(10, given)
        return str(caught.value)

    assert ["'w'" in text for text in ThreadedGroup.run(2, rank)] == [True, True]
    job.drain(0, 1)
    assert job.durable() == []


def test_declarations_are_checked_before_anything_is_written(job: DrainJob) -> None:
    def rank(group: ThreadedGroup) -> None:
        with job.manager(group) as manager:
            given = state(group, 10)
            if group.rank:
                del given["w"]
            with pytest.raises(CoverageError, match="'w'"):
                manager.save(10, given)

    ThreadedGroup.run(2, rank)
    assert not (job.folder / "hosts").exists()
