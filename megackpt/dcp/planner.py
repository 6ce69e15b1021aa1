"""Planners for torch DCP: its defaults, with delegates by type, coverage checks, balanced writers.

They work with any storage writer and reader. Their plans are torch's.

Torch below 2.15 takes a tensor that names its shard (``global_shape`` and its like) for a whole
one. ``async_save`` stages tensors into new ones, which lack these fields; a process receives bare
tensors again. ``check_plan`` and its like refuse shards that would be stored as whole tensors.
"""

from __future__ import annotations

import dataclasses
import io
from collections import ChainMap, Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import (
    _create_chunk_list,
    _create_write_items,
)
from torch.distributed.checkpoint.utils import find_state_dict_object

from megackpt import serialization
from megackpt.adapters.checkpointable import (
    ChunkShape,
    chunks_of_items,
    pieces_by_fields,
)
from megackpt.errors import ShardingError
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    NOMINAL_OBJECT,
    OBJECT,
    Declaration,
    Declarations,
    ShardId,
    TensorMeta,
)
from megackpt.planning.save_plan import SavePolicy, plan_save
from megackpt.state.storable import (
    SHARD_FIELDS,
    SHARD_METHODS,
    distributed_name,
    dtype_name,
    shard_fields,
)

__all__ = ["Delegate", "LoadPlanner", "SavePlanner"]


class Delegate:
    """How values of one type are planned, saved and loaded. Each method is torch's default.

    A value is a leaf of the state dict and has one key. It is stored as a tensor, in chunks, or as
    one object, depending on the items of ``create_write_items``. A delegate must be importable and
    picklable if the planner is sent to another process, for example by ``async_save`` with a
    process.
    """

    def create_write_items(self, key: str, value: Any) -> list[WriteItem]:
        """The items that this rank could write."""
        items: list[WriteItem] = _create_write_items(key, value)
        return items

    def lookup_object(self, value: Any, index: MetadataIndex) -> Any:
        """The part of the value that an index names."""
        return find_state_dict_object({index.fqn: value}, index)

    def transform_object(
        self,
        item: WriteItem,  # noqa: ARG002
        part: Any,
    ) -> torch.Tensor | io.BytesIO:
        """The data to write: a tensor, or (for items of type BYTE_IO) a stream."""
        if isinstance(part, torch.Tensor):
            return part
        return io.BytesIO(serialization.dump(part))

    def extensions(self, item: WriteItem) -> Sequence[StreamTransformExtension]:  # noqa: ARG002
        """torch's extensions for the item's bytes, such as compression. Readers undo them."""
        return ()

    def create_chunk_list(self, value: Any) -> list[ChunkStorageMetadata]:
        """The regions that a load fills, where the checkpoint holds a tensor."""
        chunks: list[ChunkStorageMetadata] = _create_chunk_list(value)
        return chunks

    def resolve_tensor(self, value: Any, item: ReadItem) -> torch.Tensor:
        """The memory that an item fills."""
        part: torch.Tensor = self.lookup_object(value, item.dest_index)
        return part[Box(tuple(item.dest_offsets), tuple(item.lengths)).slices()]

    def commit_tensor(
        self,
        value: Any,
        item: ReadItem,
        tensor: torch.Tensor,
    ) -> None:
        """Called when the memory of an item has been filled."""

    def load_bytes(
        self,
        value: Any,  # noqa: ARG002
        item: ReadItem,
        stream: io.BytesIO,
    ) -> Any:
        """The new value in the state dict, where the checkpoint holds an object."""
        return serialization.load(stream.read(), where=repr(item.storage_index.fqn))


Delegates = Mapping[type, Delegate]


@dataclass(frozen=True)
class _Delegated:
    """A value in a flattened state dict with its delegate, under torch's protocol."""

    value: Any
    delegate: Delegate

    @property
    def size(self) -> Any:
        """torch compares it with the stored size, if there is one."""
        value = self.value
        if shard_fields(value):
            return lambda: torch.Size(getattr(value, "global_shape", value.shape))
        return getattr(value, "size", None)

    @property
    def _is_elsewhere(self) -> bool:
        """Whether it is a DTensor on a mesh without this rank."""
        mesh = getattr(self.value, "device_mesh", None)
        return mesh is not None and mesh.get_coordinate() is None

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        if self._is_elsewhere:
            return []
        return self.delegate.create_write_items(key, self.value)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self._is_elsewhere:
            return []
        return self.delegate.create_chunk_list(self.value)


def _delegate(state_dict: Mapping[str, Any], delegates: Delegates) -> dict[str, Any]:
    """The state dict, with values that have a delegate wrapped. The nearest base class counts."""
    result = {}
    for key, value in state_dict.items():
        result[key] = value
        for kind in type(value).__mro__:
            if kind in delegates:
                result[key] = _Delegated(value, delegates[kind])
                break
    return result


def _delegated(planner: Any, index: MetadataIndex) -> _Delegated | None:
    found = planner.state_dict.get(index.fqn)
    if isinstance(found, _Delegated):
        return found
    return None


class SavePlanner(DefaultSavePlanner):
    """torch's default planner with delegates, explained coverage errors and balanced writers.

    ``delegates``: type -> Delegate, for values of that type and of types derived from it.
    See ``DefaultSavePlanner`` for all other arguments; ``enable_plan_caching`` has no effect:
    every save is planned, so no plan is reused for a state that changed.

    Equal boxes of several ranks are replicas. One of them is written: by the least loaded rank, or
    by the lowest with ``dedup_save_to_lowest_rank``. An object is written by the lowest rank.
    Holes, overlaps and disagreements raise CoverageError, which torch raises on all ranks. A plan
    of one rank alone is not checked for holes, since with ``no_dist`` each rank plans alone.
    """

    def __init__(
        self,
        *args: Any,
        delegates: Delegates | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._enable_plan_caching = False
        self.delegates = dict(delegates or {})

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = _delegate(self.state_dict, self.delegates)
        check_known(self.state_dict)

    def _create_global_plan(
        self, all_plans: list[SavePlan]
    ) -> tuple[list[SavePlan], Metadata]:
        chosen = all_plans
        # A single plan may be one of several ranks' that exchange no messages.
        if len(all_plans) > 1:
            chosen = _deduplicate(all_plans, not self.dedup_save_to_lowest_rank)
        plans, metadata = create_default_global_save_plan(chosen)
        if self.flatten_state_dict:
            mappings = dict(ChainMap(*(plan.planner_data for plan in all_plans)))
            metadata = dataclasses.replace(metadata, planner_data=mappings)
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The object that an index names: a tensor, a shard of one, or a delegate's part."""
        if found := _delegated(self, index):
            return found.delegate.lookup_object(found.value, index)
        return super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if found := _delegated(self, write_item.index):
            return found.delegate.transform_object(write_item, object)
        return super().transform_object(write_item, object)

    def extensions(self, write_item: WriteItem) -> Sequence[StreamTransformExtension]:
        """torch's extensions for the item's bytes."""
        if found := _delegated(self, write_item.index):
            return found.delegate.extensions(write_item)
        return ()

    @property
    def transforms(self) -> _StorageWriterTransforms | None:
        """``extensions`` for a storage writer; None without delegates.

        Our writer takes it from the planner. Assign it to ``transforms`` of stock's writer.
        """
        if self.delegates:
            return _Transforms(self)
        return None


class LoadPlanner(DefaultLoadPlanner):
    """torch's default planner with delegates. Objects are unpickled without running code.

    ``trusted``: classes and functions that objects may name, in addition to plain data of Python,
    numpy and torch. ``delegates``: see SavePlanner. See ``DefaultLoadPlanner`` for all other
    arguments.
    """

    def __init__(
        self,
        *args: Any,
        delegates: Delegates | None = None,
        trusted: Sequence[type | Callable[..., Any]] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.delegates = dict(delegates or {})
        self.trusted = tuple(trusted)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        given = dict(state_dict)
        if self.flatten_state_dict:
            given = flatten_state_dict(state_dict)[0]
        super().set_up_planner(state_dict, metadata, is_coordinator)
        for key, value in given.items():
            # torch 2.13 has replaced values of types that it does not know by None.
            if key in self.state_dict and not isinstance(value, torch.Tensor):
                self.state_dict[key] = value
                self._set(key, value)
        self.state_dict = _delegate(self.state_dict, self.delegates)
        check_known(self.state_dict)

    def _set(self, key: str, value: Any) -> None:
        """Set a value in the caller's state dict (``self.state_dict`` is a copy)."""
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], value)
        else:
            self.original_state_dict[key] = value

    def lookup_tensor(self, index: MetadataIndex) -> Any:
        if found := _delegated(self, index):
            return found.delegate.lookup_object(found.value, index)
        return super().lookup_tensor(index)

    def resolve_tensor(self, read_item: ReadItem) -> Any:
        if found := _delegated(self, read_item.dest_index):
            return found.delegate.resolve_tensor(found.value, read_item)
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        if found := _delegated(self, read_item.dest_index):
            found.delegate.commit_tensor(found.value, read_item, tensor)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        if found := _delegated(self, read_item.dest_index):
            loaded = found.delegate.load_bytes(found.value, read_item, value)
        else:
            data = value.read()
            loaded = serialization.load(data, trusted=self.trusted, where=repr(key))
        self._set(key, loaded)


class _Transforms(_StorageWriterTransforms):
    """A planner's extensions, as a storage writer gets them: by item."""

    def __init__(self, planner: SavePlanner) -> None:
        super().__init__()
        self._planner = planner

    def transform_save_stream(
        self, write_item: WriteItem, raw_stream: io.IOBase
    ) -> tuple[IO[bytes], list[str]]:
        transforms = _StorageWriterTransforms(self._planner.extensions(write_item))
        result: tuple[IO[bytes], list[str]]
        result = transforms.transform_save_stream(write_item, raw_stream)
        return result


def _deduplicate(plans: Sequence[SavePlan], balance: bool) -> list[SavePlan]:
    """Each box in one plan. Raises CoverageError where the boxes do not tile their tensors."""
    # DCP numbers no replicas: the first rank that plans a box has the main replica.
    replicas: Counter[ShardId] = Counter()
    declarations = []
    for rank, plan in enumerate(plans):
        own = []
        for item in plan.items:
            key, data = item.index.fqn, item.tensor_data
            box, meta, nbytes = Box((), ()), TensorMeta((), OBJECT), NOMINAL_OBJECT
            if data is not None:
                try:
                    dtype = dtype_name(data.properties.dtype)
                except ShardingError as error:
                    raise ShardingError(f"{key!r}: {error}") from error
                meta = TensorMeta(tuple(data.size), dtype)
                box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
                nbytes = box.volume * meta.itemsize
            elif item.bytes_io_data:
                nbytes = item.bytes_io_data.nbytes
            shard = ShardId(key, box)
            replica = replicas[shard]
            own.append(Declaration(shard, meta, replica, False, nbytes, rank))
            replicas[shard] += 1
        declarations.append(Declarations.of(own))
    chosen, _ = plan_save(declarations, SavePolicy(balance=balance))
    result = []
    for plan, own_rows in zip(plans, chosen, strict=True):
        items = [plan.items[row] for row in sorted(own_rows.source.tolist())]
        result.append(dataclasses.replace(plan, items=items))
    return result


_ADVICE = (
    f"torch knows the protocol from 2.15 on, if all of {', '.join(SHARD_FIELDS)} are set. "
    "megackpt.save(megackpt.sharded(state_dict), ...) knows it with any torch"
)


def check_known(state_dict: Mapping[str, Any]) -> None:
    """Raise ShardingError for shards that the installed torch takes for whole tensors."""
    for key, value in state_dict.items():
        if not shard_fields(value):
            continue
        if hasattr(value, SHARD_METHODS[0]):
            continue  # All releases of torch call the methods, whatever fields there are.
        if _from_fields(key, value) != chunks_of_items(_create_write_items(key, value)):
            raise ShardingError(
                f"{key!r}: torch {torch.__version__} takes a {distributed_name(value)} for a "
                f"whole tensor: {_ADVICE}"
            )


def named_chunks(state_dict: Mapping[str, Any]) -> dict[str, list[ChunkShape]]:
    """The chunks of each value that names chunks, by the key that torch's planners give it."""
    chunks = {}
    for key, value in flatten_state_dict(dict(state_dict))[0].items():
        if not isinstance(value, torch.Tensor):
            continue
        if hasattr(getattr(value, "_local_tensor", value), SHARD_METHODS[0]):
            chunks[key] = chunks_of_items(_create_write_items(key, value))
        elif shard_fields(value):
            chunks[key] = _from_fields(key, value)
    return chunks


def copy_fields(source: Any, staged: Any) -> None:
    """Set the shard fields and methods of staged tensors as on the tensors they are copies of."""
    if isinstance(source, Mapping) and isinstance(staged, Mapping):
        for key, value in source.items():
            copy_fields(value, staged.get(key))
    elif isinstance(source, (list, tuple)) and isinstance(staged, (list, tuple)):
        for value, copy in zip(source, staged, strict=False):
            copy_fields(value, copy)
    elif isinstance(source, torch.Tensor) and isinstance(staged, torch.Tensor):
        if source is staged:
            return
        given = vars(getattr(source, "_local_tensor", source))
        copied = vars(getattr(staged, "_local_tensor", staged))
        # Not the third method: it returns the memory of the source.
        for name in (*SHARD_FIELDS, *SHARD_METHODS[:2]):
            copied.pop(name, None)
            if name in given:
                copied[name] = given[name]


def check_plan(chunks: Mapping[str, list[ChunkShape]], plan: SavePlan) -> None:
    """Raise ShardingError where a plan of staged tensors lacks the chunks of the originals."""
    for key, expected in chunks.items():
        items = [item for item in plan.items if item.index.fqn == key]
        if items and sorted(chunks_of_items(items)) != sorted(expected):
            raise ShardingError(
                f"{key!r}: the tensor names its shard, and the copy that async_save staged of it "
                f"does not (a process receives bare tensors): {_ADVICE}"
            )


def _from_fields(key: str, tensor: torch.Tensor) -> list[ChunkShape]:
    shape, pieces = pieces_by_fields(key, tensor)
    return [(offset, size, shape) for offset, _, size in pieces]
