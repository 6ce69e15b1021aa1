"""Tensors stored whole in files that all ranks write to: parts to their places, then one pass over the result.

Such a format knows beforehand where each tensor begins (``Layout.places``). Ranks write their parts
there, run by run. When all have written, the coordinator checks that they fill each tensor, and reads
the tensors once for their digests, and for a checksum if the format has one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from megackpt.backends.base import THREADS, Source
from megackpt.errors import BackendError, CorruptCheckpoint, join_truncated
from megackpt.planning.box import Box, Boxes, Int64
from megackpt.planning.coverage import shapes_table
from megackpt.planning.manifest import (
    DIGEST_SIZE,
    Chunks,
    Location,
    Manifest,
    SavePlan,
    ShardId,
    TensorEntry,
    TensorMeta,
    WriteResult,
    listed,
)
from megackpt.storage import FileUpdater, Storage, digest_blocks

WINDOW = 8 << 20
"""Bytes that one thread reads at a time: whole digest blocks."""
_STARTS = 1 << 16  # of runs, computed at once


@dataclass(frozen=True)
class Runs:
    """The consecutive bytes of a box in a tensor's C order: ``count`` runs of ``length`` bytes each."""

    length: int
    outer: tuple[int, ...]  # extents of the axes from run to run
    strides: tuple[int, ...]  # of these axes, in bytes
    first: int  # where the first run begins in the tensor

    @classmethod
    def of(cls, box: Box, meta: TensorMeta) -> Runs:
        # Trailing axes that the box fills belong to one run, and so does the axis before them.
        leading = len(meta.shape)
        while leading and box.shape[leading - 1] == meta.shape[leading - 1]:
            leading -= 1
        leading = max(leading - 1, 0)
        axes = range(len(meta.shape))
        strides = [math.prod(meta.shape[i + 1 :]) * meta.itemsize for i in axes]
        first = sum(o * s for o, s in zip(box.offset, strides, strict=True))
        length = math.prod(box.shape[leading:]) * meta.itemsize
        return cls(length, box.shape[:leading], tuple(strides[:leading]), first)

    @property
    def count(self) -> int:
        return math.prod(self.outer)

    def starts(self) -> Iterator[int]:
        """Where each run begins in the tensor, in the C order of the box."""
        if self.count == 1:
            yield self.first
            return
        for begin in range(0, self.count, _STARTS):
            numbers = np.arange(begin, min(begin + _STARTS, self.count))
            starts = np.full(len(numbers), self.first, np.int64)
            axes = zip(reversed(self.outer), reversed(self.strides), strict=True)
            for extent, stride in axes:
                numbers, index = np.divmod(numbers, extent)
                starts += index * stride
            yield from starts.tolist()


class WrittenRow(NamedTuple):
    """The first byte and the length of one row of a plan, and the digests of its blocks."""

    place: Location
    digests: bytes


def write_tensors(root: Storage, plan: SavePlan, data: Source) -> dict[int, WrittenRow]:
    """Write the rows that are tensors to their places, durably."""
    if plan.places is None:
        raise BackendError(
            "this format writes to known places: plan with plan_for_backend"
        )
    places: dict[int, Location] = {}
    for row, number in enumerate(plan.tensor.tolist()):
        place = plan.places[number]
        if place is not None:
            places[row] = place
    # The sort is stable: rows of a file stay ordered by size, large ones first.
    rows = sorted(places, key=lambda row: places[row].file)
    found: dict[int, WrittenRow] = {}
    for file, group in groupby(rows, lambda row: places[row].file):
        part = list(group)
        shares = [part[i::THREADS] for i in range(THREADS)]  # of about the same bytes
        # Threads end before the file is closed.
        with (
            root.update(file) as updater,
            ThreadPoolExecutor(THREADS, "megackpt-write") as pool,
        ):

            def write(
                rows: list[int], updater: FileUpdater = updater
            ) -> dict[int, WrittenRow]:
                return {r: _write_row(updater, plan, r, places[r], data) for r in rows}

            for written in pool.map(write, shares):
                found.update(written)
    return found


def _write_row(
    updater: FileUpdater, plan: SavePlan, row: int, place: Location, data: Source
) -> WrittenRow:
    item = plan.row(row)
    runs = Runs.of(item.shard.box, item.meta)
    starts = runs.starts()
    position = left = 0  # in the run that is being written
    digests, length = [], 0
    for block in data.blocks(row):
        length += len(block)
        if length > item.nbytes:
            break
        digests.append(digest_blocks(block))
        while len(block):
            if not left:
                position, left = place.start + next(starts), runs.length
            part = block[:left]
            updater.write_at(position, [part])
            position += len(part)
            left -= len(part)
            block = block[len(part) :]
    if length != item.nbytes:
        raise BackendError(
            f"{item.shard} should have {item.nbytes} bytes, but others came from the model"
        )
    # A row without bytes is at byte 0: the file need not reach to its place.
    start = place.start + runs.first if length else 0
    return WrittenRow(Location(place.file, start, length), b"".join(digests))


def write_result(plan: SavePlan, written: Mapping[int, WrittenRow]) -> WriteResult:
    """The report of a rank that wrote these rows."""
    rows = [written[row] for row in range(len(plan))]
    files = list(dict.fromkeys(place.file for place, _ in rows))
    numbers = {file: i for i, file in enumerate(files)}
    digests = np.frombuffer(b"".join(digests for _, digests in rows), np.uint8)
    return WriteResult.of_rows(
        plan.boxes,
        files,
        np.array([numbers[place.file] for place, _ in rows], np.int32),
        np.array([place.start for place, _ in rows], np.int64),
        np.array([place.length for place, _ in rows], np.int64),
        digests.reshape(-1, DIGEST_SIZE),
    )


def merge_pieces(
    manifest: Manifest, places: Mapping[str, Location]
) -> tuple[Manifest, Int64]:
    """The manifest with one chunk for each tensor, and the chunks that were merged from several.

    These have no digests yet (all zeros); the others have their writer's. Raises BackendError if
    parts do not fill a tensor: the holes would be read as zeros.
    """
    chunks, tensors = manifest.chunks, manifest.tensors
    objects = np.array([entry.meta.is_object for entry in tensors], np.bool_)
    is_object = objects[chunks.tensor]
    blobs, parts = np.flatnonzero(is_object), np.flatnonzero(~is_object)
    number, first, tensor_of, count = np.unique(
        chunks.tensor[parts],
        return_index=True,
        return_inverse=True,
        return_counts=True,
    )
    entries = [tensors[n] for n in number.tolist()]
    whole = shapes_table(entries, chunks.boxes.width)
    filled = np.zeros(len(number), np.int64)
    np.add.at(filled, tensor_of, chunks.boxes.volume[parts])
    incomplete = filled != whole.prod(axis=1, dtype=np.int64)
    if incomplete.any():
        keys = [repr(entries[n].key) for n in np.flatnonzero(incomplete).tolist()]
        raise BackendError(
            "this format stores whole tensors, and no rank wrote parts of "
            f"{join_truncated(keys, separator=', ')}"
        )
    # First the objects, then one row for each tensor.
    rows = np.concatenate([blobs, parts[first]])
    several = np.concatenate([np.zeros(len(blobs), np.bool_), count > 1])
    found = [places[entry.key] for entry in entries]
    starts = np.array([place.start for place in found], np.int64)
    lengths = np.array([place.length for place in found], np.int64)
    boxes = [chunks.boxes.take(blobs), Boxes(np.zeros_like(whole), whole)]
    merged = replace(
        chunks.take(rows),
        boxes=Boxes.concat(boxes),
        writer=np.where(several, -1, chunks.writer[rows]).astype(np.int32),
        start=np.concatenate([chunks.start[blobs], starts]),
        length=np.concatenate([chunks.length[blobs], lengths]),
    )
    digests = np.zeros((int(merged.block_bounds[-1]), DIGEST_SIZE), np.uint8)
    alone = np.flatnonzero(~several)
    known = chunks.digests[chunks.blocks(rows[alone])]
    digests[merged.blocks(alone)] = known
    merged = replace(merged, digests=digests)
    return replace(manifest, chunks=merged), np.flatnonzero(several)


def compute_digests(
    root: Storage, manifest: Manifest, rows: Int64, crc: bool = False
) -> tuple[Manifest, dict[int, int]]:
    """The manifest with digests of these chunks, which are read once; and their CRC-32, or 0.

    Raises CorruptCheckpoint if one rank wrote all of a chunk, and something else is read.
    """
    chunks = manifest.chunks
    digests, bounds = chunks.digests.copy(), chunks.block_bounds
    checksums: dict[int, int] = {}
    with ThreadPoolExecutor(THREADS, "megackpt-digests") as pool:
        jobs = pool.map(
            lambda part: list(_digest_rows(root, manifest, part, crc)),
            _windows(chunks, rows),
        )
        for row, found, checksum in (result for job in jobs for result in job):
            checksums[row] = checksum
            known = digests[bounds[row] : bounds[row + 1]]
            if chunks.writer[row] >= 0 and known.tobytes() != found:
                chunk = manifest.chunk(row)
                shard = ShardId(manifest.tensors[chunks.tensor[row]].key, chunk.box)
                raise CorruptCheckpoint(
                    f"{shard}: what was written is not what is read again from "
                    f"{root.location}/{chunk.location.file}; write it again"
                )
            known[:] = np.frombuffer(found, np.uint8).reshape(-1, DIGEST_SIZE)
    return replace(manifest, chunks=replace(chunks, digests=digests)), checksums


def _windows(chunks: Chunks, rows: Int64) -> Iterator[list[int]]:
    """Chunks in file order: neighbours that fit into one window together, larger ones alone."""
    order = rows[np.lexsort((chunks.start[rows], chunks.file[rows]))]
    file, start = chunks.file[order].tolist(), chunks.start[order].tolist()
    stop = (chunks.start + chunks.length)[order].tolist()
    first = 0
    for i in range(1, len(order) + 1):
        ends = i == len(order) or file[i] != file[first]
        if ends or stop[i] - start[first] > WINDOW:
            yield order[first:i].tolist()
            first = i


def _digest_rows(
    root: Storage, manifest: Manifest, rows: list[int], crc: bool
) -> Iterator[tuple[int, bytes, int]]:
    """For each chunk of one window: its row, the digests of its blocks, its checksum."""
    chunks = manifest.chunks
    start, length = chunks.start[rows].tolist(), chunks.length[rows].tolist()
    span = start[-1] + length[-1] - start[0]
    window = memoryview(bytearray(min(WINDOW, span)))
    with root.open(manifest.files[chunks.file[rows[0]]]) as reader:
        if len(rows) > 1:
            reader.read_into(start[0], [window])
        for row, base, size in zip(rows, start, length, strict=True):
            digests, checksum = [], 0
            for done in range(0, size, WINDOW):
                if len(rows) > 1:
                    part = window[base - start[0] :][:size]
                else:
                    part = window[: size - done]
                    reader.read_into(base + done, [part])
                digests.append(digest_blocks(part))
                if crc:
                    checksum = zlib.crc32(part, checksum)
            yield row, b"".join(digests), checksum


def manifest_from_files(
    root: Storage,
    found: Iterable[tuple[TensorEntry, Box, Location]],
    backend: tuple[str, int],
) -> Manifest:
    """The manifest of these raw chunks, without digests. Raises CorruptCheckpoint for impossible ones."""
    numbers: dict[TensorEntry, int] = {}
    chunks = []
    for entry, box, place in found:
        chunks.append((numbers.setdefault(entry, len(numbers)), box, place))
    try:
        return listed(numbers, chunks, backend)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{root.location}: {error}") from error
