"""The bytes of planned regions: columns of pieces in file order, and groups that one call reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, starmap

import numpy as np

from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Int64, c_strides, cut, extents_within, runs
from megackpt.planning.manifest import DIGEST_BLOCK, Bool, LoadPlan, itemsizes

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
        tensors = plan.manifest.tensors
        itemsize = itemsizes(tensors)[chunks.tensor[plan.chunk[rows]]]
        boxes = plan.boxes.take(rows)
        if (boxes.volume * itemsize > PIECE).any():
            extents = extents_within(boxes.shape, PIECE // itemsize)
            # Powers of two, so that most pieces end where digest blocks do.
            is_cut = extents < boxes.shape
            extents[is_cut] = 1 << np.log2(extents[is_cut]).astype(np.int64)
            origin, boxes = cut(boxes, extents, boxes.offset)
            rows = rows[origin]
            itemsize = itemsize[origin]
        chunk = plan.chunk[rows]
        width = max(boxes.width, chunks.boxes.width)
        boxes = boxes.widened(width)
        holder = chunks.boxes.take(chunk).widened(width)
        length = chunks.length[chunk]
        inside = (boxes.offset >= holder.offset) & (boxes.stop <= holder.stop)
        fits = inside.all(axis=1) & (holder.volume * itemsize == length)
        if not fits.all():
            wrong = int(fits.argmin())
            name = name_of(plan, int(rows[wrong]))
            raise CorruptCheckpoint(
                f"{name} does not fit the {length[wrong]} bytes of its location"
            )

        strides = c_strides(holder.shape) * itemsize[:, None]
        low = ((boxes.offset - holder.offset) * strides).sum(axis=1)
        last = low + ((boxes.shape - 1) * strides).sum(axis=1)
        ndims = np.array([len(entry.meta.shape) for entry in tensors], np.int64)
        pieces = cls(
            row=rows,
            ndim=ndims[chunks.tensor[chunk]],
            offset=boxes.offset,
            shape=boxes.shape,
            file=chunks.file[chunk].astype(np.int64),
            base=chunks.start[chunk],
            length=length,
            low=low,
            high=last + itemsize,
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
        low = mine.low
        high = mine.high
        if checked:
            low = low // DIGEST_BLOCK * DIGEST_BLOCK
            high = np.minimum(-(-high // DIGEST_BLOCK) * DIGEST_BLOCK, mine.length)
            dense = np.ones(len(low), np.bool_)
        else:
            # The bytes of each piece that are consecutive in its chunk, at least.
            run = mine.nbytes // mine.shape.prod(axis=1)
            together = np.ones(len(run), np.bool_)
            for axis in reversed(range(mine.strides.shape[1])):
                extent = mine.shape[:, axis]
                together &= (extent == 1) | (mine.strides[:, axis] == run)
                run = np.where(together, run * extent, run)
            dense = high - low - mine.nbytes <= FAR * (mine.nbytes // run - 1)
        starts = (mine.base + low)[dense]
        stops = (mine.base + high)[dense]
        yield from zip(starts.tolist(), stops.tolist(), strict=True)

    def simple(self, checked: bool) -> Bool:
        """Which pieces are small and without gaps: one call can read them with their neighbours."""
        simple: Bool = (self.high - self.low == self.nbytes) & (self.nbytes <= SMALL)
        if checked:  # only whole blocks can be hashed where they land
            simple &= self.low % DIGEST_BLOCK == 0
            simple &= (self.high % DIGEST_BLOCK == 0) | (self.high == self.length)
        return simple

    def shares(
        self, threads: int, checked: bool
    ) -> Iterator[tuple[Pieces, list[slice]]]:
        """Consecutive pieces of about equal bytes: several shares a thread, so that threads end
        together.

        Each share comes with its groups: the pieces of one file that one call reads. A piece that
        is not simple, or does not follow closely, is its own group.
        """
        if not len(self):
            return
        simple = self.simple(checked)
        before = np.cumsum(self.nbytes) - self.nbytes
        call = before // TOGETHER + np.arange(len(self)) // CALL
        gap = (self.base + self.low)[1:] - (self.base + self.high)[:-1]
        follows = simple[1:] & simple[:-1] & (gap >= 0) & (gap <= SKIP)
        follows &= (self.file[1:] == self.file[:-1]) & (call[1:] == call[:-1])
        starts = np.append(0, np.flatnonzero(~follows) + 1)  # of groups

        size = min(PIECE, max(TOGETHER, int(self.nbytes.sum()) // (4 * threads) + 1))
        share = before[starts] // size
        bounds = np.append(starts, len(self))
        for first, last in pairwise(runs(share).tolist()):
            begin = int(bounds[first])
            groups = (bounds[first : last + 1] - begin).tolist()
            part = self.take(slice(begin, int(bounds[last])))
            yield part, list(starmap(slice, pairwise(groups)))


def name_of(plan: LoadPlan, row: int) -> str:
    """The name of the chunk of a plan's row in errors."""
    manifest = plan.manifest
    number = int(plan.chunk[row])
    chunk = manifest.chunk(number)
    key = manifest.tensors[manifest.chunks.tensor[number]].key
    return f"{key!r} {chunk.box} in {chunk.location.file}"
