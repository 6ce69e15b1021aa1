"""Checkpoints that others wrote: from ``.metadata`` (stock torch DCP, Megatron-Core) to a manifest.

Every number is bounded by what is on disk before anybody relies on it. Nested state dicts keep DCP's flat names
as keys. What Megatron-Core kept flattened stands in the manifest as the tensor that it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from megackpt.backends.torch_dist import flattened
from megackpt.backends.torch_dist.naming import COMMON, objects_named
from megackpt.backends.torch_dist.pickles import Record, Size, read_metadata
from megackpt.backends.torch_dist.writing import COMMON_FILE
from megackpt.errors import BackendError, CorruptCheckpoint, NotACheckpoint, UntrustedClass
from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import (
    DIGEST_SIZE,
    ITEMSIZE,
    Chunks,
    Manifest,
    TensorEntry,
    TensorMeta,
)
from megackpt.runtime.storage import Storage

LARGEST = 1 << 32  # bytes of .metadata
_TOLD = 20


class _Stored(NamedTuple):
    """One chunk, or one object's shard, and the record that holds it."""

    entry: TensorEntry
    box: Box
    file: str
    start: int
    length: int


def read_manifest(root: Storage, name: str, backend: tuple[str, int]) -> Manifest:
    """The manifest of a checkpoint that has no index of ours; encoding "native".

    Raises NotACheckpoint without ``.metadata``; CorruptCheckpoint where it contradicts itself or the files;
    UntrustedClass where it names what it should not; BackendError for what this release cannot read.
    """
    try:
        record = read_metadata(root.get(name, LARGEST))
        found = list(_Listing(record).items())
    except FileNotFoundError as error:
        raise NotACheckpoint(
            f"{root.location} has no {name}: it is no complete torch_dist checkpoint"
        ) from error
    except UntrustedClass as error:
        raise UntrustedClass(f"{root.location}/{name}: {error}") from None
    except (CorruptCheckpoint, BackendError) as error:
        raise type(error)(f"{root.location}/{name}: {error}") from error
    if COMMON_FILE in root.list():
        # Where there are both, common.pt counts: Megatron-Core, too, looks for it first.
        found = [item for item in found if not item.entry.is_common]
        found.append(_Stored(COMMON, Box((), ()), COMMON_FILE, 0, root.size(COMMON_FILE) or 0))
    _check_files(root, found)
    return _manifest(found, backend)


def _manifest(found: list[_Stored], backend: tuple[str, int]) -> Manifest:
    tensors: dict[TensorEntry, int] = {}
    files: dict[str, int] = {}
    tensor = [tensors.setdefault(s.entry, len(tensors)) for s in found]
    file = [files.setdefault(s.file, len(files)) for s in found]
    chunks = Chunks(
        np.array(tensor, np.int32),
        Boxes.of(s.box for s in found),
        np.full(len(found), -1, np.int32),
        np.array(file, np.int32),
        np.array([s.start for s in found], np.int64),
        np.array([s.length for s in found], np.int64),
        np.zeros((0, DIGEST_SIZE), np.uint8),
    )
    return Manifest(tuple(tensors), (None,) * len(tensors), chunks, tuple(files), "native", backend)


def _check_files(root: Storage, found: list[_Stored]) -> None:
    """Every record lies inside its file, and every file inside the directory."""
    sizes: dict[str, int | None] = {}
    problems: list[str] = []
    for item in found:
        if item.file not in sizes:
            sizes[item.file] = root.size(item.file)
            if sizes[item.file] is None:
                problems.append(
                    f"the file {item.file!r} is missing, or is no file of its own (a link, a folder)"
                )
        size = sizes[item.file]
        if size is not None and item.start + item.length > size:
            problems.append(
                f"{item.entry.key!r} {item.box} should end at byte {item.start + item.length} of {item.file!r}, "
                f"which has {size} bytes"
            )
    if problems:
        more = f" (and {len(problems) - _TOLD} more)" if len(problems) > _TOLD else ""
        raise CorruptCheckpoint(f"{root.location}: " + "; ".join(problems[:_TOLD]) + more)


class _Listing:
    """The items that a Metadata record lists."""

    def __init__(self, metadata: Record) -> None:
        self.described = metadata.field("state_dict_metadata")
        if type(self.described) is not dict:
            raise CorruptCheckpoint("it lists no items")
        self.flattened = flattened.true_shapes(metadata)
        self.places = dict(self._places(metadata.field("storage_data")))

    def _places(self, stored: Any) -> Iterator[tuple[tuple[str, Any], tuple[str, int, int]]]:
        """(name, offset or None) -> (file, start, length)."""
        if type(stored) is not dict:
            raise CorruptCheckpoint("it tells no places of items")
        for index, info in stored.items():
            if not _is(index, "MetadataIndex") or not _is(info, "_StorageInfo"):
                raise CorruptCheckpoint("its table of places holds something else")
            name, offset = index.field("fqn"), index.field("offset")
            if type(name) is not str or not (offset is None or type(offset) is Size):
                raise CorruptCheckpoint("its table of places tells of an item without a name or offset")
            if through := info.field("transform_descriptors"):
                named = [str(t) for t in through if type(t) is str] if type(through) is list else []
                raise BackendError(
                    f"{name!r} is stored through {named or 'an extension'}: compressed checkpoints cannot be read; "
                    "save it again without extensions"
                )
            yield (name, offset), _place(name, info)

    def items(self) -> Iterator[_Stored]:
        if not all(type(name) is str for name in self.described):
            raise CorruptCheckpoint("an item has a name that is no string")
        named = objects_named(n for n, meta in self.described.items() if _is(meta, "BytesStorageMetadata"))
        for name, meta in self.described.items():
            if name in named:
                entry, box = named[name]
                yield _Stored(entry, box, *self._found(name, None))
            elif _is(meta, "TensorStorageMetadata"):
                yield from self._chunks(name, meta)
            else:
                raise CorruptCheckpoint(f"{name!r} is neither a tensor nor an object")

    def _chunks(self, name: str, meta: Record) -> Iterator[_Stored]:
        size, dtype, chunks = meta.field("size"), _dtype(name, meta), meta.field("chunks")
        if type(size) is not Size or type(chunks) is not list:
            raise CorruptCheckpoint(f"{name!r} has no size or no chunks")
        listed = tuple(size)
        _check_volume(name, listed, dtype)
        if not chunks and 0 not in listed:
            raise CorruptCheckpoint(f"it lists no chunk of {name!r}, which has the shape {listed}")
        shape = self.flattened.get(name, listed)
        cells = flattened.Cells(name, listed, shape) if name in self.flattened else None
        entry, whole = TensorEntry(name, TensorMeta(shape, dtype)), Box.whole(listed)
        taken: set[tuple[str, int]] = set()
        for box in dict.fromkeys(_box(name, chunk, len(listed)) for chunk in chunks):
            if not whole.contains(box):
                raise CorruptCheckpoint(f"the chunk {box} of {name!r} lies outside of its shape {listed}")
            file, start, length = self._found(name, box.offset)
            if length < box.volume * ITEMSIZE[dtype]:
                raise CorruptCheckpoint(f"{length} bytes cannot hold {name!r} {box} of {dtype}")
            if (file, start) in taken:
                raise CorruptCheckpoint(f"two chunks of {name!r} are to begin at byte {start} of {file!r}")
            taken |= {(file, start)} if box.volume else set()
            for part in (box,) if cells is None else cells.boxes(box):
                yield _Stored(entry, part, file, start, length)

    def _found(self, name: str, offset: tuple[int, ...] | None) -> tuple[str, int, int]:
        try:
            return self.places[name, offset]
        except KeyError:
            raise CorruptCheckpoint(f"it does not tell where {name!r} (at {offset}) is stored") from None


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, Record) and value.kind == kind


def _box(name: str, chunk: Any, ndim: int) -> Box:
    offset, shape = (
        (chunk.field("offsets"), chunk.field("sizes")) if isinstance(chunk, Record) else (None, None)
    )
    if type(offset) is not Size or type(shape) is not Size or not len(offset) == len(shape) == ndim:
        raise CorruptCheckpoint(f"a chunk of {name!r} is no region of a tensor of {ndim} dimensions")
    return Box(tuple(offset), tuple(shape))


def _place(name: str, info: Record) -> tuple[str, int, int]:
    file, start, length = info.field("relative_path"), info.field("offset"), info.field("length")
    if type(file) is not str or type(start) is not int or type(length) is not int:
        raise CorruptCheckpoint(f"the place of {name!r} is none")
    if any(part in ("", ".", "..") for part in file.split("/")) or "\0" in file:
        raise CorruptCheckpoint(f"the place of {name!r}, {file!r}, is no file inside the checkpoint")
    if min(start, length) < 0 or start + length >= 1 << 63:
        raise CorruptCheckpoint(f"the place of {name!r} is {length} bytes from {start} on")
    return file, start, length


def _dtype(name: str, meta: Record) -> str:
    properties = meta.field("properties")
    state = properties.state if _is(properties, "TensorProperties") else None
    dtype = state[0] if type(state) is tuple and state else properties.field("dtype") if state else None
    if type(dtype) is not str:
        raise CorruptCheckpoint(f"{name!r} has no dtype")
    if dtype not in ITEMSIZE:
        raise BackendError(f"{name!r} is of {dtype}, which cannot be read: its elements are no whole bytes")
    return dtype


def _check_volume(name: str, shape: tuple[int, ...], dtype: str) -> None:
    if math.prod(max(n, 1) for n in shape) * ITEMSIZE[dtype] >= 1 << 63:
        raise CorruptCheckpoint(f"{name!r} of shape {shape} cannot exist")
