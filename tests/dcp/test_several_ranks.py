"""Saves of several ranks through torch DCP, synchronous and in the background, and a killed one."""

from __future__ import annotations

import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import megackpt.dcp
from megackpt.dcp import FileSystemReader, FileSystemWriter
from tests.dcp.states import (
    assert_same,
    check,
    gathered,
    loaded,
    nested,
    refused,
    sharded,
)
from tests.torch_names import (
    PROCESS_OUTLIVES_ERRORS,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]


def together(folder: str) -> None:
    """On two ranks: the walks of a synchronous save."""
    rank = dist.get_rank()
    one = f"{folder}/one"
    dcp.save(sharded(1), storage_writer=FileSystemWriter(one))
    check(one, 1)

    # Plans that are cached, to one directory and to others, with a structure that changes and changes back.
    writer = FileSystemWriter(one)
    for seed, rows, place in (
        (2, 10, "a"),
        (3, 10, "a"),
        (4, 10, "b"),
        (5, 12, "a"),
        (6, 12, "c"),
        (7, 10, "c"),
    ):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        kept = writer if seed % 2 else FileSystemWriter(f"{folder}/{place}")
        dcp.save(
            sharded(seed, rows),
            checkpoint_id=f"{folder}/{place}",
            storage_writer=kept,
            planner=planner,
        )
        check(f"{folder}/{place}", seed, rows)

    # One rank fails: all are told who and where, and what stood there stands.
    bad = {**sharded(8), "bad": torch.ones(2)}
    dcp.save(bad, storage_writer=FileSystemWriter(one))

    class Rank1Fails(DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            if rank == 1:
                raise ValueError("not today")
            return super().finish_plan(new_plan)

    for planner in (Rank1Fails(), DefaultSavePlanner()):
        if type(planner) is DefaultSavePlanner and rank == 1:  # a disk that refuses
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointException) as caught:
            dcp.save(sharded(9), storage_writer=FileSystemWriter(one), planner=planner)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )
        refused = r"rank 1 cannot write \S*\.distcp.*File too large"
        assert re.search(
            refused if type(planner) is DefaultSavePlanner else "not today",
            str(caught.value),
        )
        check(one, 8)
    dcp.save(sharded(10), storage_writer=FileSystemWriter(one))
    check(one, 10)

    # Two jobs at once: whoever comes first wins, and the other is told, or comes after it.
    for seed in range(20, 24):
        dist.barrier()
        told = ""
        try:
            dcp.save(
                {"w": torch.full((9,), seed + rank)},
                storage_writer=FileSystemWriter(one),
                no_dist=True,
            )
        except CheckpointException as error:
            told = str(error)
        assert "" in gathered(told)
        assert not told or "SaveInProgress" in told, told
        found = megackpt.load_plain_tensors(one)["w"]
        assert megackpt.verify(one).ok
        assert {float(value) for value in found} < {float(seed), float(seed + 1)}

    # Ranks that name different directories, or a planner that drops what it should hand on.
    with pytest.raises(CheckpointException, match="all ranks must name the same"):
        dcp.save(sharded(11), storage_writer=FileSystemWriter(f"{folder}/{rank}"))
    dist.barrier()
    if rank == 0:
        dcp.save(
            {"w": torch.ones(3)},
            storage_writer=FileSystemWriter(f"{folder}/0"),
            no_dist=True,
        )
        assert megackpt.verify(f"{folder}/0").ok
        assert sorted(os.listdir(folder)) == ["0", "a", "b", "c", "one"]


@pytest.mark.slow
def test_two_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks(together, 2, tmp_path)
    assert float(megackpt.load_plain_tensors(tmp_path / "one")["w"][0]) in (23.0, 24.0)


def killed(where: str) -> None:
    """All has been written, nothing was committed."""

    class Dies(FileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    dcp.save(nested(9), storage_writer=Dies(where))


def test_a_save_that_is_killed_before_its_commit(
    ranks: Any, where: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in (None, 1):
        if seed is not None:
            dcp.save(nested(seed), storage_writer=FileSystemWriter(where))
        (process,) = ranks(killed, 1, where, check=False)
        assert process.returncode == -signal.SIGKILL, process.stderr
        if seed is None:
            with refused(caplog, "died before it was complete"):
                loaded(FileSystemReader(where), nested(1))
        else:
            assert_same(loaded(FileSystemReader(where), nested(seed)), nested(seed))
    dcp.save(nested(2), storage_writer=FileSystemWriter(where))
    assert_same(loaded(FileSystemReader(where), nested(2)), nested(2))
    assert os.listdir(where.parent) == ["c"]


def in_the_background(folder: str) -> None:
    """On two ranks: ``async_save`` in threads and in processes."""
    writer = FileSystemWriter(folder)
    for seed, kind in enumerate(
        [AsyncCheckpointerType.THREAD] + [AsyncCheckpointerType.PROCESS] * 2, 1
    ):
        planner = DefaultSavePlanner(enable_plan_caching=seed > 1)
        place, state = f"{folder}/{seed}", sharded(seed)
        told = {
            "storage_writer": writer,
            "planner": planner,
            "async_checkpointer_type": kind,
        }
        future = dcp.async_save(state, checkpoint_id=place, **told)
        state["plain"].zero_()
        for tensor in state["model"].values():
            tensor.to_local().zero_()
        future.result()
        check(place, seed)
        dist.barrier()
    # In the process, too, a refusal comes back, and the next save goes on.
    told["planner"] = DefaultSavePlanner()
    writer.overwrite = False
    with pytest.raises(CheckpointException, match="CheckpointExists"):
        dcp.async_save(sharded(4), checkpoint_id=place, **told).result()
    if PROCESS_OUTLIVES_ERRORS:
        dcp.async_save(sharded(5), checkpoint_id=f"{folder}/5", **told).result()
        check(f"{folder}/5", 5)


def two_in_flight(folder: str) -> None:
    """Nobody waits for the result of the first ``async_save`` before the second one."""
    # Made before, for making them sends messages, too.
    states = {f"{folder}/{seed}": sharded(seed) for seed in (1, 2, 3)}
    with megackpt.dcp.install():
        futures: list[Any] = []
        for place, state in states.items():
            futures.append(dcp.async_save(state, checkpoint_id=place))
        for future in futures:
            future.result(60)
    for seed in (1, 2, 3):
        check(f"{folder}/{seed}", seed)


@pytest.mark.slow
def test_two_background_saves_in_flight(ranks: Any, tmp_path: Path) -> None:
    ranks(two_in_flight, 2, tmp_path, timeout=120)


@pytest.mark.slow
def test_two_ranks_in_the_background(ranks: Any, tmp_path: Path) -> None:
    ranks(in_the_background, 2, tmp_path, timeout=120)
    assert sorted(os.listdir(tmp_path)) == [
        "1",
        "2",
        "3",
        *["5"][:PROCESS_OUTLIVES_ERRORS],
    ]
