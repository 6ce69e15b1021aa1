"""Megatron-Core up to 0.15: optimizer state in flattened runs, mapped to boxes of the true tensors.

A tensor of shape (X, Y), cut into cells of (x, y), is listed with the size (X/x, Y/y, x*y): a chunk
at (i, j, start) holds elements [start, start + n) of cell (i, j) in C order. Its record holds the
elements of several boxes of the true tensor, box by box. Source: Metadata's attribute
``mcore_data`` in files of 0.12.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from megackpt.backends.torch_dist.metadata_pickle import Record
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Box
from megackpt.planning.manifest import Chunks

_SHAPE = "nd_reformulated_orig_global_shape"


def true_shapes(metadata: Record) -> dict[str, tuple[int, ...]]:
    """Name -> global shape, of the tensors that are kept flattened. Raises CorruptCheckpoint."""
    plans = metadata.field("all_local_plans") or ()
    found: dict[str, tuple[int, ...]] = {}
    for record in (*plans, metadata):
        table = None
        if isinstance(record, Record):
            table = record.field("mcore_data")
        if type(table) is not dict:
            continue
        for name, about in table.items():
            if type(about) is not dict or about.get(_SHAPE) is None:
                continue
            shape = about[_SHAPE]
            sane = isinstance(shape, tuple)
            for extent in shape if sane else ():
                sane = sane and type(extent) is int and 0 < extent < 1 << 63
            if not sane:
                raise CorruptCheckpoint(
                    f"{name!r} is flattened, of a shape that no tensor has: {shape}"
                )
            if found.setdefault(name, tuple(shape)) != tuple(shape):
                raise CorruptCheckpoint(
                    f"{name!r} is flattened, of shapes {found[name]} and {shape}"
                )
    return found


def true_boxes(
    name: str, listed: tuple[int, ...], shape: tuple[int, ...], run: Box
) -> Iterator[Box]:
    """The boxes of the true tensor whose elements, box by box, are the elements of a chunk.

    ``listed`` is the size in ``.metadata``. Raises CorruptCheckpoint where the shape cannot be cut
    so.
    """
    *counts, volume = listed or (0,)
    fits = len(counts) == len(shape)
    cell = []
    for extent, count in zip(shape, counts, strict=False):
        fits = fits and count > 0 and extent % count == 0
        cell.append(extent // max(count, 1))
    if not fits or math.prod(cell) != volume:
        raise CorruptCheckpoint(
            f"{name!r} of shape {shape} cannot be flattened to {listed}"
        )
    *index, start = run.offset
    *ones, count = run.shape
    if math.prod(ones) != 1:
        raise CorruptCheckpoint(
            f"the chunk {run} of the flattened {name!r} is in no single cell"
        )
    offset = tuple(i * n for i, n in zip(index, cell, strict=True))
    return Box(offset, tuple(cell)).runs(start, start + count)


class Part(NamedTuple):
    """Which elements of its record a chunk is: ``volume`` after ``before``, of ``held`` in all."""

    before: int
    volume: int
    held: int

    def may_be_in(self, record: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether a record of shape ``record`` can hold the chunk, which has ``shape``.

        A record of one chunk may have the chunk's shape. Any record may be a run.
        """
        if self.volume == self.held and record == shape:
            return True
        ones = (1,) * (len(record) - 1)
        return record == (*ones, self.held)


class Parts:
    """The Part of each chunk.

    Chunks of one tensor that begin at the same byte share a record, in order of offsets.
    """

    def __init__(self, chunks: Chunks) -> None:
        offsets = chunks.boxes.offset.T[::-1]
        order = np.lexsort((*offsets, chunks.start, chunks.file, chunks.tensor))
        # The first chunk of each record.
        fresh = np.zeros(len(order), np.bool_)
        fresh[:1] = True
        for column in (chunks.tensor, chunks.file, chunks.start):
            fresh[1:] |= np.diff(column[order]) != 0
        record = np.cumsum(fresh) - 1
        self._volume = chunks.boxes.volume
        passed = np.append(0, np.cumsum(self._volume[order]))
        first = np.flatnonzero(np.append(fresh, True))
        self._before, self._held = np.empty((2, len(order)), np.int64)
        self._before[order] = passed[:-1] - passed[first[record]]
        self._held[order] = np.diff(passed[first])[record]

    def __getitem__(self, chunk: int) -> Part:
        before, volume = int(self._before[chunk]), int(self._volume[chunk])
        return Part(before, volume, int(self._held[chunk]))
