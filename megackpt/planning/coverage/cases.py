"""A wrong tensor looked at closely: who declared which box of it, those nearest to what is wrong first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from megackpt.errors import join_truncated
from megackpt.planning.box import Box, Boxes, Groups, Int64
from megackpt.planning.coverage.tiling import miscounted
from megackpt.planning.manifest import Declarations, TensorEntry, TensorMeta

REGIONS = 4  # regions of one kind told for a tensor
LOOKED_AT = 4096  # boxes of a tensor among which causes are looked for


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """All that was declared about one tensor, and what is wrong with it."""

    entry: TensorEntry
    declared: Declarations  # the rows of this tensor only
    shards: Groups
    numbers: (
        Int64  # of the shards that are looked at, those nearest to what is wrong first
    )
    boxes: list[Box]  # theirs
    mains: Int64  # main replicas of each of them
    outside: list[int]  # boxes that leave the tensor
    holes: list[Box]
    overlaps: list[tuple[Box, int]]

    @property
    def orphans(self) -> list[Box]:
        """Boxes held by replicas, none of which is the main one."""
        return [
            box for box, mains in zip(self.boxes, self.mains, strict=True) if not mains
        ]

    @property
    def doubled(self) -> list[int]:
        """Boxes with several main replicas."""
        return [
            i for i, box in enumerate(self.boxes) if self.mains[i] > 1 and box.volume
        ]

    def rows(self, i: int) -> Int64:
        """Who declares a box: the main replicas where there are any."""
        rows = self.shards.rows(int(self.numbers[i]))
        return rows[self.declared.main[rows]] if self.mains[i] else rows

    def ranks(self, i: int) -> list[int]:
        return [int(rank) for rank in self.declared.rank[self.rows(i)]]


class Way(NamedTuple):
    """One of several ways in which a key is declared, and by which ranks."""

    meta: TensorMeta
    ranks: list[int]

    def size(self) -> int:
        return len(self.ranks)


def ways(declared: Declarations, numbers: Sequence[int]) -> list[Way]:
    """The ways in which a key that stands several times in the table is declared."""
    found = []
    for number in sorted(numbers):
        ranks = np.unique(declared.rank[declared.tensor == number]).tolist()
        if ranks:
            found.append(Way(declared.tensors[number].meta, ranks))
    return found


def case_of(declared: Declarations, number: int) -> Case:
    rows = np.flatnonzero(declared.tensor == number)
    entry = declared.tensors[number]
    mine = declared.take(rows)
    shards = mine.shards()
    ndim = len(entry.meta.shape)
    boxes = mine.boxes.take(shards.first)
    shape = np.array([*entry.meta.shape, *(1,) * (boxes.width - ndim)], np.int64)
    wide = boxes.widened(ndim)
    leaves = np.asarray(
        ((wide.offset < 0) | (wide.shape < 0) | (wide.stop > shape)).any(axis=1)
    )
    found = list(
        islice(
            miscounted(mine.boxes.take(np.flatnonzero(mine.main)), entry.meta.shape),
            16 * REGIONS,
        )
    )
    mains = np.add.reduceat(
        mine.main[shards.order].astype(np.int64), shards.bounds[:-1]
    )
    far = _distances(wide, [box for box, _ in found], ndim)
    far[leaves] = -1
    order = np.lexsort([*wide.offset.T[::-1], mains == 0, far])[:LOOKED_AT]
    # Boxes with too many dimensions are told with all of them.
    extra = ndim + _surplus(boxes.offset[:, ndim:], boxes.shape[:, ndim:])
    return Case(
        entry,
        mine,
        shards,
        order,
        [wide.row(i, int(extra[i])) for i in order.tolist()],
        mains[order],
        np.flatnonzero(leaves[order]).tolist(),
        [box for box, count in found if count == 0],
        [(box, count) for box, count in found if count > 1],
    )


def _distances(boxes: Boxes, regions: Sequence[Box], ndim: int) -> Int64:
    """How far each box is from the nearest of the first regions; 0 = it touches one."""
    nearest = np.full(len(boxes), 1 << 62, np.int64)
    for region in regions[: 2 * REGIONS]:
        low, high = np.array(region.offset, np.int64), np.array(region.stop, np.int64)
        gaps = np.maximum(low - boxes.stop[:, :ndim], boxes.offset[:, :ndim] - high)
        np.minimum(nearest, np.maximum(gaps + 1, 0).sum(axis=1), out=nearest)
    return nearest


def _surplus(offset: Int64, shape: Int64) -> Int64:
    """How many of the axes beyond a tensor's own each box really uses."""
    used = (offset != 0) | (shape != 1)
    if not used.shape[1]:
        return np.zeros(len(used), np.int64)
    return np.where(
        used.any(axis=1), used.shape[1] - used[:, ::-1].argmax(axis=1), 0
    ).astype(np.int64)


def named(ranks: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 0-7, 16`` for many."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    if len(spans) == 1 and spans[0][0] == spans[0][1]:
        return f"rank {spans[0][0]}"
    told = [
        str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}"
        for a, b in spans
    ]
    return f"ranks {join_truncated(told, 6, ', ')}"
