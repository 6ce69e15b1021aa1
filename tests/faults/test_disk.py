"""A disk that is full, refuses or writes less than asked: all ranks are told who and where; nothing is committed."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import AsyncCallsQueue, ShardedTensor
from megackpt.errors import StorageError
from tests.faults.share import sampled

FORMATS = ["torch_dist", "zarr", "safetensors"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def state(value: float) -> dict[str, Any]:
    return {
        f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", torch.full((20_000,), value))
        for i in range(2)
    }


def value_of(where: Path) -> float:
    tensors = megackpt.load_plain_tensors(where)
    (value,) = {float(v) for tensor in tensors.values() for v in tensor.unique()}
    return value


def fill_but(disk: Path, spare: int) -> None:
    with open(disk / "filler", "wb", buffering=0) as filler:
        room = os.statvfs(disk)
        filler.write(bytes(room.f_bavail * room.f_frsize - spare))


@pytest.mark.root
@pytest.mark.parametrize(
    ("name", "later"),
    [*((name, "") for name in FORMATS), ("torch_dist", "thread"), ("zarr", "process")],
)
def test_a_full_disk(small_disk: Path, name: str, later: str) -> None:
    """From no room at all to nearly enough, for data, tables of contents and index alike."""
    where = small_disk / "c"
    queue = AsyncCallsQueue(persistent=later == "process")

    def save(value: float) -> None:
        request = megackpt.save(
            state(value), where, name, async_sharded_save=bool(later)
        )
        if request is not None:
            queue.schedule_async_request(request)
            assert queue.maybe_finalize_async_calls(blocking=True)

    save(1.0)
    for spare in range(0, 150_000, 12_288):
        fill_but(small_disk, spare)
        try:
            with pytest.raises(StorageError, match="No space left") as caught:
                save(2.0)
        finally:
            (small_disk / "filler").unlink()
        assert str(small_disk) in str(caught.value)
        assert value_of(where) == 1.0
    save(3.0)
    queue.close()
    assert value_of(where) == 3.0
    assert os.listdir(small_disk) == ["c"]


@pytest.mark.parametrize(
    "name",
    [FORMATS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FORMATS[1:])],
)
def test_writes_that_are_cut_short_go_on(
    jobs: Any, nursery: Any, states: Any, tmp_path: Path, name: str
) -> None:
    """Every write of both ranks, those of C++ threads too, writes the first half of what it was asked to."""
    calls = []
    for short in (False, True):
        where = tmp_path / str(short) / "c"
        where.parent.mkdir()
        outcome = jobs(
            nursery.Order(
                str(where),
                name,
                1,
                str(where.parent),
                ranks=2,
                victims=(0, 1),
                short=short,
            )
        )
        assert outcome.codes == [0, 0], outcome.story
        assert states.seen(where) == 1
        calls.append([call for call, _ in outcome.calls])
    assert len(calls[1]) > len(calls[0]) + 30


@dataclass
class Refusing:
    """Overwriting saves of two ranks, and a disk that refuses one call of theirs."""

    jobs: Any
    nursery: Any
    states: Any
    folder: Path
    format: str
    later: str

    def order(self, where: Path, **more: Any) -> Any:
        told = {"ranks": 2, "later": self.later, **more}
        return self.nursery.Order(str(where), self.format, 2, str(where.parent), **told)

    def place(self, name: str) -> Path:
        where = self.folder / name / "c"
        where.parent.mkdir()
        megackpt.save(self.states.declared(1), where, self.format)
        return where

    def points(self, victim: int) -> range:
        """Those calls of one rank that write or make durable."""
        outcome = self.jobs(self.order(self.place(f"whole{victim}"), victims=(victim,)))
        assert outcome.codes == [0, 0], outcome.story
        return range(sum(name in REFUSABLE for name, _ in outcome.calls))

    def at(self, victim: int, point: int, error: int) -> str:
        where = self.place(f"{victim}.{point}.{error}")
        outcome = self.jobs(
            self.order(
                where, victims=(victim,), at=point + 1, refuse=error, of=REFUSABLE
            )
        )
        made = [one for one in outcome.calls if one[0] in REFUSABLE]
        found = self.states.seen(where)
        if point == len(made):
            # Two runs need not make equally many calls: of the ranks, the one that creates a folder syncs it.
            assert (outcome.codes, found) == ([0, 0], 2), (
                victim,
                point,
                outcome.codes,
                outcome.story,
            )
            shutil.rmtree(where.parent)
            return "no such call"
        call, path = made[point]
        told = (victim, point, call, path, outcome.codes, outcome.story)
        if outcome.codes == [
            0,
            0,
        ]:  # only to clear up was refused, which is left to the next save
            assert (found, victim) == (2, 0), told
            assert "clearing up is left to the next save" in outcome.story, told
        else:
            assert outcome.codes == [self.nursery.REFUSED] * 2, told
            assert outcome.story.count(f": {os.strerror(error)}") >= 2, told
            assert ("rank 1: " in outcome.story) == (victim == 1), told
            assert str(where.parent) in outcome.story, told
            # Once the new one has the name, the directory above cannot be made durable: an error, too.
            assert found == 1 or (call, path) == ("fsync", str(where.parent)), told
        if (
            call in SYNCS and ("openat", path) in outcome.calls
        ):  # a file: a second one would succeed, and mean nothing
            assert (
                sum(other == path and name in SYNCS for name, other in outcome.calls)
                == 1
            ), told
        megackpt.save(self.states.declared(3), where, self.format)
        assert self.states.seen(where) == 3, told
        assert os.listdir(where.parent) == ["c"], told
        shutil.rmtree(where.parent)
        return "told" if any(outcome.codes) else "clearing up"


SYNCS = ("fsync", "fdatasync")
REFUSABLE = ("write", "writev", "pwrite64", "pwritev", *SYNCS)


@pytest.mark.parametrize("count", [3, pytest.param(0, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("name", "later"),
    [
        *((name, "") for name in FORMATS[:2]),
        pytest.param("torch_dist", "thread", marks=pytest.mark.slow),
        pytest.param("zarr", "process", marks=pytest.mark.slow),
        pytest.param("torch_dist", "process", marks=pytest.mark.campaign),
        pytest.param("zarr", "thread", marks=pytest.mark.campaign),
    ],
)
def test_a_disk_that_refuses_a_write_or_an_fsync_of_one_of_two_ranks(
    jobs: Any,
    nursery: Any,
    states: Any,
    tmp_path: Path,
    note: Any,
    name: str,
    later: str,
    victim: int,
    count: int,
) -> None:
    """Data, index, ``.metadata`` and ``metadata.json`` alike; every call in the campaign, a sample otherwise."""
    refusing = Refusing(jobs, nursery, states, tmp_path, name, later)
    points, dice = refusing.points(victim), random.Random(count)
    chosen = dice.sample(points, count) if count else sampled(points)
    errors = [dice.choice((errno.EIO, errno.ENOSPC, errno.EDQUOT)) for _ in chosen]
    heard = Counter(
        jobs.each(
            lambda i: refusing.at(victim, chosen[i], errors[i]), range(len(chosen)), 2
        )
    )
    kind = f"{name}, asynchronous ({later})" if later else name
    note(
        HEAD,
        kind,
        f"{'the coordinator' if victim == 0 else 'the other'} of 2 ranks",
        *_counted(heard),
    )
    # A sample may meet calls that only clear up.
    all_points = len(chosen) == len(points)
    assert heard["told"] > (len(chosen) - heard["no such call"]) // 2 * all_points


HEAD = (
    "a write or fsync is refused",
    "where",
    "points",
    "all ranks told",
    "only clearing up was refused",
)


def _counted(heard: Counter[str]) -> tuple[int, ...]:
    return heard["told"] + heard["clearing up"], heard["told"], heard["clearing up"]


@pytest.mark.campaign
def test_a_file_that_may_not_grow_on_one_rank_of_three(
    tmp_path: Path, worlds: Any
) -> None:
    """A limit of the kernel's own (EFBIG); and the trainer's groups work on."""
    orders = [
        {
            "action": "disk",
            "job": "save",
            "point": "",
            "victim": 2,
            "strategy": name,
            "before": True,
        }
        for name in FORMATS[:2]
    ]
    reports = worlds(orders, tmp_path)
    assert len(reports) == len(orders)
    for report in reports:
        assert "hung" not in report, report
        for told in report["told"]:
            assert told["error"] == "StorageError", report
            assert "rank 2: " in told["text"], report
            assert "File too large" in told["text"], report
            assert "/.c.megackpt-" in told["text"], report  # the file
        assert all(one["found"] == 1.0 for one in report["found"]), report
        assert report["after"] == [{"ones": 3, "found": 3.0}] * 3, report
        assert report["left"] == ["c", "rendezvous"], report
