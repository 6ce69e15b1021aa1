"""Tensors that name their own shards, in saves and loads through torch DCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

import megackpt
from megackpt import sharded
from megackpt.dcp import (
    FileSystemReader,
    FileSystemWriter,
    save_state_dict_async_plan,
)
from megackpt.dcp.planner import LoadPlanner, SavePlanner
from megackpt.errors import CheckpointingException
from megackpt.testing import ThreadedGroup
from tests.adapters.named_shards import (
    KNOWS_THE_PROTOCOL,
    halves,
)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcps_planners_store_what_torch_knows_and_refuse_the_rest(
    tmp_path: Path,
) -> None:
    """One rank that holds rows 0 to 3 of 8, through our planners and our storage, in all combinations."""
    half = halves(0, torch.arange(32.0).reshape(8, 4))
    ours = {
        "planner": SavePlanner(),
        "storage_writer": FileSystemWriter(tmp_path / "a"),
    }
    for names in (["planner"], ["storage_writer"], ["planner", "storage_writer"]):
        chosen: Any = {name: ours[name] for name in names}
        target = {} if "storage_writer" in chosen else {"checkpoint_id": tmp_path / "a"}
        if not KNOWS_THE_PROTOCOL:
            with pytest.raises(CheckpointException, match=r"global_shape"):
                dcp.save({"x": half}, no_dist=True, **chosen, **target)
            continue
        dcp.save({"x": half}, no_dist=True, **chosen, **target)
        blank = halves(0, torch.zeros(8, 4))
        dcp.load(
            {"x": blank},
            planner=LoadPlanner(),
            storage_reader=FileSystemReader(tmp_path / "a"),
            no_dist=True,
        )
        assert torch.equal(blank, half)
    del half.local_sizes  # type: ignore[attr-defined]
    with pytest.raises(
        CheckpointException,
        match=r"'x': the tensor has global_shape, .*, but no local_sizes: .* Set all four",
    ):
        dcp.save(
            {"x": half},
            no_dist=True,
            planner=SavePlanner(),
            checkpoint_id=tmp_path / "b",
        )
    megackpt.save(sharded({"x": torch.ones(4, 4)}), tmp_path / "whole")
    with pytest.raises(
        CheckpointException,
        match=r"'x': the tensor has global_shape, .*, but no local_sizes: .* Set all four",
    ):
        dcp.load(
            {"x": half},
            no_dist=True,
            planner=LoadPlanner(),
            checkpoint_id=tmp_path / "whole",
        )


def test_dcps_asynchronous_save_keeps_what_tensors_say(tmp_path: Path) -> None:
    """Torch's staging makes new tensors. One rank's half, then its whole, through one writer of ours."""
    half, whole = halves(0, torch.arange(32.0).reshape(8, 4)), torch.ones(4, 4)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    writer = FileSystemWriter(tmp_path)
    try:
        for number, tensor in enumerate((half, whole)):
            state = {"x": [{"y": tensor}], "z": [torch.ones(2), "text"]}
            future = dcp.async_save(
                state, checkpoint_id=tmp_path / str(number), storage_writer=writer
            )
            if tensor is half and not KNOWS_THE_PROTOCOL:
                with pytest.raises(
                    CheckpointException,
                    match=r"'x\.0\.y': the tensor names its shard",
                ):
                    future.result()
                continue
            future.result()
            blank = (
                halves(0, torch.zeros(8, 4)) if tensor is half else torch.zeros(4, 4)
            )
            loaded = {"x": [{"y": blank}]}
            dcp.load(loaded, storage_reader=FileSystemReader(tmp_path / str(number)))
            assert torch.equal(blank, tensor)
    finally:
        dist.destroy_process_group()


class Converting(DefaultSavePlanner):
    """Resolves to new tensors, which name their shards, and has no state dict to compare with."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.own = self.state_dict
        del self.state_dict
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        given = self.own[write_item.index.fqn]
        made = given.clone()
        vars(made).update(vars(given))
        return made


@pytest.mark.skipif(KNOWS_THE_PROTOCOL, reason="this torch plans the tensor as a shard")
def test_a_shard_in_memory_of_a_planner_is_not_stored_as_a_whole(
    tmp_path: Path,
) -> None:
    half = halves(0, torch.arange(32.0).reshape(8, 4))
    writer = FileSystemWriter(tmp_path / "a")
    with pytest.raises(CheckpointException, match="data says by its global_shape"):
        dcp.save({"x": half}, no_dist=True, storage_writer=writer, planner=Converting())
    writer = FileSystemWriter(tmp_path / "b")
    save_state_dict_async_plan({"x": half}, writer, planner=Converting())
    _, preload, _ = writer.get_save_function_and_args()
    assert preload is not None
    with pytest.raises(CheckpointingException, match="data says by its global_shape"):
        preload()
    assert not (tmp_path / "a").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_dcp_reads_what_was_stored(tmp_path: Path) -> None:
    whole = torch.arange(32.0).reshape(8, 4)

    def ranks(group: Any) -> None:
        megackpt.save(
            sharded({"x": halves(group.rank, whole)}), tmp_path, process_group=group
        )

    ThreadedGroup.run(2, ranks)
    blank = {"x": torch.zeros(8, 4)}
    dcp.load(blank, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(blank["x"], whole)
