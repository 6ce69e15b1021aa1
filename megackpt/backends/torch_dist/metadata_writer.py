"""Writing ``.metadata``: the pickle of torch's ``Metadata``, made straight from a manifest's
columns.

No object of torch is made. The opcodes of a chunk differ from those of another one of the same
dtype and number of dimensions in numbers only, so they are tables of bytes, with a row for each
chunk. Strings and classes are written once, at the front, into the unpickler's memo, and fetched by
number. Only classes of torch are named. Source of the structure:
torch.distributed.checkpoint.metadata and filesystem._StorageInfo, format version 1.0.0, as DCP of
torch 2.13 writes it.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from megackpt.backends.archives import WIDE, text
from megackpt.backends.torch_dist.record_frame import frame_lengths
from megackpt.errors import BackendError
from megackpt.planning.box import Int64
from megackpt.planning.manifest import Bool, Manifest, unique_key

Bytes = NDArray[np.uint8]

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = (
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
)
_FIELDS = (
    "properties",
    "size",
    "chunks",
    "offsets",
    "sizes",
    "fqn",
    "offset",
    "index",
    "relative_path",
    "length",
)
_FETCH, _STATE, _BUILD, _TUPLE = b"j", b")\x81}(", b"ub", b"t\x85R"
"""Opcodes: fetch from the memo; begin and end an object with fields; end a torch.Size."""


class _Memo:
    """Opcodes that put values into the unpickler's memo. ``memo[name]`` fetches a value again."""

    def __init__(self) -> None:
        self.opcodes: list[bytes] = []
        self._numbers: dict[str, int] = {}
        for module, name in _CLASSES:
            self.put(name, _global(module, name))
        for field in _FIELDS:
            self.put(field, text(field))
        strided = text("torch.strided") + b"\x85R"
        self.put("strided", _global("torch.serialization", "_get_layout") + strided)
        memory_format = _global(_METADATA, "_MEM_FORMAT_ENCODING")
        self.put("contiguous", memory_format + b"K\0\x85R")

    def put(self, name: str, opcodes: bytes) -> None:
        self._numbers[name] = len(self.opcodes)
        self._append(opcodes)

    def put_texts(self, values: Iterable[str]) -> int:
        """Put these in a row. Returns the number of the first."""
        first = len(self.opcodes)
        for value in values:
            self._append(text(value))
        return first

    def _append(self, opcodes: bytes) -> None:
        number = struct.pack("<I", len(self.opcodes))
        self.opcodes.append(opcodes + b"r" + number + b"0")

    def __getitem__(self, name: str) -> bytes:
        return b"h" + bytes([self._numbers[name]])


def _global(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def _rows(count: int, *parts: bytes | Bytes) -> bytes:
    """So many rows of these parts in turn: bytes that all rows share, or a table of them."""
    columns = []
    for part in parts:
        if isinstance(part, bytes):
            shared = np.frombuffer(part, np.uint8)
            part = np.broadcast_to(shared, (count, len(part)))
        columns.append(part)
    return np.concatenate(columns, axis=1).tobytes()


def _column(numbers: Int64, dtype: str) -> Bytes:
    octets = np.ascontiguousarray(numbers, dtype).view(np.uint8)
    return octets.reshape(len(numbers), -1)


def _integers(numbers: Int64) -> tuple[bytes, Bytes]:
    """The opcode of all of these numbers, and its operands."""
    if int(numbers.max()) >= WIDE:
        return b"\x8a\x08", _column(numbers, "<i8")
    return b"J", _column(numbers, "<i4")


def _integer(number: int) -> bytes:
    if number >= WIDE:
        return b"\x8a\x08" + struct.pack("<q", number)
    return b"J" + struct.pack("<i", number)


class _Emission:
    """One ``.metadata`` in the making."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.memo = _Memo()
        self.file = self.memo.put_texts(manifest.files)
        self.key = self.memo.put_texts(entry.key for entry in manifest.tensors)
        self.described: list[bytes] = []  # of state_dict_metadata
        self.stored: list[bytes] = []  # of storage_data

    def add_tensors(self, dtype: str, ndim: int, rows: Int64) -> None:
        """Add the chunks of all tensors of this dtype and so many dimensions, ordered by tensor."""
        memo, chunks, count = self.memo, self.manifest.chunks, len(rows)
        tensor = chunks.tensor[rows].astype(np.int64)
        offset = self._sizes(chunks.boxes.offset[rows, :ndim])
        shape = chunks.boxes.shape[rows, :ndim]
        table = _rows(
            count,
            memo["ChunkStorageMetadata"] + _STATE + memo["offsets"],
            *offset,
            memo["sizes"],
            *self._sizes(shape),
            _BUILD,
        )
        width = len(table) // count
        numbers, first = np.unique(tensor, return_index=True)
        bounds = [*(first * width).tolist(), len(table)]
        # Its layout and memory format; False: it needs no gradient and is not pinned.
        properties = _global("torch", dtype) + memo["strided"] + b"\x89"
        properties += memo["contiguous"] + b"\x89"
        begin = memo["TensorStorageMetadata"] + _STATE + memo["properties"]
        begin += memo["TensorProperties"] + b")\x81(" + properties + b"tb"
        begin += memo["size"] + memo["Size"] + b"("
        for i, number in enumerate(numbers.tolist()):
            key = _FETCH + struct.pack("<I", self.key + number)
            extents = map(_integer, self.manifest.tensors[number].meta.shape)
            listed = table[bounds[i] : bounds[i + 1]]
            self.described += [key, begin, *extents, _TUPLE]
            self.described += [memo["chunks"] + b"](", listed, b"e" + _BUILD]
        head, tail = frame_lengths(dtype, shape)
        places = _rows(
            count,
            memo["MetadataIndex"] + _STATE + memo["fqn"] + _FETCH,
            _column(tensor + self.key, "<u4"),
            memo["offset"],
            *offset,
            memo["index"] + b"N" + _BUILD,
            memo["_StorageInfo"] + _STATE + memo["relative_path"] + _FETCH,
            _column(chunks.file[rows].astype(np.int64) + self.file, "<u4"),
            memo["offset"],
            *_integers(chunks.start[rows] - head),
            memo["length"],
            *_integers(head + chunks.length[rows] + tail),
            _BUILD,
        )
        self.stored.append(places)

    def add_object(self, name: str, row: int) -> None:
        memo, chunks = self.memo, self.manifest.chunks
        self.described += [text(name), memo["BytesStorageMetadata"], b")\x81"]
        file = self.file + int(chunks.file[row])
        self.stored += [
            memo["MetadataIndex"] + _STATE + memo["fqn"] + text(name),
            memo["index"] + b"N" + _BUILD,
            memo["_StorageInfo"] + _STATE + memo["relative_path"],
            _FETCH + struct.pack("<I", file),
            memo["offset"] + _integer(int(chunks.start[row])),
            memo["length"] + _integer(int(chunks.length[row])) + _BUILD,
        ]

    def content(self) -> bytes:
        memo = self.memo
        # The directory may still be renamed, so it is not named.
        meta = memo["StorageMeta"] + _STATE + text("checkpoint_id") + b"N"
        meta += text("save_id") + text(self.manifest.save_id)
        meta += text("load_id") + b"N" + text("modules") + b"]" + _BUILD
        return b"".join([
            b"\x80\x04",
            *memo.opcodes,
            memo["Metadata"] + _STATE + text("state_dict_metadata") + b"}(",
            *self.described,
            b"u" + text("planner_data") + b"N" + text("storage_data") + b"}(",
            *self.stored,
            b"u" + text("storage_meta") + meta,
            text("version") + text("1.0.0") + _BUILD + b".",
        ])  # fmt: skip

    def _sizes(self, columns: Int64) -> list[bytes | Bytes]:
        """The parts of a torch.Size for each row of (n, ndim) numbers."""
        parts: list[bytes | Bytes] = [self.memo["Size"] + b"("]
        for axis in range(columns.shape[1]):
            parts += _integers(columns[:, axis])
        return [*parts, _TUPLE]


def emit(manifest: Manifest, omit: Bool) -> bytes:
    """The content of ``.metadata``. Tensors for which ``omit`` is true (the common state) are left
    out.

    Raises BackendError where two items would have one name.
    """
    emission = _Emission(manifest)
    chunks = manifest.chunks
    names: list[str] = []
    kinds: dict[tuple[str, int], int] = {}
    kind_of = np.full(len(manifest.tensors), -1)
    for number, (key, meta) in enumerate(manifest.tensors):
        if not meta.is_object and not omit[number]:
            kind = meta.dtype, len(meta.shape)
            kind_of[number] = kinds.setdefault(kind, len(kinds))
            names.append(key)
    order = np.argsort(chunks.tensor, kind="stable")
    kind_of_row = kind_of[chunks.tensor[order]]
    for (dtype, ndim), number in kinds.items():
        rows = order[kind_of_row == number]
        if len(rows):
            emission.add_tensors(dtype, ndim, rows)
    is_object = [entry.meta.is_object for entry in manifest.tensors]
    objects = np.array(is_object, np.bool_) & ~omit
    for row in order[objects[chunks.tensor[order]]].tolist():
        key, meta = manifest.tensors[chunks.tensor[row]]
        offset = chunks.boxes.row(row, len(meta.shape)).offset
        names.append(unique_key(key, offset, meta.shape))
        emission.add_object(names[-1], row)
    counts = Counter(names)
    if len(counts) < len(names):
        twice = sorted(name for name, count in counts.items() if count > 1)
        raise BackendError(
            f"torch DCP has one item of a name, but several have these: {twice[:20]}"
        )
    return emission.content()
