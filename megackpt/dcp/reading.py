"""One rank's part of a load through torch DCP: exact ranges straight into what the planner resolves."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint._extension import (
    ExtensionRegistry,
    StreamTransformExtension,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)

from megackpt.backends.ranges import refuse_hollow
from megackpt.backends.torch_dist import METADATA, TorchDist
from megackpt.backends.torch_dist.metadata_reader import (
    LARGEST,
    Listed,
    Listing,
    Location,
    check_files,
    read_listing,
)
from megackpt.checkpoint import INDEX, absolute, open_checkpoint
from megackpt.checkpoint.opening import unreplaced
from megackpt.dcp.contents import ChunkName, native_manifest, opaque_key, rows_of
from megackpt.dcp.memory import own_keys
from megackpt.dcp.writing import settle_all
from megackpt.errors import (
    BackendError,
    CheckpointingException,
    CorruptCheckpoint,
    MismatchError,
    NotACheckpoint,
)
from megackpt.loader.row_reader import replacement
from megackpt.planning import manifest as planned
from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import Manifest
from megackpt.staging.source import overlaps_itself, synchronize
from megackpt.staging.target import LoadTarget
from megackpt.state import dtype_named
from megackpt.storage import LocalStorage, Storage, allocate, digest_blocks
from megackpt.torch_versions import COPIES_FLOAT4

_READ = 1 << 20
_SPARE = 1 << 20
"""Bytes that an archive has beyond its tensor's, at most: what an extension makes of a record is bounded by it."""


@dataclass(frozen=True, eq=False)
class Contents:
    """An open checkpoint of torch DCP's: stock's, Megatron's, or ours."""

    storage: Storage
    listing: Listing
    items: dict[ChunkName, Listed]
    manifest: Manifest
    rows: dict[ChunkName, int]

    @classmethod
    def of(cls, directory: Any, rank: int | None) -> Contents:
        """By ``.metadata``; with a rank, by what this rank wrote without collectives."""
        if rank is None:
            # Without an index nothing ties the files together: see that nobody began to clear them away.
            storage, listing, manifest = unreplaced(
                directory,
                partial(_listed, directory),
                lambda found: found[2] is not None,
            )
        else:
            storage, listing, manifest = (
                *_listed_alone(directory, f"__{rank}{METADATA}"),
                None,
            )
        listed = list(listing)
        check_files(storage, listed)
        items = {
            (
                item.name,
                None if listing.tensors[item.name].is_object else item.box.offset,
            ): item
            for item in listed
        }
        manifest = manifest or native_manifest(listing.tensors, listed)
        return cls(storage, listing, items, manifest, rows_of(manifest))

    def row(self, name: ChunkName) -> int | None:
        """The row of the manifest that holds a chunk as a plain tensor."""
        return None if name[1] is None else self.rows.get(name)

    def blob(self, name: str, place: Location, verify: bool) -> bytearray:
        """The bytes of a record, compared with their digests under this name of the index."""
        where = f"{self.storage.location}: {name!r} in {place.file}"
        with self.storage.open(place.file) as reader:
            refuse_hollow(reader, place.start, place.length, where)
            data = allocate(place.length, where)
            reader.read_into(place.start, [memoryview(data)])
        row = self.rows.get((name, None))
        known = (
            b""
            if row is None or not verify
            else self.manifest.chunk(row).digests.tobytes()
        )
        if known and digest_blocks(memoryview(data)) != known:
            raise CorruptCheckpoint(
                f"{where} is damaged: its bytes are not those that were saved"
            )
        return data


def _listed(
    directory: Any, storage: Storage
) -> tuple[Storage, Listing, Manifest | None]:
    """Where it is, what it lists, and our manifest where it has an index."""
    manifest = None
    if storage.size(INDEX) is not None:
        opened = open_checkpoint(directory)
        storage, manifest = opened.storage, opened.manifest
    if storage.size(METADATA) is None:
        raise NotACheckpoint(
            f"{storage.called} is a checkpoint, but not one of torch DCP's (it has no {METADATA}): "
            "megackpt.load reads it, megackpt.convert makes one of it"
        )
    return storage, read_listing(storage, METADATA), manifest


def _listed_alone(directory: Any, name: str) -> tuple[Storage, Listing]:
    """What a rank of stock's writer saved without collectives. Where all ranks' is, no rank may take its own: the
    others would wait for it.
    """
    try:
        storage = LocalStorage(absolute(directory))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotACheckpoint(
            f"{directory} is no directory, and so holds no {name}"
        ) from error
    if storage.size(name) is None or storage.size(METADATA) is not None:
        raise NotACheckpoint(
            f"{directory} holds no {name} without a {METADATA} beside it"
        )
    return storage, read_listing(storage, name)


def read_items(
    contents: Contents,
    plan: LoadPlan,
    planner: LoadPlanner,
    registry: ExtensionRegistry,
    verify: bool,
) -> None:
    """Carry out a plan. Errors name the item and the file, or tell that the checkpoint was replaced meanwhile."""
    try:
        _read_items(contents, plan, planner, registry, verify)
    except (CheckpointingException, OSError) as error:
        replaced = replacement(contents.storage, contents.manifest)
        if replaced is not None:
            raise replaced from error
        raise


def _read_items(
    contents: Contents,
    plan: LoadPlan,
    planner: LoadPlanner,
    registry: ExtensionRegistry,
    verify: bool,
) -> None:
    plain: list[tuple[ReadItem, int]] = []
    for item in plan.items:
        name, offset = item.storage_index.fqn, item.storage_index.offset
        key = name, None if offset is None else tuple(offset)
        if key not in contents.items:
            raise MismatchError(
                f"{contents.storage.location} holds no chunk of {name!r} at {offset}"
            )
        row = contents.row(key)
        if item.type == LoadItemType.BYTE_IO:
            data = contents.blob(name, contents.items[key].place, verify)
            planner.load_bytes(item, _decoded(contents, key, data, registry, LARGEST))
        elif row is not None:
            plain.append((item, row))
        else:
            _read_opaque(contents, key, item, planner, registry, verify)
    _read_plain(contents, plain, planner, verify)


def _read_plain(
    contents: Contents,
    items: Sequence[tuple[ReadItem, int]],
    planner: LoadPlanner,
    verify: bool,
) -> None:
    manifest = contents.manifest
    metas = [manifest.tensors[manifest.chunks.tensor[row]].meta for _, row in items]
    boxes = []
    for (item, row), meta in zip(items, metas, strict=True):
        chunk = manifest.chunks.boxes.row(row, len(meta.shape))
        offset = tuple(
            a + b for a, b in zip(chunk.offset, item.storage_offsets, strict=True)
        )
        boxes.append(Box(offset, tuple(item.lengths)))
    rows = np.array([row for _, row in items], np.int64)
    plan = planned.LoadPlan(manifest, rows, Boxes.of(boxes), np.arange(len(items)))
    stored = [dtype_named(meta.dtype) for meta in metas]
    into = _Into(planner, [item for item, _ in items], boxes, stored)
    settle_all()
    for target, box in enumerate(boxes):
        if not box.volume:
            into.finish(target)
    TorchDist().read(contents.storage, plan, into, verify)


class _Into:
    """The Target of a plan: tensors that the planner resolves when their first piece comes, and is handed when full.

    Memory that is not an item's own, as of a planner that converts in a buffer, is the planner's for one item after
    the other: such items come to be elsewhere, and are resolved, copied and handed over when full.
    """

    def __init__(
        self,
        planner: LoadPlanner,
        items: Sequence[ReadItem],
        boxes: Sequence[Box],
        stored: Sequence[torch.dtype],
    ) -> None:
        self._planner = planner
        self._items = items
        self._boxes = boxes
        self._stored = stored
        self._left = [box.volume for box in boxes]
        self._own = own_keys(planner)
        self._landings: dict[int, tuple[torch.Tensor, bool, LoadTarget]] = {}
        self._asking = threading.Lock()  # planners are not made for threads

    def _landing(self, target: int) -> LoadTarget:
        with self._asking:
            if target not in self._landings:
                item = self._items[target]
                stored, holder = self._stored[target], Boxes.of([self._boxes[target]])
                is_own = item.dest_index.fqn in self._own
                if is_own:
                    kept = resolved(self._planner, item)
                else:
                    kept = torch.empty(item.lengths, dtype=stored, device="cpu")
                self._landings[target] = (
                    kept,
                    is_own,
                    LoadTarget([kept], holder, [stored], {}),
                )
            return self._landings[target][2]

    def open(self, target: int, box: Box) -> NDArray[Any]:
        return self._landing(target).open(0, box)

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        self._landing(target).close(0, box, filled)
        with self._asking:
            self._left[target] -= box.volume
            full = self._left[target] == 0
        if full:
            self.finish(target)

    def finish(self, target: int) -> None:
        """All of it is there."""
        item, _ = self._items[target], self._landing(target)
        with self._asking:
            kept, is_own, _ = self._landings.pop(target)
            given = kept if is_own else resolved(self._planner, item).copy_(kept)
            synchronize([given])
            self._planner.commit_tensor(item, given)

    def blob(self, target: int, data: bytes) -> None:
        raise BackendError(
            f"{self._items[target].storage_index.fqn!r} is an object, not a tensor ({len(data)} bytes)"
        )


def resolved(planner: LoadPlanner, item: ReadItem) -> torch.Tensor:
    """The memory that the planner gives for an item. Raises MismatchError for another shape."""
    tensor = planner.resolve_tensor(item).detach()
    if tensor.shape != item.lengths:
        raise MismatchError(
            f"{item.storage_index.fqn!r}: the planner asks for {tuple(item.lengths)}, and resolves it to "
            f"{tuple(tensor.shape)}"
        )
    if overlaps_itself(tensor):
        raise MismatchError(
            f"{item.storage_index.fqn!r}: the planner resolves it to a tensor of which elements share memory (shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()}): what is read last would win"
        )
    return tensor


def _read_opaque(
    contents: Contents,
    key: ChunkName,
    item: ReadItem,
    planner: LoadPlanner,
    registry: ExtensionRegistry,
    verify: bool,
) -> None:
    """A chunk that torch pickled, or that went through an extension: read as stock reads it."""
    name = key[0]
    meta, (_, box, place) = contents.listing.tensors[name], contents.items[key]
    dtype = vars(torch).get(meta.dtype)
    data = contents.blob(opaque_key(name, box, meta.shape), place, verify)
    size = box.volume * (dtype.itemsize if isinstance(dtype, torch.dtype) else 16)
    stream = _decoded(contents, key, data, registry, size + _SPARE)
    where = f"{contents.storage.location}: {name!r} {box} in {place.file}"
    try:
        value = torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CorruptCheckpoint(
            f"{where}: torch cannot read the record: {error}"
        ) from error
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != box.shape:
        raise CorruptCheckpoint(f"{where}: the record holds no tensor of {box.shape}")
    within = tuple(
        slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True)
    )
    part, target = value[within], resolved(planner, item)
    if part.dtype is target.dtype is torch.float4_e2m1fn_x2 and not COPIES_FLOAT4:
        target.view(torch.uint8).copy_(part.view(torch.uint8))
    else:
        target.copy_(part)
    planner.commit_tensor(item, target)


def _decoded(
    contents: Contents,
    key: ChunkName,
    data: bytearray,
    registry: ExtensionRegistry,
    most: int,
) -> io.BytesIO:
    """What extensions make of a record's bytes."""
    through = contents.items[key].place.through
    if not through:
        return io.BytesIO(data)
    where = f"{contents.storage.location}: {key[0]!r} is stored through {list(through)}"
    try:
        extensions = registry.from_descriptor_list(through)
    except ValueError as error:
        raise BackendError(f"{where}: {error}") from error
    stream: Any = io.BytesIO(data)
    for extension in extensions:
        if isinstance(extension, StreamTransformExtension):
            stream = extension.transform_from(stream)
    found = io.BytesIO()
    try:
        for part in _parts(stream):
            found.write(part)
            if found.tell() > most:
                raise CorruptCheckpoint(f"{where}: more than {most} bytes come of it")
    except CheckpointingException:
        raise
    except Exception as error:
        raise CorruptCheckpoint(f"{where}, which cannot read it: {error}") from error
    found.seek(0)
    return found


def _parts(stream: Any) -> Iterator[bytes]:
    while part := stream.read(_READ):
        yield part
