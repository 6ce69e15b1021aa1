"""Decode a manifest from the untrusted bytes of an index: check sizes before allocating."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
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
    TensorValues,
    size_problem,
)
from megackpt.storage import unsafe_names

SmallFiles = Mapping[str, tuple[int, bytes]]
"""Name of a small file -> its size in bytes and its xxh3-128."""
Columns = dict[str, Int64]
Dims = tuple[int, ...]

_OF_TENSORS = ("key_chars", "meta", "grid", "count")
_OF_METAS = ("meta_dtype", "meta_ndim")
_TABLES = (
    *_OF_TENSORS,
    *_OF_METAS,
    "meta_dim",
    "grid_ndim",
    "grid_dim",
    "file_chars",
)
_OF_CHUNKS = ("file", "writer", "start", "length")
_PER_AXIS = ("pieces", "rest", "place", "shift")
OPTIONAL = ("nonfinite", "largest")
"""Columns of tensors that an index may lack."""
_NUMBERS = 1 << 31  # tensors, files and ranks are numbered in 32 bits
_INFINITY = 0x7F800000  # the bits of a float32
_ROOM = 16  # chunks x dimensions that one byte of index may describe


def column_names(axes: int) -> list[str]:
    """The columns of an index, in the order of their bytes.

    ``axes``: the most dimensions of a tensor in it.
    """
    per_axis = [f"{name}{axis}" for axis in range(axes) for name in _PER_AXIS]
    return [*_TABLES, *_OF_CHUNKS, *per_axis]


@dataclass(frozen=True)
class Head:
    """The JSON at the beginning of an index. Its fields are checked without the body."""

    save_id: str
    backend: tuple[str, int]
    encoding: str
    small: dict[str, tuple[int, bytes]]
    dtypes: tuple[str, ...]
    axes: int
    derived: bool
    """Boxes determine the lengths of tensor chunks. The column has only those of objects."""
    text: tuple[int, int]  # bytes of all keys, bytes of all file names
    layouts: dict[str, Layout]
    """All columns in the order of their bytes, with optional ones that are not known."""
    differing: tuple[str, ...]


def parse_head(text: bytes) -> Head:
    """Parse the head. CorruptCheckpoint if a field is missing or of a wrong type."""
    try:
        head = json.loads(text)
        axes = _natural(head["axes"], MOST_AXES + 1)
        name, version = head["backend"]
        keys, files = head["text"]
        small = {}
        for file, (size, checksum) in head["small"].items():
            small[file] = _natural(size), bytes.fromhex(checksum)
            if len(small[file][1]) != DIGEST_SIZE:
                damaged("a digest of a small file has the wrong length")
        layouts = {}
        for column, fields in head["columns"].items():
            layouts[column] = Layout.parse(fields)
        # A newer release may add columns. Those that it names as optional can be ignored.
        known = set(column_names(MOST_AXES))
        unknown = layouts.keys() - known - set(OPTIONAL)
        unknown -= set(head.get("optional", []))
        if unknown:
            raise BackendError(
                f"a newer release of megackpt wrote this index: it has the column "
                f"{min(unknown)!r}, which this release does not know. Update megackpt"
            )
        if known.intersection(layouts) != set(column_names(axes)):
            damaged("a column is missing, or of an axis that no tensor has")
        parsed = Head(
            _string(head["save_id"]),
            (_string(name), _natural(version)),
            _string(head["encoding"]),
            small,
            _strings(head["dtypes"]),
            axes,
            head["derived"] is True,
            (_natural(keys), _natural(files)),
            layouts,
            _strings(head.get("differing", [])),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        damaged(f"its head makes no sense ({type(error).__name__}: {error})")
    if parsed.encoding != "native" and not (
        parsed.encoding == "raw" and parsed.derived
    ):
        damaged(f"unknown encoding {parsed.encoding!r}")
    if unknown := set(parsed.dtypes).difference(ITEMSIZE):
        damaged(f"unknown dtypes {sorted(unknown)}")
    _check_names([*small])
    return parsed


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    return tuple(map(_string, value))


def _natural(value: Any, end: int = LARGEST) -> int:
    if type(value) is not int or not 0 <= value < end:
        raise ValueError(f"{value!r} is not an integer from 0 to {end - 1}")
    return value


def _check_names(names: Sequence[str]) -> None:
    if unsafe := unsafe_names(names):
        damaged(
            f"it names {unsafe[0]!r}, which is no name of a file inside a checkpoint"
        )
    if len(set(names)) != len(names):
        damaged("it names a file twice")


def decode_body(head: Head, body: memoryview) -> Manifest:
    """The manifest. CorruptCheckpoint if the body contradicts the head, or itself."""
    text_at = sum(layout.nbytes for layout in head.layouts.values())
    files_at = text_at + head.text[0]
    digests_at = files_at + head.text[1]
    if digests_at > len(body) or (len(body) - digests_at) % DIGEST_SIZE:
        damaged(
            f"its length is {len(body)}, its head describes {digests_at} bytes and digests"
        )
    _check_counts(head, len(body))
    columns = _unpacked(head, body)
    _check_below(columns["meta_dtype"], len(head.dtypes))
    shapes = _tuples(columns["meta_ndim"], columns["meta_dim"], head.axes)
    metas = []
    for shape, number in zip(shapes, columns["meta_dtype"].tolist(), strict=True):
        dtype = head.dtypes[number]
        if problem := size_problem(shape, dtype):
            damaged(f"of a tensor, {problem}")
        metas.append(TensorMeta(shape, dtype))
    keys = _split(body[text_at:files_at], columns["key_chars"])
    files = _split(body[files_at:digests_at], columns["file_chars"])
    _check_names(files)
    if len(set(keys)) != len(keys):
        damaged("a key occurs twice")
    if not set(head.differing) <= set(keys):
        damaged("replicas of a tensor that it does not have differed")
    _check_below(columns["meta"], len(metas))
    digests = np.frombuffer(body, np.uint8, offset=digests_at).reshape(-1, DIGEST_SIZE)
    entries = zip(keys, map(metas.__getitem__, columns["meta"].tolist()), strict=True)
    return Manifest(
        # As TensorEntry's own constructor does, without Python.
        tuple(map(partial(tuple.__new__, TensorEntry), entries)),
        _grids(columns),
        _chunks(head, columns, metas, len(files), digests),
        tuple(files),
        head.encoding,
        head.backend,
        head.save_id,
        values=_values(columns, metas),
        differing=head.differing,
    )


def _values(columns: Columns, metas: list[TensorMeta]) -> TensorValues | None:
    if not columns.keys() >= set(OPTIONAL):
        return None
    nonfinite, bits = (columns[name] for name in OPTIONAL)
    elements = np.array([math.prod(meta.shape) for meta in metas], np.int64)
    if (nonfinite > elements[columns["meta"]]).any():
        damaged("a tensor has fewer elements than are noted as NaN or infinite")
    _check_below(bits, _INFINITY + 1)
    largest = np.maximum(bits, 0).astype("<i4").view("<f4")
    return TensorValues(nonfinite, np.where(bits < 0, np.float32(-1), largest))


def _check_counts(head: Head, size: int) -> None:
    """Bound every count by the length of the index.

    Rows may take no bytes in a column, so a small index could otherwise request much memory.
    """
    counts = {name: layout.count for name, layout in head.layouts.items()}
    tensors, metas = counts["key_chars"], counts["meta_dtype"]
    grids, chunks = counts["grid_ndim"], counts["file"]
    of_chunks = column_names(head.axes)[len(_TABLES) :]
    of_tensors = [*_OF_TENSORS, *(name for name in OPTIONAL if name in counts)]
    for same in (of_tensors, _OF_METAS, of_chunks):
        if len({counts[name] for name in same}) > 1:
            damaged("its counts do not fit together")
    bounded = (
        tensors <= min(head.text[0] + 1, _NUMBERS)
        and counts["file_chars"] <= min(head.text[1], _NUMBERS)
        and max(metas, grids) <= tensors
        and counts["meta_dim"] <= head.axes * metas
        and counts["grid_dim"] <= head.axes * grids
        # Each tensor may have one chunk without bytes, and so without digests.
        and chunks * max(head.axes, 1) <= _ROOM * size + head.axes * tensors
    )
    if not bounded:
        damaged("its counts do not fit its length")


def _unpacked(head: Head, body: memoryview) -> Columns:
    columns: Columns = {}
    known = {*column_names(head.axes), *OPTIONAL}
    at = 0
    for name, layout in head.layouts.items():
        if name in known:
            column = unpack(layout, body[at : at + layout.nbytes])
            may_be_unknown = name in ("file", "writer", *OPTIONAL)
            if not may_be_unknown and column.min(initial=0) < 0:
                damaged("a number is negative")
            columns[name] = column
        at += layout.nbytes
    return columns


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


def _chunks(
    head: Head,
    columns: Columns,
    metas: list[TensorMeta],
    files: int,
    digests: Any,
) -> Chunks:
    counts, file, length = columns["count"], columns["file"], columns["length"]
    _check_sum(counts, len(file))
    _check_below(file, files)
    _check_below(columns["writer"], _NUMBERS)
    meta = np.repeat(columns["meta"], counts)
    boxes = _boxes(head, columns, metas, meta)
    itemsize = _one_or_all(np.array([m.itemsize for m in metas], np.int64), meta)
    volume = boxes.volume
    if ((itemsize == 0) & (volume != 1)).any():
        damaged("an object has a box of several elements")
    if head.derived:
        if ((itemsize > 0) & (length != 0)).any():
            damaged("a chunk is longer than its box")
        length = length + volume * itemsize
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


def _boxes(head: Head, columns: Columns, metas: list[TensorMeta], meta: Int64) -> Boxes:
    """The boxes of all chunks, each within its tensor. Axes that a tensor lacks are 0:1."""
    sizes = len(meta), head.axes
    boxes = Boxes(np.empty(sizes, np.int64), np.empty(sizes, np.int64))
    wholes = np.ones((head.axes, len(metas)), np.int64)
    lacks = np.ones(wholes.shape, np.bool_)
    for number, (shape, _) in enumerate(metas):
        wholes[: len(shape), number] = shape
        lacks[: len(shape), number] = False
    for axis in range(head.axes):
        found = [columns[f"{name}{axis}"] for name in _PER_AXIS]
        # A column of equal numbers is a view with a stride of 0: one number is enough.
        pieces, rest, place, shift = (
            column[:1] if column.strides == (0,) else column for column in found
        )
        whole = _one_or_all(wholes[axis], meta)
        extent = np.where(pieces > 0, (whole - rest) // np.maximum(pieces, 1), 0)
        step = np.maximum(extent, 1)
        # Where the product overflows, ``place`` is too large.
        fits = (rest <= whole) & (place <= whole // step)
        offset = place * step
        fits = fits & (shift <= whole - extent - offset)
        if lacks[axis].any():
            fits = fits & ((extent == 1) | ~lacks[axis][meta])
        if not fits.all():
            damaged("a chunk lies outside of its tensor")
        boxes.shape[:, axis] = extent
        boxes.offset[:, axis] = offset + shift
    return boxes


def _one_or_all(values: Int64, numbers: Int64) -> Int64:
    """``values[numbers]``, or one value if all are equal."""
    if (values == values[:1]).all():
        return values[:1]
    return values[numbers]
