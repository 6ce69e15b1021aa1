"""Shards by torch DCP's protocols, declared as ShardedTensors.

There are two protocols. Plain tensors with ``global_shape``, ``global_offsets``, ``local_offsets``
and ``local_sizes`` (torch 2.15's ``CheckpointableTensor``): boxes of the local tensor, with their
offsets in the global one. And objects with ``__create_write_items__``,
``__create_chunk_list__`` and ``__get_tensor_shard__`` (torchrec's LocalShardsWrapper,
Megatron-FSDP's uneven DTensors): they name their chunks and give the memory of each.

Neither says whether other ranks hold the same chunk, so the shards are UNNUMBERED: when the
declarations of all ranks are compared, the lowest rank's becomes the main replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from operator import index
from typing import Any, NamedTuple

import torch

from megackpt.errors import ShardingError
from megackpt.planning.box import Box
from megackpt.planning.manifest import UNNUMBERED
from megackpt.state import (
    FilledFactory,
    LocalNonpersistentObject,
    ReplicaId,
    ShardedTensor,
)
from megackpt.state.storable import (
    SHARD_FIELDS,
    SHARD_METHODS,
    shard_attributes,
    shard_fields,
)

Shape = tuple[int, ...]
ChunkShape = tuple[Shape, Shape, Shape]
"""Offset and size of a chunk, and the global shape."""


class _Chunk(NamedTuple):
    """A box of the global tensor, and its elements on this rank."""

    offset: Shape
    data: torch.Tensor
    written: bool
    """False: this rank only loads it; another one writes it."""


def declare_checkpointable(key: str, shard: Any) -> FilledFactory:
    """A shard by protocol, stored as its chunks.

    The declaration of a parameter may be used for its optimizer's state: ``shard`` then names the
    chunks of tensors that do not name chunks.
    """
    return FilledFactory(key, shard, partial(_build, shard), UNNUMBERED)


def _build(shard: Any, key: str, data: Any, replica_id: ReplicaId, *_: Any) -> Any:
    mesh = getattr(data, "device_mesh", None)
    if mesh is not None and mesh.get_coordinate() is None:
        return LocalNonpersistentObject(data)
    if has_methods(data):
        shape, chunks = _chunks_by_methods(key, data)
    else:
        named = shard
        if shard_fields(data):
            named = data
        shape, chunks = _chunks_by_fields(key, data, named)
    if not chunks and 0 in shape:
        # An empty tensor is stored, too.
        empty = torch.empty(shape, dtype=data.dtype, device="cpu")
        chunks = [_Chunk((0,) * len(shape), empty, True)]
    shards = []
    for chunk in chunks:
        if chunk.data.is_meta:
            raise ShardingError(
                f"{key!r} is on the meta device: materialise it first, by "
                "module.to_empty(device=...). (Or it is a flat range of a parameter that "
                "names its own chunks: of these only state of the parameter's shape is "
                "declared)"
            )
        # A view without the fields, which describe the whole local tensor.
        view = chunk.data.detach()
        local_shape = tuple(view.shape)
        replica = replica_id
        if not chunk.written:
            replica = 1
        shards.append(
            ShardedTensor(
                key, view, view.dtype, local_shape, shape, chunk.offset, None, replica
            )
        )
    return shards or LocalNonpersistentObject(data)


def has_methods(value: Any) -> bool:
    """Whether it, or the local tensor of a DTensor, has any of SHARD_METHODS."""
    found = shard_attributes(getattr(value, "_local_tensor", value))
    return not set(SHARD_METHODS).isdisjoint(found)


def pieces_by_fields(
    key: str, named: torch.Tensor
) -> tuple[Shape, list[tuple[Shape, Shape, Shape]]]:
    """The global shape; and for each piece its global offset, its local offset, and its size.

    ShardingError unless all fields exist and list the same number of pieces.
    """
    lacking = [name for name in SHARD_FIELDS if not hasattr(named, name)]
    if lacking:
        has = ", ".join(name for name in SHARD_FIELDS if name not in lacking)
        raise ShardingError(
            f"{key!r}: the tensor has {has}, but no {', '.join(lacking)}: its place in the global "
            "tensor is unknown. Set all four, as torch's CheckpointableTensor has them, or none"
        )
    try:
        shape = _ints(named.global_shape)  # type: ignore[attr-defined]
        offsets, starts, sizes = (
            [_ints(each) for each in getattr(named, name)] for name in SHARD_FIELDS[1:]
        )
    except TypeError as error:
        raise ShardingError(
            f"{key!r}: global_shape of a shard is a tuple of ints, and "
            f"{', '.join(SHARD_FIELDS[1:])} are tuples of such tuples ({error})"
        ) from error
    if not len(offsets) == len(starts) == len(sizes):
        raise ShardingError(
            f"{key!r}: {len(offsets)} global_offsets, {len(starts)} local_offsets and {len(sizes)} "
            "local_sizes are not one of each for each piece"
        )
    return shape, list(zip(offsets, starts, sizes, strict=True))


def chunks_of_items(items: Iterable[Any]) -> list[ChunkShape]:
    """The chunks of torch's WriteItems. Items of objects have none."""
    chunks = []
    for item in items:
        data = item.tensor_data
        if data is not None:
            chunk = data.chunk
            chunks.append((_ints(chunk.offsets), _ints(chunk.sizes), _ints(data.size)))
    return chunks


def _chunks_by_fields(
    key: str,
    data: torch.Tensor,
    named: torch.Tensor,
) -> tuple[Shape, list[_Chunk]]:
    """The global shape, and the boxes of ``data`` that the fields of ``named`` name."""
    shape, pieces = pieces_by_fields(key, named)
    whole = Box.whole(shape)
    local = Box.whole(tuple(data.shape))
    chunks = []
    for offset, start, size in pieces:
        piece = (
            f"the piece of local_sizes {size} at local_offsets {start}, global_offsets "
            f"{offset}"
        )
        if {len(offset), len(start), len(size), data.dim()} != {len(shape)}:
            raise ShardingError(
                f"{key!r}: {piece} has not the {len(shape)} axes of the global_shape {shape}, or "
                f"the local tensor of shape {local.shape} has not"
            )
        there = Box(offset, size)
        here = Box(start, size)
        inside = whole.contains(there) and local.contains(here)
        if not inside or min(size, default=0) < 0:
            raise ShardingError(
                f"{key!r}: {piece} is not within the local tensor of shape {local.shape} and the "
                f"global_shape {shape}"
            )
        chunks.append(_Chunk(offset, data.detach()[here.slices()], True))
    return shape, chunks


def _chunks_by_methods(key: str, value: Any) -> tuple[Shape, list[_Chunk]]:
    """The global shape, and the chunks that the methods of an object name.

    One method serves saves and another one loads: ShardingError if they contradict one another.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex

    kind = f"{key!r}: a {type(value).__name__}"
    lacking = [method for method in SHARD_METHODS if not hasattr(value, method)]
    if lacking:
        raise ShardingError(
            f"{kind} that names its own chunks lacks {', '.join(lacking)}: torch DCP's protocol is "
            f"{', '.join(SHARD_METHODS)}"
        )
    try:
        items = list(value.__create_write_items__(key, value))
        written, shapes = {}, set()
        for item, chunk in zip(items, chunks_of_items(items), strict=True):
            written[chunk[:2]] = item
            shapes.add(chunk[2])
        names = {item.index.fqn for item in items} | {key}
        held = [
            (_ints(chunk.offsets), _ints(chunk.sizes))
            for chunk in value.__create_chunk_list__()
        ]
    except Exception as error:  # the code of the object may raise anything
        raise ShardingError(
            f"{kind} does not name its chunks as torch DCP's planner asks for them: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not shapes and isinstance(value, torch.Tensor):
        shapes = {tuple(value.shape)}
    unique = len(names) == 1 and len(shapes) <= 1 and len(written) == len(items)
    if not unique or not written.keys() <= set(held):
        raise ShardingError(
            f"{kind} writes {_listed(written)} of {sorted(shapes)} under {sorted(names)}, and "
            f"loads {_listed(held)}: one name, one global shape, and the same chunks are expected"
        )
    # Not chunks: empty boxes that are not written. They may not even have the tensor's axes.
    held = [box for box in dict.fromkeys(held) if box in written or 0 not in box[1]]
    if held and not shapes:
        raise ShardingError(
            f"{kind} loads {_listed(held)} and writes nothing: its global shape is unknown"
        )
    chunks = []
    for number, (offset, size) in enumerate(held):
        is_written = (offset, size) in written
        place = MetadataIndex(key, torch.Size(offset), number)
        if is_written:
            place = written[offset, size].index
        try:
            data = value.__get_tensor_shard__(place)
        except Exception as error:  # the code of the object may raise anything
            raise ShardingError(
                f"{kind} does not give its chunk at {offset}: {type(error).__name__}: {error}"
            ) from error
        given: object = type(data).__name__
        if isinstance(data, torch.Tensor):
            given = tuple(data.shape)
        if given != size:
            raise ShardingError(
                f"{kind} should give for its chunk at {offset} a tensor of shape {size}, and gives "
                f"{given}"
            )
        chunks.append(_Chunk(offset, data, is_written))
    return next(iter(shapes), ()), chunks


def _ints(values: Sequence[Any]) -> Shape:
    return tuple(map(index, values))


def _listed(boxes: Any) -> str:
    return ", ".join(f"{size} at {offset}" for offset, size in boxes) or "nothing"
