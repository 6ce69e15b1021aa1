"""``restore(audit=True)``: ranks that went on from different values are named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Linear, Module

from megackpt import ShardedTensor, Strategy
from megackpt.errors import CheckpointingException, ReplicaMismatch
from megackpt.manager import CheckpointManager
from megackpt.testing import ThreadedGroup


def state(rank: int, value: int, *keys: str) -> dict[str, Any]:
    return {
        key: ShardedTensor.from_rank_offsets(
            key, torch.full((1000,), float(value)), replica_id=rank
        )
        for key in keys
    }


def errors(run: Path, strategy: Strategy, **options: Any) -> list[BaseException | None]:
    """Of each of four ranks, which restore ``a`` and keep their values of ``b``."""

    def work(group: ThreadedGroup) -> BaseException | None:
        manager = CheckpointManager(run, strategy, process_group=group)
        manager.save(1, state(group.rank, 0, "a"))
        asked = state(group.rank, min(group.rank, 1), "a", "b")
        try:
            manager.restore(asked, partial=True, **options)
        except CheckpointingException as error:
            return error
        assert asked["a"].data.eq(0).all()
        return None

    return ThreadedGroup.run(4, work)


def test_values_that_were_not_restored_are_found(tmp_path: Path) -> None:
    found = errors(tmp_path, Strategy(), audit=True)
    assert {type(error) for error in found} == {ReplicaMismatch}
    texts = {str(error) for error in found}
    assert len(texts) == 1
    text = texts.pop()
    assert f"After the restore of {tmp_path}/iter_0000001, ranks hold different" in text
    assert "ranks 1-3 (majority) against rank 0" in text
    assert "stored is" not in text
    assert "'a'" not in text


def test_without_the_audit_nothing_is_compared(tmp_path: Path) -> None:
    assert errors(tmp_path, Strategy()) == [None] * 4


def test_the_strategy_of_the_manager_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert (
        errors(tmp_path / "1", Strategy(audit_exclude=["b*"]), audit=True) == [None] * 4
    )
    caplog.clear()
    caplog.set_level(logging.WARNING, "megackpt.saver")
    strategy = Strategy(on_mismatch="warn")
    assert errors(tmp_path / "2", strategy, audit=True) == [None] * 4
    found = [r.getMessage() for r in caplog.records if r.name == "megackpt.saver"]
    assert len(found) == 1
    assert "After the restore" in found[0]


class Statistics(Module):
    """A module whose buffer is changed by loading, differently on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner = Linear(8, 8)
        self.rank = rank
        self.register_load_state_dict_post_hook(self.disturb)

    def disturb(self, *_: Any) -> None:
        with torch.no_grad():
            self.inner.bias[3] += self.rank


@pytest.mark.parametrize("is_disturbed", [False, True])
def test_the_objects_are_compared_as_they_are_after_the_restore(
    tmp_path: Path, is_disturbed: bool
) -> None:
    """A hook of the model, which runs after the load, makes replicas differ."""

    def work(group: ThreadedGroup) -> str:
        torch.manual_seed(0)
        net = Statistics(group.rank if is_disturbed else 0)
        manager = CheckpointManager(tmp_path, process_group=group)
        manager.save(1, model=net)
        try:
            found = manager.restore(model=net, audit=True)
        except ReplicaMismatch as error:
            return str(error)
        assert found is not None
        return ""

    for text in ThreadedGroup.run(2, work):
        assert ("'model.inner.bias'" in text) == is_disturbed
        assert "inner.weight" not in text
