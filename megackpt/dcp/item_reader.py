"""One rank's part of a load through torch DCP: exact ranges into the planner's tensors."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
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
from megackpt.backends.base import Backend
from megackpt.backends.ranges import read_record
from megackpt.backends.torch_dist import TorchDist
from megackpt.backends.torch_dist.metadata_reader import (
    ListedItem,
    Listing,
)
from megackpt.dcp.item_writer import local_tensors
from megackpt.dcp.planner import LoadPlanner
from megackpt.dcp.torch_metadata import ChunkName, opaque_key
from megackpt.errors import (
    BackendError,
    CorruptCheckpoint,
    MismatchError,
    join_truncated,
)
from megackpt.loader.comparison import overlapping
from megackpt.planning import manifest as planned
from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import ITEMSIZE, Manifest
from megackpt.staging.devices import synchronize, synchronize_current_stream
from megackpt.staging.source import overlaps_itself
from megackpt.staging.target import LoadTarget
from megackpt.state import dtype_named
from megackpt.storage import Storage, digest_blocks
from megackpt.torch_versions import COPIES_FLOAT4

_READ_SIZE = 1 << 20
_COPIED_BYTES = 64 << 20
"""Bytes of items that are read before they are copied to the planner's memory."""
_MAX_OVERHEAD = 1 << 20
"""Bytes of a pickled tensor beyond its elements. Bounds what an extension makes of a record."""

_RESOLVING = "resolve_tensor", "lookup_tensor", "transform_tensor"
_KNOWN_PLANNERS = DefaultLoadPlanner, LoadPlanner


@dataclass(frozen=True, eq=False)
class OpenCheckpoint:
    """An open checkpoint, with the items of torch DCP's formats."""

    storage: Storage
    listing: Listing
    items: dict[ChunkName, ListedItem]
    manifest: Manifest
    rows: dict[ChunkName, int]
    """Rows of the manifest."""
    backend: Backend = field(default_factory=TorchDist)


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
        _refuse_sparse(plan, self._planner)
        own_memory = _keys_with_own_memory(self._planner)
        direct: list[tuple[ReadItem, int]] = []
        copied: list[tuple[ReadItem, int]] = []
        for item in plan.items:
            name, offset = item.storage_index.fqn, item.storage_index.offset
            chunk: ChunkName = name, None
            if offset is not None:
                chunk = name, tuple(offset)
            if chunk not in checkpoint.items:
                raise MismatchError(
                    f"{checkpoint.storage.location} holds no chunk of {name!r} at {offset}"
                )
            listed = checkpoint.items[chunk]
            if item.type == LoadItemType.BYTE_IO:
                stream = self._read_record(listed, limits.DCP_METADATA_BYTES)
                self._planner.load_bytes(item, stream)
            elif offset is None or chunk not in checkpoint.rows:
                self._read_pickled(item, listed)
            elif item.dest_index.fqn in own_memory:
                direct.append((item, checkpoint.rows[chunk]))
            else:
                copied.append((item, checkpoint.rows[chunk]))
        synchronize_current_stream()
        tensors = [_resolve(self._planner, item) for item, _ in direct]
        self._read_regions(direct, tensors)
        synchronize(tensors)
        for (item, _), tensor in zip(direct, tensors, strict=True):
            self._planner.commit_tensor(item, tensor)
        self._read_copies(copied)

    def _read_copies(self, items: Sequence[tuple[ReadItem, int]]) -> None:
        """Items whose memory may be shared: the planner gives it when the next item is complete."""
        manifest = self._checkpoint.manifest
        begin = size = 0
        tensors: list[torch.Tensor] = []
        for end, (item, row) in enumerate(items, start=1):
            entry = manifest.tensors[manifest.chunks.tensor[row]]
            dtype = dtype_named(entry.meta.dtype)
            tensors.append(torch.empty(item.lengths, dtype=dtype, device="cpu"))
            size += tensors[-1].nbytes
            if size < _COPIED_BYTES and end < len(items):
                continue
            self._read_regions(items[begin:end], tensors)
            for (complete, _), tensor in zip(items[begin:end], tensors, strict=True):
                target = _resolve(self._planner, complete).copy_(tensor)
                synchronize([target])
                self._planner.commit_tensor(complete, target)
            begin, size, tensors = end, 0, []

    def _read_regions(
        self, items: Sequence[tuple[ReadItem, int]], tensors: Sequence[torch.Tensor]
    ) -> None:
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
        holders = Boxes.of(boxes)
        plan = planned.LoadPlan(manifest, rows, holders, np.arange(len(items)))
        target = LoadTarget(tensors, holders, dtypes, {})
        checkpoint = self._checkpoint
        checkpoint.backend.read(checkpoint.storage, plan, target, self._verify)

    def _read_pickled(self, item: ReadItem, listed: ListedItem) -> None:
        """A chunk that torch pickled, or that went through an extension: as stock reads it."""
        box = listed.box
        meta = self._checkpoint.listing.tensors[listed.name]
        size = box.volume * ITEMSIZE.get(meta.dtype, 16)
        stream = self._read_record(listed, size + _MAX_OVERHEAD)
        where = f"{self._checkpoint.storage.location}: {listed.name!r} {box} in {listed.place.file}"
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

    def _read_record(self, item: ListedItem, limit: int) -> io.BytesIO:
        """The content of a record, after the extensions that it went through.

        Its bytes are compared with the digests in the index; ``limit`` bounds what extensions make
        of them.
        """
        checkpoint, place = self._checkpoint, item.place
        where = f"{checkpoint.storage.location}: {item.name!r} in {place.file}"
        with checkpoint.storage.open(place.file) as reader:
            data = read_record(reader, place.start, place.length, where)
        shape = checkpoint.listing.tensors[item.name].shape
        key = opaque_key(item.name, item.box, shape)
        row = checkpoint.rows.get((key, None))
        if self._verify and row is not None:
            digests = checkpoint.manifest.chunk(row).digests.tobytes()
            if digests and digests != digest_blocks(memoryview(data)):
                raise CorruptCheckpoint(
                    f"{where} is damaged: its bytes are not those that were saved"
                )
        if not place.through:
            return io.BytesIO(data)
        where += f", stored through {list(place.through)}"
        try:
            extensions = self._registry.from_descriptor_list(place.through)
        except ValueError as error:
            raise BackendError(f"{where}: {error}") from error
        decoded = io.BytesIO()
        try:
            stream: Any = io.BytesIO(data)
            for extension in extensions:
                if isinstance(extension, StreamTransformExtension):
                    stream = extension.transform_from(stream)
            while decoded.tell() <= limit and (block := stream.read(_READ_SIZE)):
                decoded.write(block)
        except Exception as error:
            raise CorruptCheckpoint(
                f"{where}, which cannot read it: {error}"
            ) from error
        if decoded.tell() > limit:
            raise CorruptCheckpoint(f"{where}: more than {limit} bytes come of it")
        decoded.seek(0)
        return decoded


def _keys_with_own_memory(planner: AnyLoadPlanner) -> set[str]:
    """The keys that resolve to memory of the state dict that no other key has."""
    state = getattr(planner, "state_dict", None)
    for name in _RESOLVING:
        known = [getattr(planner_type, name) for planner_type in _KNOWN_PLANNERS]
        if getattr(type(planner), name, None) not in known:
            return set()
    if not isinstance(state, dict):
        return set()
    keys, tensors = [], []
    for key, value in state.items():
        for tensor in local_tensors(value):
            keys.append(key)
            tensors.append(tensor)
    return set(keys) - {keys[row] for row in overlapping(tensors).tolist()}


def _refuse_sparse(plan: LoadPlan, planner: AnyLoadPlanner) -> None:
    """MismatchError, before a tensor is changed, where the planner has sparse ones to fill."""
    state = getattr(planner, "state_dict", None)
    if not isinstance(state, dict):
        return
    wanted = {i.dest_index.fqn for i in plan.items if i.type != LoadItemType.BYTE_IO}
    layouts = {key: getattr(state.get(key), "layout", torch.strided) for key in wanted}
    sparse = [repr(key) for key in sorted(wanted) if layouts[key] is not torch.strided]
    if sparse:
        raise MismatchError(
            f"{join_truncated(sparse)}: a dense tensor cannot be loaded into a sparse one. Ask "
            "for a dense tensor, and make it sparse afterwards"
        )


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
