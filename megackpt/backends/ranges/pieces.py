"""The bytes of planned regions: columns of pieces in file order, and groups that one call reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, starmap

import numpy as np

from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Box, Boxes, Int64
from megackpt.planning.manifest import DIGEST_BLOCK, Bool, LoadPlan

PIECE = 32 << 20
"""Larger regions are cut: the target provides memory for one piece at a time, and threads divide
the work."""
SMALL = 256 << 10
"""Pieces up to this size are read together with their neighbours."""
TOGETHER = 1 << 20
"""Bytes that one call reads for small pieces: few enough to be in the cache when they are
hashed."""
CALL = 512
"""Pieces of one call: with the gaps between them, the limit of buffers of a call."""
SKIP = 4 << 10
"""Unwanted bytes between small pieces that are read and dropped to save another call."""

FAR = 4 << 20
"""With more unwanted bytes between the runs of one region, a request for each run is faster than
one for all."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """Columns: regions, each with its place in its chunk. In file order, without empty ones."""

    row: Int64  # of the plan
    ndim: Int64
    offset: Int64  # (n, width)
    shape: Int64  # (n, width)
    file: Int64
    base: Int64  # where the chunk starts in the file
    length: Int64  # of the chunk
    low: Int64  # first byte of the region, relative to the chunk
    high: Int64  # one past its last byte
    nbytes: Int64
    strides: Int64  # (n, width), of the chunk, in bytes

    @classmethod
    def of(cls, plan: LoadPlan, rows: Int64) -> Pieces:
        chunks = plan.manifest.chunks
        metas = [entry.meta for entry in plan.manifest.tensors]
        itemsizes = np.array([meta.itemsize for meta in metas], np.int64)
        itemsize = itemsizes[chunks.tensor[plan.chunk[rows]]]
        boxes, origin = _cut(plan.boxes.take(rows), itemsize)
        rows, itemsize = rows[origin], itemsize[origin]
        chunk = plan.chunk[rows]
        width = max(boxes.width, chunks.boxes.width)
        boxes, holder = boxes.widened(width), chunks.boxes.take(chunk).widened(width)
        _check_places(plan, rows, boxes, holder, chunks.length[chunk], itemsize)
        strides = np.ones((len(rows), width), np.int64)
        strides[:, :-1] = np.cumprod(holder.shape[:, :0:-1], axis=1)[:, ::-1]
        strides *= itemsize[:, None]
        low = ((boxes.offset - holder.offset) * strides).sum(axis=1)
        pieces = cls(
            row=rows,
            ndim=np.array([len(m.shape) for m in metas], np.int64)[
                chunks.tensor[chunk]
            ],
            offset=boxes.offset,
            shape=boxes.shape,
            file=chunks.file[chunk].astype(np.int64),
            base=chunks.start[chunk],
            length=chunks.length[chunk],
            low=low,
            high=low + ((boxes.shape - 1) * strides).sum(axis=1) + itemsize,
            nbytes=boxes.volume * itemsize,
            strides=strides,
        )
        order = np.lexsort((pieces.base + low, pieces.file))
        return pieces.take(order[pieces.nbytes[order] > 0])

    def __len__(self) -> int:
        return len(self.row)

    def take(self, rows: Int64 | slice) -> Pieces:
        return Pieces(*(column[rows] for column in vars(self).values()))

    def spans(self, rows: slice, checked: bool) -> Iterator[tuple[int, int]]:
        """Starts and stops in the file of the bytes that will be read for these pieces, lazily.

        Pieces whose runs are far apart are left out.
        """
        mine = self.take(rows)
        low, high = mine.low, mine.high
        if checked:
            low = low // DIGEST_BLOCK * DIGEST_BLOCK
            high = np.minimum(-(-high // DIGEST_BLOCK) * DIGEST_BLOCK, mine.length)
            dense = np.ones(len(low), np.bool_)
        else:
            dense = high - low - mine.nbytes <= FAR * (mine.nbytes // mine._run() - 1)
        yield from zip(
            (mine.base + low)[dense].tolist(),
            (mine.base + high)[dense].tolist(),
            strict=True,
        )

    def _run(self) -> Int64:
        """Bytes of each piece that are consecutive in its chunk, at least."""
        run: Int64 = self.nbytes // self.shape.prod(axis=1)
        together = np.ones(len(run), np.bool_)
        for axis in reversed(range(self.strides.shape[1])):
            extent = self.shape[:, axis]
            together &= (extent == 1) | (self.strides[:, axis] == run)
            run = np.where(together, run * extent, run)
        return run

    def shares(
        self, threads: int, checked: bool
    ) -> Iterator[tuple[Pieces, list[slice]]]:
        """Consecutive pieces of about equal bytes: several shares a thread, so that threads end
        together.

        Each share comes with its groups: the pieces of one file that one call reads.
        """
        if not len(self):
            return
        before = np.cumsum(self.nbytes) - self.nbytes
        first = np.flatnonzero(self._begins_group(checked, before))
        size = min(PIECE, max(TOGETHER, int(self.nbytes.sum()) // (4 * threads) + 1))
        new = np.flatnonzero(np.diff(before[first] // size, prepend=-1))
        for part in np.split(first, new[1:]):
            begin = int(part[0])
            after = first[np.searchsorted(first, part[-1], "right") :]
            end = int(after[0]) if len(after) else len(self)
            bounds = [*(part - begin).tolist(), end - begin]
            yield self.take(slice(begin, end)), list(starmap(slice, pairwise(bounds)))

    def _begins_group(self, checked: bool, before: Int64) -> Bool:
        """Where a group begins.

        A piece that is large, has gaps, or does not follow closely is its own group.
        """
        simple: Bool = (self.high - self.low == self.nbytes) & (self.nbytes <= SMALL)
        if checked:  # only whole blocks can be hashed where they land
            ends = (self.high % DIGEST_BLOCK == 0) | (self.high == self.length)
            simple = simple & (self.low % DIGEST_BLOCK == 0) & ends
        begin, end = self.base + self.low, self.base + self.high
        gap = begin[1:] - end[:-1]
        filled = before // TOGETHER + np.arange(len(before)) // CALL
        follows = simple[1:] & simple[:-1] & (gap >= 0) & (gap <= SKIP)
        follows &= (self.file[1:] == self.file[:-1]) & (filled[1:] == filled[:-1])
        return np.concatenate([np.ones(1, np.bool_), ~follows])


def _cut(boxes: Boxes, itemsize: Int64) -> tuple[Boxes, Int64]:
    """The same regions in boxes of at most PIECE bytes, and the row that each comes from."""
    large = np.flatnonzero(boxes.volume * itemsize > PIECE)
    if not len(large):
        return boxes, np.arange(len(boxes), dtype=np.int64)
    small = np.flatnonzero(boxes.volume * itemsize <= PIECE)
    origin = [small]
    parts = [boxes.take(small)]
    for row in large.tolist():
        cut = list(_halves(boxes.row(row, boxes.width), PIECE // int(itemsize[row])))
        parts.append(Boxes.of(cut, boxes.width))
        origin.append(np.full(len(cut), row, np.int64))
    return Boxes.concat(parts), np.concatenate(origin).astype(np.int64)


def _halves(box: Box, limit: int) -> Iterator[Box]:
    """Boxes of at most ``limit`` elements, cut along the outermost axis possible, at powers of two
    if possible.
    """
    if box.volume <= limit:
        yield box
        return
    axis = next(i for i, extent in enumerate(box.shape) if extent > 1)
    step = max(1, limit // math.prod(box.shape[axis + 1 :]))
    step = min(1 << (step.bit_length() - 1), box.shape[axis])
    for start in range(0, box.shape[axis], step):
        offset, shape = list(box.offset), list(box.shape)
        offset[axis] += start
        shape[axis] = min(step, box.shape[axis] - start)
        yield from _halves(Box(tuple(offset), tuple(shape)), limit)


def _check_places(
    plan: LoadPlan,
    rows: Int64,
    boxes: Boxes,
    holder: Boxes,
    length: Int64,
    itemsize: Int64,
) -> None:
    inside = (boxes.offset >= holder.offset) & (boxes.stop <= holder.stop)
    wrong = np.flatnonzero(~inside.all(axis=1) | (holder.volume * itemsize != length))
    if len(wrong):
        name = name_of(plan, int(rows[wrong[0]]))
        raise CorruptCheckpoint(
            f"{name} does not fit the {length[wrong[0]]} bytes of its location"
        )


def name_of(plan: LoadPlan, row: int) -> str:
    """The name of the chunk of a plan's row in errors."""
    manifest, number = plan.manifest, int(plan.chunk[row])
    chunk = manifest.chunk(number)
    key = manifest.tensors[manifest.chunks.tensor[number]].key
    return f"{key!r} {chunk.box} in {chunk.location.file}"
