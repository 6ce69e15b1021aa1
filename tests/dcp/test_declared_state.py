"""Calls after ``install`` without a planner: by declarations where the state is plain."""

from __future__ import annotations

import logging
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megackpt.dcp import FileSystemReader, FileSystemWriter, install
from megackpt.dcp.declared_state import declare_plain
from megackpt.errors import CorruptCheckpoint, ShardingError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

VALUES = {"n": 3, "text": "a", "betas": (0.9, 0.95), "list": [1, None], "yes": True}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of plans that torch's planners have made."""
    return count_plans(monkeypatch.setattr)


def count_plans(replace: Any) -> list[str]:
    made: list[str] = []
    for planner in (DefaultSavePlanner, DefaultLoadPlanner):

        def create(self: Any, real: Any = planner.create_local_plan) -> Any:
            made.append(type(self).__name__)
            return real(self)

        replace(planner, "create_local_plan", create)
    return made


def test_plain_states_need_no_planner(tmp_path: Path, planned: list[str]) -> None:
    state = {"m": {"w": torch.arange(6.0).view(2, 3)}, "o": [VALUES, torch.ones(())]}
    found: dict[str, Any] = {
        "m": {"w": torch.zeros(2, 3)},
        "o": [dict.fromkeys(VALUES), torch.zeros(())],
    }
    inner = found["o"][0]
    with install():
        metadata = dcp.save(state, checkpoint_id=tmp_path / "c")
        dcp.load(found, checkpoint_id=tmp_path / "c")
    assert planned == []
    assert torch.equal(found["m"]["w"], state["m"]["w"])
    assert found["o"][0] is inner
    assert inner == VALUES
    assert found["o"][1] == 1
    assert metadata.planner_data["o.0.betas"] == ("o", 0, "betas")
    # Stock reads it, too, and nests it by these paths.
    again: dict[str, Any] = {"m": {"w": torch.zeros(2, 3)}, "o": [{"n": 0}]}
    dcp.load(again, storage_reader=dcp.FileSystemReader(tmp_path / "c"))
    assert torch.equal(again["m"]["w"], state["m"]["w"])
    assert again["o"][0]["n"] == 3


@pytest.mark.parametrize(
    "value",
    [{1, 2}, (torch.ones(2),), torch.ones(3, device="meta"), torch.eye(2).to_sparse()],
    ids=["set", "tensor in a tuple", "meta", "sparse"],
)
def test_other_values_are_not_declared(value: Any) -> None:
    with pytest.raises(ShardingError, match="not a plain value"):
        declare_plain({"x": value}, None)


def test_other_values_keep_the_planner(tmp_path: Path, planned: list[str]) -> None:
    found: dict[str, Any] = {"x": None}
    with install():
        dcp.save({"x": {1, 2}}, checkpoint_id=tmp_path)
        # The state that is asked for is plain, and the stored object is not.
        dcp.load(found, checkpoint_id=tmp_path)
    assert found == {"x": {1, 2}}
    assert planned == ["DefaultSavePlanner"]


def test_equal_keys_are_not_declared() -> None:
    with pytest.raises(ShardingError, match="equal keys"):
        declare_plain({"a.b": 1, "a": {"b": 2}}, None)


def test_values_below_keys_that_are_no_text(tmp_path: Path, planned: list[str]) -> None:
    """torch's planner fills tensors below such keys, and puts values below the text."""
    state = {"s": {0: {"step": 5, "w": torch.ones(2)}}, "l": [{1: [1, 2]}]}
    kinds = (dcp.FileSystemReader, FileSystemReader)
    results: list[Any] = []
    with install():
        dcp.save(state, checkpoint_id=tmp_path)
        for kind in kinds:
            found = {"s": {0: {"step": 0, "w": torch.zeros(2)}}, "l": [{1: []}]}
            dcp.load(found, storage_reader=kind(tmp_path))
            assert found["s"][0].pop("w").tolist() == [1, 1]  # type: ignore[call-overload]
            results.append(found)
    assert planned == ["DefaultLoadPlanner"]  # by the reader of torch's
    assert results[0] == results[1]
    assert results[1]["s"] == {0: {"step": 0}, "0": {"step": 5}}


def test_a_damaged_checkpoint_is_read_once(tmp_path: Path, planned: list[str]) -> None:
    with install():
        dcp.save({"w": torch.arange(9999.0), "n": 1}, checkpoint_id=tmp_path)
        file = max(tmp_path.glob("*.distcp"), key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        with pytest.raises(CheckpointException, match="CorruptCheckpoint") as caught:
            dcp.load({"w": torch.zeros(9999), "n": 0}, checkpoint_id=tmp_path)
    assert type(caught.value.failures[0][0]) is CorruptCheckpoint
    assert planned == []


class Step(IntEnum):
    """A class that torch's planner trusts, and megackpt does not."""

    FIRST = 1


def test_objects_that_the_engine_refuses(tmp_path: Path, planned: list[str]) -> None:
    squeezed = FileSystemWriter(tmp_path / "a", _extensions=[ZStandard()])
    with install():
        dcp.save({"n": 3}, storage_writer=squeezed)
        dcp.save({"n": Step.FIRST}, checkpoint_id=tmp_path / "b")
        planned.clear()
        for name, value in (("a", 3), ("b", Step.FIRST)):
            found = {"n": 0}
            dcp.load(found, checkpoint_id=tmp_path / name)
            assert found == {"n": value}
    assert planned == ["DefaultLoadPlanner"] * 2


def test_the_latest_step_of_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = {"w": torch.zeros(2)}
    run = FileSystemReader(tmp_path)
    with install():
        for step in (1, 2):
            state = {"w": torch.full((2,), float(step))}
            dcp.save(state, checkpoint_id=tmp_path / f"step-{step}")
        for planner in (None, DefaultLoadPlanner()):
            found["w"].zero_()
            dcp.load(found, checkpoint_id=tmp_path, planner=planner)
            assert found["w"].tolist() == [2, 2]
            assert "its latest complete step, step-2, is read" in caplog.text
            caplog.clear()
        with pytest.raises(CheckpointException, match="Size mismatch"):
            dcp.load({"w": torch.zeros(3)}, checkpoint_id=tmp_path)
    found["w"].zero_()
    dcp.load(found, storage_reader=run)
    assert found["w"].tolist() == [2, 2]


def test_a_planner_says_what_is_missing(
    tmp_path: Path, planned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "megackpt.dcp.sessions")
    with install():
        dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path)
        with pytest.raises(CheckpointException, match="Missing key in checkpoint"):
            dcp.load({"y": torch.ones(2)}, checkpoint_id=tmp_path)
    assert planned == ["DefaultLoadPlanner"]
    assert f"a planner plans the load of {tmp_path}" in caplog.text


def test_a_writer_is_used_again(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path)
    ids = []
    with install():
        for value in (1.0, 2.0):
            dcp.save({"x": torch.full((2,), value)}, storage_writer=writer)
            ids.append(FileSystemReader(tmp_path).read_metadata().storage_meta)
    first, second = (meta and meta.save_id for meta in ids)
    assert first != second == writer.save_id


def several_states(folder: str) -> None:
    planned = count_plans(setattr)
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(10.0).view(5, 2)
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "b": torch.ones(2)}
    found = {"w": distribute_tensor(torch.zeros(5, 2), mesh, [Shard(1)]), "b": 0.0}
    found["b"] = torch.zeros(2)
    with install():
        metadata = dcp.save(state, checkpoint_id=f"{folder}/1")
        dcp.load(found, checkpoint_id=f"{folder}/1")
        assert planned == []
        assert torch.equal(found["w"].full_tensor(), whole)
        assert found["b"].sum() == 2
        assert set(metadata.state_dict_metadata) == {"w", "b"}
        # Each stage of a pipeline has other keys. Rank 0 holds no replica of some.
        stage = {**state, f"stage{rank}": torch.full((2,), float(rank))}
        dcp.save(stage, checkpoint_id=f"{folder}/2")
        assert planned == ["DefaultSavePlanner"]
        own = {f"stage{rank}": torch.zeros(2) - 1}
        dcp.load(own, checkpoint_id=f"{folder}/2")
        assert own[f"stage{rank}"].tolist() == [rank, rank]
        planned.clear()
        alone = {"w": torch.full((2,), float(rank)), "n": rank}
        dcp.save(alone, checkpoint_id=f"{folder}/alone{rank}", no_dist=True)
        again = {"w": torch.zeros(2) - 1, "n": -1}
        dcp.load(again, checkpoint_id=f"{folder}/alone{rank}", no_dist=True)
        assert planned == []
        assert again["n"] == rank
        assert torch.equal(again["w"], alone["w"])


@pytest.mark.slow
def test_several_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks(several_states, 2, tmp_path, timeout=120)
