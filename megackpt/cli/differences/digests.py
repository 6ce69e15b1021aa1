"""What must be read to tell whether two tensors are the same: nothing where digests say it, else which boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megackpt.planning.box import Box, Int64, runs
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    Bool,
    Declaration,
    Declarations,
    Manifest,
    ShardId,
    TensorMeta,
    TensorParts,
)


class Pair(NamedTuple):
    """One key that both sides have, and its number and meta on each."""

    key: str
    a: int
    b: int
    meta_a: TensorMeta
    meta_b: TensorMeta


def boxes_to_read(
    a: Manifest, b: Manifest, pairs: Sequence[Pair], piece: int
) -> list[list[Box] | None]:
    """For each pair (of one shape) the boxes in which it may differ, of at most ``piece`` bytes; None: it is the same.

    Raises CorruptCheckpoint where the chunks of A do not tile a tensor that must be read.
    """
    same = np.zeros(len(pairs), np.bool_)
    wrong: dict[int, list[tuple[int, Int64]]] = {}
    alike = [i for i, pair in enumerate(pairs) if pair.meta_a == pair.meta_b]
    if len(a.chunks.digests) and len(b.chunks.digests):
        numbers = np.array(alike, np.int64)
        aligned = _Aligned(a, b, [pairs[i] for i in alike])
        same[numbers[aligned.same()]] = True
        for pair, row, blocks in aligned.wrong():
            wrong.setdefault(alike[pair], []).append((row, blocks))
    parts = TensorParts(a)
    return [
        None if same[i] else list(_boxes(a, parts, pair, wrong.get(i), piece))
        for i, pair in enumerate(pairs)
    ]


class _Aligned:
    """The chunks of both sides row by row, of all pairs that are cut alike."""

    def __init__(self, a: Manifest, b: Manifest, pairs: Sequence[Pair]) -> None:
        self._a, self._b = a, b
        rows_a, owner_a = _sorted(a, [pair.a for pair in pairs])
        rows_b, owner_b = _sorted(b, [pair.b for pair in pairs])
        counts = (
            np.bincount(owner_a, minlength=len(pairs)),
            np.bincount(owner_b, minlength=len(pairs)),
        )
        self.cut_alike = counts[0] == counts[1]
        self.owner = owner_a[self.cut_alike[owner_a]]
        self.rows = rows_a[self.cut_alike[owner_a]]
        self._rows_b = rows_b[self.cut_alike[owner_b]]
        width = max(a.chunks.boxes.width, b.chunks.boxes.width)
        mine = a.chunks.boxes.take(self.rows).widened(width)
        yours = b.chunks.boxes.take(self._rows_b).widened(width)
        unlike = (mine.offset != yours.offset).any(axis=1) | (
            mine.shape != yours.shape
        ).any(axis=1)
        unlike |= a.chunks.length[self.rows] != b.chunks.length[self._rows_b]
        self.cut_alike[self.owner[unlike]] = False
        kept = self.cut_alike[self.owner]
        self.owner, self.rows, self._rows_b = (
            self.owner[kept],
            self.rows[kept],
            self._rows_b[kept],
        )
        self._place, self._block = self._unequal_blocks()

    def _unequal_blocks(self) -> tuple[Int64, Int64]:
        """(place in ``rows``, number of the block in its chunk) of every block whose digests differ."""
        bounds_a, bounds_b = self._a.chunks.block_bounds, self._b.chunks.block_bounds
        mine = self._a.chunks.digests[self._a.chunks.blocks(self.rows, bounds_a)]
        yours = self._b.chunks.digests[self._b.chunks.blocks(self._rows_b, bounds_b)]
        counts = np.diff(bounds_a)[self.rows]
        place = np.repeat(np.arange(len(counts)), counts)
        block = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
        unequal = (mine.view(np.uint64) != yours.view(np.uint64)).any(axis=1)
        return place[unequal], block[unequal]

    def same(self) -> Bool:
        """For each pair: cut alike, and all digests equal."""
        found: Bool = self.cut_alike.copy()
        found[self.owner[self._place]] = False
        return found

    def wrong(self) -> Iterator[tuple[int, int, Int64]]:
        """(pair, row of A's chunks, its unequal blocks) for every chunk that has any."""
        for low, high in pairwise(runs(self._place).tolist()):
            place = self._place[low]
            yield int(self.owner[place]), int(self.rows[place]), self._block[low:high]


def _sorted(manifest: Manifest, numbers: Sequence[int]) -> tuple[Int64, Int64]:
    """The chunks of these tensors, in an order that does not depend on who wrote them; and whose each is."""
    table = np.full(len(manifest.tensors), -1, np.int64)
    table[numbers] = np.arange(len(numbers))
    owner = table[manifest.chunks.tensor]
    rows = np.flatnonzero(owner >= 0)
    boxes = manifest.chunks.boxes.take(rows)
    order = np.lexsort([*boxes.shape.T[::-1], *boxes.offset.T[::-1], owner[rows]])
    return rows[order], owner[rows][order]


def _boxes(
    a: Manifest,
    parts: TensorParts,
    pair: Pair,
    wrong: list[tuple[int, Int64]] | None,
    piece: int,
) -> Iterator[Box]:
    chunks, ndim = a.chunks, len(pair.meta_a.shape)
    elements = max(1, piece // max(pair.meta_a.itemsize, pair.meta_b.itemsize, 1))
    if wrong is None:
        rows = parts.rows(pair.a)
        _check_whole(parts.part(pair.a), pair)
        for row in rows.tolist():
            yield from _pieces(chunks.boxes.row(row, ndim), 0, None, elements)
        return
    for row, blocks in wrong:
        box, size = chunks.boxes.row(row, ndim), pair.meta_a.itemsize
        if not size or int(chunks.length[row]) != box.volume * size:
            yield from _pieces(
                box, 0, None, elements
            )  # blocks of something else than its raw bytes
            continue
        step = DIGEST_BLOCK // size
        for run in np.split(blocks, np.flatnonzero(np.diff(blocks) > 1) + 1):
            yield from _pieces(
                box, int(run[0]) * step, (int(run[-1]) + 1) * step, elements
            )


def _pieces(box: Box, start: int, stop: int | None, elements: int) -> Iterator[Box]:
    """Elements [start, stop) of a box, in C order, as boxes of at most so many elements."""
    end = box.volume if stop is None else min(stop, box.volume)
    for low in range(start, end, elements):
        yield from box.runs(low, min(low + elements, end))


def _check_whole(part: Manifest, pair: Pair) -> None:
    if pair.meta_a.is_object or int(part.chunks.boxes.volume.sum()) == math.prod(
        pair.meta_a.shape
    ):
        return
    shard = ShardId(pair.key, Box.whole(pair.meta_a.shape))
    plan_load(
        Declarations.of([Declaration(shard, pair.meta_a, 0, False, 0, 0)]), part
    )  # tells what is wrong
