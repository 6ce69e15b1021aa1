"""Writing ``.metadata``: the pickle of torch's ``Metadata``, emitted straight from a manifest's columns.

No object of torch is made: the pickle is put together from templates in which only numbers differ, filled for
many shards at once. Strings are written once, at the front, into the unpickler's memo, and fetched by number.
Only classes of torch are named. Source of the structure: torch.distributed.checkpoint.metadata and
filesystem._StorageInfo, format version 1.0.0, as DCP of torch 2.13 writes it.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megackpt.backends.archives import WIDE, text
from megackpt.backends.torch_dist.record_frame import frame_lengths
from megackpt.errors import BackendError
from megackpt.planning.box import Int64
from megackpt.planning.manifest import Bool, Int32, Manifest, unique_key

_METADATA = "torch.distributed.checkpoint.metadata"
_GLOBALS = (
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
_WORDS = (
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


class _Memo:
    """Opcodes that put values into the unpickler's memo, and those that fetch them again."""

    def __init__(self) -> None:
        self.count = 0
        self.opcodes: list[bytes] = []
        self.fetch: dict[str, bytes] = {}

    def put(self, name: str, opcodes: bytes) -> None:
        number, self.count = self.count, self.count + 1
        self.opcodes.append(opcodes + b"r" + struct.pack("<I", number) + b"0")
        self.fetch[name] = (
            b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)
        )

    def strings(self, values: Iterable[str]) -> int:
        """Put these in a row; returns the number of the first."""
        first = self.count
        for value in values:
            self.opcodes.append(
                text(value) + b"r" + struct.pack("<I", self.count) + b"0"
            )
            self.count += 1
        return first


def _global(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def _integer(value: int) -> bytes:
    return (
        b"J" + struct.pack("<i", value)
        if value < WIDE
        else b"\x8a\x08" + struct.pack("<q", value)
    )


def _starting_memo() -> _Memo:
    memo = _Memo()
    for module, name in _GLOBALS:
        memo.put(name, _global(module, name))
    for word in _WORDS:
        memo.put(word, text(word))
    layout = (
        _global("torch.serialization", "_get_layout") + text("torch.strided") + b"\x85R"
    )
    memo.put("strided", layout)
    memo.put("contiguous", _global(_METADATA, "_MEM_FORMAT_ENCODING") + b"K\0\x85R")
    return memo


class _Template:
    """A row of opcodes with holes for numbers, filled for many rows at once."""

    def __init__(self) -> None:
        self.fixed = bytearray()
        self.holes: list[tuple[int, Int64, str]] = []

    def add(self, opcodes: bytes) -> _Template:
        self.fixed += opcodes
        return self

    def memo(self, numbers: Int64) -> _Template:
        return self._hole(b"j", numbers, "<u4")

    def integer(self, numbers: Int64) -> _Template:
        if len(numbers) and int(numbers.max()) >= WIDE:
            return self._hole(b"\x8a\x08", numbers, "<i8")
        return self._hole(b"J", numbers, "<i4")

    def size(self, memo: _Memo, columns: Int64) -> _Template:
        """A torch.Size from each row of (n, ndim) numbers."""
        self.add(memo.fetch["Size"] + b"(")
        for axis in range(columns.shape[1]):
            self.integer(columns[:, axis])
        return self.add(b"t\x85R")

    def _hole(self, opcode: bytes, numbers: Int64, dtype: str) -> _Template:
        self.add(opcode)
        self.holes.append((len(self.fixed), numbers, dtype))
        return self.add(bytes(np.dtype(dtype).itemsize))

    def rows(self, count: int) -> NDArray[np.uint8]:
        """(count, width) bytes."""
        table = np.empty((count, len(self.fixed)), np.uint8)
        table[:] = np.frombuffer(bytes(self.fixed), np.uint8)
        for start, numbers, dtype in self.holes:
            octets = (
                np.ascontiguousarray(numbers, dtype).view(np.uint8).reshape(count, -1)
            )
            table[:, start : start + octets.shape[1]] = octets
        return table


@dataclass(frozen=True, eq=False)
class _Columns:
    """The chunks that torch DCP knows about, ordered by tensor."""

    manifest: Manifest
    order: Int64  # rows of manifest.chunks
    tensor: Int32

    @classmethod
    def of(cls, manifest: Manifest, omit: Bool) -> _Columns:
        number = manifest.chunks.tensor
        rows = np.flatnonzero(~omit[number])
        order = rows[np.argsort(number[rows], kind="stable")].astype(np.int64)
        return cls(manifest, order, number[order])

    def select(self, tensors: Bool) -> Int64:
        """Positions in ``order`` of the chunks of these tensors."""
        return np.flatnonzero(tensors[self.tensor]).astype(np.int64)


def emit(manifest: Manifest, omit: Bool) -> bytes:
    """The content of ``.metadata``. Tensors for which ``omit`` is true (the common state) are left out.

    Raises BackendError where two items would have one name.
    """
    return _Emission(manifest, omit).content()


class _Emission:
    """One ``.metadata`` in the making."""

    def __init__(self, manifest: Manifest, omit: Bool) -> None:
        self.manifest = manifest
        self.columns = _Columns.of(manifest, omit)
        self.memo = _starting_memo()
        self.metas = [entry.meta for entry in manifest.tensors]
        self.is_object = np.array([m.is_object for m in self.metas], np.bool_)
        self.ndim = np.array([len(m.shape) for m in self.metas], np.int64)
        self.tensors = np.flatnonzero(~omit & ~self.is_object)
        for dtype in sorted({self.metas[t].dtype for t in self.tensors.tolist()}):
            self.memo.put(f"properties of {dtype}", self._properties(dtype))
        self.file = self.memo.strings(manifest.files)
        self.key = self.memo.strings(entry.key for entry in manifest.tensors)
        self.objects = self._object_names(self.columns.select(self.is_object & ~omit))
        self._check_names()

    def content(self) -> bytes:
        fetch = self.memo.fetch
        entries: list[bytes] = []  # of state_dict_metadata
        places: list[bytes] = []  # of storage_data
        for ndim in np.unique(self.ndim[self.tensors]).tolist():
            chosen = self.columns.select(~self.is_object & (self.ndim == ndim))
            entries.extend(self._tensor_entries(ndim, chosen))
            places.append(self._tensor_places(ndim, chosen))
        for name, row in self.objects.items():
            entries.append(text(name) + fetch["BytesStorageMetadata"] + b")\x81")
            places.append(self._object_place(name, row))
        head = (
            b"\x80\x04" + b"".join(self.memo.opcodes) + fetch["Metadata"] + b")\x81}("
        )
        tail = (
            text("storage_meta")
            + self._storage_meta()
            + text("version")
            + text("1.0.0")
            + b"ub."
        )
        middle = b"u" + text("planner_data") + b"N" + text("storage_data") + b"}("
        state = text("state_dict_metadata") + b"}("
        return b"".join((head, state, *entries, middle, *places, b"u", tail))

    def _properties(self, dtype: str) -> bytes:
        fetch = self.memo.fetch
        state = (
            _global("torch", dtype)
            + fetch["strided"]
            + b"\x89"
            + fetch["contiguous"]
            + b"\x89"
        )
        return fetch["TensorProperties"] + b")\x81(" + state + b"tb"

    def _storage_meta(self) -> bytes:
        # The directory's name may still change: the place where it is opened is the place where it is.
        fields = (
            text("checkpoint_id") + b"N" + text("save_id") + text(self.manifest.save_id)
        )
        return (
            self.memo.fetch["StorageMeta"]
            + b")\x81}("
            + fields
            + text("load_id")
            + b"N"
            + text("modules")
            + b"]ub"
        )

    def _object_names(self, chosen: Int64) -> dict[str, int]:
        """Name -> row of manifest.chunks."""
        names: dict[str, int] = {}
        for row in self.columns.order[chosen].tolist():
            entry = self.manifest.tensors[self.manifest.chunks.tensor[row]]
            box = self.manifest.chunks.boxes.row(row, len(entry.meta.shape))
            name = unique_key(entry.key, box.offset, entry.meta.shape)
            if names.setdefault(name, row) != row:
                raise BackendError(
                    f"two shards of the object {entry.key!r} are at {box}: torch DCP has one"
                )
        return names

    def _check_names(self) -> None:
        names = Counter(self.manifest.tensors[t].key for t in self.tensors.tolist())
        names.update(list(self.objects))
        twice = sorted(name for name, count in names.items() if count > 1)
        if twice:
            raise BackendError(
                f"torch DCP keeps one item a name, but these name several: {twice[:20]}"
            )

    def _tensor_entries(self, ndim: int, chosen: Int64) -> Iterator[bytes]:
        """For each tensor of ``ndim`` dimensions: its key and its TensorStorageMetadata."""
        fetch, boxes = self.memo.fetch, self.manifest.chunks.boxes
        rows = self.columns.order[chosen]
        template = _Template().add(
            fetch["ChunkStorageMetadata"] + b")\x81}(" + fetch["offsets"]
        )
        template.size(self.memo, boxes.offset[rows, :ndim]).add(fetch["sizes"])
        template.size(self.memo, boxes.shape[rows, :ndim]).add(b"ub")
        chunks = template.rows(len(rows)).tobytes()
        width = len(template.fixed)
        numbers, first = np.unique(self.columns.tensor[chosen], return_index=True)
        bounds = [*(first * width).tolist(), len(chunks)]
        start = fetch["TensorStorageMetadata"] + b")\x81}(" + fetch["properties"]
        size, listed = (
            fetch["size"] + fetch["Size"] + b"(",
            b"t\x85R" + fetch["chunks"] + b"](",
        )
        for i, number in enumerate(numbers.tolist()):
            meta = self.metas[number]
            properties = fetch[f"properties of {meta.dtype}"]
            shape = b"".join(map(_integer, meta.shape))
            key = b"j" + struct.pack("<I", self.key + number)
            yield b"".join(
                (
                    key,
                    start,
                    properties,
                    size,
                    shape,
                    listed,
                    chunks[bounds[i] : bounds[i + 1]],
                    b"eub",
                )
            )

    def _tensor_places(self, ndim: int, chosen: Int64) -> bytes:
        """The MetadataIndex and _StorageInfo of each chunk of the tensors of ``ndim`` dimensions."""
        fetch, chunks = self.memo.fetch, self.manifest.chunks
        rows = self.columns.order[chosen]
        start, length = self._records(ndim, chosen)
        template = _Template().add(fetch["MetadataIndex"] + b")\x81}(" + fetch["fqn"])
        template.memo(self.columns.tensor[chosen].astype(np.int64) + self.key).add(
            fetch["offset"]
        )
        template.size(self.memo, chunks.boxes.offset[rows, :ndim]).add(
            fetch["index"] + b"Nub"
        )
        template.add(fetch["_StorageInfo"] + b")\x81}(" + fetch["relative_path"])
        template.memo(chunks.file[rows].astype(np.int64) + self.file).add(
            fetch["offset"]
        )
        template.integer(start).add(fetch["length"]).integer(length).add(b"ub")
        return template.rows(len(rows)).tobytes()

    def _records(self, ndim: int, chosen: Int64) -> tuple[Int64, Int64]:
        """Where whole records start and how long they are, from where their payloads are."""
        chunks = self.manifest.chunks
        rows = self.columns.order[chosen]
        start, length = chunks.start[rows].copy(), chunks.length[rows].copy()
        kinds = sorted({meta.dtype for meta in self.metas if not meta.is_object})
        table = np.array(
            [-1 if m.is_object else kinds.index(m.dtype) for m in self.metas], np.int64
        )
        kind = table[self.columns.tensor[chosen]]
        for number in np.unique(kind).tolist():
            mine = np.flatnonzero(kind == number)
            head, tail = frame_lengths(
                kinds[number], chunks.boxes.shape[rows[mine], :ndim]
            )
            start[mine] -= head
            length[mine] += head + tail
        return start, length

    def _object_place(self, name: str, row: int) -> bytes:
        fetch, chunks = self.memo.fetch, self.manifest.chunks
        index = (
            fetch["MetadataIndex"]
            + b")\x81}("
            + fetch["fqn"]
            + text(name)
            + fetch["index"]
            + b"Nub"
        )
        file = b"j" + struct.pack("<I", self.file + int(chunks.file[row]))
        place = (
            fetch["offset"]
            + _integer(int(chunks.start[row]))
            + fetch["length"]
            + _integer(int(chunks.length[row]))
        )
        return (
            index
            + fetch["_StorageInfo"]
            + b")\x81}("
            + fetch["relative_path"]
            + file
            + place
            + b"ub"
        )
