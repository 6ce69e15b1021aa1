"""Of copies of an object that differ, the main replica's is stored, however the writing is spread over the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.distributed.checkpoint.planner import WriteItemType

import megackpt
from megackpt import (
    FullyParallelSaveStrategyWrapper,
    ShardedObject,
    ShardedTensor,
    Strategy,
)
from megackpt.dcp import SavePlanner
from megackpt.testing import ThreadedGroup

FORMATS = ("torch_dist", "zarr", "safetensors")


def state(rank: int, main: int, step: int = 0) -> dict[str, Any]:
    """Replicas of which rank ``main`` has the main one. It is the busiest rank, so that others would be chosen."""
    held: dict[str, Any] = {
        "rng": ShardedObject(
            "rng_state",
            f"rank {rank} step {step}",
            (1,),
            (0,),
            replica_id=(rank - main) % 4,
        ),
        "ungridded": ShardedObject(
            "bytes", b"%d" % rank * 5000, (), (), replica_id=(rank - main) % 4
        ),
        "w": ShardedTensor.from_rank_offsets(
            "w", torch.ones(64), replica_id=(rank - main) % 4
        ),
        "common": f"rank {rank} step {step}",
    }
    if rank == main:
        held["busy"] = ShardedTensor.from_rank_offsets("busy", torch.zeros(10_000))
    return held


def wish() -> dict[str, Any]:
    return {
        "rng": ShardedObject("rng_state", None, (1,), (0,)),
        "ungridded": ShardedObject("bytes", None, (), ()),
    }


def check(directory: Path, main: int, step: int = 0) -> None:
    got = megackpt.load(wish(), directory)
    assert got["rng"] == f"rank {main} step {step}"
    assert got["ungridded"] == b"%d" % main * 5000
    assert got["common"] == f"rank 0 step {step}"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("main", [0, 2])
def test_of_every_format(tmp_path: Path, name: str, main: int) -> None:
    ThreadedGroup.run(
        4,
        lambda g: megackpt.save(
            state(g.rank, main), tmp_path / "a", name, process_group=g
        ),
    )
    check(tmp_path / "a", main)


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy("torch_dist"),
        Strategy("torch_dist", balance=False),
        FullyParallelSaveStrategyWrapper("torch_dist"),
        FullyParallelSaveStrategyWrapper("zarr", None, True),
    ],
    ids=["balanced", "unbalanced", "wrapper", "wrapper-cached"],
)
def test_of_every_strategy_also_when_its_plan_is_used_again(
    tmp_path: Path, strategy: Strategy
) -> None:
    def run(group: ThreadedGroup) -> None:
        for step in range(3):
            request = megackpt.save(
                state(group.rank, 2, step),
                tmp_path / str(step),
                strategy,
                async_sharded_save=step == 1,
                process_group=group,
            )
            if request is not None:
                queue = megackpt.AsyncCallsQueue(process_group=group)
                queue.schedule_async_request(request)
                queue.close()

    ThreadedGroup.run(4, run)
    for step in range(3):
        check(tmp_path / str(step), 2, step)


def test_a_plan_that_is_found_in_what_was_loaded(tmp_path: Path) -> None:
    ThreadedGroup.run(
        4, lambda g: megackpt.save(state(g.rank, 3), tmp_path / "a", process_group=g)
    )

    def run(group: ThreadedGroup) -> None:
        asked = {
            key: value for key, value in state(group.rank, 3).items() if key != "common"
        }
        megackpt.load(asked, tmp_path / "a", process_group=group)
        megackpt.save(state(group.rank, 3, 7), tmp_path / "b", process_group=group)

    ThreadedGroup.run(4, run)
    check(tmp_path / "b", 3, 7)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    mains=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    sizes=st.lists(st.integers(0, 300), min_size=3, max_size=3),
    cells=st.integers(1, 3),
)
def test_whoever_is_busy(
    tmp_path: Path, mains: list[int], sizes: list[int], cells: int
) -> None:
    """Objects of several cells, each with its own main replica, among tensors that load the ranks unevenly."""

    def run(group: ThreadedGroup) -> None:
        held: dict[str, Any] = {
            f"{i}.{cell}": ShardedObject(
                f"o{i}",
                (group.rank, i, cell),
                (cells,),
                (cell,),
                (group.rank - main - cell) % 3,
            )
            for i, main in enumerate(mains)
            for cell in range(cells)
        }
        size = sizes[group.rank]
        held["t"] = ShardedTensor.from_rank_offsets(f"t{group.rank}", torch.zeros(size))
        megackpt.save(held, tmp_path / "h", process_group=group)

    ThreadedGroup.run(3, run)
    wishes = {
        f"{i}.{cell}": ShardedObject(f"o{i}", None, (cells,), (cell,))
        for i in range(len(mains))
        for cell in range(cells)
    }
    got = megackpt.load(wishes, tmp_path / "h", validate_access_integrity=False)
    for i, main in enumerate(mains):
        for cell in range(cells):
            assert got[f"{i}.{cell}"] == ((main + cell) % 3, i, cell)


def test_the_planner_for_dcp_takes_the_lowest_ranks() -> None:
    """DCP numbers no replicas: the lowest rank that has an object is taken for its main one."""
    planners = [SavePlanner() for _ in range(3)]
    plans = []
    for rank, planner in enumerate(planners):
        held: dict[str, Any] = {"rng": {"rank": f"rank {rank}"}, "w": torch.ones(4)}
        if rank == 0:
            held["busy"] = torch.zeros(10_000)
        planner.set_up_planner(held, is_coordinator=rank == 0)
        plans.append(planner.create_local_plan())
    chosen, _ = planners[0].create_global_plan(plans)
    writers = [
        rank
        for rank, plan in enumerate(chosen)
        for item in plan.items
        if item.type == WriteItemType.BYTE_IO
    ]
    assert writers == [0]
