"""``megackpt.index``: the manifest of a checkpoint with its digests. Columnar, pickle-free.

The bytes, all integers little-endian::

    8   magic "megackpt"
    4   version (1)
    4   length of the head
    .   head: JSON in UTF-8
    .   columns: integers, in the order of the head, each as in ``columns.Layout``
    .   text of all keys, then of all file names, UTF-8 without separators
    .   digests: 16 bytes for each block of at most 1 MiB of each chunk, in the order of the
        chunks; or nothing
    16  xxh3-128 of all that precedes

Chunks are sorted by tensor, so a count per tensor replaces a number per chunk. A shape is stored
as the quotient of the tensor's shape by it, and the remainder. An offset is stored as its quotient
by the chunk's own shape, and the remainder. In regular grids the quotients are small, and the
remainders are all zero and take no bytes.

Optional: two columns of tensors, the elements that are NaN or infinite, and the bits of the
largest magnitude of the others as float32 (-1: not known); and the field ``differing`` of the
head, keys of tensors whose replicas differed.

Every version begins with the magic and the version, and ends with the digest. A later release may
add fields to the head, and columns that its field ``optional`` names: readers ignore those that
they do not know. A reader refuses an unknown column that is not optional, and a newer version.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from megackpt import gc_pause
from megackpt.checkpoint.columns import damaged, pack
from megackpt.checkpoint.unpacking import (
    OPTIONAL,
    Columns,
    Head,
    SmallFiles,
    column_names,
    decode_body,
    parse_head,
)
from megackpt.errors import BackendError, CheckpointingException, CorruptCheckpoint
from megackpt.planning.box import Boxes, Int64
from megackpt.planning.manifest import (
    DIGEST_SIZE,
    ITEMSIZE,
    Manifest,
    TensorEntry,
)
from megackpt.storage import Storage, digest, read_dense

INDEX = "megackpt.index"
VERSION = 1

MAGIC = b"megackpt"
_START = struct.Struct("<8sII")
START = _START.size


def encode_index(manifest: Manifest, small: SmallFiles) -> bytes:
    """The content of ``megackpt.index`` for a manifest of written chunks and the small files."""
    tensor = manifest.chunks.tensor
    if (np.diff(tensor) < 0).any():
        order = np.argsort(tensor, kind="stable")
        manifest = replace(manifest, chunks=manifest.chunks.take(order))
    columns, derived = _columns(manifest)
    columns |= _optional_columns(manifest)
    packed = {name: pack(column) for name, column in columns.items()}
    keys = "".join([entry.key for entry in manifest.tensors])
    key_bytes = keys.encode("utf-8", "surrogatepass")
    file_bytes = "".join(manifest.files).encode("utf-8", "surrogatepass")
    small_digests = {}
    for name, (size, checksum) in small.items():
        small_digests[name] = [size, checksum.hex()]
    head = {
        "save_id": manifest.save_id,
        "backend": list(manifest.backend),
        "encoding": manifest.encoding,
        "small": small_digests,
        "dtypes": list(ITEMSIZE),
        "axes": _axes(manifest.tensors),
        "derived": derived,
        "text": [len(key_bytes), len(file_bytes)],
        "columns": {name: layout.fields() for name, (layout, _) in packed.items()},
    }
    if manifest.values is not None:
        head["optional"] = list(OPTIONAL)
    if manifest.differing:
        head["differing"] = list(manifest.differing)
    text = json.dumps(head, separators=(",", ":")).encode()
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

    ``intact=False`` also reads an index that does not match its own digest.

    ``data`` is untrusted. The result is a consistent manifest or an error, and the memory that it
    takes is proportional to the length of ``data``.

    Raises:
        CorruptCheckpoint: the index is damaged, truncated or inconsistent.
        BackendError: a version of the index that this release does not know.
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
    except (CorruptCheckpoint, BackendError) as error:
        raise type(error)(f"{where}: {error}") from error


def _is_intact(data: bytes) -> bool:
    return digest(memoryview(data)[:-DIGEST_SIZE]) == data[-DIGEST_SIZE:]


def head_length(start: bytes) -> int:
    """The bytes of the beginning and the head, from the first ``START`` bytes of an index."""
    if len(start) < START:
        damaged("it is truncated")
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
    columns.update(_relative(chunks.boxes, wholes[meta[chunks.tensor]]))
    names = column_names(axes)
    return {name: np.asarray(columns[name], np.int64) for name in names}, derived


def _optional_columns(manifest: Manifest) -> Columns:
    values = manifest.values
    if values is None:
        return {}
    largest = np.ascontiguousarray(values.largest, "<f4").view("<i4").astype(np.int64)
    columns = values.nonfinite, np.where(values.largest < 0, -1, largest)
    return dict(zip(OPTIONAL, columns, strict=True))


def _relative(boxes: Boxes, whole: Int64) -> Iterator[tuple[str, Int64]]:
    """The columns of each axis: tensor shapes and offsets, divided by the chunks' shapes."""
    for axis in range(whole.shape[1]):
        shape, offset = boxes.shape[:, axis], boxes.offset[:, axis]
        divisor: Int64 = np.maximum(shape, 1)
        pieces: Int64 = np.where(shape > 0, whole[:, axis] // divisor, 0)
        yield f"pieces{axis}", pieces
        yield f"rest{axis}", whole[:, axis] - pieces * shape
        yield f"place{axis}", offset // divisor
        yield f"shift{axis}", offset % divisor
