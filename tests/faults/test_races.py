"""Two and more jobs at one directory at once: one saves, the others are told; and loads while a job overwrites."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.checkpoint import Transaction, save_session
from megackpt.errors import CheckpointReplaced, SaveInProgress
from megackpt.storage.local import LocalStorage
from tests.faults.share import part

PROCESSES = multiprocessing.get_context("fork")
OWN = {
    "common.pt",
    "__0_0.distcp",
    "__0_1.distcp",
    ".metadata",
    "metadata.json",
    "megackpt.index",
}
BEFORE = ("nothing", "an empty directory", "a checkpoint", "a dead save")


def state(value: float) -> dict[str, Any]:
    whole = {
        f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", torch.full((5000,), value))
        for i in range(4)
    }
    return {**whole, "value": value}


def loaded(where: Path) -> float:
    """The one value that the checkpoint holds everywhere."""
    found = megackpt.load(state(-1.0), where)
    (value,) = {
        found["value"],
        *(float(v) for i in range(4) for v in found[f"w{i}"].unique()),
    }
    return value


class Meetings:
    """Processes that meet to save to one directory: each begins at the same instant, and whoever has begun
    waits until all have begun or heard why they cannot. So exactly one can win."""

    def __init__(
        self, contenders: int, rounds: int, where: Path, locks: bool = True
    ) -> None:
        self.contenders, self.rounds, self.where, self.locks = (
            contenders,
            rounds,
            where,
            locks,
        )
        self.begun, self.start = (
            PROCESSES.Barrier(contenders, timeout=60) for _ in range(2)
        )
        self.said = PROCESSES.SimpleQueue()

    def run(self, seed: int, before: str) -> list[dict[int, str]]:
        """For each meeting what each contender heard; "" for one that has saved."""
        jobs = [
            PROCESSES.Process(target=self.contend, args=(n, seed, before))
            for n in range(self.contenders)
        ]
        for job in jobs:
            job.start()
        heard: list[dict[int, str]] = [{} for _ in range(self.rounds)]
        for _ in range(self.contenders * self.rounds):
            meeting, job, word = self.said.get()
            heard[meeting][job] = word
        for process in jobs:
            process.join()
            assert process.exitcode == 0
        return heard

    def contend(self, job: int, seed: int, before: str) -> None:
        logging.disable()
        chance = random.Random(f"{seed} {job}")
        real = save_session.begin
        if not self.locks:  # as on a file system without them
            LocalStorage.lock = lambda _: True  # type: ignore[method-assign]

        def begin(*args: Any, **options: Any) -> Any:
            for _ in range(
                chance.randrange(20_000)
            ):  # some tenths of a millisecond: each meeting is another one
                pass
            try:
                return real(*args, **options)
            finally:
                self.begun.wait()

        save_session.begin = begin
        for meeting in range(self.rounds):
            where = self.where / str(meeting) / "c"
            if job == 0:
                save_session.begin = real
                prepare(where, before)
                save_session.begin = begin
            self.start.wait()
            try:
                megackpt.save(state(float(job)), where)
                word = ""
            except SaveInProgress:
                word = "SaveInProgress"
            except BaseException:  # noqa: BLE001 - told to the test
                word = traceback.format_exc()
            self.said.put((meeting, job, word))
        os._exit(0)


def prepare(where: Path, before: str) -> None:
    where.parent.mkdir()
    if before == "an empty directory":
        where.mkdir()
    elif before == "a checkpoint":
        megackpt.save(state(-2.0), where)
    elif before == "a dead save":
        pid = os.fork()
        if pid == 0:
            Transaction.commit = lambda *_, **__: os._exit(9)  # type: ignore[method-assign, assignment]
            megackpt.save(state(-3.0), where)
        os.waitpid(pid, 0)


def met(meetings: Meetings, before: str, seed: int) -> Counter[str]:
    """What the losers heard; each meeting has one winner, whose checkpoint is whole, and leaves nothing else."""
    losers: Counter[str] = Counter()
    for meeting, heard in enumerate(meetings.run(seed, before)):
        words = sorted(heard.values())
        losers.update(words[1:])
        where = meetings.where / str(meeting) / "c"
        if words[0]:
            losers["nobody won"] += 1
            continue
        assert words[1], f"two have won: {heard}"
        assert heard[int(loaded(where))] == ""
        assert set(os.listdir(where)) == OWN, os.listdir(where)
        assert os.listdir(where.parent) == ["c"]
    return losers


@pytest.mark.parametrize("before", BEFORE)
def test_of_jobs_that_begin_at_once_one_saves_and_all_others_raise(tmp_path, before):
    heard = met(Meetings(3, 10, tmp_path), before, seed=1)
    assert heard == {"SaveInProgress": 20}


HEAD = (
    "jobs that begin at once",
    "over",
    "locks",
    "meetings",
    "nobody saved",
    "losers told SaveInProgress",
)


@pytest.mark.campaign
@pytest.mark.parametrize("jobs", [2, 4])
@pytest.mark.parametrize("before", BEFORE)
def test_hundreds_of_meetings(tmp_path, note, before, jobs):
    rounds = part(150)
    heard = met(Meetings(jobs, rounds, tmp_path), before, seed=jobs)
    note(
        HEAD, jobs, before, "yes", rounds, heard["nobody won"], heard["SaveInProgress"]
    )
    assert heard == {"SaveInProgress": rounds * (jobs - 1)}


@pytest.mark.campaign
@pytest.mark.parametrize("before", BEFORE)
def test_without_locks_at_most_one_job_saves_and_all_others_raise(
    tmp_path, note, before
):
    rounds = part(100)
    heard = met(Meetings(3, rounds, tmp_path, locks=False), before, seed=3)
    note(HEAD, 3, before, "no", rounds, heard["nobody won"], heard["SaveInProgress"])
    assert set(heard) <= {"SaveInProgress", "nobody won"}
    assert heard["SaveInProgress"] == rounds * 2


def load_again_and_again(where: Path, seed: int, done: Any, said: Any) -> None:
    logging.disable()
    found: Counter[str] = Counter()
    try:
        while not done.is_set() or not found:
            try:
                found[str(loaded(where))] += 1
            except CheckpointReplaced:
                found["replaced"] += 1
        said.put(found)
    except BaseException:  # noqa: BLE001 - told to the test
        said.put(traceback.format_exc())
    os._exit(0)


def overwritten(where: Path, rounds: int, readers: int) -> tuple[int, int, int]:
    """Loads, loads that were told of a replacement, and how many different checkpoints the loads saw."""
    megackpt.save(state(0.0), where)
    done, said = PROCESSES.Event(), PROCESSES.SimpleQueue()
    jobs = [
        PROCESSES.Process(target=load_again_and_again, args=(where, n, done, said))
        for n in range(readers)
    ]
    for job in jobs:
        job.start()
    for value in range(1, rounds + 1):
        megackpt.save(state(float(value)), where)
    done.set()
    found: Counter[str] = Counter()
    for _ in jobs:
        one = said.get()
        assert isinstance(one, Counter), one
        found += one
    for job in jobs:
        job.join()
        assert job.exitcode == 0
    told = found.pop("replaced", 0)
    return found.total(), told, len(found)


def test_loads_under_overwriting_saves_see_one_whole_checkpoint(tmp_path):
    loads, told, different = overwritten(tmp_path / "c", rounds=20, readers=2)
    assert different > 1, "the readers never met a replacement"
    assert loads + told > 2


@pytest.mark.campaign
def test_loads_under_hundreds_of_overwriting_saves(tmp_path, note):
    saves = part(300, least=30)
    loads, told, different = overwritten(tmp_path / "c", rounds=saves, readers=3)
    head = (
        "overwriting saves",
        "loads of 3 readers meanwhile",
        "checkpoints they saw",
        "told CheckpointReplaced",
    )
    note(head, saves, loads + told, different, told)
    assert different > saves // 3
