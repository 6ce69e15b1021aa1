"""The manifest of a directory without our index.

Arrays are found by their descriptions, chunks by files and by the indexes of shards.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter

from megackpt import limits
from megackpt.backends.object_files import (
    COMMON_FILE,
    OBJECTS,
    ObjectFile,
    decode_key,
    key_files,
    object_shards,
    objects_in,
    parse_shard,
)
from megackpt.backends.zarr.array_metadata import PARSE_ERRORS, read_layout
from megackpt.backends.zarr.codecs import MISSING, shard_index
from megackpt.backends.zarr.grid import (
    ARRAY,
    DESCRIPTIONS,
    FOREIGN,
    MEGATRON,
    VERSION,
    ZARRAY,
    ArrayLayout,
    Grid,
    join,
)
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Box
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

logger = logging.getLogger(__name__)

_ZGROUP = ".zgroup"
_TABLES = (*DESCRIPTIONS, _ZGROUP, ".zattrs", ".zmetadata")
_ORBAX = frozenset(("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"))
"""Orbax has zarr arrays in its directories. These files say which ones, and how they are nested."""
_ROOT_KEY = "array"
"""The key where the directory itself is an array."""
_NAMED = 5  # missing chunks that an error names for each tensor
_DEEPEST = 32  # nested folders, for keys with "/" in version 1
_MOST_FOLDERS = 1_000  # that are looked at behind a link
_CHUNK = re.compile(r"(c\.)?[0-9]+(\.[0-9]+)*")
"""Names of chunks, and of folders of chunks."""
_LOCKS = ".sync"
"""Megatron-Core up to 0.15 writes flattened tensors under zarr's ProcessSynchronizer. It leaves
empty files with the names of the locked files (".zarray", "0.0"), in a folder with the name of the
array and this ending.
"""


def holds(root: Storage, folder: str, name: str) -> bool:
    """Is there a file of this name in a folder of this name?"""
    try:
        return root.size(folder) is None and root.size(f"{folder}/{name}") is not None
    except CorruptCheckpoint:  # the folder is a link
        return False


def recognised(root: Storage) -> bool:
    """Is this a zarr group or array, or a folder of these? An unfinished save of ours is not.

    The first description of a group or an array decides, of the root or of a folder in it.
    """
    names = root.list()
    if not _ORBAX.isdisjoint(names):
        return False
    for folder in ("", *names):
        for name in (ZARRAY, _ZGROUP, ARRAY):
            if folder and not holds(root, folder, name):
                continue
            file = join(folder, name)
            if not folder and root.size(file) is None:
                continue
            foreign = name != ARRAY or _is_foreign(root, file)
            if foreign is not None:
                return foreign
    return False


def _is_foreign(root: Storage, file: str) -> bool | None:
    """Does this zarr.json lack what we write into each? None: it describes no group or array."""
    try:
        document = json.loads(root.get(file, limits.ZARR_DESCRIPTION_BYTES))
        ours = not {"key", "megackpt"}.isdisjoint(document.get("attributes", ()))
        kind = document["zarr_format"], document["node_type"]
    except (CorruptCheckpoint, *PARSE_ERRORS):
        return None
    if kind not in ((3, "array"), (3, "group")):
        return None
    return not ours


def discover(root: Storage, version: int, fills: bool = True) -> Manifest:
    """The manifest, from the files alone.

    ``fills``: missing chunks of FOREIGN arrays have the fill value. Raises CorruptCheckpoint naming
    the chunks that are missing or cut off.
    """
    found = _Found(root, version, version == FOREIGN and fills)
    if version != VERSION:
        if COMMON_FILE in root.list():
            found.entry(COMMON_KEY, TensorMeta((), OBJECT))
            found.chunk(Box((), ()), COMMON_FILE, 0, found.size(COMMON_FILE))
        _find_nested(found, "", 0)
        if version == FOREIGN and any(e.meta.is_object for e in found.entries):
            return discover(root, MEGATRON)  # of which metadata.json was lost
        if not found.entries and not found.problems:
            found.problems.append(
                "it holds neither an array nor an object nor a common state"
            )
    else:
        _find_in_root(found)
    if found.problems:
        raise CorruptCheckpoint(
            f"{root.location} is damaged: {'; '.join(found.problems)}. "
            "hint: every chunk of an array must be there (zarr would give its fill value instead)"
        )
    if found.missing:
        logger.info(
            "%s: %d chunks are not stored, so their elements are the fill values of the arrays, "
            "as zarr specifies; missing_chunks='error' refuses such arrays",
            root.location,
            found.missing,
        )
    manifest = listed(found.entries, found.chunks, ("zarr", version))
    return replace(
        manifest,
        grids=tuple(found.grids),
        encoding=found.encoding,
        tables=(*found.tables, *key_files(found.entries)),
    )


@dataclass(slots=True)
class _Found:
    """The contents of a directory as far as it was read, and everything that is wrong with it."""

    root: Storage
    version: int
    fills: bool
    entries: list[TensorEntry] = field(default_factory=list)
    grids: list[Grid | None] = field(default_factory=list)
    chunks: list[tuple[int, Box, Location]] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    encoding: str = "raw"
    problems: list[str] = field(default_factory=list)
    missing: int = 0

    def entry(self, key: str, meta: TensorMeta, grid: Grid | None = None) -> None:
        self.entries.append(TensorEntry(key, meta))
        self.grids.append(grid)

    def chunk(self, box: Box, file: str, start: int, length: int) -> None:
        self.chunks.append((len(self.entries) - 1, box, Location(file, start, length)))

    def size(self, file: str) -> int:
        size = self.root.size(file)
        if size is None:
            self.problems.append(f"{file} is not a regular file (a link, a folder)")
        return size or 0

    def objects(self, shards: Iterable[ObjectFile]) -> None:
        """Shards of objects, object by object."""
        for entry, group in groupby(shards, lambda shard: shard.entry):
            self.entry(*entry)
            for _, box, place in group:
                self.chunk(box, place.file, place.start, place.length)

    def array(self, folder: str, key: str, layout: ArrayLayout) -> None:
        """An array, whose chunks must all exist."""
        self.entry(key, TensorMeta(layout.shape, layout.dtype), layout.cell)
        if layout.packing.compressor is not None:
            self.encoding = "native"
        origin = layout.file((0,) * len(layout.shape))
        description = join(folder, layout.description)
        if 0 in layout.shape:
            # Only our saves write a file for it.
            file = description
            if self.version == VERSION:
                file = join(folder, origin)
            self.chunk(Box.whole(layout.shape), file, 0, 0)
            return
        files = {}
        for file in _files_below(self.root, folder, origin.count("/")):
            index = layout.index_in(file.removeprefix(join(folder, "")))
            if index is not None:
                files[index] = file
        there = sorted(files)
        for index in there:
            self.cell(layout, layout.box(index), files[index], description)
        # A description may claim any number of cells. The existing files bound the work.
        gaps = list(_gaps(layout.counts, there))
        strays: list[str] = []
        if gaps and self.fills:
            # As of another separator: zeros would take the place of their elements.
            present = {file.removeprefix(join(folder, "")) for file in files.values()}
            strays = [
                name
                for name in self.root.list(folder)
                if _CHUNK.fullmatch(name) and name not in present
                if "." in name or layout.separator == "."
            ]
        if strays:
            self.problems.append(
                f"tensor {key!r} ({folder}) lacks the chunk {layout.file(gaps[0].offset)}, and has "
                f"{strays[0]}, which is no chunk of it"
            )
        elif gaps and self.fills:
            self.encoding = "native"
            for gap in gaps:
                self.missing += gap.volume * layout.chunks_in_a_cell
                box = layout.region(gap)
                length = box.volume * ITEMSIZE[layout.dtype]
                self.chunk(box, description, 0, length)
        elif gaps:
            # A gap is named by its first cell.
            names = [join(folder, layout.file(gap.offset)) for gap in gaps[:_NAMED]]
            self.problems.append(
                f"tensor {key!r} ({folder}) lacks the chunk {', '.join(names)}"
            )

    def cell(self, layout: ArrayLayout, box: Box, file: str, description: str) -> None:
        """The chunks in the file of a cell, except chunks beyond the end of the tensor."""
        itemsize = ITEMSIZE[layout.dtype]
        if not layout.sharded:
            size = self.size(file)
            if layout.stored_bytes not in (None, size):
                self.problems.append(
                    f"{file} has {size} bytes instead of {layout.stored_bytes}"
                )
            self.chunk(box, file, 0, box.volume * itemsize)
            return
        try:
            starts, lengths = shard_index(
                self.root, file, layout.chunks_in_a_cell, *layout.index_form
            )
        except CorruptCheckpoint as error:
            self.problems.append(str(error))
            return
        boxes = layout.chunks(box)
        for row, number in enumerate(layout.numbers(boxes).tolist()):
            part = boxes.row(row, len(layout.shape))
            start = int(starts[number])
            length = int(lengths[number])
            if start == MISSING and self.fills:
                self.encoding = "native"
                self.missing += 1
                self.chunk(part, description, 0, part.volume * itemsize)
                continue
            if start == MISSING or layout.stored_bytes not in (None, length):
                self.problems.append(
                    f"{file} has {length} bytes of chunk {number}, {part}"
                )
                return
            self.chunk(part, file, start, part.volume * itemsize)


def _gaps(counts: Grid, there: Sequence[Grid]) -> Iterator[Box]:
    """Boxes of cells, as few as the sorted indices allow, that tile a grid without these cells."""
    if not there:
        yield Box((0,) * len(counts), counts)
        return
    if not counts:
        return
    inner = counts[1:]
    first = 0
    for number, same in groupby(there, itemgetter(0)):
        if number > first:
            yield Box((first, *(0,) * len(inner)), (number - first, *inner))
        for gap in _gaps(inner, [index[1:] for index in same]):
            yield Box((number, *gap.offset), (1, *gap.shape))
        first = number + 1
    if first < counts[0]:
        yield Box((first, *(0,) * len(inner)), (counts[0] - first, *inner))


def _files_below(root: Storage, name: str, levels: int) -> Iterator[str]:
    """The files of an array's chunks, and perhaps more, that many levels of folders down."""
    for entry in root.list(name):
        if not levels:
            yield join(name, entry)
        elif entry == "c" or entry.isdecimal():
            yield from _files_below(root, join(name, entry), levels - 1)


def _find_in_root(found: _Found) -> None:
    """Version 2: the folders of arrays and of objects are in the root."""
    root = found.root
    found.tables.append(ARRAY)
    found.objects(objects_in(root))
    names = [name for name in root.list() if not name.endswith(OBJECTS)]
    arrays = [name for name in names if holds(root, name, ARRAY)]
    if root.size(ARRAY) is None:
        found.problems.append(f"it lacks the {ARRAY} of the group")
    try:
        group = json.loads(root.get(ARRAY, limits.ZARR_DESCRIPTION_BYTES))
        count = group["attributes"]["megackpt"]["arrays"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        count = None  # another program's
    if count not in (None, len(arrays)):
        found.problems.append(
            f"{ARRAY} lists {count} arrays, and {len(arrays)} are there"
        )
    for name in arrays:
        layout = read_layout(root, name)
        key = decode_key(name)
        if layout is not None and layout.key is not None:
            key = layout.key
        if layout is not None and key is not None:
            found.tables.append(f"{name}/{ARRAY}")
            found.array(name, key, layout)
        else:
            found.problems.append(
                f"{name}/{ARRAY} lacks the tensor's key, which was shortened"
            )


def _find_nested(found: _Found, folder: str, depth: int) -> None:
    """Version 1: keys are not encoded, so that "/" in them makes nested folders."""
    root = found.root
    if depth > _DEEPEST:
        raise CorruptCheckpoint(
            f"{root.location}/{folder}: folders in folders, {depth} deep"
        )
    try:
        names = root.list(folder)
    except CorruptCheckpoint as error:
        if _link_may_hold_data(root, folder):
            found.problems.append(str(error))
        return
    shards = []
    layout = None
    found.tables += [join(folder, name) for name in _TABLES if name in names]
    described = not set(DESCRIPTIONS).isdisjoint(names)
    if described:
        layout = read_layout(root, folder)
    if layout is not None:
        found.array(folder, folder or _ROOT_KEY, layout)
        # The folders in this one have numbers of chunks as names. Version 3 nests no arrays.
        if layout.separator == "/" or layout.description == ARRAY:
            return
    elif ZARRAY in names:
        found.problems.append(
            f"{join(folder, ZARRAY)} is not a regular file, or is beside the {ARRAY} of a group"
        )
    elif described and root.size(join(folder, ARRAY)) is None:
        found.problems.append(f"{join(folder, ARRAY)} is not a regular file")
    elif folder and not described:
        shards = fnmatch.filter(names, "shard_*.pt")
        if shards:
            try:
                found.objects([*object_shards(root, folder, folder, shards)])
            except CorruptCheckpoint as error:
                found.problems.append(str(error))
    for name in names:
        below = join(folder, name)
        is_chunk = layout is not None and name.replace(".", "").isdigit()
        if is_chunk or name in shards or root.size(below) is not None:
            continue
        if not (name.endswith(_LOCKS) and _is_locks(root, below)):
            _find_nested(found, below, depth + 1)


def _link_may_hold_data(root: Storage, link: str) -> bool:
    """Could this link lead to an array or an object?

    Not if it leads to a file, to a folder above, or to a folder without arrays and objects, such as
    a tokenizer's.
    """
    if not isinstance(root, LocalStorage):
        return True
    path = os.path.realpath(f"{root.location}/{link}")
    within = os.path.realpath(root.location)
    if os.path.isfile(path) or os.path.commonpath([path, within]) == path:
        return False
    errors: list[OSError] = []
    for number, (_, _, files) in enumerate(os.walk(path, onerror=errors.append)):
        # A large folder may hold anything, and so may an unreadable one.
        described = not set(DESCRIPTIONS).isdisjoint(files)
        if number == _MOST_FOLDERS or described or any(map(parse_shard, files)):
            return True
    return bool(errors)


def _is_locks(root: Storage, folder: str) -> bool:
    """Is this the folder of an array's locks? The files of an array would not be empty."""
    if not holds(root, folder.removesuffix(_LOCKS), ZARRAY):
        return False
    try:
        return all(root.size(f"{folder}/{name}") == 0 for name in root.list(folder))
    except CorruptCheckpoint:  # a link
        return False
