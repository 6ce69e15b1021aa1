"""What torch DCP takes for shards by protocol, declared as shards: nothing of DCP's is asked but its index class.

Two protocols. Plain tensors with ``global_shape``, ``global_offsets``, ``local_offsets`` and ``local_sizes`` (torch
2.15's ``CheckpointableTensor``): boxes of the local tensor, each with its place in the global one. And objects with
``__create_write_items__``, ``__create_chunk_list__`` and ``__get_tensor_shard__`` (torchrec's LocalShardsWrapper, the
uneven DTensors of Megatron-FSDP), which name their chunks and give the memory of each.

Neither says whether other ranks hold the same chunk, so the shards are UNNUMBERED: when the declarations of all ranks
are there, the lowest rank's becomes the main replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, NamedTuple

import torch

from megackpt.errors import ShardingError
from megackpt.planning.manifest import UNNUMBERED
from megackpt.state import (
    FactoryBuildFn,
    FactoryMergeFn,
    LocalNonpersistentObject,
    ReplicaId,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.state.storable import SHARD_FIELDS, SHARD_METHODS, has_shard_fields

Shape = tuple[int, ...]


class _Chunk(NamedTuple):
    """A box of the global tensor, and the memory of its elements on this rank."""

    offset: Shape
    data: torch.Tensor
    written: bool  # False: this rank holds it, and leaves the writing to another one


@dataclass
class ShardedCheckpointable(ShardedTensorFactory):
    """A shard by protocol, stored as its chunks; loaded, it is the same object, whose memory was filled.

    ``shard``: what names the chunks, where ``data`` does not: for the optimizer's state of a parameter, the parameter.
    """

    build_fn: FactoryBuildFn = field(init=False, repr=False)
    merge_fn: FactoryMergeFn = field(init=False, repr=False)
    replica_id: ReplicaId = UNNUMBERED
    shard: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.build_fn, self.merge_fn = self._shards, self._filled
        self.shard = self.data if self.shard is None else self.shard

    def _shards(
        self, key: str, data: Any, replica_id: ReplicaId, _: slice | None
    ) -> Any:
        """One ShardedTensor for each chunk; what holds no element of its tensor is not declared on this rank."""
        mesh = getattr(data, "device_mesh", None)
        if mesh is not None and mesh.get_coordinate() is None:
            return LocalNonpersistentObject(data)
        if follows_methods(data):
            whole, chunks = _chunks_by_methods(key, data)
        else:
            named = (
                data
                if isinstance(data, torch.Tensor) and has_shard_fields(data)
                else self.shard
            )
            whole, chunks = _chunks_by_fields(key, data, named)
        if not chunks and whole and 0 in whole:
            chunks = [
                _Chunk(
                    (0,) * len(whole),
                    torch.empty(whole, dtype=data.dtype, device="cpu"),
                    True,
                )
            ]
        shards = [
            _declared(key, chunk, whole, replica_id if chunk.written else 1)
            for chunk in chunks
        ]
        return shards or LocalNonpersistentObject(data)

    def _filled(self, _: Any) -> Any:
        return self.data


def follows_methods(x: Any) -> bool:
    """Has it, or has the local tensor of a DTensor, any of SHARD_METHODS?"""
    asked = getattr(x, "_local_tensor", x)
    asked = asked if isinstance(asked, torch.Tensor) else type(asked)
    return any(hasattr(asked, name) for name in SHARD_METHODS)


def _declared(
    key: str, chunk: _Chunk, whole: Shape, replica_id: ReplicaId
) -> ShardedTensor:
    if chunk.data.is_meta:
        raise ShardingError(
            f"{key!r} is on the meta device: materialise it first, by module.to_empty(device=...). (Or it is a flat "
            "range of a parameter that names its own chunks: of these only state of the parameter's shape is declared)"
        )
    # A view without what the tensor says of itself: that is of the whole local tensor.
    data = chunk.data.detach()
    return ShardedTensor(
        key, data, data.dtype, tuple(data.shape), whole, chunk.offset, None, replica_id
    )


def _chunks_by_fields(
    key: str, data: torch.Tensor, named: torch.Tensor
) -> tuple[Shape, list[_Chunk]]:
    """The global shape, and the boxes of ``data`` that the fields of ``named`` name."""
    lacking = [name for name in SHARD_FIELDS if not hasattr(named, name)]
    if lacking:
        has = ", ".join(name for name in SHARD_FIELDS if name not in lacking)
        raise ShardingError(
            f"{key!r}: the tensor has {has}, but no {', '.join(lacking)}: nobody can tell where it lies in the global "
            "tensor. Set all four, as torch's CheckpointableTensor has them, or none"
        )
    try:
        whole = _ints(named.global_shape)  # type: ignore[attr-defined]
        offsets, starts, sizes = (
            [_ints(each) for each in getattr(named, name)] for name in SHARD_FIELDS[1:]
        )
    except TypeError as error:
        raise ShardingError(
            f"{key!r}: {', '.join(SHARD_FIELDS)} of a shard are tuples of ints, and but for the first tuples of such "
            f"tuples ({error})"
        ) from error
    local, axes = tuple(data.shape), len(whole)
    if not len(offsets) == len(starts) == len(sizes):
        raise ShardingError(
            f"{key!r}: {len(offsets)} global_offsets, {len(starts)} local_offsets and {len(sizes)} local_sizes are "
            "not one of each for each piece"
        )
    chunks = []
    for offset, start, size in zip(offsets, starts, sizes, strict=True):
        piece = f"the piece of local_sizes {size} at local_offsets {start}, global_offsets {offset}"
        if not len(offset) == len(start) == len(size) == len(local) == axes:
            raise ShardingError(
                f"{key!r}: {piece} has not the {axes} axes of the global_shape {whole}, or the local tensor of shape "
                f"{local} has not"
            )
        if not _within(start, size, local) or not _within(offset, size, whole):
            raise ShardingError(
                f"{key!r}: {piece} is not within the local tensor of shape {local} and the global_shape {whole}"
            )
        box = tuple(
            slice(first, first + length)
            for first, length in zip(start, size, strict=True)
        )
        chunks.append(_Chunk(offset, data.detach()[box], True))
    return whole, chunks


def _chunks_by_methods(key: str, value: Any) -> tuple[Shape, list[_Chunk]]:
    """The global shape, and the chunks that the methods of an object name.

    Raises ShardingError where the methods contradict one another, as one of them serves saves, the other loads.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex

    name = type(value).__name__
    lacking = [method for method in SHARD_METHODS if not hasattr(value, method)]
    if lacking:
        raise ShardingError(
            f"{key!r}: a {name} that names its own chunks lacks {', '.join(lacking)}: torch DCP's protocol is "
            f"{', '.join(SHARD_METHODS)}"
        )
    try:
        items = list(value.__create_write_items__(key, value))
        held = [
            (_ints(chunk.offsets), _ints(chunk.sizes))
            for chunk in value.__create_chunk_list__()
        ]
        written = {
            (_ints(i.tensor_data.chunk.offsets), _ints(i.tensor_data.chunk.sizes)): i
            for i in items
        }
        shapes = {_ints(item.tensor_data.size) for item in items}
    except Exception as error:  # the object's own code, which may raise anything
        raise ShardingError(
            f"{key!r}: a {name} does not name its chunks as torch DCP's planner asks for them: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not shapes and isinstance(value, torch.Tensor):
        shapes = {tuple(value.shape)}
    wrong = [item.index.fqn for item in items if item.index.fqn != key]
    if (
        wrong
        or len(shapes) > 1
        or len(written) < len(items)
        or not written.keys() <= set(held)
    ):
        raise ShardingError(
            f"{key!r}: a {name} writes {_named(written)} of {sorted(shapes)} under {sorted({key, *wrong})}, and "
            f"loads {_named(held)}: one name, one global shape, and the same chunks are expected"
        )
    # What has no elements and is not written is no chunk: it need not even have the axes of the tensor.
    held = [box for box in dict.fromkeys(held) if box in written or 0 not in box[1]]
    if held and not shapes:
        raise ShardingError(
            f"{key!r}: a {name} loads {_named(held)} and writes nothing: its global shape is unknown"
        )
    chunks = []
    for number, (offset, size) in enumerate(held):
        item = written.get((offset, size))
        place = item.index if item else MetadataIndex(key, torch.Size(offset), number)
        try:
            data = value.__get_tensor_shard__(place)
        except Exception as error:  # as above
            raise ShardingError(
                f"{key!r}: a {name} does not give its chunk at {offset}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(data, torch.Tensor) or tuple(data.shape) != size:
            given = (
                tuple(data.shape)
                if isinstance(data, torch.Tensor)
                else type(data).__name__
            )
            raise ShardingError(
                f"{key!r}: the chunk at {offset} of a {name} should be a tensor of shape {size}, and is {given}"
            )
        chunks.append(_Chunk(offset, data, item is not None))
    return next(iter(shapes), ()), chunks


def _ints(values: Sequence[Any]) -> Shape:
    return tuple(map(index, values))


def _within(start: Shape, size: Shape, shape: Shape) -> bool:
    triples = zip(start, size, shape, strict=True)
    return all(
        first >= 0 and length >= 0 and first + length <= end
        for first, length, end in triples
    )


def _named(boxes: Any) -> str:
    return ", ".join(f"{size} at {offset}" for offset, size in boxes) or "nothing"
