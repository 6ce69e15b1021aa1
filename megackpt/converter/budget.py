"""The memory limit of a conversion, and the number of workers that fit into it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import numpy as np

from megackpt import limits
from megackpt.errors import BackendError
from megackpt.planning.box import Int64
from megackpt.planning.manifest import Manifest, ShardId, itemsizes

# A worker holds the cells that it reads and writes at the same time, and what its threads need.
_CELLS = 4
# Formats with a grid and casts copy each cell once more.
_CELLS_COPYING = 6
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def parse_size(size: str | int) -> int:
    """Return bytes: of a number, or of a text such as "64MiB", "1.5 GB" or "512k".

    Raises ValueError for anything else.
    """
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([kmgt]?i?)b?\s*", size.lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{size!r} is not a size in bytes (as 64MiB, 1GB or 1000000)")
    return int(float(match[1]) * _UNITS[match[2]])


def worker_count(
    limit: int, wanted: int | None, tasks: int, total: int, each: int
) -> int:
    """Return how many workers to use: ``wanted``, or one a processor, as far as they fit.

    Args:
        limit: the memory limit in bytes.
        total: bytes to write.
        each: the most that one worker takes, from ``worker_bytes``.
    """
    if wanted is None:
        wanted = len(os.sched_getaffinity(0))
        if total <= limits.CONVERT_SINGLE_PROCESS_BYTES:
            wanted = 1
    return max(1, min(wanted, tasks, limit // each))


def worker_bytes(
    manifest: Manifest,
    tensors: Sequence[int],
    decoded: Int64,
    copying: bool,
    limit: int,
) -> int:
    """Return the most memory that one worker takes to convert these tensors of a manifest.

    Args:
        tensors: their numbers.
        decoded: the result of ``Backend.decoded_bytes`` for the manifest.
        copying: cells are copied, for a grid or a cast.
        limit: the memory limit in bytes.

    Raises BackendError naming the largest object or encoded chunk if it does not fit.
    """
    cell = limits.CONVERT_CELL_BYTES
    base = cell * _CELLS
    if copying:
        base = cell * _CELLS_COPYING
    if limit < base:
        raise BackendError(
            f"this conversion takes at least max_memory={_mebibytes(base)}"
        )
    chunks = manifest.chunks
    is_object = itemsizes(manifest.tensors) == 0
    held = np.where(is_object[chunks.tensor], chunks.length, decoded)
    held *= np.isin(chunks.tensor, tensors)
    # A chunk is read and written at the same time, so it counts twice; the base has one cell of it.
    most = base + max(0, 2 * int(held.max(initial=0)) - cell)
    if most > limit:
        row = int(np.argmax(held))
        number = chunks.tensor[row]
        key, meta = manifest.tensors[number]
        shard = ShardId(key, chunks.boxes.row(row, len(meta.shape)))
        kind = "a chunk that is decoded whole, in memory"
        if is_object[number]:
            kind = "an object"
        raise BackendError(
            f"{shard} is {kind} of {held[row]} bytes: more than max_memory={_mebibytes(limit)} "
            f"allows. Give {_mebibytes(most)}"
        )
    return most


def _mebibytes(count: int) -> str:
    return f"{-(-count // (1 << 20))}MiB"
