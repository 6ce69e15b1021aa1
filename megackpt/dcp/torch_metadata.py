"""Conversion of torch DCP's metadata of a checkpoint to our manifest, and of the manifest back."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
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
from megackpt.backends.torch_dist import METADATA, TorchDist, metadata_writer
from megackpt.backends.torch_dist.metadata_pickle import Record
from megackpt.backends.torch_dist.metadata_reader import (
    LISTED_COMMON,
    ListedItem,
    Listing,
    objects_named,
)
from megackpt.checkpoint import decode_index, encode_index
from megackpt.dcp.item_writer import StoredItem
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
    OBJECT,
    Manifest,
    TensorEntry,
    TensorMeta,
    digest_rows,
    unique_key,
)
from megackpt.storage import Storage

ChunkName = tuple[str, tuple[int, ...] | None]
"""DCP's name of a chunk: the tensor's name, and the chunk's offset (None: an object)."""


@dataclass(frozen=True)
class PlannedByDcp(TorchDist):
    """torch_dist with a ``.metadata`` file that was made before, from a DCP planner's metadata.

    Or of the declarations of a state dict.
    """

    table: bytes = b""
    state_dict: Any = None
    storage_meta: StorageMeta | None = None

    def __getstate__(self) -> int:
        """What plans depend on, for the cache of plans."""
        return self.files_per_rank

    def finish(self, root: Storage, manifest: Manifest) -> Finished:  # noqa: ARG002
        table = self.table
        if self.state_dict is not None:
            paths = flatten_state_dict(self.state_dict)[1]
            fields = {"planner_data": paths, "storage_meta": self.storage_meta}
            table = metadata_writer.emit(manifest, fields)
        return Finished(manifest, {METADATA: table, **config_file(self.properties)})


def manifest_of(
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    common: StoredItem | None,
) -> Manifest:
    """The manifest of a save, from the planner's metadata and each rank's write results.

    A chunk that torch pickled, or that went through an extension, is listed as an object: the
    bytes of its record. ``common``: the common state, if the metadata does not list one.
    Raises CoverageError for chunks that no rank wrote, or that have another dtype, and
    CheckpointingException for names that the index cannot hold.
    """
    items = metadata.state_dict_metadata
    if COMMON_KEY in items:
        raise _reserved(COMMON_KEY)
    if isinstance(items.get(LISTED_COMMON), TensorStorageMetadata):
        raise _reserved(LISTED_COMMON)
    written = {}
    for rank, own in enumerate(results):
        for result in own:
            written[result.index] = rank, result.storage_data
    tensors: dict[TensorEntry, int] = {}
    chunks, writers, digests, unwritten = [], [], [], []

    def add(entry: TensorEntry, box: Box, writer: int, item: StoredItem) -> None:
        number = tensors.setdefault(entry, len(tensors))
        chunks.append((number, box, item.info.relative_path, item.start, item.length))
        writers.append(writer)
        digests.append(item.digests)

    for index, entry, box in _planned_chunks(metadata):
        if index not in written:
            unwritten.append(f"{index.fqn!r} {box}")
            continue
        if entry.is_common and common is not None:
            continue
        rank, item = written[index]
        meta = entry.meta
        if item.dtype and item.dtype != meta.dtype:
            raise CoverageError(
                f"rank {rank} wrote {index.fqn!r} {box} as {item.dtype}, and the planner's "
                f"metadata says {meta.dtype}"
            )
        if not item.dtype and not meta.is_object:
            key = opaque_key(entry.key, box, meta.shape)
            entry, box = TensorEntry(key, TensorMeta((), OBJECT)), Box((), ())
        add(entry, box, rank, item)
    if unwritten:
        raise CoverageError(
            "the planner's metadata lists what no rank has written: "
            f"{join_truncated(unwritten, 5, ', ')}"
        )
    if common is not None:
        add(COMMON, Box((), ()), 0, common)
    manifest = Manifest.of(tensors, chunks)
    columns = replace(
        manifest.chunks,
        writer=np.array(writers, np.int32),
        digests=digest_rows(b"".join(digests)),
    )
    manifest = replace(manifest, chunks=columns)
    # The keys are the caller's: see now, before the commit, that the index can be read again.
    try:
        decode_index(encode_index(manifest, {}))
    except CorruptCheckpoint as error:
        raise CheckpointingException(
            f"the planner's metadata makes no index that can be read: {error}"
        ) from error
    return manifest


def _reserved(name: str) -> CheckpointingException:
    return CheckpointingException(
        f"{name!r} is the name of a checkpoint's common state: choose another key"
    )


def check_common(storage: Storage, results: Sequence[Sequence[WriteResult]]) -> None:
    """Raise CheckpointingException if the object with the common state's name is not one."""
    for result in itertools.chain(*results):
        if result.index.fqn != LISTED_COMMON:
            continue
        item: StoredItem = result.storage_data
        data = bytearray(item.length)
        with storage.open(item.info.relative_path) as reader:
            reader.read_into(item.start, [memoryview(data)])
        where = repr(LISTED_COMMON)
        value = serialization.load(bytes(data), stand_ins=True, where=where)
        is_list = isinstance(value, list) and len(value) == 1
        if not is_list or not isinstance(value[0], dict):
            raise _reserved(LISTED_COMMON)


def _planned_chunks(
    metadata: Metadata,
) -> Iterator[tuple[MetadataIndex, TensorEntry, Box]]:
    """Every chunk of the metadata once."""
    items = metadata.state_dict_metadata
    names = []
    for name, item in items.items():
        if isinstance(item, BytesStorageMetadata):
            names.append(name)
    objects = objects_named(names)
    # How many different values a key would have in the index.
    count = Counter(items.keys() - objects.keys())
    for entry in {entry for entry, _ in objects.values()}:
        count[entry.key] += 1
    for name, item in items.items():
        if isinstance(item, BytesStorageMetadata):
            entry, box = objects[name]
            if count[entry.key] > 1:
                # The name only looks like one cell of a grid of objects.
                entry, box = TensorEntry(name, TensorMeta((), OBJECT)), Box((), ())
            yield MetadataIndex(name), entry, box
            continue
        dtype = str(item.properties.dtype).removeprefix("torch.")
        entry = TensorEntry(name, TensorMeta(tuple(item.size), dtype))
        boxes = dict[Box, None]()
        for chunk in item.chunks:
            boxes[Box(tuple(chunk.offsets), tuple(chunk.sizes))] = None
        for box in boxes:
            yield MetadataIndex(name, torch.Size(box.offset)), entry, box


def opaque_key(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """The index's key for a chunk that is not stored as a plain tensor."""
    if box == Box.whole(shape):
        return name
    return unique_key(name, box.offset, shape)


def encode_metadata(
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    storage_meta: StorageMeta | None,
) -> bytes:
    """Complete the planner's metadata as stock's writer does; the bytes of ``.metadata``."""
    metadata.version = "1.0.0"
    metadata.storage_meta = storage_meta
    metadata.storage_data = {}
    for own in results:
        for result in own:
            metadata.storage_data[result.index] = result.storage_data.info
    return pickle.dumps(metadata)


def rows_of(manifest: Manifest) -> dict[ChunkName, int]:
    """DCP's name of each chunk -> its row in ``manifest.chunks``."""
    chunks = manifest.chunks
    rows: dict[ChunkName, int] = {}
    for row, number in enumerate(chunks.tensor.tolist()):
        key, meta = manifest.tensors[number]
        offset = chunks.boxes.row(row, len(meta.shape)).offset
        if meta.is_object:
            rows[unique_key(key, offset, meta.shape), None] = row
        else:
            rows[key, offset] = row
    return rows


def metadata_of(
    listing: Listing, items: Mapping[ChunkName, ListedItem], load_id: str
) -> Metadata:
    """torch's Metadata of a listing. CorruptCheckpoint for a dtype that torch does not have."""
    described: dict[str, Any] = {}
    for name, meta in listing.tensors.items():
        if meta.is_object:
            described[name] = BytesStorageMetadata()
            continue
        dtype = vars(torch).get(meta.dtype)
        if not isinstance(dtype, torch.dtype):
            raise CorruptCheckpoint(
                f"{name!r}: torch {torch.__version__} has no dtype {meta.dtype}"
            )
        described[name] = TensorStorageMetadata(
            TensorProperties(dtype), torch.Size(meta.shape), []
        )
    stored = {}
    for (name, offset), item in items.items():
        place = item.place
        stored[MetadataIndex(name, offset)] = _StorageInfo(
            place.file, place.start, place.length, list(place.through) or None
        )
        if offset is not None:
            chunk = ChunkStorageMetadata(
                torch.Size(item.box.offset), torch.Size(item.box.shape)
            )
            described[name].chunks.append(chunk)
    record = listing.record
    meta_record = record.field("storage_meta")
    if not isinstance(meta_record, Record):
        meta_record = Record("StorageMeta")
    metadata = Metadata(
        described,
        planner_data=record.field("planner_data"),
        storage_data=stored,
        storage_meta=StorageMeta(
            meta_record.field("checkpoint_id"),
            meta_record.field("save_id"),
            load_id,
            meta_record.field("modules") or [],
        ),
    )
    # Not as an argument: torch 2.8 has no such field, and reads files that have it.
    metadata.version = record.field("version")
    return metadata
