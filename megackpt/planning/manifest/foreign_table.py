"""A manifest made of a format's own table of contents, with every value checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Box
from megackpt.planning.manifest.chunks import Location, Manifest
from megackpt.planning.manifest.tensors import ITEMSIZE, TensorEntry

_TOO_MUCH = 1 << 63
_MOST_DIMENSIONS = 64  # torch's and numpy's limit


def listed(
    tensors: Iterable[TensorEntry],
    chunks: Iterable[tuple[int, Box, Location]],
    backend: tuple[str, int],
) -> Manifest:
    """The manifest of a table of contents, without digests.

    ``chunks`` are for each chunk its tensor's number, its box, and the location of its raw
    bytes. Raises CorruptCheckpoint for impossible values, types included: keys twice, unknown
    dtypes, shapes beyond 2^63 bytes, boxes beyond their tensor, lengths that differ from the
    box's.
    """
    entries = tuple(tensors)
    _check_entries(entries)
    rows = []
    for number, box, location in chunks:
        _check_chunk(entries, number, box, location)
        rows.append((number, box, location.file, location.start, location.length))
    return replace(Manifest.of(entries, rows), backend=backend)


def _check_entries(entries: Sequence[TensorEntry]) -> None:
    seen: set[object] = set()
    for key, (shape, dtype) in entries:
        if not _is_text(key) or key in seen:
            raise CorruptCheckpoint(
                f"the table of contents names {key!r}, which is not a key or is listed twice"
            )
        seen.add(key)
        if not _is_text(dtype) or dtype not in ITEMSIZE:
            raise CorruptCheckpoint(
                f"the table of contents gives {key!r} the dtype {dtype!r}"
            )
        counts = _are_counts(shape) and len(shape) <= _MOST_DIMENSIONS
        if (
            not counts
            or math.prod(max(n, 1) for n in shape) * max(ITEMSIZE[dtype], 1)
            >= _TOO_MUCH
        ):
            raise CorruptCheckpoint(
                f"the table of contents gives {key!r} the shape {shape!r}"
            )


def _check_chunk(
    entries: Sequence[TensorEntry], number: int, box: Box, location: Location
) -> None:
    if not _are_counts((number, location.start, location.length)) or number >= len(
        entries
    ):
        raise CorruptCheckpoint(
            f"the table of contents has {location} of tensor {number!r} of {len(entries)}"
        )
    key, meta = entries[number]
    inside = _are_counts((*box.offset, *box.shape)) and len(box.shape) == len(
        meta.shape
    )
    if not inside or any(end > n for end, n in zip(box.stop, meta.shape, strict=True)):
        raise CorruptCheckpoint(
            f"the table of contents has {box!r} of {key!r}, which is of {meta.shape}"
        )
    whole = (
        box.volume == 1
        if meta.is_object
        else box.volume * meta.itemsize == location.length
    )
    if (
        not whole
        or not _is_text(location.file)
        or location.start + location.length >= _TOO_MUCH
    ):
        raise CorruptCheckpoint(
            f"the table of contents has {key!r} {box} of {meta.dtype} in {location}"
        )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_counts(numbers: Iterable[object]) -> bool:
    return all(type(n) is int and n >= 0 for n in numbers)
