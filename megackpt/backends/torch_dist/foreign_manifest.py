"""Checkpoints that others wrote: from ``.metadata`` (stock torch DCP, Megatron-Core) to a manifest.

Every number is bounded by what is on disk before anybody relies on it. Nested state dicts keep DCP's flat names
as keys. What Megatron-Core kept flattened stands in the manifest as the tensor that it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megackpt.backends.torch_dist import flattened
from megackpt.backends.torch_dist.distcp_writer import COMMON_FILE
from megackpt.backends.torch_dist.metadata_reader import (
    Listed,
    Listing,
    Location,
    check_files,
    read_listing,
)
from megackpt.backends.torch_dist.object_names import objects_named
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    COMMON,
    ITEMSIZE,
    Manifest,
    TensorEntry,
    TensorMeta,
)
from megackpt.storage import Storage


class _Stored(NamedTuple):
    """One chunk, or one object's shard, and the record that holds it."""

    entry: TensorEntry
    box: Box
    place: Location


def read_manifest(root: Storage, name: str, backend: tuple[str, int]) -> Manifest:
    """The manifest of a checkpoint that has no index of ours; encoding "native".

    Raises NotACheckpoint without ``.metadata``; CorruptCheckpoint where it contradicts itself or the files;
    UntrustedClass where it names what it should not; BackendError for what this release cannot read.
    """
    listing = read_listing(root, name)
    try:
        found = list(_items(listing))
    except (CorruptCheckpoint, BackendError) as error:
        raise type(error)(f"{root.location}/{name}: {error}") from error
    if COMMON_FILE in root.list():
        # Where there are both, common.pt counts: Megatron-Core, too, looks for it first.
        found = [item for item in found if not item.entry.is_common]
        found.append(
            _Stored(
                COMMON,
                Box((), ()),
                Location(COMMON_FILE, 0, root.size(COMMON_FILE) or 0),
            )
        )
    check_files(root, [Listed(item.entry.key, item.box, item.place) for item in found])
    tensors: dict[TensorEntry, int] = {}
    rows = [
        (tensors.setdefault(entry, len(tensors)), box, *place[:3])
        for entry, box, place in found
    ]
    return replace(Manifest.of(tensors, rows), encoding="native", backend=backend)


def _items(listing: Listing) -> Iterator[_Stored]:
    named = objects_named(
        name for name, meta in listing.tensors.items() if meta.is_object
    )
    shapes = flattened.true_shapes(listing.record)
    for name, box, place in listing:
        if place.through:
            raise BackendError(
                f"{name!r} is stored through {list(place.through)}: compressed checkpoints are read by "
                "megackpt.dcp.FileSystemReader only; save it again without extensions"
            )
        if name in named:
            entry, box = named[name]
            yield _Stored(entry, box, place)
            continue
        listed = listing.tensors[name]
        if listed.dtype not in ITEMSIZE:
            raise BackendError(
                f"{name!r} is of {listed.dtype}, which cannot be read: its elements are no whole bytes"
            )
        shape = shapes.get(name, listed.shape)
        cells = flattened.Cells(name, listed.shape, shape) if name in shapes else None
        for part in (box,) if cells is None else cells.boxes(box):
            yield _Stored(
                TensorEntry(name, TensorMeta(shape, listed.dtype)), part, place
            )
