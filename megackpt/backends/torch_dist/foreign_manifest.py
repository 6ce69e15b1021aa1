"""The manifest of a checkpoint of stock torch DCP or Megatron-Core, from its ``.metadata``.

Every number is compared with the files before it is used. Keys are DCP's flat names. A tensor that
Megatron-Core flattened has its true shape in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megackpt.backends.archives import check_archive
from megackpt.backends.base import THREADS
from megackpt.backends.object_files import COMMON_FILE
from megackpt.backends.torch_dist import flattened
from megackpt.backends.torch_dist.metadata_reader import (
    ListedItem,
    Listing,
    RecordPlace,
    check_files,
    objects_named,
    read_listing,
)
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    COMMON,
    ITEMSIZE,
    Manifest,
    ShardId,
    TensorEntry,
    TensorMeta,
)
from megackpt.storage import Storage

EDGE = 2048
"""Bytes read from either end of a record: its zip directory and all before the data."""


class _Stored(NamedTuple):
    """One chunk, or one shard of an object, and its record."""

    entry: TensorEntry
    box: Box
    place: RecordPlace


def read_manifest(root: Storage, name: str) -> Manifest:
    """The manifest of a checkpoint without our index; encoding "native".

    Raises NotACheckpoint without ``.metadata``; CorruptCheckpoint if it contradicts itself or the
    files; UntrustedClass if it names a class that is not allowed; BackendError for unsupported
    contents.
    """
    listing = read_listing(root, name)
    try:
        found = list(_items(listing))
    except (CorruptCheckpoint, BackendError) as error:
        raise type(error)(f"{root.location}/{name}: {error}") from error
    if COMMON_FILE in root.list():
        # common.pt takes precedence; Megatron-Core has the same rule.
        found = [item for item in found if not item.entry.is_common]
        place = RecordPlace(COMMON_FILE, 0, root.size(COMMON_FILE) or 0)
        found.append(_Stored(COMMON, Box((), ()), place))
    check_files(root, [ListedItem(s.entry.key, s.box, s.place) for s in found])
    return _manifest(found)


def native_manifest(
    tensors: Mapping[str, TensorMeta], items: Iterable[ListedItem]
) -> Manifest:
    """The manifest of the plain tensors, as they are listed: torch DCP's planners ask for these."""
    return _manifest(
        _Stored(TensorEntry(name, tensors[name]), box, place)
        for name, box, place in items
        if ITEMSIZE.get(tensors[name].dtype) and not place.through
    )


def _manifest(stored: Iterable[_Stored]) -> Manifest:
    tensors: dict[TensorEntry, int] = {}
    rows = []
    for entry, box, place in stored:
        number = tensors.setdefault(entry, len(tensors))
        rows.append((number, box, place.file, place.start, place.length))
    return replace(
        Manifest.of(tensors, rows), encoding="native", backend=("torch_dist", 1)
    )


def _items(listing: Listing) -> Iterator[_Stored]:
    objects = [name for name, meta in listing.tensors.items() if meta.is_object]
    named = objects_named(objects)
    shapes = flattened.true_shapes(listing.record)
    for name, box, place in listing:
        if place.through:
            raise BackendError(
                f"{name!r} is stored through {list(place.through)}: compressed checkpoints are "
                "read by megackpt.dcp.FileSystemReader only; save it again without extensions"
            )
        if name in named:
            entry, box = named[name]
            yield _Stored(entry, box, place)
            continue
        listed = listing.tensors[name]
        if listed.dtype not in ITEMSIZE:
            raise BackendError(
                f"{name!r} is of {listed.dtype}, which cannot be read: its elements are not whole "
                "bytes"
            )
        shape, parts = listed.shape, iter((box,))
        if name in shapes:
            shape = shapes[name]
            parts = flattened.true_boxes(name, listed.shape, shape, box)
        entry = TensorEntry(name, TensorMeta(shape, listed.dtype))
        for part in parts:
            yield _Stored(entry, part, place)


def damage(root: Storage, manifest: Manifest) -> list[str] | None:
    """The records that do not match the CRC-32 in their zip directories.

    None if there are none, and some records were written without checksums.
    """
    chunks = manifest.chunks
    # Several chunks may share a record.
    places = np.stack([chunks.file, chunks.start])
    rows = np.unique(places, axis=1, return_index=True)[1]
    rows = rows[chunks.file[rows] >= 0]
    found: list[str] = []
    any_unchecked = False

    def check_record(row: int) -> tuple[list[str], bool]:
        """The problems of a record, and whether it has bytes without a checksum."""
        chunk = manifest.chunk(row)
        place = chunk.location
        if root.size(place.file) is None:
            return [], False  # reported once for the file
        with root.open(place.file) as reader:
            try:
                problems, unchecked = check_archive(reader, place.start, place.length)
            except CorruptCheckpoint as error:
                problems, unchecked = [str(error)], False
        shard = ShardId(manifest.tensors[chunks.tensor[row]].key, chunk.box)
        where = f"{root.location}/{place.file}"
        return [f"{shard}: {problem}: {where}" for problem in problems], unchecked

    with ThreadPoolExecutor(THREADS, "megackpt-checksums") as pool:
        for problems, unchecked in pool.map(check_record, rows.tolist()):
            found += problems
            any_unchecked = any_unchecked or unchecked
    if any_unchecked and not found:
        return None
    return found
