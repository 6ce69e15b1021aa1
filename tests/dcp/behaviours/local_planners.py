"""In one process: planners, torch's and those that users derive."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests.dcp.behaviours.catalogue import behaviour
from tests.dcp.states import assert_same

STATE = {"m": {"w": torch.arange(8.0), "v": torch.ones(3)}, "n": [1]}


class Note:
    """What a planner may put into the metadata."""

    def __init__(self, text: str) -> None:
        self.text = text


def refused(text: str, state: dict[str, Any], folder: Path, **more: Any) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, checkpoint_id=folder, **more)
    assert text in str(caught.value)


@behaviour(quick=True)
def a_key_that_is_missing(folder: Path) -> None:
    dcp.save({"module": nn.Linear(2, 2)}, checkpoint_id=folder)
    module = nn.Linear(2, 2)
    module.extra = nn.Parameter(torch.full((2, 2), 3.0))
    refused("Missing key in checkpoint", {"module": module}, folder)


@behaviour()
def a_partial_load(folder: Path) -> None:
    dcp.save({"module": nn.Linear(2, 2)}, checkpoint_id=folder)
    module = nn.Linear(2, 2)
    module.extra = nn.Parameter(torch.full((2, 2), 3.0))
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"module": module}, checkpoint_id=folder, planner=planner)
    assert module.extra.sum() == 12


@behaviour()
def a_tensor_of_another_size(folder: Path) -> None:
    dcp.save({"module": nn.Linear(2, 2)}, checkpoint_id=folder)
    refused("Size mismatch", {"module": nn.Linear(3, 2)}, folder)


@behaviour(quick=True)
def fewer_keys_than_saved(folder: Path) -> None:
    dcp.save(STATE, checkpoint_id=folder)
    found = {"m": {"v": torch.zeros(3)}}
    dcp.load(found, checkpoint_id=folder)
    assert_same(found, {"m": {"v": torch.ones(3)}})


@behaviour(flat=(True, False))
def flattening_or_not(folder: Path, flat: bool) -> None:
    saved = {"w": torch.arange(8.0), "plain": {"n": 3, "text": "x"}}
    save = DefaultSavePlanner(flat, flat)
    dcp.save(saved, checkpoint_id=folder, planner=save)
    found = {"w": torch.zeros(8), "plain": {"n": 0, "text": ""}}
    load = DefaultLoadPlanner(flat, flat)
    dcp.load(found, checkpoint_id=folder, planner=load)
    assert_same(found, saved)


@behaviour(keys=(("m",), ("m.w", "n"), ("none",), None))
def a_load_into_nothing(folder: Path, keys: tuple[str, ...] | None) -> None:
    dcp.save(STATE, checkpoint_id=folder)
    planner = _EmptyStateDictLoadPlanner()
    if keys is not None:
        planner = _EmptyStateDictLoadPlanner(keys=set(keys))
    found: dict[str, Any] = {}
    reader = dcp.FileSystemReader(folder)
    _load_state_dict(found, storage_reader=reader, planner=planner, no_dist=True)
    expected: Any = {
        ("m",): {"m": STATE["m"]},
        ("m.w", "n"): {"m": {"w": torch.arange(8.0)}, "n": [1]},
        ("none",): {},
        None: STATE,
    }[keys]
    assert_same(found, expected)


@behaviour()
def a_planner_that_renames(folder: Path) -> None:
    class Renaming(DefaultLoadPlanner):
        def set_up_planner(
            self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
        ) -> None:
            old = {f"old_{key}": value for key, value in state_dict.items()}
            super().set_up_planner(old, metadata, is_coordinator)
            self.original_state_dict = state_dict

        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            key = read_item.dest_index.fqn.removeprefix("old_")
            self.original_state_dict[key] = torch.load(value, weights_only=False)

    dcp.save({"old_w": torch.arange(3.0), "old_n": 4}, checkpoint_id=folder)
    found = {"w": torch.zeros(3), "n": 0}
    dcp.load(found, checkpoint_id=folder, planner=Renaming())
    assert_same(found, {"w": torch.arange(3.0), "n": 4})


@behaviour()
def a_planner_that_saves_half_precision(folder: Path) -> None:
    class Half(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            items = []
            for item in plan.items:
                if item.tensor_data is not None:
                    data = item.tensor_data
                    properties = dataclasses.replace(
                        data.properties, dtype=torch.float16
                    )
                    data = dataclasses.replace(data, properties=properties)
                    item = dataclasses.replace(item, tensor_data=data)
                items.append(item)
            self.plan = dataclasses.replace(plan, items=items)
            return self.plan

        def resolve_data(self, write_item: WriteItem) -> Any:
            data = super().resolve_data(write_item)
            return data.half() if isinstance(data, torch.Tensor) else data

    dcp.save(STATE, checkpoint_id=folder, planner=Half())
    listed = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert listed["m.w"].properties.dtype == torch.float16
    found = {"m": {"w": torch.zeros(8), "v": torch.zeros(3)}, "n": [0]}
    dcp.load(found, checkpoint_id=folder)
    assert_same(found, STATE)


@behaviour()
def a_planner_that_only_resolves_half_precision(folder: Path) -> None:
    """The metadata keep the old dtype, as in an example of torch's documentation."""

    class Half(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            data = super().resolve_data(write_item)
            return data.to(torch.half) if isinstance(data, torch.Tensor) else data

    dcp.save(STATE, checkpoint_id=folder, planner=Half())
    found = {"m": {"w": torch.zeros(8), "v": torch.zeros(3)}, "n": [0]}
    dcp.load(found, checkpoint_id=folder)
    assert_same(found, STATE)


@behaviour()
def a_planner_that_loads_into_other_memory(folder: Path) -> None:
    committed: list[str] = []

    class Scaling(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            tensor = super().resolve_tensor(read_item)
            return torch.empty_like(tensor)

        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            committed.append(read_item.dest_index.fqn)
            super().resolve_tensor(read_item).copy_(tensor * 2)

    dcp.save({"w": torch.arange(8.0), "v": torch.ones(3)}, checkpoint_id=folder)
    found = {"w": torch.zeros(8), "v": torch.zeros(3)}
    dcp.load(found, checkpoint_id=folder, planner=Scaling())
    assert_same(found, {"w": torch.arange(8.0) * 2, "v": torch.full((3,), 2.0)})
    assert sorted(committed) == ["v", "w"]


@behaviour()
def a_planner_that_skips_items(folder: Path) -> None:
    class Some(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            items = [item for item in plan.items if item.index.fqn != "m.v"]
            self.plan = dataclasses.replace(plan, items=items)
            return self.plan

    dcp.save(STATE, checkpoint_id=folder, planner=Some())
    listed = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert set(listed) == {"m.w", "n"}


@behaviour()
def a_planner_that_transforms_objects(folder: Path) -> None:
    class Encoding(DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            if write_item.index.fqn == "n":
                stream = io.BytesIO()
                torch.save([object, "encoded"], stream)
                return stream
            return super().transform_object(write_item, object)

    dcp.save(STATE, checkpoint_id=folder, planner=Encoding())
    found = {"n": None}
    dcp.load(found, checkpoint_id=folder)
    assert found["n"] == [[1], "encoded"]


@behaviour()
def planner_data_of_plain_values(folder: Path) -> None:
    class Noting(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            note = {"layers": [1, 2], "name": "run", "at": (0.5, None)}
            return plans, dataclasses.replace(metadata, planner_data=note)

    dcp.save(STATE, checkpoint_id=folder, planner=Noting())
    told = dcp.FileSystemReader(folder).read_metadata().planner_data
    assert told == {"layers": [1, 2], "name": "run", "at": (0.5, None)}


@behaviour()
def planner_data_of_any_class(folder: Path) -> None:
    class Noting(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            return plans, dataclasses.replace(metadata, planner_data=Note("hello"))

    dcp.save(STATE, checkpoint_id=folder, planner=Noting())
    told: Any = dcp.FileSystemReader(folder).read_metadata().planner_data
    assert told.text == "hello"


def cut(plan: SavePlan, ranges: Sequence[tuple[int, int]]) -> SavePlan:
    """The plan of a single vector with an item for each of these ranges: start and size."""
    (item,) = plan.items
    pieces = []
    for start, size in ranges:
        chunk = ChunkStorageMetadata(torch.Size([start]), torch.Size([size]))
        data = dataclasses.replace(item.tensor_data, chunk=chunk)
        index = dataclasses.replace(item.index, offset=chunk.offsets)
        pieces.append(
            dataclasses.replace(
                item, type=WriteItemType.SHARD, index=index, tensor_data=data
            )
        )
    return dataclasses.replace(plan, items=pieces)


@behaviour(commits=False)
def overlapping_chunks_are_refused(folder: Path) -> None:
    class Overlapping(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            self.plan = cut(super().create_local_plan(), ((0, 5), (4, 5)))
            return self.plan

    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.ones(9)}, checkpoint_id=folder, planner=Overlapping())
    assert "ailed to validate global plan" in str(caught.value)


@behaviour()
def a_tensor_in_several_chunks(folder: Path) -> None:
    """A planner that cuts a tensor, and loads that cross the cuts."""

    class Cutting(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            self.plan = cut(super().create_local_plan(), ((0, 4), (4, 5)))
            return self.plan

        def resolve_data(self, write_item: WriteItem) -> Any:
            chunk = write_item.tensor_data.chunk
            (start,), (size,) = chunk.offsets, chunk.sizes
            return self.state_dict["w"][start : start + size]

    dcp.save({"w": torch.arange(9.0)}, checkpoint_id=folder, planner=Cutting())
    listed = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata["w"]
    assert [tuple(chunk.offsets) for chunk in listed.chunks] == [(0,), (4,)]
    found = {"w": torch.zeros(9)}
    dcp.load(found, checkpoint_id=folder)
    assert torch.equal(found["w"], torch.arange(9.0))


@behaviour(lowest=(True, False))
def planners_with_deduplication_options(folder: Path, lowest: bool) -> None:
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
    dcp.save(STATE, checkpoint_id=folder, planner=planner)
    found = {"m": {"w": torch.zeros(8), "v": torch.zeros(3)}, "n": [0]}
    dcp.load(found, checkpoint_id=folder)
    assert_same(found, STATE)


@behaviour(change=("values", "shape", "keys"))
def plans_are_cached(folder: Path, change: str) -> None:
    states = [{"w": torch.full((6,), float(i)), "n": i} for i in range(4)]
    if change == "shape":
        states[2] = {"w": torch.full((9,), 2.0), "n": 2}
    elif change == "keys":
        states[2] = {"other": torch.full((6,), 2.0), "w": torch.ones(2)}
    # torch caches by the name of the class, for the rest of the process.
    name = f"Planner_{folder.name}_{change}"
    kind = type(name, (DefaultSavePlanner,), {})
    for step, state in enumerate(states):
        planner = kind(enable_plan_caching=True)
        writer = dcp.FileSystemWriter(folder / str(step))
        dcp.save(state, storage_writer=writer, planner=planner)
    for step, state in enumerate(states):
        found: dict[str, Any] = {}
        for key, value in state.items():
            found[key] = torch.zeros_like(value) if torch.is_tensor(value) else None
        dcp.load(found, checkpoint_id=folder / str(step))
        assert_same(found, state)


@behaviour()
def plans_are_cached_for_another_writer(folder: Path) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    kind = type(f"Planner_{folder.name}", (DefaultSavePlanner,), {})
    for step, number in enumerate((1.0, 2.0, 3.0)):
        path = folder / str(step)
        writer: Any = dcp.FileSystemWriter(path)
        if step == 1:
            writer = FsspecWriter(str(path))
        planner = kind(enable_plan_caching=True)
        state = {"w": torch.full((4,), number)}
        dcp.save(state, storage_writer=writer, planner=planner)
        found = {"w": torch.zeros(4)}
        dcp.load(found, checkpoint_id=path)
        assert_same(found, state)


@behaviour(since=(2, 14))
def narrowing_is_refused_on_request(folder: Path) -> None:
    dcp.save({"w": torch.rand(4)}, checkpoint_id=folder)
    planner = DefaultLoadPlanner(allow_unsafe_types=False)
    refused(
        "dtype mismatch",
        {"w": torch.zeros(4, dtype=torch.bfloat16)},
        folder,
        planner=planner,
    )
