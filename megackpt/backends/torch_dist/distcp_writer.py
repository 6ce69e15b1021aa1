"""The write pass: which rows go into which file, and each file from front to back with digests."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megackpt.backends.archives import frame
from megackpt.backends.base import Links, Source
from megackpt.backends.object_files import COMMON_FILE
from megackpt.errors import BackendError
from megackpt.planning.box import Int64, group, runs
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    ITEMSIZE,
    SavePlan,
    WriteResult,
    digest_rows,
    table_of,
)
from megackpt.planning.unchanged import UNCHANGED
from megackpt.serialization.archive import ALIGNMENT
from megackpt.storage import FileWriter, Storage, digest, digest_blocks

BATCH = 1 << 20
"""Bytes of small records that one write gathers. The hashed bytes are still in the cache."""
_TOGETHER = 256
"""Rows whose bytes are looked up together."""
VIEWS = 1024
"""Buffers that one write takes."""
UNCHANGED_BYTES = 256 << 20
"""Bytes of a file that is linked or written as a whole, unless one row has more."""
SMALL = 64 << 10
"""Bytes of a tensor, with which Python's work for it counts more than the copy of its bytes."""


@dataclass(frozen=True)
class FilePart:
    """One file of one rank, and the rows of the rank's plan in the file, in order."""

    name: str
    rows: list[int]
    links: Links | None = None
    """The step before may have a file with exactly these rows."""


class WrittenRecord(NamedTuple):
    """The raw bytes of one row in its file, and the digests of their blocks."""

    start: int
    length: int
    digests: bytes


def file_name(rank: int, number: int, hint: str = "") -> str:
    """Megatron's name for the ``number``-th file of a rank, or of a group of keys of the rank."""
    return f"{hint}__{rank}_{number}.distcp"


def distribute(
    plan: SavePlan, files: int, hint: str | None, without: Collection[int] = ()
) -> list[FilePart]:
    """Distribute the rows of a plan over files: objects in turn, then tensors, largest first.

    The common state has a separate file. So have keys that begin with ``hint``. Rows ``without``
    are left out.
    """
    # The box of an object has one element, and the size of its blob is not known.
    itemsize = np.array([entry.meta.itemsize or -1 for entry in plan.tensors], np.int64)
    sizes = plan.boxes.volume * itemsize[plan.tensor]
    common: list[int] = []
    groups: dict[str, list[int]] = {"": []}
    for row, number in enumerate(plan.tensor.tolist()):
        entry = plan.tensors[number]
        if row in without:
            continue
        if entry.is_common:
            common.append(row)
        elif hint is not None and entry.key.startswith(hint):
            groups.setdefault(hint, []).append(row)
        else:
            groups[""].append(row)
    parts = []
    if common:
        parts.append(FilePart(COMMON_FILE, common))
    for prefix, rows in groups.items():
        bins = spread(sizes[rows].tolist(), files)
        for number, positions in enumerate(bins):
            if positions:
                name = file_name(plan.rank, number, prefix)
                parts.append(FilePart(name, [rows[i] for i in positions]))
    return parts


def unchanged_files(plan: SavePlan, links: Links) -> list[FilePart]:
    """Distribute the rows of ``links`` over files of at most UNCHANGED_BYTES, or of one row.

    A file of the step before keeps its rows if all of them are still such rows. The other rows are
    distributed anew, so that the change of one row costs no other file.
    """
    groups: list[tuple[Links | None, list[int]]] = []
    free = links.rows.copy()
    if links.before is not None:
        written = links.before.written
        files = group(written.file)
        for rows in map(files.rows, range(len(files))):
            name = written.files[written.file[rows[0]]]
            held = written.item[rows]
            if name.startswith(f"{UNCHANGED}/") and free[held].all():
                groups.append((links, held.tolist()))
                free[held] = False
    lengths = plan.lengths
    filled = UNCHANGED_BYTES
    for row in np.flatnonzero(free).tolist():
        filled += int(lengths[row])
        if filled > UNCHANGED_BYTES:
            groups.append((None, []))
            filled = int(lengths[row])
        groups[-1][1].append(row)
    return [
        FilePart(f"{UNCHANGED}/{file_name(plan.rank, number)}", rows, known)
        for number, (known, rows) in enumerate(groups)
    ]


def spread(sizes: Sequence[int], files: int) -> list[list[int]]:
    """Distribute items by their bytes over files, each into the least full one.

    Objects (-1: their size is not known) come first, in turn; then tensors, largest first.
    """
    bins: list[list[int]] = [[] for _ in range(files)]
    objects, tensors = 0, []
    for row, size in enumerate(sizes):
        if size < 0:
            bins[objects % files].append(row)
            objects += 1
        else:
            tensors.append(row)
    tensors.sort(key=sizes.__getitem__, reverse=True)
    # A heap of the bytes and the number of each file.
    load = [(0, number) for number in range(files)]
    for row in tensors:
        filled, number = load[0]
        bins[number].append(row)
        heapq.heapreplace(load, (filled + sizes[row], number))
    return bins


def write_files(
    root: Storage,
    plan: SavePlan,
    data: Source,
    parts: list[FilePart],
    threads: int = 0,
) -> WriteResult:
    """Write all files, durably, in this many threads, or one thread each."""
    with ThreadPoolExecutor(threads or max(len(parts), 1), "megackpt-write") as pool:
        lengths = plan.lengths
        jobs = []
        for part in parts:
            nbytes = lengths[part.rows]
            jobs.append(pool.submit(_write_file, root, part, nbytes, plan, data))
    place = np.empty((2, len(plan)), np.int64)
    digests = [b""] * len(plan)
    names = [""] * len(plan)
    for part, job in zip(parts, jobs, strict=True):
        written = job.result()
        place[:, part.rows] = np.array([record[:2] for record in written]).T
        for row, record in zip(part.rows, written, strict=True):
            digests[row] = record.digests
            names[row] = part.name
    files, file = table_of(names)
    hashed = digest_rows(b"".join(digests))
    return WriteResult.of_rows(plan.boxes, files, file, place[0], place[1], hashed)


def _write_file(
    root: Storage,
    part: FilePart,
    nbytes: Int64,
    plan: SavePlan,
    data: Source,
) -> list[WrittenRecord]:
    """Write these rows, or link their file. ``nbytes``: the bytes of each row."""
    if part.links is not None:

        def digests(row: int) -> bytes:
            return b"".join(map(digest_blocks, data.blocks(row)))

        with root.batch() as batch:
            before = part.links.link(batch, part.name, part.rows, digests)
        if before is not None:
            starts = before.written.start[before.bounds[part.rows]].tolist()
            known = map(before.digests, part.rows)
            return list(map(WrittenRecord, starts, nbytes.tolist(), known))
    written: list[WrittenRecord] = []
    with root.create(part.name) as writer:
        writer.expect(int(nbytes.sum()))
        records = Records(writer)
        # Objects, large tensors and small ones are in separate runs, since most neighbours are of
        # one kind.
        small = (nbytes > 0) & (nbytes <= SMALL)
        bounds = runs(small + 2 * (np.arange(len(small)) // _TOGETHER)).tolist()
        for first, last in pairwise(bounds):
            rows = part.rows[first:last]
            found: Sequence[memoryview | None] = [None] * len(rows)
            if small[first]:
                found = data.views(rows, nbytes[first:last].tolist())
            numbers = plan.tensor[rows].tolist()
            shapes = plan.boxes.shape[rows].tolist()
            for row, number, shape, view in zip(
                rows, numbers, shapes, found, strict=True
            ):
                if view is None:
                    written.append(_write_row(records, row, plan, data))
                else:
                    meta = plan.tensors[number].meta
                    extents = tuple(shape[: len(meta.shape)])
                    written.append(records.whole(meta.dtype, extents, view))
        records.end()
    return written


def _write_row(
    records: Records, row: int, plan: SavePlan, data: Source
) -> WrittenRecord:
    item = plan.row(row)
    blocks = data.blocks(row)
    if item.meta.is_object:
        return records.blob(blocks)
    record = records.tensor(item.meta.dtype, item.shard.box.shape, blocks)
    if record.length != item.nbytes:
        raise BackendError(
            f"{item.shard} should have {item.nbytes} bytes, "
            f"but {record.length} came from the model"
        )
    return record


class Records:
    """Writes consecutive records into one file. ``end`` ends the last one.

    Memory that is handed over must not change until the next flush: of a payload that comes in
    several blocks, every block but the last is flushed before the next one is taken. ``flushed`` is
    called after each flush.
    """

    def __init__(self, writer: FileWriter, flushed: Callable[[], object] = int) -> None:
        self._writer = writer
        self._flushed = flushed
        self._position = writer.position
        self._waiting: list[memoryview] = []
        self._size = 0
        # The end of the last record is written together with the head of the next one.
        self._tail = b""

    def blob(self, blocks: Iterator[memoryview]) -> WrittenRecord:
        """Write bytes as they are."""
        self._add(memoryview(self._tail))
        self._tail = b""
        return self._write_payload(blocks, -1)

    def tensor(
        self, dtype: str, shape: tuple[int, ...], blocks: Iterator[memoryview]
    ) -> WrittenRecord:
        """Write the archive of a C-order tensor. Returns the place of its elements."""
        self._add(self._frame(dtype, shape))
        return self._write_payload(blocks, math.prod(shape) * ITEMSIZE[dtype])

    def whole(
        self, dtype: str, shape: tuple[int, ...], data: memoryview
    ) -> WrittenRecord:
        """``tensor`` of one block of at most SMALL bytes, which stays as it is until ``end``."""
        self._add(self._frame(dtype, shape), data)
        return WrittenRecord(self._position - len(data), len(data), digest(data))

    def _frame(self, dtype: str, shape: tuple[int, ...]) -> memoryview:
        """The end of the last record, and the head of the next one."""
        head, ending = frame(dtype, shape)
        padding = bytes(-(self._position + len(self._tail)) % ALIGNMENT)
        before = self._tail + padding + head
        self._tail = ending
        return memoryview(before)

    def end(self) -> None:
        self._add(memoryview(self._tail))
        self._tail = b""
        self._flush()

    def _add(self, *parts: memoryview) -> None:
        for data in parts:
            self._waiting.append(data)
            self._size += len(data)
            self._position += len(data)
        if self._size >= BATCH or len(self._waiting) >= VIEWS:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write(self._waiting)
            self._waiting, self._size = [], 0
            self._flushed()

    def _write_payload(self, blocks: Iterator[memoryview], size: int) -> WrittenRecord:
        """Hash and write in one pass. ``size``: the bytes to come; -1 if that is not known."""
        start, length = self._position, 0
        digests: list[bytes] = []
        for block in blocks:
            for first in range(0, len(block), DIGEST_BLOCK):
                part = block[first : first + DIGEST_BLOCK]
                digests.append(digest(part))
                self._add(part)
                if len(part) == DIGEST_BLOCK:
                    # The bytes that were hashed are still in the processor's cache.
                    self._flush()
            length += len(block)
            if length == size:
                break
            # The memory of this block is reused for the next one.
            self._flush()
        return WrittenRecord(start, length, b"".join(digests))
