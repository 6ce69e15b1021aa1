"""The table of contents: the small files that make a directory of cells a zarr group, written and read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from megackpt.backends.zarr.layout import ArrayLayout, array_document, grid_of, parse_array
from megackpt.backends.zarr.names import (
    ARRAY,
    COMMON,
    METADATA,
    OBJECTS,
    decode_key,
    encode_key,
    folder,
    parse_shard,
)
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import (
    COMMON_KEY,
    DIGEST_SIZE,
    ITEMSIZE,
    OBJECT,
    Chunks,
    Manifest,
    TensorEntry,
    TensorMeta,
)
from megackpt.runtime.storage import Storage

NAME = "zarr"
VERSION = 2

_CONSOLIDATED = 10_000  # arrays; a longer list would cost every reader more than it saves
_KNOWN_TO_ALL = (
    frozenset(ITEMSIZE) - {OBJECT, "complex32", "bfloat16"} - {d for d in ITEMSIZE if "float8" in d}
)
_DESCRIPTION_LIMIT = 1 << 24  # bytes that a zarr.json may have
_NAMED = 5  # missing chunks that an error names for each tensor


def contents(manifest: Manifest) -> dict[str, bytes]:
    """The small files of a checkpoint: every array's zarr.json, the group's, and metadata.json last."""
    files: dict[str, bytes] = {}
    documents: dict[str, Any] = {}
    shortened: dict[str, str] = {}
    for entry, grid in zip(manifest.tensors, manifest.grids, strict=True):
        name = folder(entry)
        if not entry.meta.is_object:
            shape = entry.meta.shape
            document = json.loads(array_document(shape, entry.meta.dtype, grid_of(shape, grid)))
            documents[name] = document | {"attributes": {"key": entry.key}}
            files[f"{name}/{ARRAY}"] = _encoded(documents[name])
        elif not entry.is_common and decode_key(encode_key(entry.key)) is None:
            shortened[name] = entry.key
    files[ARRAY] = _encoded(_group(manifest, documents, shortened))
    files[METADATA] = _encoded(
        {
            "sharded_backend": NAME,
            "sharded_backend_version": VERSION,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
    )
    return files


def _group(manifest: Manifest, documents: dict[str, Any], shortened: dict[str, str]) -> dict[str, Any]:
    """The group's zarr.json.

    Consolidated metadata lets zarr-python list the arrays without stumbling over our other files. It
    would keep zarr-python from opening the group at all where an array's dtype is not known to it.
    """
    about = {"version": VERSION, "objects": shortened}
    group: dict[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": {"megackpt": about}}
    plain = all(entry.meta.is_object or entry.meta.dtype in _KNOWN_TO_ALL for entry in manifest.tensors)
    if plain and len(documents) <= _CONSOLIDATED:
        group["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": documents}
    return group


def _encoded(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()


@dataclass(slots=True)
class _Found:
    """What was found in a directory so far, and everything that is wrong with it."""

    entries: list[TensorEntry] = field(default_factory=list)
    grids: list[tuple[int, ...] | None] = field(default_factory=list)
    tensor: list[int] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    raw: bool = True
    problems: list[str] = field(default_factory=list)

    def tensor_begins(self, key: str, meta: TensorMeta, grid: tuple[int, ...] | None) -> None:
        self.entries.append(TensorEntry(key, meta))
        self.grids.append(grid)

    def chunk(self, box: Box, file: str, length: int) -> None:
        self.tensor.append(len(self.entries) - 1)
        self.boxes.append(box)
        self.files.append(file)
        self.lengths.append(length)

    def manifest(self) -> Manifest:
        count = len(self.tensor)
        chunks = Chunks(
            np.array(self.tensor, np.int32),
            Boxes.of(self.boxes),
            np.full(count, -1, np.int32),
            np.arange(count, dtype=np.int32),
            np.zeros(count, np.int64),
            np.array(self.lengths, np.int64),
            np.zeros((0, DIGEST_SIZE), np.uint8),
        )
        encoding = "raw" if self.raw else "native"
        return Manifest(
            tuple(self.entries), tuple(self.grids), chunks, tuple(self.files), encoding, (NAME, VERSION)
        )


def discover(root: Storage) -> Manifest:
    """What the files themselves tell. CorruptCheckpoint naming all chunks missing or of a wrong size."""
    found = _Found()
    shortened = _shortened_objects(root)
    for name in root.list():
        if name == COMMON:
            found.tensor_begins(COMMON_KEY, TensorMeta((), OBJECT), None)
            found.chunk(Box((), ()), COMMON, root.size(COMMON) or 0)
        elif name.endswith(OBJECTS):
            _add_object(root, name, shortened.get(name) or decode_key(name.removesuffix(OBJECTS)), found)
        elif root.size(name) is None and root.size(f"{name}/{ARRAY}") is not None:
            _add_array(root, name, found)
    if found.problems:
        raise CorruptCheckpoint(
            f"{root.location} is damaged: " + "; ".join(found.problems) + ". hint: every chunk of an array "
            "must be there (zarr would give its fill value for a lost one)"
        )
    return found.manifest()


def _shortened_objects(root: Storage) -> dict[str, str]:
    """Folders whose names were too long to hold the keys of their objects, with these keys."""
    where = f"{root.location}/{ARRAY}"
    try:
        group = json.loads(root.get(ARRAY, _DESCRIPTION_LIMIT))
        objects = group.get("attributes", {}).get("megackpt", {}).get("objects", {})
        return {str(name): str(key) for name, key in objects.items()}
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{where} is missing: this is no zarr group") from None
    except (ValueError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{where} does not describe a zarr group: {error!r}") from error


def _add_object(root: Storage, name: str, key: str | None, found: _Found) -> None:
    shards = {file: parse_shard(file) for file in root.list(name)}
    shapes = {shard[1] for shard in shards.values() if shard is not None}
    if key is None or None in shards.values() or len(shapes) != 1:
        found.problems.append(f"{name} is no folder of one object's shards: it holds {sorted(shards)}")
        return
    found.tensor_begins(key, TensorMeta(shapes.pop(), OBJECT), None)
    for file, shard in shards.items():
        offset = shard[0] if shard else ()
        found.chunk(Box(offset, (1,) * len(offset)), f"{name}/{file}", root.size(f"{name}/{file}") or 0)


def _add_array(root: Storage, name: str, found: _Found) -> None:
    where = f"{root.location}/{name}/{ARRAY}"
    layout = parse_array(root.get(f"{name}/{ARRAY}", _DESCRIPTION_LIMIT), where)
    key = decode_key(name) if layout.key is None else layout.key
    if key is None:
        found.problems.append(
            f"{where} does not tell the tensor's key, which is too long to be the folder's name"
        )
        return
    found.tensor_begins(key, TensorMeta(layout.shape, layout.dtype), layout.cell)
    found.raw &= layout.raw
    if 0 in layout.shape:
        found.chunk(Box.whole(layout.shape), f"{name}/{layout.file([0] * len(layout.shape))}", 0)
        return
    missing = _missing(root, name, layout)
    if missing:
        found.problems.append(f"tensor {key!r} ({name}) lacks the chunk {', '.join(missing)}")
        return
    _add_cells(root, name, layout, found)


def _missing(root: Storage, name: str, layout: ArrayLayout) -> list[str]:
    """Some of the chunk files that are not there, without ever listing more than are."""
    levels = layout.file([0] * len(layout.shape)).count("/")
    there = set(_below(root, name, levels))
    expected = (f"{name}/{layout.file(index)}" for index in layout.indices())
    return list(islice((file for file in expected if file not in there), _NAMED))


def _below(root: Storage, name: str, levels: int) -> Iterator[str]:
    for entry in root.list(name):
        if levels and entry != ARRAY:
            yield from _below(root, f"{name}/{entry}", levels - 1)
        else:
            yield f"{name}/{entry}"


def _add_cells(root: Storage, name: str, layout: ArrayLayout, found: _Found) -> None:
    itemsize = ITEMSIZE[layout.dtype]
    stored = Box.whole(layout.cell).volume * itemsize
    for index in layout.indices():
        offset = tuple(i * extent for i, extent in zip(index, layout.cell, strict=True))
        edge = zip(layout.cell, layout.shape, offset, strict=True)
        box = Box(offset, tuple(min(extent, end - start) for extent, end, start in edge))
        file = f"{name}/{layout.file(index)}"
        size = root.size(file)
        if size is None or (layout.raw and size != stored):
            found.problems.append(
                f"{file} has {size} bytes instead of {stored}" if size else f"{file} is no file"
            )
        found.chunk(box, file, box.volume * itemsize if layout.raw else size or 0)
