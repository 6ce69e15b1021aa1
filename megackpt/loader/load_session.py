"""One load on one rank: the bounded calls to its storage, their progress, and the rows it wants."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ParamSpec, TypeVar

import numpy as np

# Imported here, not in the first load: np.unique would import numpy.ma, and serialization the list
# of globals that a pickle may name.
import numpy.ma
import torch
from numpy.typing import NDArray

import megackpt.serialization.allowlist  # noqa: F401
from megackpt import events, serialization
from megackpt.backends.base import Target
from megackpt.checkpoint import (
    Directory,
    Opened,
    backend_of,
    in_run,
    open_checkpoint,
    open_same,
)
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
from megackpt.strategies import Strategy

NICE = 5
"""Added to the nice value of threads that read during other work: their share is a third then."""

P = ParamSpec("P")
T = TypeVar("T")


class LoadSession:
    """Opens and reads the checkpoint of one load, on one rank.

    Each call to the storage is bounded: StorageError if the storage does not answer. After a call
    that was given up, all later calls raise the same error.

    Args:
        timeout: how long the storage may not answer in one call. None: for ever.
        who: the reader, for errors, such as "rank 0, host 'a'".
    """

    def __init__(self, timeout: timedelta | None, who: str = "") -> None:
        self._executor = Executor(timeout)
        self._who = f" ({who})" if who else ""
        self.alive = self._executor.alive
        self.close = self._executor.close
        self.cancel = self._executor.progress.cancel

    def call(
        self, name: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Make a call to the storage, under a name for errors, such as "opening run/3"."""
        return self._executor.call(f"{name}{self._who}", work, *args, **kwargs)

    def lower_priority(self) -> None:
        """Make later calls with less of the processor: threads with other work go first."""
        if sys.platform == "linux":  # elsewhere a process has one priority
            self.call("reading", os.nice, NICE)

    def open(
        self, directory: Directory, asked: Strategy | None = None
    ) -> tuple[Directory, Opened]:
        """The checkpoint in a directory, or the latest one of a run, and where it is.

        Like ``checkpoint.in_run`` with ``checkpoint.open_checkpoint``.
        """
        opened = partial(open_checkpoint, asked=asked, moved=self.alive)
        return self.call(f"opening {directory}", in_run, directory, opened, self.alive)

    def open_same(
        self, directory: Directory, manifest: Manifest, asked: Strategy | None
    ) -> Opened:
        """The checkpoint that another rank has opened: see ``checkpoint.open_same``."""
        opening = f"opening {directory}"
        save_id = manifest.save_id
        root = self.call(opening, open_same, directory, save_id, asked, self.alive)
        backend = backend_of(root, manifest, asked)
        if backend.properties.follows_links:
            root = self.call(opening, root.following)
        return Opened(root, backend, manifest, {})

    def read(
        self, opened: Opened, plan: LoadPlan, target: LoadTarget, verify: bool
    ) -> None:
        """Carry out the plan. ``verify`` compares the bytes with the stored digests.

        Work on the tensors that the thread of the load has queued must be done: ``synchronize``.
        """
        is_read = np.zeros(len(target.tensors), np.bool_)
        is_read[plan.target] = True
        todo = int(target.memory.nbytes[is_read].sum())
        into = counted_target(target, todo)
        work = partial(opened.backend.read, opened.storage, plan, into, verify)
        self.read_by(opened.storage, plan.manifest, work)
        synchronize(target.tensors)
        events.current().done = todo + sum(map(len, target.blobs.values()))

    def read_by(
        self, storage: Storage, manifest: Manifest, work: Callable[[], object]
    ) -> None:
        """Call ``work``, which reads into tensors of the caller.

        Raises CheckpointReplaced if ``work`` fails after a save has replaced the checkpoint.
        """

        def read() -> None:
            try:
                work()
            except (CheckpointingException, OSError) as error:
                replaced = _replacement(storage, manifest)
                if replaced is not None:
                    raise replaced from error
                raise

        try:
            self.call(f"reading {storage.called}", read)
        except StorageError as error:
            if self._executor.gave_up is None:
                raise
            raise StorageError(
                f"{error}. The tensors of this load must not be used: when the storage "
                "answers, reads that hang may still write to them. Load into other tensors"
            ) from None

    def rows(
        self,
        opened: Opened,
        wanted: Declarations,
        tensors: Sequence[torch.Tensor | None] = (),
        *,
        verify: bool = True,
        trusted: Sequence[type] = (),
    ) -> list[Any]:
        """Read each wanted row: into ``tensors[i]``, or as an object without such a tensor."""
        into = [*tensors, *[None] * (len(wanted) - len(tensors))]
        target = target_of(wanted, opened.manifest, into)
        synchronize(target.tensors)
        self.read(opened, plan_load(wanted, opened.manifest), target, verify)
        return values_of(opened.storage, wanted, target, trusted)


def _replacement(storage: Storage, manifest: Manifest) -> CheckpointReplaced | None:
    """The exception to raise if reading failed because a save replaced the checkpoint."""
    try:
        if manifest.save_id:
            open_same(storage.called, manifest.save_id)
    except CheckpointReplaced as error:
        return error
    except (CheckpointingException, OSError):
        return None  # the error of the read says more
    return None


def counted_target(target: Target, todo: int) -> Target:
    """The target itself if no observer shows the progress of this stage, which loads ``todo``
    bytes.
    """
    stage = events.current()
    if not stage.counts_bytes:
        return target
    stage.todo = todo
    return CountedTarget(target, stage.advance)


@dataclass(frozen=True, eq=False)
class CountedTarget(Target):
    """Calls ``advance`` with the bytes of each region and blob that the target has received."""

    target: Target
    advance: Callable[[int], None]

    def views(
        self, targets: Sequence[int], sizes: Sequence[int]
    ) -> Sequence[memoryview | None]:
        """See ``Target.views``. Memory that is handed out counts as filled."""
        views = self.target.views(targets, sizes)
        self.advance(sum(len(view) for view in views if view is not None))
        return views

    def open(self, target: int, box: Box) -> NDArray[Any]:
        return self.target.open(target, box)

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        self.target.close(target, box, filled)
        self.advance(filled.nbytes)

    def blob(self, target: int, data: bytes) -> None:
        self.target.blob(target, data)
        self.advance(len(data))


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
