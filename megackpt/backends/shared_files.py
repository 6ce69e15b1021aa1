"""Tensors that stand whole in files which all ranks write into: pieces to their places, then one look at it all.

A format of this kind knows beforehand where each tensor begins (``Backend.layout``). Ranks write their pieces there,
run by run; when all have written, the coordinator sees whether they fill each tensor, and reads what stands there
once for its digests (and for a checksum that the format may want).
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
_RUNS = 1 << 16  # places of runs that are worked out at once


@dataclass(frozen=True)
class Runs:
    """The consecutive bytes that a box has in a tensor's C order: ``count`` runs of ``length`` bytes each."""

    length: int
    outer: tuple[int, ...]  # extents of the axes that lead from run to run
    strides: tuple[int, ...]  # of these axes, in bytes
    first: int  # where the first run begins in the tensor

    @classmethod
    def of(cls, box: Box, meta: TensorMeta) -> Runs:
        whole, axes = meta.shape, len(meta.shape)
        # Trailing axes that the box fills belong to one run, and so does the one before them.
        inner = next(
            (i + 1 for i in reversed(range(axes)) if box.shape[i] != whole[i]), 0
        )
        leading = max(inner - 1, 0)
        strides = [math.prod(whole[i + 1 :]) * meta.itemsize for i in range(axes)]
        first = sum(o * s for o, s in zip(box.offset, strides, strict=True))
        length = math.prod(box.shape[leading:]) * meta.itemsize
        return cls(length, box.shape[:leading], tuple(strides[:leading]), first)

    @property
    def count(self) -> int:
        return math.prod(self.outer)

    def starts(self) -> Iterator[int]:
        """Where each run begins in the tensor, in the box's C order."""
        if self.count == 1:
            yield self.first
            return
        for begin in range(0, self.count, _RUNS):
            numbers = np.arange(begin, min(begin + _RUNS, self.count))
            place = np.full(len(numbers), self.first, np.int64)
            for extent, stride in zip(
                reversed(self.outer), reversed(self.strides), strict=True
            ):
                numbers, within = np.divmod(numbers, extent)
                place += within * stride
            yield from place.tolist()


class Written(NamedTuple):
    """Where the bytes of one row of a plan begin and how many there are, and the digests of their blocks."""

    place: Location
    digests: bytes


def write_tensors(root: Storage, plan: SavePlan, data: Source) -> dict[int, Written]:
    """Write the rows that are tensors, durably, to their places: by row, where each landed."""
    if plan.places is None:
        raise BackendError(
            "this format writes into places known beforehand: plan with plan_for_backend"
        )
    places = {
        row: place
        for row, number in enumerate(plan.tensor.tolist())
        if (place := plan.places[number])
    }
    rows = sorted(
        places, key=lambda row: places[row].file
    )  # stable: large ones stay in front
    found: dict[int, Written] = {}
    for file, group in groupby(rows, lambda row: places[row].file):
        part = list(group)
        shares = [
            part[i::THREADS] for i in range(THREADS)
        ]  # of about the same bytes, as rows stand by size
        # Threads end before the file is closed.
        with (
            root.update(file) as updater,
            ThreadPoolExecutor(THREADS, "megackpt-write") as pool,
        ):
            for landed in pool.map(
                lambda share: _write_rows(updater, plan, share, places, data), shares
            ):
                found.update(landed)
    return found


def _write_rows(
    updater: FileUpdater,
    plan: SavePlan,
    rows: list[int],
    places: Mapping[int, Location],
    data: Source,
) -> dict[int, Written]:
    return {row: _write_row(updater, plan, row, places[row], data) for row in rows}


def _write_row(
    updater: FileUpdater, plan: SavePlan, row: int, place: Location, data: Source
) -> Written:
    item = plan.row(row)
    runs = Runs.of(item.shard.box, item.meta)
    starts, at, room = runs.starts(), 0, 0
    digests, length = [], 0
    for block in data.blocks(row):
        length += len(block)
        if length > item.nbytes:
            break
        digests.append(digest_blocks(block))
        while len(block):
            if not room:
                at, room = place.start + next(starts), runs.length
            part = block[:room]
            updater.write_at(at, [part])
            at, room, block = at + len(part), room - len(part), block[len(part) :]
    if length != item.nbytes:
        raise BackendError(
            f"{item.shard} should have {item.nbytes} bytes, but others came from the model"
        )
    # Where nothing was written, the file need not reach.
    return Written(
        Location(place.file, place.start + runs.first if length else 0, length),
        b"".join(digests),
    )


def result(plan: SavePlan, landed: Mapping[int, Written]) -> WriteResult:
    """What a rank reports, from where each row of its plan landed."""
    rows = [landed[row] for row in range(len(plan))]
    files = list(dict.fromkeys(place.file for place, _ in rows))
    numbers = {file: i for i, file in enumerate(files)}
    return WriteResult.of_rows(
        plan.boxes,
        files,
        np.array([numbers[place.file] for place, _ in rows], np.int32),
        np.array([place.start for place, _ in rows], np.int64),
        np.array([place.length for place, _ in rows], np.int64),
        np.frombuffer(b"".join(digests for _, digests in rows), np.uint8).reshape(
            -1, DIGEST_SIZE
        ),
    )


def merge_pieces(
    manifest: Manifest, places: Mapping[str, Location]
) -> tuple[Manifest, Int64]:
    """The manifest with one chunk for each tensor, and the chunks that several pieces have become.

    These have no digests yet (all zeros); the others have their writer's. Raises BackendError where pieces do not
    fill a tensor: what nobody wrote would be zeros.
    """
    chunks, tensors = manifest.chunks, manifest.tensors
    is_object = np.array([entry.meta.is_object for entry in tensors], np.bool_)[
        chunks.tensor
    ]
    blobs, pieces = np.flatnonzero(is_object), np.flatnonzero(~is_object)
    number, first, which, count = np.unique(
        chunks.tensor[pieces],
        return_index=True,
        return_inverse=True,
        return_counts=True,
    )
    whole = shapes_table([tensors[n] for n in number.tolist()], chunks.boxes.width)
    filled = np.zeros(len(number), np.int64)
    np.add.at(filled, which, chunks.boxes.volume[pieces])
    _refuse_holes(
        [tensors[n].key for n in number[filled != whole.prod(axis=1, dtype=np.int64)]]
    )
    rows = np.concatenate([blobs, pieces[first]])
    several = np.concatenate([np.zeros(len(blobs), np.bool_), count > 1])
    found = [places[tensors[n].key] for n in number.tolist()]
    joined = replace(
        chunks.take(rows, chunks.block_bounds),
        boxes=Boxes.concat(
            [chunks.boxes.take(blobs), Boxes(np.zeros_like(whole), whole)]
        ),
        writer=np.where(several, -1, chunks.writer[rows]).astype(np.int32),
        start=np.concatenate(
            [chunks.start[blobs], np.array([p.start for p in found], np.int64)]
        ),
        length=np.concatenate(
            [chunks.length[blobs], np.array([p.length for p in found], np.int64)]
        ),
    )
    bounds = joined.block_bounds
    digests = np.zeros((int(bounds[-1]), DIGEST_SIZE), np.uint8)
    alone = np.flatnonzero(~several)
    digests[joined.blocks(alone, bounds)] = chunks.digests[
        chunks.blocks(rows[alone], chunks.block_bounds)
    ]
    return replace(manifest, chunks=replace(joined, digests=digests)), np.flatnonzero(
        several
    )


def _refuse_holes(keys: list[str]) -> None:
    if keys:
        told = join_truncated([repr(key) for key in keys], separator=", ")
        raise BackendError(
            f"this format keeps whole tensors, and no rank wrote parts of {told}"
        )


def compute_digests(
    root: Storage, manifest: Manifest, rows: Int64, crc: bool = False
) -> tuple[Manifest, dict[int, int]]:
    """The manifest with digests of what stands at the places of these chunks, read once; their CRC-32 (or 0).

    Raises CorruptCheckpoint where one rank wrote all of a chunk, and this is not what stands there.
    """
    chunks = manifest.chunks
    digests, bounds = chunks.digests.copy(), chunks.block_bounds
    checksums: dict[int, int] = {}
    with ThreadPoolExecutor(THREADS, "megackpt-survey") as pool:
        for share in pool.map(
            lambda part: list(_seen(root, manifest, part, crc)), _shares(chunks, rows)
        ):
            for row, found, checksums[row] in share:
                known = digests[bounds[row] : bounds[row + 1]]
                if chunks.writer[row] >= 0 and known.tobytes() != found:
                    chunk, key = (
                        manifest.chunk(row, bounds),
                        manifest.tensors[chunks.tensor[row]].key,
                    )
                    raise CorruptCheckpoint(
                        f"{ShardId(key, chunk.box)}: what was written is not what is read again from "
                        f"{root.location}/{chunk.location.file}; write it anew"
                    )
                known[:] = np.frombuffer(found, np.uint8).reshape(-1, DIGEST_SIZE)
    return replace(manifest, chunks=replace(chunks, digests=digests)), checksums


def _shares(chunks: Chunks, rows: Int64) -> Iterator[list[int]]:
    """Chunks in file order: neighbours that one window holds together, larger ones alone."""
    order = rows[np.lexsort((chunks.start[rows], chunks.file[rows]))]
    file, start = chunks.file[order].tolist(), chunks.start[order].tolist()
    stop = (chunks.start + chunks.length)[order].tolist()
    begin = 0
    for i in range(1, len(order) + 1):
        if i == len(order) or file[i] != file[begin] or stop[i] - start[begin] > WINDOW:
            yield order[begin:i].tolist()
            begin = i


def _seen(
    root: Storage, manifest: Manifest, rows: list[int], crc: bool
) -> Iterator[tuple[int, bytes, int]]:
    """Of each chunk of a share its row, the digests of its blocks, its checksum."""
    start, length = (
        manifest.chunks.start[rows].tolist(),
        manifest.chunks.length[rows].tolist(),
    )
    window = memoryview(bytearray(min(WINDOW, start[-1] + length[-1] - start[0])))
    with root.open(manifest.files[manifest.chunks.file[rows[0]]]) as reader:
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
                checksum = zlib.crc32(part, checksum) if crc else 0
            yield row, b"".join(digests), checksum


def manifest_from_files(
    root: Storage,
    found: Iterable[tuple[TensorEntry, Box, Location]],
    backend: tuple[str, int],
) -> Manifest:
    """The manifest of what files say that they hold, raw and without digests. CorruptCheckpoint for what cannot be."""
    numbers: dict[TensorEntry, int] = {}
    chunks = [
        (numbers.setdefault(entry, len(numbers)), box, place)
        for entry, box, place in found
    ]
    try:
        return listed(numbers, chunks, backend)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{root.location}: {error}") from error
