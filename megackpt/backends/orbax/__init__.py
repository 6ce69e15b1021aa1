"""Checkpoints of orbax, the library of JAX: read, not written."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from megackpt import serialization
from megackpt.backends.base import (
    Properties,
    ReadOnlyBackend,
    Target,
    run_in_threads,
)
from megackpt.backends.orbax.arrays import DRIVERS, Session, session
from megackpt.backends.orbax.contents import Contents
from megackpt.backends.orbax.trees import (
    AGGREGATE,
    MANIFEST,
    PROCESS,
    STEP,
    UNFINISHED,
    Item,
    Tree,
    find_items,
    read_tree,
)
from megackpt.backends.ranges import hand_out, read_raw
from megackpt.errors import BackendError, CorruptCheckpoint, NotACheckpoint
from megackpt.planning.box import Box, Int64, group
from megackpt.planning.manifest import (
    LoadPlan,
    Manifest,
    ReadItem,
    ShardId,
    itemsizes,
)
from megackpt.storage import Storage

_INDICATOR = "orbax.checkpoint"
"""An empty file that version 1 writes beside the items."""
_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Orbax(ReadOnlyBackend):
    """A step or an item of orbax, of version 0 or 1, with or without OCDBT, of zarr or zarr3.

    =========================  ====================================================================
    ``_CHECKPOINT_METADATA``   the directory has items; ``orbax.checkpoint``: it is of version 1
    ``<item>/_METADATA``       the tree of an item. The directory may itself be one item
    ``<item>/manifest.ocdbt``  OCDBT: arrays and their chunks are values of a B+tree in ``d/``
    ``<item>/<name>/.zarray``  without OCDBT: an array, ``zarr.json`` for zarr3
    ``<item>/_strings.json``   leaves that are strings
    ``<item>/checkpoint``      older checkpoints: leaves and small arrays, as msgpack
    =========================  ====================================================================

    A key consists of the keys of its leaf, joined with dots. Where there are several items, it
    begins with the name of the item. Leaves that are strings, empty, or plain numbers in msgpack
    are the common state, by the same keys. A chunk of the manifest is the smallest part of an array
    that tensorstore decodes. Its location has the file that describes the array, as ``length`` the
    bytes that it decodes to, and as ``start`` twice the number of characters before the name of the
    array in the key, plus 1 if missing chunks have the fill value.

    Options: ``item``, the name of the one item to read; ``missing_chunks``: "fill" reads chunks
    that are missing as the fill value of their array, "error" refuses them. None: as orbax does.
    It refuses them if the writer stored all chunks, and its ``_METADATA`` says so.
    """

    item: str | None = None
    missing_chunks: str | None = None

    properties: ClassVar[Properties] = Properties(
        "orbax",
        1,
        frozenset({0, 1}),
        encoding="native",
        read_only=True,
        covers=frozenset({"zarr"}),
    )

    def __post_init__(self) -> None:
        if self.missing_chunks not in (None, "fill", "error"):
            raise BackendError(
                f"missing_chunks is 'fill', 'error' or None, not {self.missing_chunks!r}"
            )

    def recognises(self, root: Storage) -> bool:
        """Raises NotACheckpoint for a part of a checkpoint, and in a save that is not finished."""
        for name in root.location.split("/"):
            if UNFINISHED in name:
                raise NotACheckpoint(
                    f"{root.location}: a save of orbax that is running, or died: orbax renames "
                    f"{name!r} when it is complete. Open another step"
                )
        if name.startswith(PROCESS):
            raise NotACheckpoint(
                f"{root.location} has the share of one process. Open the directory above it"
            )
        try:
            return STEP in root.list() or bool(find_items(root))
        except CorruptCheckpoint:  # an entry is a link
            return False

    def decoded_bytes(self, manifest: Manifest) -> Int64:
        chunks = manifest.chunks
        # A chunk is in memory as it is stored, and decoded.
        decoded = np.maximum(1, 2 * chunks.length)
        raw = [file.rpartition("/")[2] == AGGREGATE for file in manifest.files]
        is_object = itemsizes(manifest.tensors)[chunks.tensor] == 0
        return np.where(np.array(raw, np.bool_)[chunks.file] & ~is_object, 0, decoded)

    def read_manifest(self, root: Storage) -> Manifest:
        found = Contents(root)
        trees = self._trees(root)
        for item, prefix, tree in trees:
            fill = not tree.complete
            if self.missing_chunks is not None:
                fill = self.missing_chunks == "fill"
            found.add(item, prefix, tree, fill)
        version = int(root.size(_INDICATOR) is not None)
        if trees[0][0].path:
            found.own_entries("")
            others = {*root.list()} - {*found.tables} - {i.name for i, _, _ in trees}
            if self.item is None and others:
                logger.warning(
                    "%s: %s are not trees of arrays, and are not read",
                    root.location,
                    ", ".join(sorted(others)),
                )
        return found.manifest(version)

    def _trees(self, root: Storage) -> list[tuple[Item, str, Tree]]:
        """The items to read, each with the beginning of its keys and its tree."""
        items = find_items(root)
        names = [item.name for item in items]
        if self.item is not None:
            items = [item for item in items if item.name == self.item]
        if not items:
            wanted = "tree of arrays" if self.item is None else f"item {self.item!r}"
            raise NotACheckpoint(
                f"{root.location} holds no {wanted}: its items are {names}"
            )
        if len(items) == 1:
            return [(items[0], "", read_tree(root, items[0]))]
        return [(item, f"{item.name}.", read_tree(root, item)) for item in items]

    def read(self, root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
        raw = self.decoded_bytes(plan.manifest)[plan.chunk] == 0
        read_raw(root, plan.take(raw), into, verify)
        chunks = plan.manifest.chunks
        is_object = itemsizes(plan.manifest.tensors)[chunks.tensor[plan.chunk]] == 0
        for row in plan.take(is_object).rows():
            values: dict[str, Any] = {}
            for _, prefix, tree in self._trees(root):
                values |= {prefix + name: tree.values[name] for name in tree.values}
            into.blob(row.target, serialization.dump(values))
        arrays = plan.take(~raw & ~is_object)
        regions = group(arrays.chunk)  # of each chunk

        def work(numbers: Iterator[int]) -> None:
            for number in numbers:
                items = arrays.take(regions.rows(number)).rows()
                _read_regions(opened, list(items), into)

        if len(arrays):
            with session(root) as opened:
                opened.endpoint.expect(2 * int(chunks.length.max()) + (1 << 16))
                run_in_threads(len(regions), work)


def _read_regions(opened: Session, items: list[ReadItem], into: Target) -> None:
    """Read regions of one chunk."""
    key, _ = items[0].entry
    file = items[0].chunk.location.file
    start = items[0].chunk.location.start
    length = items[0].chunk.location.length
    folder, _, last = file.rpartition("/")
    name = key[start // 2 :]
    path = f"{folder}/" if folder else ""
    if name and last != MANIFEST:
        path = path.removesuffix(f"{name}/")
    item = Item("", path, last == MANIFEST)
    array = opened.array(item, name, bool(start % 2), DRIVERS.get(last, ""))
    low = np.min([part.box.offset for part in items], axis=0)
    high = np.max([part.box.stop for part in items], axis=0)
    read = Box(tuple(low.tolist()), tuple((high - low).tolist()))
    if length > _MEMORY:
        raise CorruptCheckpoint(
            f"{ShardId(key, read)} in {file}: its chunk has {length} bytes, more than there is "
            "memory for"
        )
    values = opened.read(array, read, f"{ShardId(key, read)} in {file}")
    hand_out(values, read, items, into)
