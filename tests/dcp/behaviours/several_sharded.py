"""On two ranks: torch's own ShardedTensor, objects and messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardMetadata,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tests.dcp.behaviours.catalogue import behaviour

ROWS, COLUMNS = 10, 20
SPECS = ("chunks", "turns", "stripes", "uneven", "columns")


def rows(*cuts: tuple[int, int, int]) -> EnumerableShardingSpec:
    shards = []
    for start, size, rank in cuts:
        shards.append(ShardMetadata([start, 0], [size, COLUMNS], f"rank:{rank}/cpu"))
    return EnumerableShardingSpec(shards)


def spec_named(name: str) -> Any:
    if name == "stripes":
        return rows((0, 2, 0), (2, 1, 1), (3, 3, 0), (6, 3, 1), (9, 1, 0))
    if name == "uneven":
        return rows((0, 8, 1), (8, 2, 0))
    order = [0, 1, 1, 0] if name == "turns" else [0, 1]
    dim = 1 if name == "columns" else 0
    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in order])


def sharded(name: str, seed: int) -> Any:
    torch.manual_seed(seed + dist.get_rank())
    return sharded_tensor.rand(spec_named(name), ROWS, COLUMNS)


def gathered(tensor: Any) -> torch.Tensor:
    """The whole tensor, on all ranks."""
    whole = torch.zeros(*tensor.size())
    for shard in tensor.local_shards():
        (top, left), (height, width) = (
            shard.metadata.shard_offsets,
            shard.metadata.shard_sizes,
        )
        whole[top : top + height, left : left + width] = shard.tensor
    dist.all_reduce(whole)
    return whole


@behaviour(ranks=2, source=SPECS)
def sharded_tensors_are_cut_otherwise(folder: Path, source: str) -> None:
    saved = sharded(source, 1)
    dcp.save({"w": saved}, checkpoint_id=folder)
    for target in SPECS:
        found = sharded(target, 7)
        dcp.load({"w": found}, checkpoint_id=folder)
        assert torch.equal(gathered(found), gathered(saved)), target


@behaviour(ranks=2, thread_count=(1, 2))
def sharded_and_plain_change_places(folder: Path, thread_count: int) -> None:
    for source, target in (("chunks", "uneven"), ("turns", "stripes")):
        path = folder / source
        saved = {
            "a": sharded(source, 1),
            "b": torch.arange(200.0).reshape(ROWS, COLUMNS),
        }
        writer = dcp.FileSystemWriter(path, thread_count=thread_count)
        dcp.save(saved, storage_writer=writer)
        found = {"a": torch.zeros(ROWS, COLUMNS), "b": sharded(target, 7)}
        dcp.load(found, storage_reader=dcp.FileSystemReader(path))
        assert torch.equal(found["a"], gathered(saved["a"]))
        assert torch.equal(gathered(found["b"]), saved["b"])


@behaviour(ranks=2)
def a_model_with_sharded_tensors(folder: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.w = sharded("chunks", seed)
            self.b = torch.nn.Parameter(torch.full((3,), float(seed)))
            self._register_state_dict_hook(sharded_tensor.state_dict_hook)

    saved, found = Model(1), Model(7)
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    state = found.state_dict()
    dcp.load(state, checkpoint_id=folder)
    assert torch.equal(gathered(state["w"]), gathered(saved.w))
    assert torch.equal(state["b"], saved.b)


@behaviour(ranks=2, thread_count=(1, 2))
def objects_of_two_ranks(folder: Path, thread_count: int) -> None:
    writer = dcp.FileSystemWriter(folder, thread_count=thread_count)
    dcp.save({"list": [1], "text": "string"}, storage_writer=writer)
    found = {"list": [2], "text": "other"}
    dcp.load(found, storage_reader=dcp.FileSystemReader(folder))
    assert found == {"list": [1], "text": "string"}


@behaviour(ranks=2)
def each_rank_has_keys_of_its_own(folder: Path) -> None:
    rank = dist.get_rank()
    state = {f"rank{rank}": torch.full((3,), float(rank)), f"n{rank}": rank}
    dcp.save(state, checkpoint_id=folder)
    other = 1 - rank
    found = {f"rank{other}": torch.zeros(3), f"n{other}": None}
    dcp.load(found, checkpoint_id=folder)
    assert found[f"n{other}"] == other
    assert torch.equal(found[f"rank{other}"], torch.full((3,), float(other)))


@behaviour(ranks=2)
def a_rank_without_anything(folder: Path) -> None:
    state = {"w": torch.ones(3)} if dist.get_rank() == 0 else {}
    dcp.save(state, checkpoint_id=folder)
    found = {"w": torch.zeros(3)} if dist.get_rank() else {}
    dcp.load(found, checkpoint_id=folder)
    assert all(value.sum() == 3 for value in found.values())


@behaviour(ranks=2, lowest=(True, False))
def replicas_are_written_once(folder: Path, lowest: bool) -> None:
    state = {f"w{i}": torch.full((10_000,), float(i)) for i in range(4)}
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
    dcp.save(state, checkpoint_id=folder, planner=planner)
    dist.barrier()
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
    assert 160_000 <= sum(sizes.values()) < 200_000
    writers = {name.split("_")[2] for name, size in sizes.items() if size}
    assert writers == ({"0"} if lowest else {"0", "1"})
    found = {key: torch.zeros(10_000) for key in state}
    dcp.load(found, checkpoint_id=folder)
    assert all(torch.equal(found[key], state[key]) for key in state)


@behaviour(ranks=2)
def keys_in_another_order(folder: Path) -> None:
    """Objects whose loading sends messages: torch loads them in one order on all ranks."""

    class Talking:
        def __init__(self, collective: Any) -> None:
            self.collective = collective

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.collective(torch.ones(2 + (self.collective is dist.all_reduce)))

    def collect(tensor: torch.Tensor) -> None:
        dist.all_gather([torch.zeros_like(tensor) for _ in range(2)], tensor)

    state = {"a": Talking(collect), "b": Talking(dist.all_reduce)}
    if dist.get_rank():
        state = dict(reversed(list(state.items())))
    dcp.save(state, checkpoint_id=folder)
    dcp.load(state, checkpoint_id=folder)


@behaviour(ranks=2)
def overwriting_on_two_ranks(folder: Path) -> None:
    dcp.save({"w": torch.ones(10)}, checkpoint_id=folder)
    writer = dcp.FileSystemWriter(folder, overwrite=True)
    dcp.save({"w": torch.full((10,), 2.0)}, storage_writer=writer)
    found = {"w": torch.zeros(10)}
    dcp.load(found, checkpoint_id=folder)
    assert found["w"].sum() == 20
    writer = dcp.FileSystemWriter(folder, overwrite=False)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.zeros(10)}, storage_writer=writer)
    assert "Checkpoint already exists" in str(caught.value)


def failing(base: Any, stage: str, rank: int) -> Any:
    """A subclass that raises in this method on this rank."""

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == rank:
            raise ValueError("injected")
        return getattr(base, stage)(self, *args, **kwargs)

    return type("Faulty", (base,), {stage: fail})


@behaviour(
    ranks=2,
    stage=("prepare_local_plan", "write_data", "set_up_storage_writer"),
    rank=(0, 1),
)
def a_writer_fails_on_one_rank(folder: Path, stage: str, rank: int) -> None:
    faulty = failing(dcp.FileSystemWriter, stage, rank)
    state = {"w": sharded("chunks", 1), "n": 3}
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=faulty(folder))
    assert set(caught.value.failures) == {rank}
    assert isinstance(caught.value.failures[rank][0], ValueError)
    dist.barrier()
    assert not (folder / ".metadata").exists()
    dcp.save(state, checkpoint_id=folder)


@behaviour(ranks=2, rank=(0, 1), stage=("prepare_local_plan", "read_data"))
def a_reader_fails_on_one_rank(folder: Path, stage: str, rank: int) -> None:
    faulty = failing(dcp.FileSystemReader, stage, rank)
    dcp.save({"w": sharded("chunks", 1)}, checkpoint_id=folder)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": sharded("turns", 1)}, storage_reader=faulty(folder))
    assert set(caught.value.failures) == {rank}


@behaviour(ranks=2)
def another_coordinator(folder: Path) -> None:
    state = {"w": sharded("chunks", 1), "n": 3}
    writer = dcp.FileSystemWriter(folder)
    dcp.save_state_dict(state, writer, coordinator_rank=1)
    found = {"w": sharded("turns", 7), "n": 0}
    reader = dcp.FileSystemReader(folder)
    dcp.load_state_dict(found, reader, coordinator_rank=1)
    assert torch.equal(gathered(found["w"]), gathered(state["w"]))
    assert found["n"] == 3


@behaviour(ranks=2)
def saved_in_threads_of_two_ranks(folder: Path) -> None:
    rank = dist.get_rank()
    for step in (1, 2):
        state = {f"w{rank}": torch.full((500,), float(step)), "n": step}
        path = folder / str(step)
        future: Any = dcp.async_save(state, checkpoint_id=path)
        state[f"w{rank}"].zero_()  # type: ignore[union-attr]
        future.result()
        dist.barrier()
        found = {f"w{1 - rank}": torch.zeros(500), "n": 0}
        dcp.load(found, checkpoint_id=path)
        assert found[f"w{1 - rank}"].mean() == step
        assert found["n"] == step


@behaviour(ranks=4)
def groups_save_apart(folder: Path) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    group, path = groups[rank % 2], folder / str(rank % 2)
    state = {f"w{rank}": torch.full((5,), float(rank)), "n": rank % 2}
    dcp.save(state, checkpoint_id=path, process_group=group)
    other = (rank + 2) % 4
    found = {f"w{other}": torch.zeros(5), "n": 9}
    dcp.load(found, checkpoint_id=path, process_group=group)
    assert found["n"] == rank % 2
    assert torch.equal(found[f"w{other}"], torch.full((5,), float(other)))


@behaviour(ranks=2)
def a_torch_file_is_read_by_one_rank(folder: Path) -> None:
    from torch.distributed.checkpoint.format_utils import (
        BroadcastingTorchSaveReader,
        DynamicMetaLoadPlanner,
    )

    whole = torch.arange(200.0).reshape(ROWS, COLUMNS)
    if dist.get_rank() == 0:
        torch.save({"w": whole}, folder / "model.pt")
    dist.barrier()
    found = {"w": torch.zeros_like(whole)}
    dcp.load(
        found,
        planner=DynamicMetaLoadPlanner(),
        storage_reader=BroadcastingTorchSaveReader(),
        checkpoint_id=folder / "model.pt",
    )
    assert torch.equal(found["w"], whole)
    dcp.save(found, checkpoint_id=folder / "c")
