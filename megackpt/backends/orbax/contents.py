"""The manifest of a checkpoint of orbax: arrays as tensorstore describes them, and other leaves."""

from __future__ import annotations

import json
import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megackpt.backends.orbax.arrays import DRIVERS, Session, session
from megackpt.backends.orbax.trees import MANIFEST, TREE, Item, Tree
from megackpt.errors import BackendError, CorruptCheckpoint, join_truncated
from megackpt.planning.box import Box, Boxes, cut
from megackpt.planning.manifest import (
    COMMON,
    ITEMSIZE,
    OBJECT,
    Location,
    Manifest,
    TensorEntry,
    TensorMeta,
    key_problem,
    size_problem,
)
from megackpt.storage import Storage

_DTYPES = frozenset(ITEMSIZE) - {OBJECT, "complex32"}
_PADDED = 64 << 20
_PADDING = 16
"""A chunk may have _PADDED bytes more than _PADDING times the bytes of its part of the tensor."""
_MOST_CHUNKS = 1 << 18
_SPARSE = 16
"""Chunks of a checkpoint: at most _MOST_CHUNKS more than _SPARSE times the files of chunks."""

_OWN = re.compile(
    r"_(CHECKPOINT_)?METADATA|_sharding|_strings\.json|array_metadatas|checkpoint"
    r"|commit_success\.txt|d|manifest\.ocdbt|ocdbt[._][\w.]+|orbax\.checkpoint"
)
"""Entries that orbax makes beside the folders of items and arrays."""
ONE = "value"
"""The key of a tree that is one array."""
_DOCUMENTS = {driver: file for file, driver in DRIVERS.items()}
_AT_ONCE = 256
"""Arrays that are opened at a time."""

logger = logging.getLogger(__name__)


@dataclass
class Contents:
    """The contents of a checkpoint as far as it was read, and everything that is wrong with it."""

    root: Storage
    entries: list[TensorEntry] = field(default_factory=list)
    rows: list[tuple[int, Box, str, int, int]] = field(default_factory=list)
    """Chunks: the number of their tensor, box, file, start, length."""
    sources: dict[str, str] = field(default_factory=dict)
    """Key -> the leaf that it is of, for messages."""
    problems: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    filled: int = 0
    stored: int = 0
    has_values: bool = False

    def add(self, item: Item, prefix: str, tree: Tree, fill: bool) -> None:
        """Add the leaves of an item."""
        self.own_entries(item.path)
        if tree.values and not self.has_values:
            self.has_values = True
            file = item.path + tree.file
            self._chunks(COMMON, [(Box((), ()), Location(file, 0, 0))])
        for name in tree.values:
            source = f"{item.path}{prefix}{name}"
            other = self.sources.setdefault(prefix + name, source)
            if other != source:
                self.problems.append(f"{source} and {other} have one key")
        for name, inline in tree.inline.items():
            meta = TensorMeta(inline.shape, inline.dtype)
            self._tensor(item, prefix + name, meta, inline.pieces)
        with session(self.root) as opened:
            self._arrays(opened, item, prefix, tree, fill)

    def own_entries(self, folder: str) -> None:
        """Add the entries of a folder that orbax makes beside arrays to the tables."""
        names = self.root.list(folder.rstrip("/"))
        self.tables += [f"{folder}{name}" for name in names if _OWN.fullmatch(name)]

    def _arrays(
        self, opened: Session, item: Item, prefix: str, tree: Tree, fill: bool
    ) -> None:
        drivers, files = _arrays_of(opened.keys(item))
        chunks = [f"{item.path}{file}" for name in drivers for file in files[name]]
        self.stored += len(chunks)
        if not item.ocdbt:
            self.tables += chunks
        names = sorted(drivers)
        if tree.arrays is not None:
            names = sorted(drivers.keys() & tree.arrays.keys())
            lost = sorted(tree.arrays.keys() - drivers.keys())
            extra = sorted(drivers.keys() - tree.arrays.keys())
            if lost:
                self.problems.append(
                    f"the arrays of these leaves are missing: {join_truncated(lost)}"
                )
            if extra:
                self.problems.append(
                    f"{TREE} names no leaves for these arrays: {join_truncated(extra)}"
                )
        for first in range(0, len(names), _AT_ONCE):
            batch = names[first : first + _AT_ONCE]
            for name in batch:
                opened.begin(item, name, fill, drivers[name])
            for name in batch:
                array = opened.array(item, name, fill, drivers[name])
                self._array(
                    array, item, prefix, name, fill, len(files[name]), drivers[name]
                )

    def _array(
        self,
        array: Any,
        item: Item,
        prefix: str,
        name: str,
        fill: bool,
        count: int,
        driver: str,
    ) -> None:
        key = prefix + (name or ONE)
        shape = tuple(array.shape)
        dtype = array.dtype.name
        layout = array.chunk_layout
        chunk = tuple(layout.read_chunk.shape or ())
        cell = tuple(layout.write_chunk.shape or ())
        if dtype not in _DTYPES:
            self.unsupported.append(f"{key!r} is of {dtype}")
            return
        if problem := size_problem(shape, dtype):
            self.problems.append(f"{key!r}: {problem}")
            return
        if '"blosc"' in json.dumps(array.codec.to_json()):
            # tensorstore takes the memory that a header of blosc claims.
            self.problems.append(
                f"{key!r} is compressed by blosc, which orbax does not use: zarr reads it, from a "
                "directory of its own"
            )
            return
        number = _count(shape, chunk)
        nbytes = math.prod(chunk) * ITEMSIZE[dtype]
        part = math.prod(map(min, shape, chunk)) * ITEMSIZE[dtype]
        if nbytes > _PADDED + _PADDING * part:
            self.problems.append(
                f"{key!r} of shape {shape} has chunks of shape {chunk}"
            )
            return
        if len(self.rows) + number > _MOST_CHUNKS + _SPARSE * self.stored:
            self.problems.append(
                f"{key!r} of shape {shape} would have {number} chunks of shape {chunk}, and the "
                f"files of {self.stored} chunks are there"
            )
            return
        missing = _count(shape, cell) - count
        if missing > 0 and not fill:
            self.problems.append(
                f"{key!r} lacks {missing} of its chunks (missing_chunks='fill' reads them as its "
                "fill value)"
            )
        self.filled += max(0, missing)
        whole = Boxes.of([Box.whole(shape)])
        extents = np.array([chunk], np.int64)
        boxes = cut(whole, extents, np.zeros_like(extents))[1]
        file = f"{item.path}{MANIFEST}"
        if not item.ocdbt:
            folder = f"{name}/" if name else ""
            file = f"{item.path}{folder}{_DOCUMENTS[driver]}"
        place = Location(file, 2 * (len(key) - len(name)) + fill, nbytes)
        parts = [(boxes.row(row, len(shape)), place) for row in range(len(boxes))]
        self._tensor(item, key, TensorMeta(shape, dtype), parts)

    def _tensor(
        self,
        item: Item,
        key: str,
        meta: TensorMeta,
        parts: Sequence[tuple[Box, Location]],
    ) -> None:
        source = f"{item.path}{key}"
        other = self.sources.setdefault(key, source)
        problem = key_problem(key)
        if other != source:
            problem = f"{source} and {other} have one key"
        if problem:
            self.problems.append(f"{key!r}: {problem}")
        self._chunks(TensorEntry(key, meta), parts)

    def _chunks(
        self, entry: TensorEntry, parts: Sequence[tuple[Box, Location]]
    ) -> None:
        number = len(self.entries)
        for box, place in parts:
            self.rows.append((number, box, place.file, place.start, place.length))
        self.entries.append(entry)

    def manifest(self, version: int) -> Manifest:
        """Raises BackendError with all dtypes that torch lacks, else CorruptCheckpoint."""
        if self.unsupported:
            raise BackendError(
                f"{self.root.location} cannot be read: torch does not have the dtypes of its "
                f"leaves ({join_truncated(self.unsupported)}). Save it by orbax without these "
                "leaves, or in another dtype"
            )
        if not self.entries and not self.problems:
            self.problems.append(f"its {TREE} names no leaves")
        if self.problems:
            raise CorruptCheckpoint(
                f"{self.root.location} cannot be read: {join_truncated(self.problems)}"
            )
        if self.filled:
            logger.info(
                "%s: %d chunks are missing, and have the fill value of their array",
                self.root.location,
                self.filled,
            )
        return replace(
            Manifest.of(self.entries, self.rows),
            encoding="native",
            backend=("orbax", version),
            tables=tuple(self.tables),
        )


def _arrays_of(keys: Iterable[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The arrays that these files are of: their drivers, and the files of their chunks."""
    drivers: dict[str, str] = {}
    chunks = []
    for key in keys:
        folder, _, last = key.rpartition("/")
        if last not in DRIVERS:
            chunks.append(key)
        elif drivers.setdefault(folder, DRIVERS[last]) != DRIVERS[last]:
            raise CorruptCheckpoint(
                f"the array {folder!r} is described twice, for zarr and for zarr3"
            )
    files = defaultdict[str, list[str]](list)
    for key in chunks:
        folder = key.rpartition("/")[0]
        while folder and folder not in drivers:
            folder = folder.rpartition("/")[0]
        files[folder].append(key)
    return drivers, files


def _count(shape: tuple[int, ...], chunk: tuple[int, ...]) -> int:
    """The number of chunks of a shape."""
    return math.prod(-(-a // b) for a, b in zip(shape, chunk, strict=True))
