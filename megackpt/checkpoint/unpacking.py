"""Decode a manifest from the untrusted bytes of an index: check sizes before allocating."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from megackpt.checkpoint.columns import Layout, damaged, unpack
from megackpt.errors import BackendError
from megackpt.planning.box import Boxes, Int64
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    DIGEST_SIZE,
    ITEMSIZE,
    LARGEST,
    MOST_AXES,
    Chunks,
    Manifest,
    TensorEntry,
    TensorMeta,
    size_problem,
)
from megackpt.storage import unsafe_names

SmallFiles = Mapping[str, tuple[int, bytes]]
"""Name of a small file -> its size in bytes and its xxh3-128."""
Columns = dict[str, Int64]
Dims = tuple[int, ...]

_OF_TENSORS = ("key_chars", "meta", "grid", "count")
_OF_METAS = ("meta_dtype", "meta_ndim")
_OF_CHUNKS = ("file", "writer", "start", "length")
_PER_AXIS = ("pieces", "rest", "place", "shift")
_NUMBERS = 1 << 31  # tensors, files and ranks are numbered in 32 bits
_ROOM = 16  # chunks x dimensions that one byte of index may describe


def column_names(axes: int) -> list[str]:
    """The columns of an index, in the order of their bytes.

    ``axes``: the most dimensions of a tensor in it.
    """
    per_axis = [f"{name}{axis}" for axis in range(axes) for name in _PER_AXIS]
    tables = (
        *_OF_TENSORS,
        *_OF_METAS,
        "meta_dim",
        "grid_ndim",
        "grid_dim",
        "file_chars",
    )
    return [*tables, *_OF_CHUNKS, *per_axis]


@dataclass(frozen=True)
class Head:
    """The JSON at the beginning of an index. Its fields are checked without the body."""

    save_id: str
    backend: tuple[str, int]
    encoding: str
    small: dict[str, tuple[int, bytes]]
    dtypes: list[str]
    axes: int
    derived: bool
    """Boxes determine the lengths of tensor chunks. The column has only those of objects."""
    text: tuple[int, int]  # bytes of all keys, bytes of all file names
    layouts: dict[str, Layout]
    """All columns in the order of their bytes, with optional ones that are not known."""


def parse_head(text: bytes) -> Head:
    """Parse the head. CorruptCheckpoint if a field is missing or of a wrong type."""
    try:
        head = json.loads(text)
        axes = _natural(head["axes"], MOST_AXES + 1)
        columns = head["columns"]
        name, version = head["backend"]
        keys, files = head["text"]
        parsed = Head(
            _string(head["save_id"]),
            (_string(name), _natural(version)),
            _string(head["encoding"]),
            {
                _string(n): (_natural(size), bytes.fromhex(hexa))
                for n, (size, hexa) in head["small"].items()
            },
            [_string(d) for d in head["dtypes"]],
            axes,
            head["derived"] is True,
            (_natural(keys), _natural(files)),
            {_string(n): Layout.parse(fields) for n, fields in columns.items()},
        )
        _check_columns(columns, axes, head.get("optional", []))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        damaged(f"its head makes no sense ({type(error).__name__}: {error})")
    _check_head(parsed)
    return parsed


def _check_columns(found: Iterable[str], axes: int, optional: Iterable[str]) -> None:
    """A newer release may add columns. Those that it names as optional can be ignored."""
    known = set(column_names(MOST_AXES))
    if unknown := set(found).difference(known, optional):
        raise BackendError(
            f"a newer release of megackpt wrote this index: it has the column "
            f"{min(unknown)!r}, which this release does not know. Update megackpt"
        )
    if known.intersection(found) != set(column_names(axes)):
        damaged("a column is missing, or of an axis that no tensor has")


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _natural(value: Any, end: int = LARGEST) -> int:
    if type(value) is not int or not 0 <= value < end:
        raise ValueError(f"{value!r} is not an integer from 0 to {end - 1}")
    return value


def _check_head(head: Head) -> None:
    if head.encoding not in ("raw", "native") or (
        head.encoding == "raw" and not head.derived
    ):
        damaged(f"unknown encoding {head.encoding!r}")
    if unknown := [d for d in head.dtypes if d not in ITEMSIZE]:
        damaged(f"unknown dtypes {unknown}")
    if any(len(checksum) != DIGEST_SIZE for _, checksum in head.small.values()):
        damaged("a digest of a small file has the wrong length")
    _check_names(list(head.small))


def _check_names(names: Sequence[str]) -> None:
    if unsafe := unsafe_names(names):
        damaged(
            f"it names {unsafe[0]!r}, which is no name of a file inside a checkpoint"
        )
    if len(set(names)) != len(names):
        damaged("it names a file twice")


def decode_body(head: Head, body: memoryview) -> Manifest:
    """The manifest. CorruptCheckpoint if the body contradicts the head, or itself."""
    digests_at = sum(layout.nbytes for layout in head.layouts.values()) + sum(head.text)
    if digests_at > len(body) or (len(body) - digests_at) % DIGEST_SIZE:
        damaged(
            f"its length is {len(body)}, its head describes {digests_at} bytes and digests"
        )
    _check_counts(head, len(body))
    columns, text = _unpacked(head, body)
    if any(
        column.size and column.min() < 0
        for n, column in columns.items()
        if n not in ("file", "writer")
    ):
        damaged("a number is negative")
    metas = _metas(head, columns)
    keys = _split(text[: head.text[0]], columns["key_chars"])
    files = _split(text[head.text[0] :], columns["file_chars"])
    _check_names(files)
    if len(set(keys)) != len(keys):
        damaged("a key occurs twice")
    _check_below(columns["meta"], len(metas))
    digests = np.frombuffer(body, np.uint8, offset=digests_at).reshape(-1, DIGEST_SIZE)
    entries = zip(keys, map(metas.__getitem__, columns["meta"].tolist()), strict=True)
    return Manifest(
        tuple(
            map(partial(tuple.__new__, TensorEntry), entries)
        ),  # as its own constructor does, without Python
        _grids(columns),
        _chunks(head, columns, len(files), digests),
        tuple(files),
        head.encoding,
        head.backend,
        head.save_id,
    )


def _check_counts(head: Head, size: int) -> None:
    """Bound every count by the length of the index.

    Rows may take no bytes in a column, so a small index could otherwise request much memory.
    """
    counts = {name: layout.count for name, layout in head.layouts.items()}
    tensors, metas, grids = (
        counts["key_chars"],
        counts["meta_dtype"],
        counts["grid_ndim"],
    )
    chunks = counts["file"]
    of_chunks = [
        *_OF_CHUNKS,
        *(f"{name}{axis}" for axis in range(head.axes) for name in _PER_AXIS),
    ]
    same = (
        all(counts[name] == tensors for name in _OF_TENSORS)
        and all(counts[name] == metas for name in _OF_METAS)
        and all(counts[name] == chunks for name in of_chunks)
    )
    bounded = (
        tensors <= min(head.text[0] + 1, _NUMBERS)
        and counts["file_chars"] <= min(head.text[1], _NUMBERS)
        and max(metas, grids) <= tensors
        and counts["meta_dim"] <= head.axes * metas
        and counts["grid_dim"] <= head.axes * grids
        # Each tensor may have one chunk without bytes, and so without digests.
        and chunks * max(head.axes, 1) <= _ROOM * size + head.axes * tensors
    )
    if not same or not bounded:
        damaged("its counts do not fit together, or not its length")


def _unpacked(head: Head, body: memoryview) -> tuple[Columns, memoryview]:
    columns: Columns = {}
    known = set(column_names(head.axes))
    at = 0
    for name, layout in head.layouts.items():
        if name in known:
            columns[name] = unpack(layout, body[at : at + layout.nbytes])
        at += layout.nbytes
    return columns, body[at : at + sum(head.text)]


def _check_below(column: Int64, end: int) -> None:
    if column.size and column.max() >= end:
        damaged("a number points to nothing")


def _check_sum(column: Int64, total: int) -> None:
    # In floating point, where nothing overflows; exact for every total that can be right.
    if column.sum(dtype=np.float64) != total:
        damaged(f"numbers should add up to {total} and do not")


def _split(data: memoryview, lengths: Int64) -> list[str]:
    try:
        text = bytes(data).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        damaged(f"its text is not UTF-8 ({error})")
    _check_sum(lengths, len(text))
    return [text[a:b] for a, b in pairwise(accumulate(lengths.tolist(), initial=0))]


def _tuples(ndims: Int64, dims: Int64, axes: int) -> list[Dims]:
    _check_below(ndims, axes + 1)
    _check_sum(ndims, len(dims))
    values = dims.tolist()
    return [
        tuple(values[a:b]) for a, b in pairwise(accumulate(ndims.tolist(), initial=0))
    ]


def _metas(head: Head, columns: Columns) -> list[TensorMeta]:
    _check_below(columns["meta_dtype"], len(head.dtypes))
    shapes = _tuples(columns["meta_ndim"], columns["meta_dim"], head.axes)
    dtypes = [head.dtypes[i] for i in columns["meta_dtype"].tolist()]
    for shape, dtype in zip(shapes, dtypes, strict=True):
        if problem := size_problem(shape, dtype):
            damaged(f"of a tensor, {problem}")
    return list(map(TensorMeta, shapes, dtypes))


def _grids(columns: Columns) -> tuple[Dims | None, ...]:
    ndims = columns["grid_ndim"]
    grids: list[Dims | None] = [None, *_tuples(ndims, columns["grid_dim"], MOST_AXES)]
    _check_below(columns["grid"], len(grids))
    numbers = columns["grid"]
    gridded = numbers > 0
    if (
        ndims[numbers[gridded] - 1] != columns["meta_ndim"][columns["meta"][gridded]]
    ).any():
        damaged("a grid has other dimensions than its tensor")
    return tuple(map(grids.__getitem__, numbers.tolist()))


def _chunks(head: Head, columns: Columns, files: int, digests: Any) -> Chunks:
    counts, file, length = columns["count"], columns["file"], columns["length"]
    _check_sum(counts, len(file))
    _check_below(file, files)
    _check_below(columns["writer"], _NUMBERS)
    meta = np.repeat(columns["meta"], counts)
    boxes = _boxes(head, columns, meta)
    sizes = np.array([ITEMSIZE[d] for d in head.dtypes], np.int64)
    itemsize = (
        sizes[columns["meta_dtype"]][meta] if len(meta) else np.zeros(0, np.int64)
    )
    _check_objects(boxes, itemsize)
    if head.derived:
        if length[itemsize > 0].any():
            damaged("a chunk is longer than its box")
        length = length + boxes.volume * itemsize
    if head.encoding == "raw" and (file[length > 0] < 0).any():
        damaged("a chunk is in no file")
    if len(digests):
        _check_sum(-(-length // DIGEST_BLOCK), len(digests))
    tensor = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return Chunks(
        tensor,
        boxes,
        columns["writer"].astype(np.int32),
        file.astype(np.int32),
        columns["start"],
        length,
        digests,
    )


def _check_objects(boxes: Boxes, itemsize: Int64) -> None:
    objects = np.flatnonzero(itemsize == 0)
    if (boxes.take(objects).volume != 1).any():
        damaged("an object has a box of several elements")


def _boxes(head: Head, columns: Columns, meta: Int64) -> Boxes:
    """The boxes of all chunks, each within its tensor. Axes that a tensor lacks are 0:1."""
    boxes = Boxes(
        np.empty((len(meta), head.axes), np.int64),
        np.empty((len(meta), head.axes), np.int64),
    )
    ndims, dims = columns["meta_ndim"], columns["meta_dim"]
    first = np.cumsum(ndims) - ndims
    for axis in range(head.axes):
        own = ndims > axis
        whole = np.ones(len(ndims), np.int64)
        whole[own] = dims[first[own] + axis]
        fits = _fill_axis(boxes, columns, axis, whole[meta])
        if not fits or (boxes.shape[~own[meta], axis] != 1).any():
            damaged("a chunk lies outside of its tensor")
    return boxes


def _fill_axis(boxes: Boxes, columns: Columns, axis: int, whole: Int64) -> bool:
    """Fill in offsets and extents along one axis; False if any leaves ``[0, whole]``.

    No step can overflow.
    """
    pieces, rest, place, shift = (columns[f"{name}{axis}"] for name in _PER_AXIS)
    if (rest > whole).any():
        return False
    shape = np.where(pieces > 0, (whole - rest) // np.maximum(pieces, 1), 0)
    if (place > whole // np.maximum(shape, 1)).any():
        return False
    offset = place * np.maximum(shape, 1)
    if (shift > whole - shape - offset).any():
        return False
    offset += shift
    boxes.shape[:, axis], boxes.offset[:, axis] = shape, offset
    return True
