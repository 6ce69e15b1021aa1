"""On two and four ranks: DTensors, saved with one placement and loaded with another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    zeros,
)

from tests.dcp.behaviours.catalogue import behaviour

ONE = ("R", "S0", "S1")
TWO = ("RR", "RS", "SR", "SS", "ST", "TS")
"""Placements by letter: replicated, cut along the first axis (S), the second (T)."""


def placements(letters: str) -> list[Any]:
    known = {"R": Replicate(), "S": Shard(0), "T": Shard(1)}
    return [known[letter] for letter in letters.replace("S0", "S").replace("S1", "T")]


def mesh_for(letters: str) -> DeviceMesh:
    ranks = dist.get_world_size()
    if len(placements(letters)) == 1:
        return init_device_mesh("cpu", (ranks,))
    return init_device_mesh("cpu", (2, ranks // 2))


def distributed(whole: torch.Tensor, letters: str) -> DTensor:
    return distribute_tensor(whole, mesh_for(letters), placements(letters))


def check(
    folder: Path, source: str, targets: Sequence[str], shape: tuple[int, int]
) -> None:
    whole = torch.arange(float(shape[0] * shape[1])).reshape(shape)
    dcp.save({"d": distributed(whole, source)}, checkpoint_id=folder)
    for target in targets:
        empty = zeros(
            *shape, device_mesh=mesh_for(target), placements=placements(target)
        )
        found = {"d": empty}
        dcp.load(found, checkpoint_id=folder)
        assert found["d"] is empty
        assert torch.equal(found["d"].full_tensor(), whole), target


@behaviour(ranks=2, source=ONE)
def placements_of_one_dimension_change(folder: Path, source: str) -> None:
    check(folder, source, ONE, (5, 4))


@behaviour(ranks=4, source=TWO)
def placements_of_two_dimensions_change(folder: Path, source: str) -> None:
    check(folder, source, TWO, (4, 6))


@behaviour(ranks=4, source=("R", "S0"))
def from_one_dimension_to_two(folder: Path, source: str) -> None:
    check(folder, source, TWO, (4, 4))


@behaviour(ranks=4, source=TWO)
def from_two_dimensions_to_one(folder: Path, source: str) -> None:
    check(folder, source, ("R", "S0"), (4, 4))


@behaviour(ranks=4)
def shards_without_elements(folder: Path) -> None:
    check(folder / "1", "S0", ["SS"], (1, 3))
    check(folder / "2", "SS", ["S0"], (3, 2))
    check(folder / "3", "SS", ["R"], (2, 1))


@behaviour(ranks=4)
def a_mesh_of_some_ranks(folder: Path) -> None:
    whole = torch.arange(12.0).reshape(6, 2)
    mesh = DeviceMesh("cpu", [0, 1])
    state = {"plain": torch.ones(3)}
    if dist.get_rank() < 2:
        state["d"] = distribute_tensor(whole, mesh, [Shard(0)])
    dcp.save(state, checkpoint_id=folder)
    found = {"d": distributed(torch.zeros(6, 2), "S0"), "plain": torch.zeros(3)}
    dcp.load(found, checkpoint_id=folder)
    assert torch.equal(found["d"].full_tensor(), whole)
    assert found["plain"].sum() == 3


@behaviour(ranks=2)
def a_model_with_extra_state(folder: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self, factor: int) -> None:
            super().__init__()
            whole = torch.arange(4.0) * factor
            self.cut = torch.nn.Parameter(distributed(whole, "S0"))
            self.copied = torch.nn.Parameter(distributed(whole + 4, "R"))
            self.extra: Any = {"n": factor, "t": torch.full((1,), float(factor))}

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    saved, found = Model(1), Model(10)
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    state = found.state_dict()
    dcp.load(state, checkpoint_id=folder)
    found.load_state_dict(state)
    assert torch.equal(found.cut.full_tensor(), torch.arange(4.0))
    assert torch.equal(found.copied.full_tensor(), torch.arange(4.0) + 4)
    assert found.extra["n"] == 1
    assert found.extra["t"] == 1


@behaviour(ranks=2)
def a_dtensor_is_loaded_as_a_tensor_and_back(folder: Path) -> None:
    whole = torch.arange(20.0).reshape(5, 4)
    dcp.save({"d": distributed(whole, "S0"), "t": whole}, checkpoint_id=folder)
    found = {"d": torch.zeros(5, 4), "t": distributed(torch.zeros(5, 4), "S1")}
    dcp.load(found, checkpoint_id=folder)
    assert torch.equal(found["d"], whole)
    assert torch.equal(found["t"].full_tensor(), whole)


@behaviour(ranks=2)
def metadata_of_dtensors(folder: Path) -> None:
    whole = torch.zeros(6, 4, dtype=torch.bfloat16)
    dcp.save({"d": distributed(whole, "S0"), "n": b"x"}, checkpoint_id=folder)
    listed = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensor = listed["d"]
    assert (tensor.size, tensor.properties.dtype) == ((6, 4), torch.bfloat16)
    places = sorted((tuple(c.offsets), tuple(c.sizes)) for c in tensor.chunks)
    assert places == [((0, 0), (3, 4)), ((3, 0), (3, 4))]


@behaviour(ranks=2)
def a_checkpoint_of_two_ranks_in_one_process(folder: Path) -> None:
    whole = torch.arange(20.0).reshape(5, 4)
    dcp.save({"d": distributed(whole, "S0")}, checkpoint_id=folder)
    found = {"d": torch.zeros(5, 4)}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert torch.equal(found["d"], whole)


@behaviour(ranks=2)
def a_dtensor_is_saved_while_training_goes_on(folder: Path) -> None:
    whole = torch.arange(20.0).reshape(5, 4)
    state = {"d": distributed(whole, "S0"), "n": 1}
    future: Any = dcp.async_save(state, checkpoint_id=folder)
    state["d"].to_local().zero_()  # type: ignore[union-attr]
    future.result()
    dist.barrier()
    found = {"d": distributed(torch.zeros(5, 4), "S1"), "n": 0}
    dcp.load(found, checkpoint_id=folder)
    assert torch.equal(found["d"].full_tensor(), whole)
    assert found["n"] == 1
