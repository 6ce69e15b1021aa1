"""Reading the rows that one rank wants: tensors into memory, objects from their blobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# Imported here, not in the first load: np.unique would import numpy.ma, and serialization the list
# of globals that a pickle may name.
import numpy.ma
import torch

import megackpt.serialization.allowlist  # noqa: F401
from megackpt import events, serialization
from megackpt.backends.base import Backend
from megackpt.backends.progress import counted_target
from megackpt.checkpoint import open_same
from megackpt.errors import (
    CheckpointingException,
    CheckpointReplaced,
    CorruptCheckpoint,
    StorageError,
)
from megackpt.planning.box import Box
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import (
    COMMON_KEY,
    OBJECT,
    Declaration,
    Declarations,
    LoadPlan,
    Manifest,
    ShardId,
    TensorEntry,
)
from megackpt.staging.devices import synchronize
from megackpt.staging.target import LoadTarget
from megackpt.state import ShardedTensor, dtype_named
from megackpt.storage import Executor, Storage


def read_rows(
    root: Storage,
    backend: Backend,
    manifest: Manifest,
    wanted: Declarations,
    tensors: Sequence[torch.Tensor | None],
    executor: Executor,
    *,
    verify: bool = True,
    trusted: Sequence[type] = (),
) -> list[Any]:
    """Read every wanted row: into ``tensors[i]`` or, where that is None, as an object."""
    target = target_of(wanted, manifest, tensors)
    plan = plan_load(wanted, manifest)
    read(executor, root, backend, plan, target, verify, root.called)
    return values_of(root, wanted, target, trusted)


def read(
    executor: Executor,
    root: Storage,
    backend: Backend,
    plan: LoadPlan,
    target: LoadTarget,
    verify: bool,
    where: str,
) -> None:
    """Carry out the plan. ``verify`` compares the bytes with the stored digests.

    StorageError names ``where`` if the storage does not answer.
    """
    tensors = target.tensors
    synchronize(tensors)
    is_read = np.zeros(len(tensors), np.bool_)
    is_read[plan.target] = True
    todo = int(target.memory.nbytes[is_read].sum())
    into = counted_target(target, todo)

    def work() -> None:
        try:
            backend.read(root, plan, into, verify)
        except (CheckpointingException, OSError) as error:
            replaced = replacement(root, plan.manifest)
            if replaced is not None:
                raise replaced from error
            raise

    try:
        executor.call(f"reading {where}", work)
    except StorageError as error:
        if executor.gave_up is None:
            raise
        raise StorageError(
            f"{error}. The tensors of this load must not be used: when the storage "
            "answers, reads that hang may still write to them. Load into others"
        ) from None
    synchronize(tensors)
    events.current().done = todo + sum(map(len, target.blobs.values()))


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


def replacement(root: Storage, manifest: Manifest) -> CheckpointReplaced | None:
    """The exception to raise if reading failed because a save replaced the checkpoint."""
    try:
        if manifest.save_id:
            open_same(root.called, manifest.save_id)
    except CheckpointReplaced as error:
        return error
    except (CheckpointingException, OSError):
        return None  # the error of the read says more
    return None


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
