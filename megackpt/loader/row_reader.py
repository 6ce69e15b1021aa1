"""The rows that one rank wants: memory for the tensors, objects from their blobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Imported here, not in the first load: np.unique would import numpy.ma, and serialization the list
# of globals that a pickle may name.
import numpy.ma  # noqa: F401
import torch

import megackpt.serialization.allowlist  # noqa: F401
from megackpt import serialization
from megackpt.errors import (
    CheckpointingException,
    CorruptCheckpoint,
)
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    COMMON_KEY,
    OBJECT,
    Declaration,
    Declarations,
    Manifest,
    ShardId,
    TensorEntry,
)
from megackpt.staging.target import LoadTarget
from megackpt.state import ShardedTensor, dtype_named
from megackpt.storage import Storage


def values_of(
    root: Storage,
    wanted: Declarations,
    target: LoadTarget,
    trusted: Sequence[type] = (),
) -> list[Any]:
    """For each wanted row its tensor, or the object in its blob."""
    values: list[Any] = list(target.tensors)
    for row, blob in target.blobs.items():
        shard = wanted.row(row).shard
        where = f"{root.location}: {shard}"
        values[row] = serialization.load(blob, trusted=trusted, where=where)
        if shard.key == COMMON_KEY and not isinstance(values[row], dict):
            kind = type(values[row]).__name__
            raise CorruptCheckpoint(f"{where} is a {kind}, not a dict")
    return values


def target_of(
    wanted: Declarations, manifest: Manifest, tensors: Sequence[torch.Tensor | None]
) -> LoadTarget:
    """The memory for the wanted rows, with the dtypes in which they are stored."""
    numbers = manifest.numbers()
    dtypes: list[torch.dtype | None] = []
    for entry in wanted.tensors:
        number = numbers.get(entry.key)
        name = OBJECT
        if number is not None:
            name = manifest.tensors[number].meta.dtype
        dtypes.append(None if name == OBJECT else dtype_named(name))
    by_row = [dtypes[number] for number in wanted.tensor.tolist()]
    return LoadTarget(tensors, wanted.boxes, by_row, {})


def common_row(manifest: Manifest, rank: int = 0) -> Declarations:
    """The common state as a wanted row; no row if none is stored."""
    shard = ShardId(COMMON_KEY, Box((), ()))
    found = next((e for e in manifest.tensors if e.is_common), None)
    if found is None:
        return Declarations.of([])
    return Declarations.of([Declaration(shard, found.meta, 0, False, 0, rank)])


def whole(entry: TensorEntry, replica_id: int = 0) -> ShardedTensor:
    """A stored tensor as one shard without data."""
    shape = entry.meta.shape
    dtype = dtype_named(entry.meta.dtype)
    offset = (0,) * len(shape)
    fragments = (1,) * len(shape)
    return ShardedTensor(
        entry.key, None, dtype, shape, shape, offset, fragments, replica_id
    )


def destination(shard: ShardedTensor) -> torch.Tensor:
    """The caller's tensor, or a new one on the CPU; zeroed if a smaller one may be stored."""
    tensor = shard.data
    if tensor is None or tensor.is_meta:
        shape = tuple(shard.local_shape)
        try:
            tensor = torch.empty(shape, dtype=shard.dtype, device="cpu")
        except RuntimeError as error:
            raise CheckpointingException(
                f"there is no memory for {shard.key!r}, {shape} of {shard.dtype}"
            ) from error
    if tensor.requires_grad or type(tensor) is not torch.Tensor:
        tensor = tensor.detach()
    if shard.allow_shape_mismatch:
        return tensor.zero_()
    return tensor
