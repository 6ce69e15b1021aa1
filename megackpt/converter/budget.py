"""How much memory a conversion may take, and how many workers that allows."""

from __future__ import annotations

import os
import re

import numpy as np

from megackpt.converter.cutting import CELL
from megackpt.errors import BackendError
from megackpt.planning.box import Int64
from megackpt.planning.manifest import Manifest, ShardId

DEFAULT = 512 << 20
ALONE = 512 << 20
"""Bytes up to which a conversion is not worth the start of other processes."""
_LEAST = (
    4 * CELL
)  # cells that are read and written at the same time, and what threads need
_COPYING = (
    6 * CELL
)  # where cells are made up anew in memory: by formats with a grid, and by casts
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", 1)}
_TOLD = 8


def parse_size(given: str | int) -> int:
    """Bytes: a number, or text like "64MiB", "1.5 GB", "512k". ValueError for anything else."""
    if isinstance(given, int):
        return given
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([kmgt]?i?)b?\s*", given.lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{given!r} is no number of bytes (as 64MiB, 1GB or 1000000)")
    return int(float(match[1]) * _UNITS[match[2]])


def size_text(count: int) -> str:
    """At least so many bytes, in MiB."""
    return f"{-(-count // (1 << 20))}MiB"


def workers_within(
    cap: int, asked: int | None, tasks: int, total: int, each: int
) -> int:
    """How many workers: as many as are asked for (else by processors), but no more than fit into the cap.

    ``total``: bytes to be written; ``each``: what one worker may take (``worker_bytes``).
    """
    if asked is None:
        asked = 1 if total <= ALONE else len(os.sched_getaffinity(0))
    return max(1, min(asked, tasks, cap // each))


def worker_bytes(manifest: Manifest, decoded: Int64, copying: bool, cap: int) -> int:
    """What one worker may take, at the most, to write what is in this manifest. ``copying``: cells are made up anew.

    Raises BackendError, naming them, where objects or chunks that are decoded whole do not fit into the cap.
    """
    base = _COPYING if copying else _LEAST
    if cap < base:
        raise BackendError(
            f"this conversion takes at least max_memory={size_text(base)}"
        )
    chunks = manifest.chunks
    is_object = np.array(
        [entry.meta.is_object for entry in manifest.tensors], np.bool_
    )[chunks.tensor]
    held = np.where(is_object, chunks.length, decoded)
    beyond = np.maximum(2 * held - CELL, 0)  # up to a cell is reckoned with
    most = int(beyond.max(initial=0))
    if base + most > cap:
        told = []
        for row in np.flatnonzero(base + beyond > cap)[:_TOLD].tolist():
            key, meta = manifest.tensors[chunks.tensor[row]]
            shard = ShardId(key, chunks.boxes.row(row, len(meta.shape)))
            kind = "an object" if is_object[row] else "a chunk that is decoded whole,"
            told.append(f"{shard} is {kind} of {held[row]} bytes")
        raise BackendError(
            f"{'; '.join(told)}: more than max_memory={size_text(cap)} allows. Give {size_text(base + most)}"
        )
    return base + most
