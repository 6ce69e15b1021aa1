"""The write pass: which rows go into which file, and each file from front to back, digests on the way."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megackpt.backends.archives import ALIGNMENT
from megackpt.backends.base import Source
from megackpt.backends.torch_dist.record_frame import frame
from megackpt.errors import BackendError
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    DIGEST_SIZE,
    ITEMSIZE,
    SavePlan,
    TensorEntry,
    WriteResult,
)
from megackpt.storage import FileWriter, Storage, digest

COMMON_FILE = "common.pt"
BATCH = 8 << 20
"""Bytes of small records that are gathered into one write."""
VIEWS = 1024
"""Pieces of memory that one write takes."""


@dataclass(frozen=True)
class FilePart:
    """One file of one rank, and the rows of its plan that go there, in order."""

    name: str
    rows: list[int]


class Landed(NamedTuple):
    """Where one row landed: its raw bytes, and the digests of their blocks."""

    start: int
    length: int
    digests: bytes


def file_name(rank: int, number: int, hint: str = "") -> str:
    """Megatron's name for the ``number``-th file of a rank, optionally of a group of keys."""
    return f"{hint}__{rank}_{number}.distcp"


def distribute(plan: SavePlan, files: int, hint: str | None) -> list[FilePart]:
    """The rows of a plan over files: objects in turn, then tensors, largest first, into the least full file.

    The common state has a file of its own; keys that begin with ``hint`` have files of their own, too.
    """
    common = [
        i
        for i, number in enumerate(plan.tensor.tolist())
        if plan.tensors[number].is_common
    ]
    parts = [FilePart(COMMON_FILE, common)] if common else []
    named = _matching(plan.tensors, plan.tensor.tolist(), hint)
    for group, prefix in (
        ((False, ""),) if hint is None else ((False, ""), (True, hint))
    ):
        rows = [
            i for i, match in enumerate(named) if match is group and i not in common
        ]
        bins = _bins(plan, rows, files)
        parts += [
            FilePart(file_name(plan.rank, n, prefix), mine)
            for n, mine in enumerate(bins)
            if mine
        ]
    return parts


def _matching(
    tensors: Sequence[TensorEntry], numbers: list[int], hint: str | None
) -> list[bool]:
    table = [hint is not None and entry.key.startswith(hint) for entry in tensors]
    return [table[number] for number in numbers]


def _bins(plan: SavePlan, rows: list[int], files: int) -> list[list[int]]:
    is_object = np.array([entry.meta.is_object for entry in plan.tensors], np.bool_)[
        plan.tensor
    ]
    itemsize = np.array([entry.meta.itemsize for entry in plan.tensors], np.int64)[
        plan.tensor
    ]
    size = (
        np.where(is_object, -1, plan.boxes.volume * itemsize).tolist()
        if len(plan)
        else []
    )
    return [
        [rows[i] for i in mine] for mine in spread([size[row] for row in rows], files)
    ]


def spread(sizes: Sequence[int], files: int) -> list[list[int]]:
    """Rows by their bytes (-1: an object, of which nobody knows) over files: objects in turn, then tensors, largest
    first, each into the least full file.
    """
    bins: list[list[int]] = [[] for _ in range(files)]
    for turn, row in enumerate(row for row, size in enumerate(sizes) if size < 0):
        bins[turn % files].append(row)
    load = [(0, n) for n in range(files)]
    for row in sorted(
        (row for row, size in enumerate(sizes) if size >= 0),
        key=lambda row: -sizes[row],
    ):
        filled, n = load[0]
        bins[n].append(row)
        heapq.heapreplace(load, (filled + sizes[row], n))
    return bins


def write_files(
    root: Storage, plan: SavePlan, data: Source, parts: list[FilePart]
) -> WriteResult:
    """Write all files, one thread each, durably."""
    landed: dict[int, Landed] = {}
    with ThreadPoolExecutor(max(len(parts), 1), "megackpt-write") as pool:
        jobs = [pool.submit(_write_file, root, part, plan, data) for part in parts]
    for part, job in zip(parts, jobs, strict=True):
        landed.update(zip(part.rows, job.result(), strict=True))
    file = np.zeros(len(plan), np.int32)
    for number, part in enumerate(parts):
        file[part.rows] = number
    places = [landed[i] for i in range(len(plan))]
    return WriteResult.of_rows(
        plan.boxes,
        [part.name for part in parts],
        file,
        np.array([p.start for p in places], np.int64),
        np.array([p.length for p in places], np.int64),
        np.frombuffer(b"".join(p.digests for p in places), np.uint8).reshape(
            -1, DIGEST_SIZE
        ),
    )


def _write_file(
    root: Storage, part: FilePart, plan: SavePlan, data: Source
) -> list[Landed]:
    metas = [plan.tensors[number].meta for number in plan.tensor[part.rows].tolist()]
    extents = plan.boxes.shape[part.rows].tolist()
    landed: list[Landed] = []
    with root.create(part.name) as writer:
        itemsize = np.array([meta.itemsize for meta in metas], np.int64)
        writer.expect(int((plan.boxes.volume[part.rows] * itemsize).sum()))
        records = Records(writer)
        for row, meta, extent in zip(part.rows, metas, extents, strict=True):
            if meta.is_object:
                landed.append(records.blob(data.blocks(row)))
                continue
            shape = tuple(extent[: len(meta.shape)])
            place = records.tensor(meta.dtype, shape, data.blocks(row))
            if place.length != math.prod(shape) * meta.itemsize:
                shard = plan.row(row).shard
                raise BackendError(
                    f"{shard} should have {math.prod(shape) * meta.itemsize} bytes, but {place.length} came from the "
                    "model"
                )
            landed.append(place)
        records.end()
    return landed


class Records:
    """Records on their way into one file, one after the other; ``end`` ends the last one."""

    def __init__(self, writer: FileWriter) -> None:
        self._batch = _Batch(writer)
        self._tail = (
            b""  # of the record before: written in one piece with the next one's head
        )

    def blob(self, pieces: Iterator[memoryview]) -> Landed:
        """Bytes as they are."""
        self._end_record()
        return _write_payload(self._batch, pieces, -1)

    def tensor(
        self, dtype: str, shape: tuple[int, ...], pieces: Iterator[memoryview]
    ) -> Landed:
        """The archive of a C-order tensor: where its elements landed, which are these pieces."""
        padding = bytes(-(self._batch.position + len(self._tail)) % ALIGNMENT)
        head, ending = frame(dtype, shape)
        self._batch.add(memoryview(self._tail + padding + head))
        self._tail = ending
        return _write_payload(self._batch, pieces, math.prod(shape) * ITEMSIZE[dtype])

    def end(self) -> None:
        self._end_record()
        self._batch.flush()

    def _end_record(self) -> None:
        self._batch.add(memoryview(self._tail))
        self._tail = b""


class _Batch:
    """Bytes on their way into a file. Memory that is handed over must stay unchanged until the next flush."""

    def __init__(self, writer: FileWriter) -> None:
        self._writer = writer
        self._waiting: list[memoryview] = []
        self._size = 0
        self.position = writer.position

    def add(self, data: memoryview) -> None:
        self._waiting.append(data)
        self._size += len(data)
        self.position += len(data)
        if self._size >= BATCH or len(self._waiting) == VIEWS:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            self._writer.write(self._waiting)
            self._waiting, self._size = [], 0


def _write_payload(batch: _Batch, pieces: Iterator[memoryview], size: int) -> Landed:
    """Hash and write in one go. ``size``: bytes to come, or -1 where nobody knows."""
    start, length = batch.position, 0
    digests: list[bytes] = []
    for piece in pieces:
        for first in range(0, len(piece), DIGEST_BLOCK):
            block = piece[first : first + DIGEST_BLOCK]
            digests.append(digest(block))
            batch.add(block)
            if len(block) == DIGEST_BLOCK:
                batch.flush()  # while the block that was hashed is still in the cache
        length += len(piece)
        if length == size:
            break
        batch.flush()  # before the memory of this piece is used for the next one
    return Landed(start, length, b"".join(digests))
