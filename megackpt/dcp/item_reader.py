"""One rank's part of a load through torch DCP: exact ranges into the planner's tensors."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint._extension import (
    ExtensionRegistry,
    StreamTransformExtension,
)
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner as AnyLoadPlanner,
    ReadItem,
)

from megackpt import limits
from megackpt.backends.ranges import refuse_sparse
from megackpt.backends.torch_dist import TorchDist
from megackpt.backends.torch_dist.metadata_reader import (
    ListedItem,
    Listing,
    RecordPlace,
)
from megackpt.dcp.item_writer import local_tensors, synchronize_stream
from megackpt.dcp.planner import LoadPlanner
from megackpt.dcp.torch_metadata import ChunkName, opaque_key
from megackpt.errors import (
    BackendError,
    CheckpointingException,
    CorruptCheckpoint,
    MismatchError,
)
from megackpt.loader.comparison import overlapping
from megackpt.planning import manifest as planned
from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import Manifest
from megackpt.staging.source import overlaps_itself, synchronize
from megackpt.staging.target import LoadTarget
from megackpt.state import dtype_named
from megackpt.storage import Storage, allocate, digest_blocks
from megackpt.torch_versions import COPIES_FLOAT4

_READ_SIZE = 1 << 20
_MAX_OVERHEAD = 1 << 20
"""Bytes of a pickled tensor beyond its elements. Bounds what an extension makes of a record."""

_RESOLVING = "resolve_tensor", "lookup_tensor", "transform_tensor"
_KNOWN_METHODS = {
    getattr(planner, name)
    for planner in (DefaultLoadPlanner, LoadPlanner)
    for name in _RESOLVING
}


@dataclass(frozen=True, eq=False)
class OpenCheckpoint:
    """An open checkpoint of torch DCP's format."""

    storage: Storage
    listing: Listing
    items: dict[ChunkName, ListedItem]
    manifest: Manifest
    rows: dict[ChunkName, int]
    """Rows of the manifest."""

    def read_record(self, name: str, place: RecordPlace, verify: bool) -> bytearray:
        """The bytes of a record, compared with the digests that the index has for ``name``."""
        where = f"{self.storage.location}: {name!r} in {place.file}"
        with self.storage.open(place.file) as reader:
            refuse_sparse(reader, place.start, place.length, where)
            data = allocate(place.length, where)
            reader.read_into(place.start, [memoryview(data)])
        row = self.rows.get((name, None))
        if verify and row is not None:
            digests = self.manifest.chunk(row).digests.tobytes()
            if digests and digests != digest_blocks(memoryview(data)):
                raise CorruptCheckpoint(
                    f"{where} is damaged: its bytes are not those that were saved"
                )
        return data


class ItemReader:
    """Carries out one rank's load plan. Errors name the item and the file."""

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        planner: AnyLoadPlanner,
        registry: ExtensionRegistry,
        verify: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._planner = planner
        self._registry = registry
        self._verify = verify

    def read(self, plan: LoadPlan) -> None:
        checkpoint = self._checkpoint
        plain: list[tuple[ReadItem, int]] = []
        for item in plan.items:
            name, offset = item.storage_index.fqn, item.storage_index.offset
            chunk = name, None if offset is None else tuple(offset)
            if chunk not in checkpoint.items:
                raise MismatchError(
                    f"{checkpoint.storage.location} holds no chunk of {name!r} at {offset}"
                )
            if item.type == LoadItemType.BYTE_IO:
                place = checkpoint.items[chunk].place
                data = checkpoint.read_record(name, place, self._verify)
                self._planner.load_bytes(
                    item, self._decode(chunk, data, limits.DCP_METADATA_BYTES)
                )
            elif offset is not None and chunk in checkpoint.rows:
                plain.append((item, checkpoint.rows[chunk]))
            else:
                self._read_pickled(item, chunk)
        self._read_plain(plain)

    def _read_plain(self, items: Sequence[tuple[ReadItem, int]]) -> None:
        """Regions of plain tensors, through the reader of our own loads."""
        manifest = self._checkpoint.manifest
        boxes, dtypes = [], []
        for item, row in items:
            meta = manifest.tensors[manifest.chunks.tensor[row]].meta
            chunk = manifest.chunks.boxes.row(row, len(meta.shape))
            offset = np.add(chunk.offset, item.storage_offsets).tolist()
            boxes.append(Box(tuple(offset), tuple(item.lengths)))
            dtypes.append(dtype_named(meta.dtype))
        rows = np.array([row for _, row in items], np.int64)
        plan = planned.LoadPlan(manifest, rows, Boxes.of(boxes), np.arange(len(items)))
        target = _ItemsTarget(self._planner, [item for item, _ in items], boxes, dtypes)
        synchronize_stream()
        for number, box in enumerate(boxes):
            if not box.volume:
                target.finish(number)
        TorchDist().read(self._checkpoint.storage, plan, target, self._verify)

    def _read_pickled(self, item: ReadItem, chunk: ChunkName) -> None:
        """A chunk that torch pickled, or that went through an extension: as stock reads it."""
        checkpoint = self._checkpoint
        name = chunk[0]
        meta = checkpoint.listing.tensors[name]
        box, place = checkpoint.items[chunk].box, checkpoint.items[chunk].place
        key = opaque_key(name, box, meta.shape)
        data = checkpoint.read_record(key, place, self._verify)
        dtype = vars(torch).get(meta.dtype)
        itemsize = dtype.itemsize if isinstance(dtype, torch.dtype) else 16
        stream = self._decode(chunk, data, box.volume * itemsize + _MAX_OVERHEAD)
        where = f"{checkpoint.storage.location}: {name!r} {box} in {place.file}"
        try:
            value = torch.load(stream, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CorruptCheckpoint(
                f"{where}: torch cannot read the record: {error}"
            ) from error
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != box.shape:
            raise CorruptCheckpoint(
                f"{where}: the record holds no tensor of {box.shape}"
            )
        region = Box(tuple(item.storage_offsets), tuple(item.lengths))
        part, target = value[region.slices()], _resolve(self._planner, item)
        if part.dtype is target.dtype is torch.float4_e2m1fn_x2 and not COPIES_FLOAT4:
            target.view(torch.uint8).copy_(part.view(torch.uint8))
        else:
            target.copy_(part)
        self._planner.commit_tensor(item, target)

    def _decode(
        self,
        chunk: ChunkName,
        data: bytearray,
        limit: int,
    ) -> io.BytesIO:
        """The record's content, after the extensions that it went through."""
        descriptors = self._checkpoint.items[chunk].place.through
        if not descriptors:
            return io.BytesIO(data)
        where = f"{self._checkpoint.storage.location}: {chunk[0]!r} is stored through "
        where += str(list(descriptors))
        try:
            extensions = self._registry.from_descriptor_list(descriptors)
        except ValueError as error:
            raise BackendError(f"{where}: {error}") from error
        stream: Any = io.BytesIO(data)
        for extension in extensions:
            if isinstance(extension, StreamTransformExtension):
                stream = extension.transform_from(stream)
        decoded = io.BytesIO()
        try:
            while block := stream.read(_READ_SIZE):
                decoded.write(block)
                if decoded.tell() > limit:
                    raise CorruptCheckpoint(
                        f"{where}: more than {limit} bytes come of it"
                    )
        except CheckpointingException:
            raise
        except Exception as error:
            raise CorruptCheckpoint(
                f"{where}, which cannot read it: {error}"
            ) from error
        decoded.seek(0)
        return decoded


@dataclass(eq=False)
class _OpenItem:
    """An item that is being filled. ``direct``: ``tensor`` is the planner's own."""

    tensor: torch.Tensor
    direct: bool
    target: LoadTarget


class _ItemsTarget:
    """The Target of a plan: tensors that the planner resolves when their first bytes arrive.

    A planner may convert all its items in one buffer. Items whose memory may be shared are read
    into memory of ours, and resolved, copied and committed when complete.
    """

    def __init__(
        self,
        planner: AnyLoadPlanner,
        items: Sequence[ReadItem],
        boxes: Sequence[Box],
        stored: Sequence[torch.dtype],
    ) -> None:
        self._planner = planner
        self._items = items
        self._boxes = boxes
        self._stored = stored
        self._missing = [box.volume for box in boxes]
        self._direct_keys = _keys_with_own_memory(planner)
        self._open: dict[int, _OpenItem] = {}
        self._lock = threading.Lock()  # Planners are not thread-safe.

    def _open_item(self, target: int) -> _OpenItem:
        with self._lock:
            if target not in self._open:
                item, stored = self._items[target], self._stored[target]
                direct = item.dest_index.fqn in self._direct_keys
                if direct:
                    tensor = _resolve(self._planner, item)
                else:
                    tensor = torch.empty(item.lengths, dtype=stored, device="cpu")
                boxes = Boxes.of([self._boxes[target]])
                load_target = LoadTarget([tensor], boxes, [stored], {})
                self._open[target] = _OpenItem(tensor, direct, load_target)
            return self._open[target]

    def open(self, target: int, box: Box) -> NDArray[Any]:
        return self._open_item(target).target.open(0, box)

    def close(
        self,
        target: int,
        box: Box,
        filled: NDArray[Any],
    ) -> None:
        self._open_item(target).target.close(0, box, filled)
        with self._lock:
            self._missing[target] -= box.volume
            complete = self._missing[target] == 0
        if complete:
            self.finish(target)

    def finish(self, target: int) -> None:
        """Hand a complete item to the planner."""
        item = self._items[target]
        opened = self._open_item(target)
        with self._lock:
            del self._open[target]
            tensor = opened.tensor
            if not opened.direct:
                tensor = _resolve(self._planner, item).copy_(tensor)
            synchronize([tensor])
            self._planner.commit_tensor(item, tensor)

    def blob(self, target: int, data: bytes) -> None:
        name = self._items[target].storage_index.fqn
        raise BackendError(f"{name!r} is an object, not a tensor ({len(data)} bytes)")


def _keys_with_own_memory(planner: AnyLoadPlanner) -> set[str]:
    """The keys that resolve to memory of the state dict that no other key has."""
    state = getattr(planner, "state_dict", None)
    known = all(
        getattr(type(planner), name, None) in _KNOWN_METHODS for name in _RESOLVING
    )
    if not known or not isinstance(state, dict):
        return set()
    keys, tensors = [], []
    for key, value in state.items():
        for tensor in local_tensors(value):
            keys.append(key)
            tensors.append(tensor)
    return set(keys) - {keys[row] for row in overlapping(tensors).tolist()}


def _resolve(planner: AnyLoadPlanner, item: ReadItem) -> torch.Tensor:
    """The planner's tensor for an item. MismatchError for one that cannot take the data."""
    tensor = planner.resolve_tensor(item).detach()
    name = item.storage_index.fqn
    if tensor.shape != item.lengths:
        raise MismatchError(
            f"{name!r}: the planner asks for {tuple(item.lengths)}, and resolves it to "
            f"{tuple(tensor.shape)}"
        )
    if overlaps_itself(tensor):
        raise MismatchError(
            f"{name!r}: the planner resolves it to a tensor whose elements share memory (shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()}): the last read would win"
        )
    return tensor
