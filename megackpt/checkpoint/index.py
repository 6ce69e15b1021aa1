"""``megackpt.index``: the manifest of a checkpoint with its digests. Columnar, pickle-free.

The bytes, all integers little-endian::

    8   magic "megackpt"
    4   version (1)
    4   length of the head
    .   head: JSON in UTF-8
    .   columns: integers, in the order of the head, each by its ``columns.Layout``
    .   text of all keys, then of all file names, UTF-8 without separators
    .   digests: 16 bytes for each block of at most 1 MiB of each chunk, in the order of the
        chunks; or no bytes
    16  xxh3-128 of all that precedes

Chunks are sorted by tensor, so a count per tensor replaces a number per chunk. A shape is stored
as the quotient of the tensor's shape by it, and the remainder. An offset is stored as its quotient
by the shape of the chunk, and the remainder. In regular grids the quotients are small, and the
remainders are all zero and take no bytes.

Optional: two columns of tensors, the elements that are NaN or infinite, and the bits of the
largest magnitude of the finite ones as float32 (-1: not known); and the fields ``differing`` of the
head, keys of tensors whose replicas differed, ``milliseconds`` from the
call of the save to its commit (0: not known), and ``subclasses``, records of tensors that wrap
others, each with the keys that it is for.

Every version begins with the magic and the version, and ends with the digest. A later release may
add fields to the head, and columns that its field ``optional`` names: readers ignore unknown ones.
A reader refuses an unknown column that is not optional, and a newer version.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, NoReturn

import numpy as np

from megackpt import gc_pause
from megackpt.errors import (
    BackendError,
    CheckpointingException,
    CorruptCheckpoint,
    SaveInProgress,
)
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
    inner_keys,
    inner_names,
    size_problem,
)
from megackpt.storage import Storage, digest, read_dense, unsafe_names

INDEX = "megackpt.index"
VERSION = 1

MAGIC = b"megackpt"
_START = struct.Struct("<8sII")
START = _START.size
IN_PLACE = _START.pack(MAGIC, 0, 0)
"""Stands in place of an index while ``megackpt.deltas.apply`` changes the files in place."""


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
_WIDTHS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_ROW, _PATCH = np.dtype("<u4"), np.dtype("<i8")
_SAMPLE = 1024
_NUMBERS = 1 << 31  # tensors, files and ranks are numbered in 32 bits
_INFINITY = 0x7F800000  # the bits of a float32
_DIGITS = 12  # of the milliseconds that a save takes
_ROOM = 16  # chunks x dimensions that one byte of index may describe


def column_names(axes: int) -> list[str]:
    """The columns of an index, in the order of their bytes.

    ``axes``: the most dimensions of a tensor in it.
    """
    per_axis = [f"{name}{axis}" for axis in range(axes) for name in _PER_AXIS]
    return [*_TABLES, *_OF_CHUNKS, *per_axis]


def damaged(what: str) -> NoReturn:
    raise CorruptCheckpoint(f"the index is damaged: {what}")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a column of ``count`` numbers is stored.

    Row i is ``base + step * small[i]``. ``small`` are unsigned integers of ``width`` bytes; if
    ``width`` is 0, all are 0. ``patches`` rows that differ follow: first their row numbers
    (uint32), then their values (int64).
    """

    count: int
    width: int
    base: int
    step: int
    patches: int

    @property
    def nbytes(self) -> int:
        patch = _ROW.itemsize + _PATCH.itemsize
        return self.count * self.width + self.patches * patch

    @classmethod
    def parse(cls, fields: Any) -> Layout:
        """The layout in the head of an index. CorruptCheckpoint if it is invalid."""
        sane = isinstance(fields, list) and len(fields) == 5
        if not sane or {*map(type, fields)} != {int}:
            damaged(f"{fields!r} describes no column")
        layout = cls(*fields)
        sane = (
            0 <= layout.count < LARGEST
            and (layout.width == 0 or layout.width in _WIDTHS)
            and -1 <= layout.base < LARGEST
            and 1 <= layout.step < LARGEST
            and 0 <= layout.patches <= layout.count
        )
        if not sane:
            damaged(f"{fields!r} describes no column")
        return layout


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
    """Boxes determine the lengths of tensor chunks. The column has only the lengths of objects."""
    text: tuple[int, int]  # bytes of all keys, bytes of all file names
    layouts: dict[str, Layout]
    """All columns in the order of their bytes, with optional ones that are not known."""
    differing: tuple[str, ...]
    milliseconds: int
    subclasses: tuple[tuple[str, str], ...]


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
        # A newer release may add columns. Columns that it names as optional can be ignored.
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
            _natural(head.get("milliseconds", 0)),
            _records(head["subclasses"]) if "subclasses" in head else (),
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


def _records(value: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Key -> record of a tensor that wraps others. Raises an error if a field is missing."""
    for text in value:
        record = json.loads(text)
        _string(record["class"])
        _strings(record["inner"])
        record["context"].items()
        tuple(map(_natural, record["shape"]))
    return tuple((key, text) for text in value for key in _strings(value[text]))


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
    columns: Columns = {}
    known = {*column_names(head.axes), *OPTIONAL}
    at = 0
    for name, layout in head.layouts.items():
        if name in known:
            column = columns[name] = unpack(layout, body[at : at + layout.nbytes])
            may_be_unknown = name in ("file", "writer", *OPTIONAL)
            if not may_be_unknown and column.min(initial=0) < 0:
                damaged("a number is negative")
        at += layout.nbytes
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
    # Counted first: a small record may name many tensors.
    inner = sum(len(inner_names(text)) for _, text in head.subclasses)
    if inner and (inner > len(keys) or not inner_keys(head.subclasses) <= set(keys)):
        damaged("it lacks a tensor that another one wraps")
    _check_below(columns["meta"], len(metas))
    digests = np.frombuffer(body, np.uint8, offset=digests_at).reshape(-1, DIGEST_SIZE)
    entries = zip(keys, map(metas.__getitem__, columns["meta"].tolist()), strict=True)
    return Manifest(
        # Equal to TensorEntry's constructor, without a call of Python code.
        tuple(map(partial(tuple.__new__, TensorEntry), entries)),
        _grids(columns),
        _chunks(head, columns, metas, len(files), digests),
        tuple(files),
        head.encoding,
        head.backend,
        head.save_id,
        values=_values(columns, metas),
        differing=head.differing,
        milliseconds=head.milliseconds,
        subclasses=head.subclasses,
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


def _check_below(column: Int64, end: int) -> None:
    if column.size and column.max() >= end:
        damaged("a number points to nothing")


def _check_sum(column: Int64, total: int) -> None:
    # In floating point, which does not overflow; exact for every total that can be right.
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


def encode_index(manifest: Manifest, small: SmallFiles) -> bytes:
    """The content of ``megackpt.index`` for a manifest of written chunks and the small files."""
    tensor = manifest.chunks.tensor
    if (np.diff(tensor) < 0).any():
        order = np.argsort(tensor, kind="stable")
        manifest = replace(manifest, chunks=manifest.chunks.take(order))
    columns, derived = _columns(manifest)
    if (values := manifest.values) is not None:
        largest = np.ascontiguousarray(values.largest, "<f4").view("<i4")
        bits = np.where(values.largest < 0, -1, largest.astype(np.int64))
        columns |= zip(OPTIONAL, (values.nonfinite, bits), strict=True)
    packed = {name: pack(column) for name, column in columns.items()}
    keys = "".join([entry.key for entry in manifest.tensors])
    key_bytes = keys.encode("utf-8", "surrogatepass")
    file_bytes = "".join(manifest.files).encode("utf-8", "surrogatepass")
    small_digests = {}
    for name, (size, checksum) in small.items():
        small_digests[name] = [size, checksum.hex()]
    head: dict[str, Any] = {
        "save_id": manifest.save_id,
        "backend": list(manifest.backend),
        "encoding": manifest.encoding,
        "small": small_digests,
        "dtypes": list(ITEMSIZE),
        "axes": _axes(manifest.tensors),
        "derived": derived,
        "text": [len(key_bytes), len(file_bytes)],
        "columns": {name: astuple(layout) for name, (layout, _) in packed.items()},
        "milliseconds": manifest.milliseconds,
    }
    if manifest.values is not None:
        head["optional"] = list(OPTIONAL)
    if manifest.differing:
        head["differing"] = list(manifest.differing)
    for key, record in manifest.subclasses:
        head.setdefault("subclasses", {}).setdefault(record, []).append(key)
    text = json.dumps(head, separators=(",", ":")).encode()
    # The size of an index does not depend on the time that the save took.
    text += b" " * (_DIGITS - len(str(manifest.milliseconds)))
    parts = [_START.pack(MAGIC, VERSION, len(text)), text]
    for _, column in packed.values():
        parts += column
    parts += [key_bytes, file_bytes, manifest.chunks.digests.tobytes()]
    body = b"".join(parts)
    return body + digest(body)


def sealed_index(manifest: Manifest, small: SmallFiles) -> bytes:
    """``encode_index``, and a check that the result can be decoded.

    Raises CheckpointingException if it cannot, so no save is committed that no reader accepts.
    """
    try:
        data = encode_index(manifest, small)
        decode_index(data)
    except (CorruptCheckpoint, ValueError) as error:
        raise CheckpointingException(
            f"nothing is committed, as no reader would take what this save has written: {error}"
        ) from error
    return data


@gc_pause.paused()
def decode_index(
    data: bytes, where: str = INDEX, *, intact: bool = True
) -> tuple[Manifest, dict[str, tuple[int, bytes]]]:
    """The arguments of ``encode_index``: chunks sorted by tensor, digests as a view of ``data``.

    ``intact=False`` also reads an index that does not match its digest.

    ``data`` is untrusted. The result is a consistent manifest or an error, and the memory that it
    takes is proportional to the length of ``data``.

    Raises:
        CorruptCheckpoint: the index is damaged, truncated or inconsistent.
        BackendError: a version of the index that this release does not know.
        SaveInProgress: the files are changed in place.
    """
    try:
        try:
            end = head_length(data)
        except BackendError:
            if _is_intact(data):
                raise
            damaged("it does not match its own digest")
        if end + DIGEST_SIZE > len(data):
            damaged("it is truncated")
        if intact and not _is_intact(data):
            damaged("it does not match its own digest")
        head = parse_head(data[START:end])
        return decode_body(head, memoryview(data)[end:-DIGEST_SIZE]), head.small
    except (CorruptCheckpoint, BackendError, SaveInProgress) as error:
        raise type(error)(f"{where}: {error}") from error


def _is_intact(data: bytes) -> bool:
    return digest(memoryview(data)[:-DIGEST_SIZE]) == data[-DIGEST_SIZE:]


def head_length(start: bytes) -> int:
    """The bytes of the beginning and the head, from the first ``START`` bytes of an index."""
    if len(start) < START:
        damaged("it is truncated")
    if start == IN_PLACE:
        raise SaveInProgress(
            "megackpt.deltas.apply changes these files in place, or died at it: call it with this "
            "directory again"
        )
    magic, version, length = _START.unpack_from(start)
    if magic != MAGIC:
        damaged("it does not begin as an index does")
    if version != VERSION:
        raise BackendError(
            f"version {version} of the index is too new: this release reads up to {VERSION}"
        )
    return START + int(length)


def read_head(storage: Storage) -> Head | None:
    """Read only the head of the index in this directory; None without an index.

    Raises CorruptCheckpoint if it is damaged, BackendError if this release does not know its
    version.
    """
    try:
        reader = storage.open(INDEX)
    except FileNotFoundError:
        return None
    with reader:
        start = bytearray(min(START, reader.size))
        reader.read_into(0, [memoryview(start)])
        try:
            length = head_length(bytes(start)) - START
        except BackendError:
            decode_index(storage.get(INDEX), f"{storage.location}/{INDEX}")
            raise
        if START + length > reader.size:
            raise CorruptCheckpoint(f"{storage.location}/{INDEX} is truncated")
        head = read_dense(
            reader, START, length, f"the head of {storage.location}/{INDEX}"
        )
        return parse_head(bytes(head))


def _axes(tensors: Sequence[TensorEntry]) -> int:
    return max((len(entry.meta.shape) for entry in tensors), default=0)


def _columns(manifest: Manifest) -> tuple[Columns, bool]:
    """All columns by name, and whether the boxes of tensor chunks determine their lengths."""
    chunks, tensors = manifest.chunks, manifest.tensors
    all_metas = [entry.meta for entry in tensors]
    metas = {meta: number for number, meta in enumerate(dict.fromkeys(all_metas))}
    grids = {grid: i for i, grid in enumerate(dict.fromkeys((None, *manifest.grids)))}
    dtypes = {name: number for number, name in enumerate(ITEMSIZE)}
    shapes = [meta.shape for meta in metas]
    known_grids = [grid for grid in grids if grid is not None]
    meta = np.array([metas[meta] for meta in all_metas], np.int64)
    itemsize = np.array([meta.itemsize for meta in metas], np.int64)
    itemsize = itemsize[meta][chunks.tensor]
    extra = chunks.length - chunks.boxes.volume * itemsize
    derived = not extra[itemsize > 0].any()
    columns: dict[str, Any] = {
        "key_chars": [len(entry.key) for entry in tensors],
        "meta": meta,
        "grid": [grids[grid] for grid in manifest.grids],
        "count": np.bincount(chunks.tensor, minlength=len(tensors)),
        "meta_dtype": [dtypes[meta.dtype] for meta in metas],
        "meta_ndim": list(map(len, shapes)),
        "meta_dim": list(chain(*shapes)),
        "grid_ndim": list(map(len, known_grids)),
        "grid_dim": list(chain(*known_grids)),
        "file_chars": list(map(len, manifest.files)),
        "file": chunks.file,
        "writer": chunks.writer,
        "start": chunks.start,
        "length": chunks.length,
    }
    if derived:
        columns["length"] = extra
    axes = _axes(tensors)
    wholes = np.ones((len(shapes), axes), np.int64)
    for number, shape in enumerate(shapes):
        wholes[number, : len(shape)] = shape
    # Of each axis: tensor shapes and offsets, divided by the chunks' shapes.
    of_chunks = wholes[meta[chunks.tensor]]
    for axis in range(axes):
        extent, offset = chunks.boxes.shape[:, axis], chunks.boxes.offset[:, axis]
        divisor = np.maximum(extent, 1)
        pieces = np.where(extent > 0, of_chunks[:, axis] // divisor, 0)
        columns[f"pieces{axis}"] = pieces
        columns[f"rest{axis}"] = of_chunks[:, axis] - pieces * extent
        columns[f"place{axis}"] = offset // divisor
        columns[f"shift{axis}"] = offset % divisor
    names = column_names(axes)
    return {name: np.asarray(columns[name], np.int64) for name in names}, derived


# Columns of integers, encoded as few bytes and decoded without a loop. The bytes are untrusted.
# Every number in an index is in [-1, LARGEST).


def pack(values: Int64) -> tuple[Layout, list[bytes]]:
    """The shortest layout for these numbers, and their bytes."""
    if not len(values):
        return Layout(0, 0, 0, 1, 0), []
    low, high = int(values.min()), int(values.max())
    if low < -1 or high >= LARGEST:
        raise ValueError(
            f"an index holds numbers from -1 to 2**62, not {low} to {high}"
        )
    step = 1
    # The greatest common divisor of all differences. One of a few is cheap and often 1.
    if _width(high - low) > 1:
        step = math.gcd(*(values[:_SAMPLE] - low).tolist())
        if step != 1:
            step = int(np.gcd.reduce(values - low)) or 1
    width = _width((high - low) // step)
    dense = Layout(len(values), width, low, step, 0)
    rows = np.flatnonzero(values)
    sparse = Layout(len(values), 0, 0, 1, len(rows))
    if sparse.nbytes < dense.nbytes and len(values) <= 1 << 32:
        patches = values[rows].astype(_PATCH)
        return sparse, [rows.astype(_ROW).tobytes(), patches.tobytes()]
    if not width:
        return dense, []
    small = (values - low) // step
    return dense, [small.astype(_WIDTHS[width]).tobytes()]


def _width(span: int) -> int:
    """The bytes that a number up to ``span`` takes; 0 for none."""
    width = 0
    while span >= 1 << (8 * width):
        width = 2 * width or 1
    return width


def unpack(layout: Layout, data: memoryview) -> Int64:
    """The numbers of a column from exactly ``layout.nbytes`` bytes.

    Equal numbers are a view of one, with a stride of 0. Any other column takes ``8 * layout.count``
    bytes.
    """
    if not layout.width:
        values = np.broadcast_to(np.int64(layout.base), layout.count)
        if layout.patches:
            values = values.copy()
    else:
        small = np.frombuffer(data, _WIDTHS[layout.width], layout.count)
        if layout.count and layout.base + layout.step * int(small.max()) >= LARGEST:
            damaged("a number is too large")
        values = small.astype(np.int64)
        if layout.step != 1:
            values *= layout.step
        if layout.base:
            values += layout.base
    if layout.patches:
        start = layout.count * layout.width
        rows = np.frombuffer(data, _ROW, layout.patches, start)
        patches = np.frombuffer(data, _PATCH, layout.patches, start + rows.nbytes)
        if rows.max() >= layout.count:
            damaged("a number is out of range")
        if patches.min() < -1 or patches.max() >= LARGEST:
            damaged("a number is out of range")
        values[rows] = patches
    return values
