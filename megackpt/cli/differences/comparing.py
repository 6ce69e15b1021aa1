"""Comparing two open checkpoints: by digests, and what these leave open by reading, a bounded batch at a time.

Equal means equal bit for bit, unless a tolerance is given.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megackpt import tree
from megackpt.checkpoint import Opened
from megackpt.checkpoint.regions import Region, Regions
from megackpt.cli.differences.digests import Pair, boxes_to_read
from megackpt.cli.differences.elements import Element, Tally, Tolerance
from megackpt.planning.box import Box
from megackpt.planning.manifest import Manifest, TensorMeta

PIECE = 8 << 20
"""Bytes of one region that is read from each side."""
BATCH = 2 * PIECE
"""Bytes of regions that are read together from each side."""
_MANY = 4096  # regions that are read together, however small


@dataclass(frozen=True)
class TensorDifference:
    """How the values of one tensor differ.

    ``largest`` and ``mean`` are of the absolute differences, in float64 (of whole numbers: exactly); the mean is
    over all elements of the tensor, equal ones counting 0. Elements that are NaN on a side count in neither:
    ``nans`` tells how many of the differing elements are NaN in A, and in B.
    """

    key: str
    total: int  # elements of the tensor
    elements: int  # of these, elements that differ
    first: tuple[Element, ...]
    largest: float
    mean: float
    nans: tuple[int, int]


@dataclass(frozen=True)
class ObjectDifference:
    """How one object (or the common state) differs: (path, value in A, value in B) of each part that does.

    A part that a side does not have is ``...`` there; the path of a whole object is empty.
    """

    key: str
    box: Box
    changes: tuple[tuple[tree.Path, Any, Any], ...]


@dataclass(frozen=True)
class Comparison:
    """All that differs. ``described``: keys whose shapes or dtypes do; if only the dtypes do, values are compared."""

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    described: tuple[tuple[str, TensorMeta, TensorMeta], ...]
    tensors: tuple[TensorDifference, ...]
    objects: tuple[ObjectDifference, ...]
    compared: int  # keys on both sides
    by_digest: int  # of these, known to be the same without being read
    bytes_read: int  # from both sides

    @property
    def same(self) -> bool:
        return not (
            self.only_a or self.only_b or self.described or self.tensors or self.objects
        )


def compare(
    a: Opened,
    b: Opened,
    *,
    select: str = "*",
    tolerance: Tolerance | None = None,
    start: Callable[[int], None] = lambda _total: None,
    advance: Callable[[int], None] = lambda _done: None,
) -> Comparison:
    """Compare the keys that match the glob ``select``; the common state has the key "common_state".

    Holds some BATCH of either side, or the shards of one object. ``start`` is told how many bytes will be read
    (of both sides, as far as is known), ``advance`` each time how many have been.

    Raises CorruptCheckpoint where a side cannot be read.
    """
    mine, yours = _numbers(a.manifest, select), _numbers(b.manifest, select)
    pairs = [
        Pair(
            key,
            mine[key],
            yours[key],
            a.manifest.tensors[mine[key]].meta,
            b.manifest.tensors[yours[key]].meta,
        )
        for key in mine
        if key in yours
    ]
    alike = [
        p
        for p in pairs
        if p.meta_a.shape == p.meta_b.shape and p.meta_a.is_object == p.meta_b.is_object
    ]
    boxes = boxes_to_read(a.manifest, b.manifest, alike, PIECE)
    todo = [
        (pair, found)
        for pair, found in zip(alike, boxes, strict=True)
        if found is not None
    ]
    work = _Work(Regions(a), Regions(b), advance)
    start(sum(_nbytes(a.manifest, b.manifest, pair, found) for pair, found in todo))
    return Comparison(
        tuple(key for key in mine if key not in yours),
        tuple(key for key in yours if key not in mine),
        tuple((p.key, p.meta_a, p.meta_b) for p in pairs if p.meta_a != p.meta_b),
        tuple(work.tensors([t for t in todo if not t[0].meta_a.is_object], tolerance)),
        tuple(
            d for pair, _ in todo if pair.meta_a.is_object for d in work.object(pair)
        ),
        len(pairs),
        len(alike) - len(todo),
        work.bytes_read,
    )


def _numbers(manifest: Manifest, select: str) -> dict[str, int]:
    return {
        e.key: i
        for i, e in enumerate(manifest.tensors)
        if fnmatch.fnmatchcase(e.key, select)
    }


def _nbytes(a: Manifest, b: Manifest, pair: Pair, boxes: Sequence[Box]) -> int:
    """Bytes to be read from both sides."""
    if pair.meta_a.is_object:
        sides = ((a.chunks, pair.a), (b.chunks, pair.b))
        return sum(
            int(chunks.length[chunks.tensor == number].sum())
            for chunks, number in sides
        )
    return sum(box.volume for box in boxes) * (
        pair.meta_a.itemsize + pair.meta_b.itemsize
    )


class _Work:
    """The reading of one comparison."""

    def __init__(self, a: Regions, b: Regions, advance: Callable[[int], None]) -> None:
        self._a, self._b = a, b
        self._advance = advance
        self.bytes_read = 0

    def tensors(
        self, todo: Sequence[tuple[Pair, list[Box]]], tolerance: Tolerance | None
    ) -> Iterator[TensorDifference]:
        tallies = {
            p: Tally(p.meta_a.shape, (p.meta_a.dtype, p.meta_b.dtype), tolerance)
            for p, _ in todo
        }
        for batch in _batches(todo):
            mine = self._a.arrays([(pair.a, box) for pair, box in batch])
            yours = self._b.arrays([(pair.b, box) for pair, box in batch])
            for (pair, box), x, y in zip(batch, mine, yours, strict=True):
                tallies[pair].add(box, x, y)
            self._count(sum(array.nbytes for array in (*mine, *yours)))
        for pair, tally in tallies.items():
            if tally.elements:
                yield TensorDifference(
                    pair.key,
                    math.prod(pair.meta_a.shape),
                    tally.elements,
                    tally.first,
                    tally.largest,
                    tally.mean,
                    tally.nans,
                )

    def object(self, pair: Pair) -> Iterator[ObjectDifference]:
        """The shards of one object, each looked into if its blobs are not the same bytes."""
        mine, yours = _shards(self._a, pair.a), _shards(self._b, pair.b)
        for box in sorted({*mine, *yours}):
            x, y = _blob(self._a, mine.get(box)), _blob(self._b, yours.get(box))
            self._count(len(x or b"") + len(y or b""))
            if x == y:
                continue
            where = [
                f"{side.opened.storage.location}: {pair.key!r} {box}"
                for side in (self._a, self._b)
            ]
            changes = tuple(_changes(x, y, *where))
            if changes:
                yield ObjectDifference(pair.key, box, changes)

    def _count(self, done: int) -> None:
        self.bytes_read += done
        self._advance(done)


def _batches(
    todo: Sequence[tuple[Pair, list[Box]]],
) -> Iterator[list[tuple[Pair, Box]]]:
    batch: list[tuple[Pair, Box]] = []
    held = 0
    for pair, boxes in todo:
        for box in boxes:
            nbytes = box.volume * max(pair.meta_a.itemsize, pair.meta_b.itemsize)
            if batch and (held + nbytes > BATCH or len(batch) == _MANY):
                yield batch
                batch, held = [], 0
            batch.append((pair, box))
            held += nbytes
    if batch:
        yield batch


def _shards(side: Regions, number: int) -> dict[Box, Region]:
    chunks, ndim = (
        side.opened.manifest.chunks,
        len(side.opened.manifest.tensors[number].meta.shape),
    )
    rows = (chunks.tensor == number).nonzero()[0].tolist()
    return {box: (number, box) for box in (chunks.boxes.row(row, ndim) for row in rows)}


def _blob(side: Regions, region: Region | None) -> bytes | None:
    return None if region is None else side.blobs([region])[0]


def _changes(
    a: bytes | None, b: bytes | None, where_a: str, where_b: str
) -> Iterator[tuple[tree.Path, Any, Any]]:
    from megackpt.cli.differences.parts import changes  # brings torch
    from megackpt.serialization.inspection import look

    yield from changes(
        ... if a is None else look(a, where_a), ... if b is None else look(b, where_b)
    )
