"""Tensors stored whole in files that all ranks write to: parts to their places, then one pass over
the result.

Such a format knows beforehand where each tensor begins (``Layout.places``). Ranks write their parts
to these places, run by run. When all have written, the coordinator checks that the parts fill each
tensor, and reads the tensors that several ranks wrote once for their digests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, groupby, product
from operator import mul

import numpy as np

from megackpt.backends.base import THREADS, Source, WrittenRow, run_in_threads
from megackpt.errors import BackendError, CorruptCheckpoint, join_truncated
from megackpt.planning.box import Box, Int64
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    DIGEST_SIZE,
    Chunk,
    Location,
    Manifest,
    SavePlan,
    TensorEntry,
    TensorMeta,
    TensorParts,
    digest_rows,
    listed,
)
from megackpt.storage import FileUpdater, Storage, digest_blocks

WINDOW = 8 << 20
"""Bytes that one thread reads at a time: whole digest blocks."""


def byte_runs(box: Box, meta: TensorMeta) -> tuple[int, Iterator[int]]:
    """The runs of consecutive bytes of a box in a tensor's C order: their length, their starts."""
    ndim = len(meta.shape)
    # Trailing axes that the box fills belong to one run, and so does the axis before them.
    outer = ndim
    while outer and box.shape[outer - 1] == meta.shape[outer - 1]:
        outer -= 1
    outer = max(outer - 1, 0)
    strides = [math.prod(meta.shape[i + 1 :]) * meta.itemsize for i in range(ndim)]
    first = sum(map(mul, box.offset, strides))
    indices = product(*map(range, box.shape[:outer]))
    starts = (first + sum(map(mul, index, strides)) for index in indices)
    return math.prod(box.shape[outer:]) * meta.itemsize, starts


def write_tensors(
    root: Storage, plan: SavePlan, data: Source, heads: Mapping[str, bytes]
) -> dict[int, WrittenRow]:
    """Write the rows that are tensors to their places, durably.

    ``heads``: file to its first bytes, for storage that writes files ``in_order``.
    """
    if plan.places is None:
        raise BackendError(
            "this format writes to known places: plan with plan_for_backend"
        )
    places: dict[int, Location] = {}
    for row, number in enumerate(plan.tensor.tolist()):
        place = plan.places[number]
        if place is not None:
            places[row] = place
    written: dict[int, WrittenRow] = {}

    def work(numbers: Iterator[int]) -> None:
        for number in numbers:
            row = part[number]
            written[row] = _write_row(updater, plan, row, places[row], data)

    def order(row: int) -> tuple[str | int, ...]:
        place = places[row]
        return place.file, place.start, *plan.boxes.offset[row].tolist()

    for file, group in groupby(sorted(places, key=order), lambda row: places[row].file):
        part = list(group)
        with root.update(file) as updater:
            if root.in_order:
                updater.expect(sum(map(plan.lengths.item, part)))
                updater.write_at(0, [memoryview(heads.get(file, b""))])
                work(iter(range(len(part))))
            else:
                run_in_threads(len(part), work)
    return written


def _write_row(
    updater: FileUpdater, plan: SavePlan, row: int, place: Location, data: Source
) -> WrittenRow:
    item = plan.row(row)
    run, starts = byte_runs(item.shard.box, item.meta)
    start = left = 0
    # A row without bytes is at byte 0: the file need not reach to its place.
    if item.nbytes:
        start = place.start + next(starts)
        left = run
    position = start
    digests = []
    length = 0
    for block in data.blocks(row):
        length += len(block)
        if length > item.nbytes:
            break
        digests.append(digest_blocks(block))
        while len(block):
            if not left:
                position = place.start + next(starts)
                left = run
            part = block[:left]
            updater.write_at(position, [part])
            position += len(part)
            left -= len(part)
            block = block[len(part) :]
    if length != item.nbytes:
        raise BackendError(
            f"{item.shard} should have {item.nbytes} bytes, but others came from the model"
        )
    return Location(place.file, start, length), b"".join(digests)


def merge_pieces(
    manifest: Manifest, places: Mapping[str, Location]
) -> tuple[Manifest, Int64]:
    """The manifest with one chunk for each tensor, and the chunks that were merged from several.

    These have no digests yet (all zeros); all other chunks have their writer's digests. Raises
    BackendError if parts do not fill a tensor: the holes would be read as zeros.
    """
    parts = TensorParts(manifest)
    volume = manifest.chunks.boxes.volume
    chunks: list[Chunk] = []
    rows: list[tuple[int, Box, str, int, int]] = []
    incomplete: list[str] = []
    for number, (key, meta) in enumerate(manifest.tensors):
        own = parts.rows(number)
        found: list[Chunk] = []
        if meta.is_object or len(own) == 1:  # a tensor may have very many
            found = list(map(manifest.chunk, own.tolist()))
        if not meta.is_object:
            if volume[own].sum() != math.prod(meta.shape):
                incomplete.append(repr(key))
            place = places[key]
            blocks = -(-place.length // DIGEST_BLOCK)
            digests = np.zeros((blocks, DIGEST_SIZE), np.uint8)
            writer = -1
            if found:
                digests = found[0].digests
                writer = found[0].writer
            found = [Chunk(Box.whole(meta.shape), place, digests, writer)]
        for chunk in found:
            place = chunk.location
            rows.append((number, chunk.box, place.file, place.start, place.length))
        chunks += found
    if incomplete:
        raise BackendError(
            "this format stores whole tensors, and no rank wrote parts of "
            f"{join_truncated(incomplete, separator=', ')}"
        )
    merged = Manifest.of(manifest.tensors, rows)
    writers = np.array([chunk.writer for chunk in chunks], np.int32)
    digests = np.concatenate([digest_rows(b""), *(chunk.digests for chunk in chunks)])
    columns = replace(merged.chunks, writer=writers, digests=digests)
    merged = replace(manifest, chunks=columns, files=merged.files)
    return merged, np.flatnonzero(writers < 0)


def compute_digests(root: Storage, manifest: Manifest, rows: Int64) -> Manifest:
    """The manifest with digests of these chunks, which are read once."""
    chunks = manifest.chunks
    digests = chunks.digests.copy()
    bounds = chunks.block_bounds
    if not len(rows):
        return manifest
    # Chunks in file order, in parts of one file and about a window.
    order = rows[np.lexsort((chunks.start[rows], chunks.file[rows]))]
    window = np.cumsum(chunks.length[order]) // WINDOW
    is_last = (np.diff(chunks.file[order]) > 0) | (np.diff(window) > 0)
    parts = np.split(order, np.flatnonzero(is_last) + 1)
    with ThreadPoolExecutor(THREADS, "megackpt-digests") as pool:
        jobs = pool.map(lambda part: _digest_rows(root, manifest, part.tolist()), parts)
        for row, found in chain.from_iterable(jobs):
            digests[bounds[row] : bounds[row + 1]] = digest_rows(found)
    return replace(manifest, chunks=replace(chunks, digests=digests))


def _digest_rows(
    root: Storage, manifest: Manifest, rows: list[int]
) -> list[tuple[int, bytes]]:
    """For each of these chunks of one file: its row, and the digests of its blocks."""
    chunks = manifest.chunks
    found = []
    window = memoryview(bytearray(min(WINDOW, int(chunks.length[rows].max()))))
    with root.open(manifest.files[chunks.file[rows[0]]]) as reader:
        for row in rows:
            start = int(chunks.start[row])
            length = int(chunks.length[row])
            digests = []
            for done in range(0, length, WINDOW):
                part = window[: length - done]
                reader.read_into(start + done, [part])
                digests.append(digest_blocks(part))
            found.append((row, b"".join(digests)))
    return found


def manifest_from_files(
    root: Storage,
    found: Iterable[tuple[TensorEntry, Box, Location]],
    backend: tuple[str, int],
) -> Manifest:
    """The manifest of these raw chunks, without digests.

    Raises CorruptCheckpoint for impossible ones.
    """
    numbers: dict[TensorEntry, int] = {}
    chunks = []
    for entry, box, place in found:
        chunks.append((numbers.setdefault(entry, len(numbers)), box, place))
    try:
        return listed(numbers, chunks, backend)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{root.location}: {error}") from error
