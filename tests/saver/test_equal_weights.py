"""A step whose weights are those of the step before: one WARNING of the save."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.deltas import WeightPublisher
from megackpt.manager import CheckpointManager
from megackpt.testing import ThreadedGroup


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING, "megackpt")
    return lambda: [
        r.getMessage() for r in caplog.records if "the weights of" in r.getMessage()
    ]


def state(value: float, step: float, rank: int = 0, size: int = 1) -> dict[str, Any]:
    weight = torch.full((4, 100), value + rank)
    counter = torch.tensor(step)
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", weight, (0, rank, size)),
        "step": ShardedTensor.from_rank_offsets("step", counter, replica_id=rank),
        "random": ShardedTensor.from_rank_offsets(
            "random", torch.randint(0, 255, (100,), dtype=torch.uint8), replica_id=rank
        ),
        "iteration": step,
    }


@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
def test_a_first_step_that_is_saved_three_times(
    tmp_path: Path, warnings: Any, backend: str
) -> None:
    """As in NeMo-RL #3312: the numbers go on, and the weights are those of the first step."""

    def run(group: ThreadedGroup) -> None:
        for step in (1, 2, 3):
            mine = state(1.0, step, group.rank, group.size)
            where = tmp_path / f"step_{step}" / "policy"
            megackpt.save(mine, where, backend, process_group=group)

    ThreadedGroup.run(2, run)
    found = warnings()
    assert len(found) == 2
    assert found[0].startswith(
        f"{tmp_path}/step_2/policy has the weights of {tmp_path}/step_1/policy: "
    )


def test_weights_that_change_are_not_mentioned(tmp_path: Path, warnings: Any) -> None:
    for step in range(3):
        megackpt.save(state(step, step), tmp_path / f"{step}")
    assert warnings() == []


def test_a_step_that_is_saved_again_is_not_mentioned(
    tmp_path: Path, warnings: Any
) -> None:
    for name in ("iter_1", "iter_1", "final", "best"):
        megackpt.save(state(1.0, 1), tmp_path / name)
    assert warnings() == []


def test_counters_alone_are_not_weights(tmp_path: Path, warnings: Any) -> None:
    for step in (1, 2):
        kept = {key: value for key, value in state(1.0, 1).items() if key != "weight"}
        megackpt.save(kept, tmp_path / f"{step}")
    assert warnings() == []


def test_an_asynchronous_save_of_a_manager(tmp_path: Path, warnings: Any) -> None:
    with CheckpointManager(tmp_path, asynchronous=True) as manager:
        for step in (10, 20):
            manager.save(step, state(1.0, step))
            manager.finalize()
    assert len(warnings()) == 1
    assert "iter_0000020 has the weights of" in warnings()[0]


def test_equal_changes_are_not_equal_weights(tmp_path: Path, warnings: Any) -> None:
    weights = {"weight": torch.ones(400, dtype=torch.bfloat16)}
    with WeightPublisher(tmp_path) as publisher:
        for number in range(4):
            publisher.publish(number, weights)
            weights["weight"].view(torch.int16)[::7] += 1
    assert warnings() == []
