"""Bytes of cells in and out: cells through tensorstore, objects beside them, all with digests."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import ml_dtypes  # noqa: F401  (numpy learns bfloat16 and the float8 kinds)
import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from megackpt.backends.base import Source, Target
from megackpt.backends.ranges import read_raw
from megackpt.backends.zarr.layout import Cells, Grid, array_document, grid_of, refuse_unfit
from megackpt.backends.zarr.names import cell_file, encode_key, shard_file
from megackpt.errors import BackendError, CheckpointingException, CorruptCheckpoint, StorageError
from megackpt.planning.box import Int64
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    DIGEST_SIZE,
    Bool,
    LoadPlan,
    Manifest,
    ReadItem,
    SavePlan,
    TensorEntry,
    WriteItem,
    WriteResult,
)
from megackpt.runtime.storage import Storage, digest_blocks

THREADS = 2

_Open = Callable[[TensorEntry, Grid | None], ts.TensorStore]


def write_rows(root: Storage, plan: SavePlan, data: Source) -> WriteResult:
    """Write every row into a file of its own, durably: cells as zarr chunks, objects as blobs."""
    refuse_unfit(plan.tensors, plan.grids)
    files = _files(plan)
    lengths = np.zeros(len(plan), np.int64)
    digests = [b""] * len(plan)
    context = _context()

    def work(rows: Iterator[int]) -> None:
        opened = _latest(lambda entry, grid: _open(root, entry, grid, context))
        for row in rows:
            item = plan.row(row)
            if item.meta.is_object or not item.nbytes:
                lengths[row], digests[row] = _write_blob(root, files[row], data.blocks(row))
                continue
            values = np.ascontiguousarray(data.array(row)).reshape(item.shard.box.shape)
            lengths[row], digests[row] = values.nbytes, digest_blocks(_octets(values))
            with _as(StorageError, f"cannot write {item.shard} to {root.location}/{files[row]}"):
                _write_cell(opened, item, values)

    _share(len(plan), work)
    _sync_folders(root, files)
    table = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_SIZE)
    numbers = np.arange(len(plan), dtype=np.int32)
    return WriteResult.of_rows(plan.boxes, files, numbers, np.zeros(len(plan), np.int64), lengths, table)


def _files(plan: SavePlan) -> list[str]:
    """The file of each row. BackendError for rows that are no whole cells: two ranks would share a file."""
    cells = Cells.of(plan.tensors, plan.grids, plan.tensor, plan.boxes)
    astray = [str(plan.row(int(row)).shard) for row in np.flatnonzero(~cells.whole)]
    if astray:
        raise BackendError(
            f"zarr stores whole cells of a regular grid, and these are none: {'; '.join(astray)}. "
            "hint: plan with SavePolicy(gridded=True), or save as torch_dist"
        )
    names = [encode_key(entry.key) for entry in plan.tensors]
    index = cells.index.tolist()
    files = []
    for row, number in enumerate(plan.tensor.tolist()):
        entry = plan.tensors[number]
        if entry.meta.is_object:
            files.append(shard_file(entry, plan.boxes.row(row, len(entry.meta.shape))))
        else:
            files.append(cell_file(names[number], index[row][: len(entry.meta.shape)]))
    return files


def _write_blob(root: Storage, file: str, blocks: Iterator[memoryview]) -> tuple[int, bytes]:
    digests = []
    with root.create(file) as writer:
        for block in blocks:
            digests.append(digest_blocks(block))
            writer.write([block])
        length = writer.position
    return length, b"".join(digests)


def _write_cell(opened: _Open, item: WriteItem, values: NDArray[Any]) -> None:
    store = opened(TensorEntry(item.shard.key, item.meta), item.grid)
    region = store[item.shard.box.slices()]
    # The memory may be referred to, instead of copied, because nothing reads through this handle later.
    written = region.write(values.view(store.dtype.numpy_dtype), can_reference_source_data_indefinitely=True)
    written.result()


def _octets(values: NDArray[Any]) -> memoryview:
    return values.reshape(-1).view(np.uint8).data


def _sync_folders(root: Storage, files: Sequence[str]) -> None:
    """Make the entries of new folders durable. The folder that a file is in was synced with the file."""
    folders = {""}
    for file in files:
        above = file.rpartition("/")[0].rpartition("/")[0]
        while above not in folders:
            folders.add(above)
            above = above.rpartition("/")[0]
    root.sync(folders)


def read_rows(root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
    """Fetch regions: byte ranges where a file begins with the chunk's bytes, else through tensorstore."""
    ranged = raw_rows(plan.manifest, plan.chunk)
    if ranged.any():
        read_raw(root, plan.take(ranged), into, verify, threads=THREADS)
    if not ranged.all():
        _read_cells(root, plan.take(~ranged), into, verify)


def raw_rows(manifest: Manifest, rows: Int64) -> Bool:
    """For each of these chunks: are the bytes at its location those of its box?"""
    chunks = manifest.chunks
    cells = Cells.of(manifest.tensors, manifest.grids, chunks.tensor[rows], chunks.boxes.take(rows))
    return cells.is_object | (cells.prefix & (manifest.encoding == "raw"))


def _read_cells(root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
    order = np.argsort(plan.chunk, kind="stable")
    starts = np.flatnonzero(np.diff(plan.chunk[order], prepend=-1))
    groups = np.split(order, starts[1:])
    context = _context()
    known = plan.manifest.encoding == "raw"  # else only the array's own metadata can tell

    def work(numbers: Iterator[int]) -> None:
        opened = _latest(lambda entry, grid: _open(root, entry, grid, context, known))
        for number in numbers:
            part = plan.take(groups[number])
            grid = plan.manifest.grids[int(plan.manifest.chunks.tensor[part.chunk[0]])]
            _read_cell(root, list(part.rows()), grid, into, verify, opened)

    _share(len(groups), work)


def _read_cell(
    root: Storage, items: list[ReadItem], grid: Grid | None, into: Target, verify: bool, opened: _Open
) -> None:
    """Fetch regions of one chunk."""
    entry, chunk = items[0].entry, items[0].chunk
    where = f"{entry.key!r} {chunk.box} in {root.location}/{chunk.location.file}"
    if root.size(chunk.location.file) is None:  # tensorstore would give zeros
        raise CorruptCheckpoint(f"{where}: the file is missing, or no regular file")
    size = math.prod(grid or ()) * entry.meta.itemsize
    if size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):  # tensorstore would end the process
        raise CorruptCheckpoint(f"{where}: a chunk of {size} bytes is more than this machine has memory for")
    with _as(CorruptCheckpoint, f"{where} cannot be read"):
        store = opened(entry, grid)
        checked = verify and len(chunk.digests) > 0
        stored = [chunk.box] if checked else [item.box for item in items]
        values = [store[box.slices()].read().result() for box in stored]
    if checked:
        _check(_octets(np.ascontiguousarray(values[0])), chunk.digests, where)
        values = [values[0][item.box.relative_to(chunk.box).slices()] for item in items]
    for item, found in zip(items, values, strict=True):
        filled = into.open(item.target, item.box)
        filled[...] = found.view(filled.dtype)
        into.close(item.target, item.box, filled)


def _check(octets: memoryview, digests: NDArray[np.uint8], where: str) -> None:
    found = np.frombuffer(digest_blocks(octets), np.uint8).reshape(-1, DIGEST_SIZE)
    if found.shape != digests.shape:
        raise CorruptCheckpoint(f"{where}: {len(octets)} bytes do not fit {len(digests)} digests")
    damaged = np.flatnonzero((found != digests).any(axis=1)).tolist()
    if damaged:
        bounds = [(b * DIGEST_BLOCK, min((b + 1) * DIGEST_BLOCK, len(octets))) for b in damaged]
        told = ", ".join(f"{block} (bytes {a}:{b})" for block, (a, b) in zip(damaged, bounds, strict=True))
        raise CorruptCheckpoint(f"{where}: the bytes are not those that were saved; damaged blocks: {told}")


@contextmanager
def _as(kind: type[CheckpointingException], told: str) -> Iterator[None]:
    """tensorstore raises ValueError whatever happens: say what it means here."""
    try:
        yield
    except ValueError as error:
        story = str(error).partition(" [tensorstore_spec=")[0]
        raise kind(f"{told}: {story}") from error


def _context() -> ts.Context:
    """Two threads, and no cache: a chunk is touched once."""
    return ts.Context(
        {
            "file_io_concurrency": {"limit": THREADS},
            "data_copy_concurrency": {"limit": THREADS},
            "cache_pool": {"total_bytes_limit": 0},
        }
    )


def _open(
    root: Storage, entry: TensorEntry, grid: Grid | None, context: ts.Context, known: bool = True
) -> ts.TensorStore:
    """The array of a tensor. ``known``: by what we know of it, without looking at its zarr.json."""
    spec: dict[str, Any] = {
        "driver": "zarr3",
        "open": True,
        "kvstore": root.kvstore(encode_key(entry.key)),
    }
    if known:
        shape = entry.meta.shape
        document = json.loads(array_document(shape, entry.meta.dtype, grid_of(shape, grid)))
        # Chunks of zeros are written too: a missing file is a loss that we want to notice.
        spec |= {"metadata": document, "assume_metadata": True, "store_data_equal_to_fill_value": True}
    store = ts.open(spec, context=context).result()
    if store.shape != entry.meta.shape or store.dtype.name != entry.meta.dtype:
        raise ValueError(f"its zarr.json tells of {store.dtype.name} {store.shape}")
    return store


def _latest(make: _Open) -> _Open:
    """``make``, keeping the handle that was made last: rows of one tensor stand together."""
    kept: list[tuple[TensorEntry, ts.TensorStore]] = []

    def opened(entry: TensorEntry, grid: Grid | None) -> ts.TensorStore:
        if not kept or kept[0][0] != entry:
            kept[:] = [(entry, make(entry, grid))]
        return kept[0][1]

    return opened


def _share(count: int, work: Callable[[Iterator[int]], None]) -> None:
    """Let THREADS threads take the numbers below ``count`` from one iterator; the first error stops all."""
    numbers = iter(range(count))  # taking from it is one step of the interpreter
    if count < 2:
        work(numbers)
        return

    def until_error() -> None:
        try:
            work(numbers)
        except BaseException:
            for _ in numbers:
                pass
            raise

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(until_error) for _ in range(THREADS)]:
            future.result()
