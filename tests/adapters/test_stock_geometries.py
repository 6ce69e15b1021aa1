"""The same shards saved by stock DCP and by us: what both load is equal bit for bit, or we refused with a reason.

Stock's planners, writer and reader are driven here rank by rank, in one process; ours run with threads as ranks.
"""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import megackpt
from megackpt import ShardingError, sharded
from megackpt.testing import ThreadedGroup

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]  # offset, size
DTYPES = (torch.float32, torch.float64, torch.int32)
STOCK_KNOWS_FIELDS = hasattr(dcp, "CheckpointableTensor")
REASONS = ("torch makes two layouts", "is not the piece of")


@dataclass
class Geometry:
    """How ranks hold a tensor: ``make(rank, whole)`` is what one of them has of it."""

    kind: str
    told: str
    ranks: int
    make: Callable[[int, torch.Tensor], Any]

    def shards(self, whole: torch.Tensor) -> list[tuple[Any, dict[str, Any]]]:
        """Of every rank: its shard, and the state that declares it."""
        made = []
        for rank in range(self.ranks):
            with as_rank(rank, self.ranks):
                shard = self.make(rank, whole)
                made.append((shard, sharded({"x": shard})))
        return made


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """This process as one rank of many, without any other one: tensors made here may be used after it."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


# --- geometries


def drawn(chance: random.Random, shape: Shape, kinds: Sequence[str]) -> Geometry:
    kind = chance.choice(kinds)
    maker = {
        "DTensor": dtensor,
        "FSDP2 over TP": fsdp2,
        "strided": strided,
        "fields": by_fields,
        "methods": by_methods,
        "uneven DTensor": uneven_dtensor,
    }[kind]
    return maker(kind, chance, shape)


def drawn_mesh(chance: random.Random) -> Shape:
    return tuple(chance.randint(1, 3) for _ in range(chance.randint(1, 3)))


def coordinates(rank: int, mesh: Shape) -> Shape:
    place = []
    for size in reversed(mesh):
        rank, at = divmod(rank, size)
        place.append(at)
    return tuple(reversed(place))


def dtensor(kind: str, chance: random.Random, shape: Shape) -> Geometry:
    """Shards and replicas over each axis of the mesh: even, uneven and empty ones, as sizes come."""
    mesh = drawn_mesh(chance)
    placements: list[Placement] = [
        Replicate() if chance.random() < 0.3 else Shard(chance.randrange(len(shape)))
        for _ in mesh
    ]
    return distributed(kind, mesh, placements)


def strided(kind: str, chance: random.Random, shape: Shape) -> Geometry:
    """Strided shards of any factor, cut from left to right."""
    mesh = drawn_mesh(chance)
    placements: list[Placement] = []
    often = chance.randrange(len(shape))
    for _ in mesh:
        axis = chance.choice((often, often, chance.randrange(len(shape))))
        any_factor = _StridedShard(axis, split_factor=chance.randint(1, 4))
        placements.append(
            chance.choice((Replicate(), Shard(axis), any_factor, any_factor))
        )
    return distributed(kind, mesh, placements)


def distributed(kind: str, mesh: Shape, placements: list[Placement]) -> Geometry:
    def make(_: int, whole: torch.Tensor) -> DTensor:
        placed = distribute_tensor(
            whole, init_device_mesh("cpu", mesh), placements, src_data_rank=None
        )
        return DTensor.from_local(
            placed.to_local().clone(),
            placed.device_mesh,
            placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    return Geometry(kind, f"{placements} over a mesh of {mesh}", math.prod(mesh), make)


def fsdp2(kind: str, chance: random.Random, shape: Shape) -> Geometry:
    """Tensor (and expert) parallelism cut first, then FSDP2 what they have left, in a strided shard if need be."""
    mesh = (
        chance.randint(1, 3),
        *(chance.randint(1, 3) for _ in range(chance.randint(1, 2))),
    )
    axis = chance.randrange(len(shape))
    others: list[Placement] = [
        Shard(chance.choice((axis, chance.randrange(len(shape))))) for _ in mesh[1:]
    ]
    before = [
        size
        for size, other in zip(mesh[1:], others, strict=True)
        if other == Shard(axis)
    ]
    factor = math.prod(before)
    own: Placement = (
        _StridedShard(axis, split_factor=factor) if factor > 1 else Shard(axis)
    )
    placements = [own, *others]

    def make(rank: int, whole: torch.Tensor) -> DTensor:
        place, local = coordinates(rank, mesh), whole
        for dim in (*range(1, len(mesh)), 0):
            cut: Any = Shard(axis) if dim == 0 else placements[dim]
            parts, _ = cut._split_tensor(
                local, mesh[dim], with_padding=False, contiguous=False
            )
            local = parts[place[dim]]
        device_mesh = init_device_mesh("cpu", mesh)
        return DTensor.from_local(
            local.clone(),
            device_mesh,
            placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    return Geometry(kind, f"{placements} over a mesh of {mesh}", math.prod(mesh), make)


def partition(chance: random.Random, shape: Shape, count: int) -> list[Box]:
    """Boxes that tile the shape, ``count`` at the most."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(count - 1):
        offset, size = boxes.pop(chance.randrange(len(boxes)))
        axis = chance.randrange(len(shape))
        at = chance.randint(0, size[axis])
        if 0 < at < size[axis]:
            left = (*size[:axis], at, *size[axis + 1 :])
            right = (*size[:axis], size[axis] - at, *size[axis + 1 :])
            middle = (*offset[:axis], offset[axis] + at, *offset[axis + 1 :])
            boxes += [(offset, left), (middle, right)]
        else:
            boxes.append((offset, size))
    return boxes


def dealt(chance: random.Random, shape: Shape) -> list[list[Box]]:
    """The boxes that each rank holds: several, none, and some that others hold as well."""
    ranks = math.prod(drawn_mesh(chance))
    held: list[list[Box]] = [[] for _ in range(ranks)]
    for box in partition(chance, shape, chance.randint(1, 2 * ranks)):
        copies = chance.choice((1, 1, 1, 2, ranks))
        for rank in chance.sample(range(ranks), min(copies, ranks)):
            held[rank].append(box)
    return held


def by_fields(kind: str, chance: random.Random, shape: Shape) -> Geometry:
    """Plain tensors that say which boxes they hold, one under another in a buffer with padding."""
    held = dealt(chance, shape)
    pads = [
        [chance.choice((0, 0, 1, 2)) for _ in shape]
        for _ in range(sum(map(len, held)) + len(held))
    ]
    empty = [chance.random() < 0.1 for _ in held]
    said_as = chance.choice((tuple, list, torch.Size))

    def make(rank: int, whole: torch.Tensor) -> torch.Tensor:
        boxes = list(held[rank])
        if empty[rank]:
            boxes.append((shape, (0,) * len(shape)))
        own = pads[rank :: len(held)]
        places: list[tuple[Shape, Shape, Shape]] = []
        row = 0
        for (offset, size), pad in zip(
            boxes, own + [[0] * len(shape)] * len(boxes), strict=False
        ):
            start = (row + pad[0], *pad[1:])
            places.append((offset, start, size))
            row = start[0] + size[0]
        ends = [
            [a + s for a, s in zip(start, size, strict=True)]
            for _, start, size in places
        ]
        extent = [
            max((end[axis] for end in ends), default=0) for axis in range(len(shape))
        ]
        local: Any = torch.full(extent, 77, dtype=whole.dtype)
        for offset, start, size in places:
            local[slices(start, size)] = whole[slices(offset, size)]
        local.global_shape = shape
        local.global_offsets = tuple(said_as(offset) for offset, _, _ in places)
        local.local_offsets = tuple(said_as(start) for _, start, _ in places)
        local.local_sizes = tuple(said_as(size) for _, _, size in places)
        return local

    return Geometry(kind, f"{held}", len(held), make)


def slices(offset: Shape, size: Shape) -> tuple[slice, ...]:
    return tuple(
        slice(first, first + length) for first, length in zip(offset, size, strict=True)
    )


def items_of(
    key: str, boxes: Sequence[Box], dtype: torch.dtype, shape: Shape
) -> list[WriteItem]:
    return [
        WriteItem(
            MetadataIndex(key, torch.Size(offset)),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(offset), torch.Size(size)),
                TensorProperties(dtype),
                torch.Size(shape),
            ),
        )
        for offset, size in boxes
    ]


class Chunked(torch.Tensor):
    """A tensor of the global shape that has no memory of its own, and names its chunks."""

    chunks: dict[Box, torch.Tensor]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return items_of(fqn, list(self.chunks), self.dtype, tuple(self.shape))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
            for offset, size in self.chunks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(
            data
            for (offset, _), data in self.chunks.items()
            if offset == tuple(index.offset or ())
        )


def by_methods(kind: str, chance: random.Random, shape: Shape) -> Geometry:
    held = dealt(chance, shape)

    def make(rank: int, whole: torch.Tensor) -> Chunked:
        made = torch.empty(shape, dtype=whole.dtype).as_subclass(Chunked)
        made.chunks = {box: whole[slices(*box)].clone() for box in held[rank]}
        return made

    return Geometry(kind, f"{held}", len(held), make)


def uneven_dtensor(kind: str, chance: random.Random, shape: Shape) -> Geometry:
    """Cuts at any places along one axis, told by closures on the local tensor, as Megatron-FSDP does it."""
    mesh, axis = drawn_mesh(chance), chance.randrange(len(shape))
    over = chance.randrange(len(mesh))
    cuts = sorted(chance.randint(0, shape[axis]) for _ in range(mesh[over] - 1))
    bounds = [0, *cuts, shape[axis]]
    placements: list[Placement] = [
        Shard(axis) if dim == over else Replicate() for dim in range(len(mesh))
    ]

    def make(rank: int, whole: torch.Tensor) -> DTensor:
        first, last = bounds[coordinates(rank, mesh)[over] :][:2]
        local = whole.narrow(axis, first, last - first).clone()
        box = (
            tuple(first if a == axis else 0 for a in range(len(shape))),
            tuple(local.shape),
        )
        made = DTensor.from_local(
            local,
            init_device_mesh("cpu", mesh),
            placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        told: Any = made._local_tensor
        chunk = ChunkStorageMetadata(box[0], box[1])  # type: ignore[arg-type]
        items = [box] if local.numel() else []
        told.__create_chunk_list__ = lambda: [chunk]
        told.__create_write_items__ = lambda key, _: items_of(
            key, items, local.dtype, shape
        )
        return made

    return Geometry(
        kind,
        f"{placements} over a mesh of {mesh}, cut at {cuts}",
        math.prod(mesh),
        make,
    )


def memory(shard: Any) -> list[torch.Tensor]:
    if isinstance(shard, Chunked):
        return list(shard.chunks.values())
    return [shard._local_tensor if isinstance(shard, DTensor) else shard]


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


# --- stock DCP, rank by rank


def stock_saves(states: Sequence[dict[str, Any]], folder: Path) -> None:
    planners = [DefaultSavePlanner() for _ in states]
    writers = [dcp.FileSystemWriter(folder, sync_files=False) for _ in states]
    plans = []
    for rank, (state, planner, writer) in enumerate(
        zip(states, planners, writers, strict=True)
    ):
        planner.set_up_planner(state, is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    results = []
    for plan, planner, writer in zip(
        writers[0].prepare_global_plan(plans), planners, writers, strict=True
    ):
        results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    writers[0].finish(metadata, results)


def stock_loads(states: Sequence[dict[str, Any]], folder: Path) -> None:
    for rank, state in enumerate(states):
        planner, reader = DefaultLoadPlanner(), dcp.FileSystemReader(folder)
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = planner.create_global_plan([plan])
        reader.read_data(planner.finish_plan(plan), planner).wait()


# --- ours


def together(
    states: Sequence[dict[str, Any]], call: Callable[..., Any], folder: Path
) -> str:
    """Do this on all ranks. Returns why it was refused; empty where it was not."""

    def one(group: Any) -> str:
        try:
            call(states[group.rank], folder, process_group=group)
        except ShardingError as error:
            return str(error)
        return ""

    found = set(ThreadedGroup.run(len(states), one))
    assert len(found) == 1, found  # all ranks hear the same
    return str(found.pop())


def outcome(seed: int, folder: Path) -> str:
    """What became of one geometry. AssertionError where it is neither of those that may be."""
    chance = random.Random(seed)
    sizes = (0,) if chance.random() < 0.02 else (1, 2, 3, 4, 5, 6, 7, 8, 9)
    shape = tuple(chance.choice((*sizes, 5)) for _ in range(chance.randint(1, 4)))
    kinds = (
        "DTensor",
        "DTensor",
        "FSDP2 over TP",
        "strided",
        "fields",
        "fields",
        "methods",
        "uneven DTensor",
    )
    saved, asked = drawn(chance, shape, kinds), drawn(chance, shape, kinds)
    dtype = chance.choice(DTYPES)
    whole = (torch.arange(math.prod(shape)) + 1).to(dtype).reshape(shape)
    told = f"seed {seed}: {shape} as {saved.kind} {saved.told}; loaded as {asked.kind} {asked.told}"

    given = saved.shards(whole)
    refused = together([state for _, state in given], megackpt.save, folder / "ours")
    if refused:
        assert any(reason in refused for reason in REASONS), f"{told}: {refused}"
        return f"{saved.kind}: refused by us, {next(reason for reason in REASONS if reason in refused)!r}"
    ours = megackpt.load_plain_tensors(folder / "ours")["x"]
    assert same([ours], [whole]), f"{told}: we store {ours}"
    loaded = asked.shards(torch.zeros_like(whole))
    blank_refused = together(
        [state for _, state in loaded], megackpt.load, folder / "ours"
    )
    expected = [memory(shard) for shard, _ in asked.shards(whole)]
    if not blank_refused:
        for rank, (shard, _) in enumerate(loaded):
            assert same(memory(shard), expected[rank]), (
                f"{told}: rank {rank} loads {memory(shard)}"
            )
    if not STOCK_KNOWS_FIELDS and saved.kind == "fields":
        return f"{saved.kind}: equal to what was cut; this torch does not know it"

    try:
        stock_saves([{"x": shard} for shard, _ in given], folder / "stock")
        state = {"x": torch.zeros_like(whole)}
        dcp.load(state, checkpoint_id=folder / "stock", no_dist=True)
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - stock's own refusals are of all kinds
        return (
            f"{saved.kind}: equal to what was cut; stock fails ({type(error).__name__})"
        )
    if not same([state["x"]], [whole]):
        return f"{saved.kind}: equal to what was cut; stock stores other values"
    if not blank_refused and (STOCK_KNOWS_FIELDS or asked.kind != "fields"):
        blank = [shard for shard, _ in asked.shards(torch.zeros_like(whole))]
        try:
            stock_loads([{"x": shard} for shard in blank], folder / "stock")
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - as above
            return f"{saved.kind}: equal; stock fails to load it as {asked.kind} ({type(error).__name__})"
        if not all(
            same(memory(shard), expected[rank]) for rank, shard in enumerate(blank)
        ):
            return f"{saved.kind}: equal; stock loads other values as {asked.kind}"
    return f"{saved.kind}: equal"


def outcomes(seeds: Sequence[int], folder: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            found[outcome(seed, folder / str(seed))] += 1
    return found


def test_what_stock_and_we_load_is_equal_or_refused_by_us(tmp_path: Path) -> None:
    found = outcomes(range(20), tmp_path)
    assert sum(n for name, n in found.items() if "refused by us" not in name) > 17, (
        found
    )


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_two_thousand_geometries(
    first: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures of docs/reliability.md are the sums of what these print."""
    found = outcomes(range(first, first + 250), tmp_path)
    with capsys.disabled():
        print(f"\ntorch {torch.__version__}, geometries {first} to {first + 249}:")
        for name, count in sorted(found.items()):
            print(f"  {count:4} {name}")
