"""What a checkpoint holds, in torch DCP's words and in ours: from each to the other."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megackpt import serialization
from megackpt.backends.base import Finished, config_file
from megackpt.backends.torch_dist import METADATA, TorchDist
from megackpt.backends.torch_dist.metadata_pickle import Record
from megackpt.backends.torch_dist.metadata_reader import Listed, Listing
from megackpt.backends.torch_dist.object_names import LISTED_COMMON, objects_named
from megackpt.checkpoint import decode_index, encode_index
from megackpt.dcp.writing import Written
from megackpt.errors import (
    CheckpointingException,
    CorruptCheckpoint,
    CoverageError,
    join_truncated,
)
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    COMMON,
    COMMON_KEY,
    DIGEST_SIZE,
    ITEMSIZE,
    OBJECT,
    Manifest,
    TensorEntry,
    TensorMeta,
    unique_key,
)
from megackpt.storage import Storage

ChunkName = tuple[str, tuple[int, ...] | None]
"""What DCP knows a chunk by: its tensor's name, and its offset (None: an object)."""


@dataclass(frozen=True)
class PlannedByDcp(TorchDist):
    """torch_dist with the table of contents that a planner of DCP's made, to the letter."""

    table: bytes = b""

    def finish(self, root: Storage, manifest: Manifest) -> Finished:  # noqa: ARG002 - it is finished
        return Finished(
            manifest, {METADATA: self.table, **config_file(self.properties)}
        )


@dataclass(frozen=True)
class _Row:
    """One chunk of the index."""

    entry: TensorEntry
    box: Box
    writer: int
    written: Written


def manifest_of(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]], common: Written | None
) -> Manifest:
    """Our manifest of a save, from the planner's metadata and what each rank wrote.

    A chunk that torch pickled, or that went through an extension, stands in it as the object that its bytes are.
    Raises CoverageError for chunks that nobody wrote, or of another dtype, and CheckpointingException for names that
    an index cannot keep.
    """
    _check_names(metadata)
    written = {
        result.index: (rank, result)
        for rank, those in enumerate(results)
        for result in those
    }
    rows: list[_Row] = []
    unwritten: list[str] = []
    for index, entry, box in _planned(metadata):
        if index not in written:
            unwritten.append(f"{index.fqn!r} {box}")
            continue
        rank, place = written[index][0], written[index][1].storage_data
        if place.dtype and place.dtype != entry.meta.dtype:
            raise CoverageError(
                f"rank {rank} wrote {index.fqn!r} {box} as {place.dtype}, and the planner's metadata says "
                f"{entry.meta.dtype}"
            )
        plain = entry.meta.is_object or place.dtype
        rows.append(
            _Row(entry, box, rank, place) if plain else _opaque(entry, box, rank, place)
        )
    if unwritten:
        raise CoverageError(
            f"the planner's metadata lists what no rank has written: {join_truncated(unwritten, 5, ', ')}"
        )
    if common is not None:
        rows = [row for row in rows if not row.entry.is_common]
        rows.append(_Row(COMMON, Box((), ()), 0, common))
    manifest = _manifest(rows)
    try:
        decode_index(encode_index(manifest, {}))
    except CorruptCheckpoint as error:
        raise CheckpointingException(
            f"the planner's metadata makes no index that can be read: {error}"
        ) from error
    return manifest


def _check_names(metadata: Metadata) -> None:
    items = metadata.state_dict_metadata
    kept = items.get(LISTED_COMMON)
    if COMMON_KEY in items or isinstance(kept, TensorStorageMetadata):
        name = COMMON_KEY if COMMON_KEY in items else LISTED_COMMON
        raise CheckpointingException(
            f"{name!r} is the name of a checkpoint's common state: choose another key"
        )


def check_common(storage: Storage, manifest: Manifest) -> None:
    """Is what stands under the name of the common state one? Raises CheckpointingException."""
    numbers = [
        number for number, entry in enumerate(manifest.tensors) if entry.is_common
    ]
    for row in np.flatnonzero(np.isin(manifest.chunks.tensor, numbers)).tolist():
        place = manifest.chunk(row).location
        data = bytearray(place.length)
        with storage.open(manifest.files[manifest.chunks.file[row]]) as reader:
            reader.read_into(place.start, [memoryview(data)])
        value = serialization.load(
            bytes(data), stand_ins=True, where=repr(LISTED_COMMON)
        )
        if not (
            isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict)
        ):
            raise CheckpointingException(
                f"{LISTED_COMMON!r} is the name of a checkpoint's common state, which is a list of one dict: choose "
                "another key"
            )


def _planned(metadata: Metadata) -> Iterator[tuple[MetadataIndex, TensorEntry, Box]]:
    """Every chunk once."""
    items = metadata.state_dict_metadata.items()
    named = objects_named(
        name for name, item in items if isinstance(item, BytesStorageMetadata)
    )
    kinds = Counter(entry.key for entry in {entry for entry, _ in named.values()})
    kinds.update(name for name, _ in items if name not in named)
    for name, item in items:
        if isinstance(item, BytesStorageMetadata):
            entry, box = named[name]
            if kinds[entry.key] > 1:  # no piece of a grid, it only looks so
                entry, box = TensorEntry(name, TensorMeta((), OBJECT)), Box((), ())
            yield MetadataIndex(name), entry, box
            continue
        dtype = str(item.properties.dtype).removeprefix("torch.")
        entry = TensorEntry(name, TensorMeta(tuple(item.size), dtype))
        boxes = (Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in item.chunks)
        for box in dict.fromkeys(boxes):
            yield MetadataIndex(name, torch.Size(box.offset)), entry, box


def opaque_key(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """The key under which our index has a chunk that is no plain tensor."""
    return name if box == Box.whole(shape) else unique_key(name, box.offset, shape)


def _opaque(entry: TensorEntry, box: Box, rank: int, place: Written) -> _Row:
    key = opaque_key(entry.key, box, entry.meta.shape)
    return _Row(TensorEntry(key, TensorMeta((), OBJECT)), Box((), ()), rank, place)


def _manifest(rows: Sequence[_Row]) -> Manifest:
    tensors: dict[TensorEntry, int] = {}
    located = [
        (tensors.setdefault(row.entry, len(tensors)), row.box, *row.written[:3])
        for row in rows
    ]
    manifest = Manifest.of(tensors, located)
    writer = np.array([row.writer for row in rows], np.int32)
    digests = np.frombuffer(
        b"".join(row.written.digests for row in rows), np.uint8
    ).reshape(-1, DIGEST_SIZE)
    return replace(
        manifest, chunks=replace(manifest.chunks, writer=writer, digests=digests)
    )


def table_of(
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    storage_meta: StorageMeta | None,
) -> bytes:
    """The planner's metadata, completed as stock's writer does, and the bytes of ``.metadata``."""
    metadata.version = "1.0.0"
    metadata.storage_data = {
        r.index: r.storage_data.info() for those in results for r in those
    }
    metadata.storage_meta = storage_meta
    return pickle.dumps(metadata)


def rows_of(manifest: Manifest) -> dict[ChunkName, int]:
    """Row in ``manifest.chunks`` by what DCP knows it by."""
    chunks = manifest.chunks
    rows: dict[ChunkName, int] = {}
    for row, number in enumerate(chunks.tensor.tolist()):
        key, meta = manifest.tensors[number]
        offset = chunks.boxes.row(row, len(meta.shape)).offset
        name = (
            (unique_key(key, offset, meta.shape), None)
            if meta.is_object
            else (key, offset)
        )
        rows[name] = row
    return rows


def native_manifest(
    tensors: Mapping[str, TensorMeta], listed: Iterable[Listed]
) -> Manifest:
    """The manifest of others' plain records, each tensor as it is listed."""
    rows = [
        _Row(
            TensorEntry(name, tensors[name]),
            box,
            -1,
            Written(*place[:3], b"", "", (0, 0), ()),
        )
        for name, box, place in listed
        if ITEMSIZE.get(tensors[name].dtype) and not place.through
    ]
    return replace(_manifest(rows), encoding="native", backend=("torch_dist", 1))


def metadata_of(
    listing: Listing, items: Mapping[ChunkName, Listed], load_id: str
) -> Metadata:
    """torch's own Metadata of a listing. Raises CorruptCheckpoint for a dtype that torch does not have."""
    described: dict[str, Any] = {
        name: _described(name, meta) for name, meta in listing.tensors.items()
    }
    stored = {}
    for (name, offset), (_, box, (file, start, length, through)) in items.items():
        stored[MetadataIndex(name, offset)] = _StorageInfo(
            file, start, length, list(through) or None
        )
        if offset is not None:
            chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
            described[name].chunks.append(chunk)
    meta, version = (
        listing.record.field("storage_meta"),
        listing.record.field("version"),
    )
    said = meta if isinstance(meta, Record) else Record("StorageMeta")
    metadata = Metadata(
        described,
        planner_data=listing.record.field("planner_data"),
        storage_data=stored,
        storage_meta=StorageMeta(
            said.field("checkpoint_id"),
            said.field("save_id"),
            load_id,
            said.field("modules") or [],
        ),
    )
    metadata.version = (
        version  # no argument: torch 2.8 has no such field, and reads those that have
    )
    return metadata


def _described(
    name: str, meta: TensorMeta
) -> BytesStorageMetadata | TensorStorageMetadata:
    if meta.is_object:
        return BytesStorageMetadata()
    dtype = vars(torch).get(meta.dtype)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpoint(
            f"{name!r} is of {meta.dtype}, which is no dtype of torch {torch.__version__}"
        )
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(meta.shape), [])
