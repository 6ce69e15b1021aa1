"""Format to format: a load walked straight into a save, a bounded piece at a time.

The source's manifest is the declaration.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.backends.base import Backend, plan_in_format
from megackpt.checkpoint import Opened, begin, commit, open_checkpoint
from megackpt.planning.box import Box
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import (
    Declaration,
    Declarations,
    Manifest,
    SavePlan,
    ShardId,
    TensorEntry,
    TensorParts,
)
from megackpt.planning.save_plan import SavePolicy, regular_grid
from megackpt.runtime.staging import PIECE, carried_dtype
from megackpt.strategies import StrategyLike, backend_named, resolve


def convert(
    source: str | Path, target: str | Path, to: StrategyLike, *, overwrite: bool = False, verify: bool = True
) -> None:
    """Rewrite a checkpoint of any readable format as a checkpoint of another, in this process.

    The target is committed atomically: it is complete when this returns, and untouched when this raises.
    Tensors travel in pieces of at most 16 MiB (whole cells, where the target is gridded), objects whole.

    Args:
        to: the target's format, as for ``save``.
        overwrite: replace a complete checkpoint at ``target`` (else CheckpointExists).
        verify: check the source's digests on the way.
    """
    opened = open_checkpoint(source)
    _rewrite(opened, opened.manifest.tensors, target, resolve(to).make_backend(), overwrite, verify)


def remove_sharded_tensors(checkpoint_dir: str | Path, key_prefix: str) -> None:
    """Take all tensors and objects whose keys begin with ``key_prefix`` out of a checkpoint.

    What remains is written anew and replaces the checkpoint in one atomic step: readers see the one or the other.
    Call it on one process. The common state stays. Where no key begins so, nothing is written.
    """
    opened = open_checkpoint(checkpoint_dir)
    kept = [e for e in opened.manifest.tensors if e.is_common or not e.key.startswith(key_prefix)]
    if len(kept) == len(opened.manifest.tensors):
        return
    backend = backend_named(opened.backend.name)
    _rewrite(opened, kept, checkpoint_dir, backend, overwrite=True, verify=True)


def _rewrite(
    opened: Opened,
    entries: Sequence[TensorEntry],
    target: str | Path,
    backend: Backend,
    overwrite: bool,
    verify: bool,
) -> None:
    declared = _declared(opened.manifest, entries, backend.gridded)
    (plan,), manifest = plan_in_format(backend, [declared], SavePolicy())
    place = begin(target, save_id=uuid.uuid4().hex, overwrite=overwrite)
    try:
        place.announce(backend.files(1, manifest))
        result = backend.write(place.storage, plan, _Reread(opened, plan, verify))
        commit(place, backend, manifest.located([result]))
    except BaseException:
        place.abort()
        raise


def _declared(manifest: Manifest, entries: Sequence[TensorEntry], gridded: bool) -> Declarations:
    """The source's chunks as one rank's declarations; where the target needs a grid and they have none, cut anew."""
    boxes: dict[str, list[Box]] = {}
    for i, number in enumerate(manifest.chunks.tensor.tolist()):
        key, meta = manifest.tensors[number]
        boxes.setdefault(key, []).append(manifest.chunks.boxes.row(i, len(meta.shape)))
    rows: list[Declaration] = []
    for entry in entries:
        held = boxes[entry.key]
        if gridded and regular_grid(entry.meta.shape, held) is None:
            held = list(_cells(entry.meta.shape, PIECE // max(entry.meta.itemsize, 1)))
        rows += [_declaration(entry, box) for box in held]
    return Declarations.of(rows)


def _declaration(entry: TensorEntry, box: Box) -> Declaration:
    nbytes = box.volume * entry.meta.itemsize
    return Declaration(ShardId(entry.key, box), entry.meta, 0, False, nbytes, 0)


def _cells(shape: tuple[int, ...], elements: int) -> Iterator[Box]:
    """A regular grid of boxes, each of at most so many elements, over a tensor of this shape."""
    cell = list(shape)
    for axis in range(len(cell)):
        inner = math.prod(cell[axis + 1 :])
        cell[axis] = max(1, min(cell[axis], elements // max(inner, 1)))
    counts = [-(-n // c) if n else 0 for n, c in zip(shape, cell, strict=True)]
    for number in np.ndindex(*counts):
        offset = tuple(n * c for n, c in zip(number, cell, strict=True))
        yield Box(offset, tuple(min(c, n - o) for c, n, o in zip(cell, shape, offset, strict=True)))


@dataclass(frozen=True, eq=False)
class _Piece:
    """The Target of one region (or one object) on its way through."""

    array: NDArray[Any]
    holder: Box
    blobs: list[bytes] = field(default_factory=list)

    def open(self, target: int, box: Box) -> NDArray[Any]:  # noqa: ARG002 - there is one target only
        inside: tuple[Any, ...] = box.relative_to(self.holder).slices()
        return self.array[(*inside, ...)]  # with "...", a view even where there are no dimensions

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        """Nothing to do: the array is the place itself."""

    def blob(self, target: int, data: bytes) -> None:  # noqa: ARG002 - there is one target only
        self.blobs.append(data)


class _Reread:
    """The Source of a conversion: rows of the target's plan, fetched from the source checkpoint when asked for."""

    def __init__(self, opened: Opened, plan: SavePlan, verify: bool) -> None:
        self.opened = opened
        self.plan = plan
        self.verify = verify
        self.numbers = opened.manifest.numbers()
        self.parts = TensorParts(opened.manifest)

    def blocks(self, row: int) -> Iterator[memoryview]:
        item = self.plan.row(row)
        part = self.parts.part(self.numbers[item.shard.key])
        if item.meta.is_object:
            yield memoryview(self._fetch(part, item.shard.box, np.empty(0)).blobs[0])
            return
        step = PIECE // item.meta.itemsize
        volume = item.shard.box.volume
        buffer = np.empty(min(step, volume), carried_dtype(item.meta.itemsize))
        for start in range(0, volume, step):
            filled = 0
            for box in item.shard.box.runs(start, min(start + step, volume)):
                self._fetch(part, box, buffer[filled : filled + box.volume].reshape(box.shape))
                filled += box.volume
            yield buffer[:filled].view(np.uint8).data

    def array(self, row: int) -> NDArray[Any]:
        item = self.plan.row(row)
        array = np.empty(item.shard.box.shape, carried_dtype(item.meta.itemsize))
        return self._fetch(self.parts.part(self.numbers[item.shard.key]), item.shard.box, array).array

    def _fetch(self, part: Manifest, box: Box, array: NDArray[Any]) -> _Piece:
        """One region of one tensor, into ``array``. ``part`` is the tensor's own manifest."""
        piece = _Piece(array, box)
        wanted = Declarations.of([_declaration(part.tensors[0], box)])
        self.opened.backend.read(self.opened.storage, plan_load(wanted, part), piece, self.verify)
        return piece
