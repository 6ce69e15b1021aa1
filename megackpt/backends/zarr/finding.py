"""What a directory holds by its own account: arrays by their metadata, chunks by their files and shards' indexes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby, islice

import numpy as np

from megackpt import limits
from megackpt.backends.object_files import (
    COMMON_FILE,
    OBJECTS,
    decode_key,
    objects_in,
    parse_shard,
)
from megackpt.backends.zarr.layout import ArrayLayout, Grid, chunk_numbers
from megackpt.backends.zarr.names import ARRAY, MEGATRON, ZARRAY
from megackpt.backends.zarr.stores import MISSING, layout_in, shard_index
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Box, Boxes, cut
from megackpt.planning.manifest import (
    COMMON_KEY,
    ITEMSIZE,
    OBJECT,
    Location,
    Manifest,
    TensorEntry,
    TensorMeta,
    listed,
)
from megackpt.storage import LocalStorage, Storage

_NAMED = 5  # missing chunks that an error names for each tensor
_DEEPEST = 32  # folders in folders, for keys with "/" in version 1
_ENTRIES = 10_000  # that are looked at behind a link
_LOCKS = ".sync"
"""Megatron-Core up to 0.15 writes flattened tensors under zarr's ProcessSynchronizer: it leaves empty files that are
called as what they lock (".zarray", "0.0") in a folder that is called as the array, with this behind.
"""


def holds(root: Storage, folder: str, name: str) -> bool:
    """Is there a file of this name in a folder of this name?"""
    try:
        return root.size(folder) is None and root.size(f"{folder}/{name}") is not None
    except CorruptCheckpoint:  # the folder is a link to somewhere
        return False


def discover(root: Storage, version: int) -> Manifest:
    """What the files themselves tell. CorruptCheckpoint naming all chunks missing or of a wrong size."""
    found = _Found(root)
    if version == MEGATRON:
        if COMMON_FILE in root.list():
            if (size := root.size(COMMON_FILE)) is None:
                found.problems.append(
                    f"{COMMON_FILE} is no regular file (a link, a folder)"
                )
            found.entry(COMMON_KEY, TensorMeta((), OBJECT))
            found.chunk(Box((), ()), COMMON_FILE, 0, size or 0)
        _walk(found, "", 0)
        if not found.entries and not found.problems:
            found.problems.append(
                "it holds neither an array nor an object nor a common state"
            )
    else:
        _look_through(found)
    if found.problems:
        raise CorruptCheckpoint(
            f"{root.location} is damaged: "
            + "; ".join(found.problems)
            + ". hint: every chunk of an array "
            "must be there (zarr would give its fill value for a lost one)"
        )
    manifest = listed(found.entries, found.chunks, ("zarr", version))
    return replace(
        manifest, grids=tuple(found.grids), encoding="raw" if found.raw else "native"
    )


@dataclass(slots=True)
class _Found:
    """What was found in a directory so far, and everything that is wrong with it."""

    root: Storage
    entries: list[TensorEntry] = field(default_factory=list)
    grids: list[Grid | None] = field(default_factory=list)
    chunks: list[tuple[int, Box, Location]] = field(default_factory=list)
    raw: bool = True
    problems: list[str] = field(default_factory=list)

    def entry(self, key: str, meta: TensorMeta, grid: Grid | None = None) -> None:
        self.entries.append(TensorEntry(key, meta))
        self.grids.append(grid)

    def chunk(self, box: Box, file: str, start: int, length: int) -> None:
        self.chunks.append((len(self.entries) - 1, box, Location(file, start, length)))

    def object(self, folder: str, files: list[str]) -> None:
        """The shards of one object of version 1."""
        shards = {file: parse_shard(file) for file in files}
        shapes = {shard[1] for shard in shards.values() if shard is not None}
        if None in shards.values() or len(shapes) != 1:
            self.problems.append(
                f"{folder} is no folder of one object's shards: it holds {files}"
            )
            return
        self.entry(folder, TensorMeta(shapes.pop(), OBJECT))
        for file, shard in shards.items():
            offset = shard[0] if shard else ()
            size = self.root.size(f"{folder}/{file}")
            if size is None:
                self.problems.append(f"{folder}/{file} is no file")
            self.chunk(
                Box(offset, (1,) * len(offset)), f"{folder}/{file}", 0, size or 0
            )

    def array(self, folder: str, key: str, layout: ArrayLayout) -> None:
        """An array, whose chunks must all be there."""
        self.entry(key, TensorMeta(layout.shape, layout.dtype), layout.cell)
        self.raw &= layout.raw
        if 0 in layout.shape:
            origin = (0,) * len(layout.shape)
            self.chunk(Box.whole(layout.shape), f"{folder}/{layout.file(origin)}", 0, 0)
            return
        missing = _missing(self.root, folder, layout)
        if missing:
            self.problems.append(
                f"tensor {key!r} ({folder}) lacks the chunk {', '.join(missing)}"
            )
            return
        for index in layout.indices():
            file = f"{folder}/{layout.file(index)}"
            if layout.index is None:
                self._cell(layout, layout.box(index), file)
            else:
                self._shard(layout, layout.box(index), file)

    def _cell(self, layout: ArrayLayout, box: Box, file: str) -> None:
        size, stored = self.root.size(file), layout.stored_bytes
        if size is None or stored not in (None, size):
            what = (
                "is no file"
                if size is None
                else f"has {size} bytes instead of {stored}"
            )
            self.problems.append(f"{file} {what}")
        self.chunk(box, file, 0, box.volume * ITEMSIZE[layout.dtype])

    def _shard(self, layout: ArrayLayout, box: Box, file: str) -> None:
        """The chunks in one shard, but for those that lie beyond the tensor's end."""
        try:
            starts, lengths = shard_index(
                self.root, file, layout.chunks_in_a_cell, layout.index or ("end", True)
            )
        except CorruptCheckpoint as error:
            self.problems.append(str(error))
            return
        inner = np.array([layout.inner], np.int64)
        _, boxes = cut(Boxes.of([box]), inner, np.zeros_like(inner))
        numbers = chunk_numbers(boxes, layout.cell, layout.inner).tolist()
        for row, number in enumerate(numbers):
            part = boxes.row(row, len(layout.shape))
            if starts[number] == MISSING or layout.stored_bytes not in (
                None,
                lengths[number],
            ):
                self.problems.append(
                    f"{file} has {lengths[number]} bytes of chunk {number}, {part}"
                )
                return
            self.chunk(
                part, file, int(starts[number]), part.volume * ITEMSIZE[layout.dtype]
            )


def _look_through(found: _Found) -> None:
    """Version 2: every array and every object's folder stands in the root."""
    root = found.root
    for entry, shards in groupby(objects_in(root), lambda sidecar: sidecar.entry):
        found.entry(*entry)
        for _, box, place in shards:
            found.chunk(box, place.file, 0, place.length)
    arrays = [
        name
        for name in root.list()
        if not name.endswith(OBJECTS) and holds(root, name, ARRAY)
    ]
    if root.size(ARRAY) is None:
        found.problems.append(f"it lacks the {ARRAY} of the group")
    told = _arrays_told(root)
    if told not in (None, len(arrays)):
        found.problems.append(
            f"{ARRAY} tells of {told} arrays, and {len(arrays)} are there"
        )
    for name in arrays:
        layout = layout_in(root, name)
        key = layout.key if layout and layout.key is not None else decode_key(name)
        if layout is not None and key is not None:
            found.array(name, key, layout)
        else:
            found.problems.append(
                f"{name}/{ARRAY} does not tell the tensor's key, which was shortened"
            )


def _arrays_told(root: Storage) -> object:
    """How many arrays the group's own description counts; None where it does not tell."""
    try:
        return json.loads(root.get(ARRAY, limits.ZARR_DESCRIPTION_BYTES))["attributes"][
            "megackpt"
        ]["arrays"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _walk(found: _Found, folder: str, depth: int) -> None:
    """Version 1: keys stand as they are, so that "/" in them makes folders in folders."""
    if depth > _DEEPEST:
        raise CorruptCheckpoint(
            f"{found.root.location}/{folder}: folders in folders, {depth} deep"
        )
    try:
        names = found.root.list(folder)
    except CorruptCheckpoint as error:
        if _may_be_ours(found.root, folder):
            found.problems.append(str(error))
        return
    layout = layout_in(found.root, folder) if ZARRAY in names else None
    if layout is None and ZARRAY in names:
        found.problems.append(f"{folder}/{ZARRAY} is no regular file")
    shards = [
        name for name in names if name.startswith("shard_") and name.endswith(".pt")
    ]
    if layout is not None:
        found.array(folder, folder, layout)
    elif folder and shards:
        found.object(folder, shards)
    if layout is not None and layout.separator == "/":
        return  # the folders in this one are numbers of chunks
    for name in names:
        below = f"{folder}/{name}" if folder else name
        is_chunk = layout is not None and name.replace(".", "").isdigit()
        if is_chunk or name in shards or found.root.size(below) is not None:
            continue
        if not (name.endswith(_LOCKS) and _is_locks(found.root, below)):
            _walk(found, below, depth + 1)


def _may_be_ours(root: Storage, link: str) -> bool:
    """Could this, which is neither a file nor a folder, stand for an array or an object? A link could, unless it leads
    to a file, to a folder above, or to one in which there is nothing of the kind: a tokenizer, for example.
    """
    if not isinstance(root, LocalStorage):
        return True
    path, within = (
        os.path.realpath(name) for name in (f"{root.location}/{link}", root.location)
    )
    if os.path.isfile(path) or os.path.commonpath([path, within]) == path:
        return False
    waiting, entries = [path], 0
    while waiting:
        try:
            with os.scandir(waiting.pop()) as folder:
                for entry in folder:
                    entries += 1
                    if (
                        entries > _ENTRIES
                        or entry.name == ZARRAY
                        or parse_shard(entry.name)
                    ):
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:  # it leads nowhere, or may not be looked into
            return True
    return False


def _is_locks(root: Storage, folder: str) -> bool:
    """Are these Megatron's locks of an array ``KEY``, left in the folder ``KEY.sync`` beside it? An array of that name
    has files that are not empty.
    """
    if not holds(root, folder.removesuffix(_LOCKS), ZARRAY):
        return False
    try:
        return all(root.size(f"{folder}/{name}") == 0 for name in root.list(folder))
    except CorruptCheckpoint:  # a link
        return False


def _missing(root: Storage, name: str, layout: ArrayLayout) -> list[str]:
    """Some of the chunk files that are not there, without ever listing more than are."""
    levels = layout.file([0] * len(layout.shape)).count("/")
    there = set(_below(root, name, levels))
    expected = (f"{name}/{layout.file(index)}" for index in layout.indices())
    return list(islice((file for file in expected if file not in there), _NAMED))


def _below(root: Storage, name: str, levels: int) -> Iterator[str]:
    for entry in root.list(name):
        if levels and entry not in (ARRAY, ZARRAY):
            yield from _below(root, f"{name}/{entry}", levels - 1)
        else:
            yield f"{name}/{entry}"
