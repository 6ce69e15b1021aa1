"""Planners for torch DCP: its default ones, with delegates by type, explained coverage and balanced writers.

They work with any storage writer and reader of torch's kind, ours and others. A plan of theirs is a plan of torch's.
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
from megackpt.dcp.protocol import check_known
from megackpt.errors import CheckpointingException, ShardingError
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
from megackpt.state.storable import dtype_name, has_shard_fields

__all__ = ["Delegate", "LoadPlanner", "SavePlanner"]


class Delegate:
    """How values of one kind are planned, saved and loaded; each method does what torch's planners do by default.

    A value is a leaf of the state dict and has one key. It is stored as tensors (chunks of one global tensor) or
    as one object, whichever ``create_write_items`` says. A delegate must be importable and picklable where a
    planner is sent to another process, as by ``async_save`` into a process.
    """

    def create_write_items(self, key: str, value: Any) -> list[WriteItem]:
        """What this rank offers to write."""
        items: list[WriteItem] = _create_write_items(key, value)
        return items

    def lookup_object(self, value: Any, index: MetadataIndex) -> Any:
        """The part of the value that an index names."""
        return find_state_dict_object({index.fqn: value}, index)

    def transform_object(self, item: WriteItem, part: Any) -> torch.Tensor | io.BytesIO:  # noqa: ARG002
        """What is written of the part: a tensor, or (for items of type BYTE_IO) a stream."""
        return (
            part
            if isinstance(part, torch.Tensor)
            else io.BytesIO(serialization.dump(part))
        )

    def extensions(self, item: WriteItem) -> Sequence[StreamTransformExtension]:  # noqa: ARG002
        """The extensions of torch's that the item's bytes pass through, as compression; stock's reader undoes them."""
        return ()

    def create_chunk_list(self, value: Any) -> list[ChunkStorageMetadata]:
        """The regions that a load is to fill, where the checkpoint holds a tensor."""
        chunks: list[ChunkStorageMetadata] = _create_chunk_list(value)
        return chunks

    def resolve_tensor(self, value: Any, item: ReadItem) -> torch.Tensor:
        """The memory that an item fills."""
        part: torch.Tensor = self.lookup_object(value, item.dest_index)
        return part[Box(tuple(item.dest_offsets), tuple(item.lengths)).slices()]

    def commit_tensor(self, value: Any, item: ReadItem, tensor: torch.Tensor) -> None:
        """The memory of an item has been filled."""

    def load_bytes(self, value: Any, item: ReadItem, stream: io.BytesIO) -> Any:  # noqa: ARG002
        """The value that stands in the state dict from now on, where the checkpoint holds an object."""
        return serialization.load(stream.read(), where=repr(item.storage_index.fqn))


Delegates = Mapping[type, Delegate]


@dataclass(frozen=True)
class _Delegated:
    """A value in a flattened state dict that a delegate speaks for, in the words of torch's own protocol."""

    value: Any
    delegate: Delegate

    @property
    def size(self) -> Any:
        """torch compares it with what is stored, where there is one."""
        if isinstance(self.value, torch.Tensor) and has_shard_fields(self.value):
            return lambda: torch.Size(
                getattr(self.value, "global_shape", self.value.shape)
            )
        return getattr(self.value, "size", None)

    @property
    def _absent(self) -> bool:
        """A DTensor on a mesh that this rank is not part of."""
        mesh = getattr(self.value, "device_mesh", None)
        return mesh is not None and mesh.get_coordinate() is None

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        return [] if self._absent else self.delegate.create_write_items(key, self.value)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [] if self._absent else self.delegate.create_chunk_list(self.value)


def _delegated(state_dict: Mapping[str, Any], delegates: Delegates) -> dict[str, Any]:
    """The state dict with values of the table's types, and of types derived from them, given to their delegates."""
    if not delegates:
        return dict(state_dict)
    found = {key: _delegate_of(value, delegates) for key, value in state_dict.items()}
    return {
        key: value if (delegate := found[key]) is None else _Delegated(value, delegate)
        for key, value in state_dict.items()
    }


def _delegate_of(value: Any, delegates: Delegates) -> Delegate | None:
    return next(
        (delegates[kind] for kind in type(value).__mro__ if kind in delegates), None
    )


_unfinished: dict[str, list[Any]] = {}
"""What torch's caches held on the coordinator before a save that it has not finished planning: ranks hold it still."""


class SavePlanner(DefaultSavePlanner):
    """torch's default planner, and: delegates, explained coverage errors, writers balanced by bytes.

    ``delegates``: type -> Delegate, for values of that type and of types derived from it (the nearest wins).
    Other arguments are those of ``DefaultSavePlanner``. Equal boxes of several ranks are replicas, of which one is
    written: by the least loaded rank, or the lowest with ``dedup_save_to_lowest_rank``; an object always by the
    lowest. Holes, overlaps and disagreements raise CoverageError, which torch brings to all ranks. A plan of one
    rank alone is not looked at for holes: with ``no_dist`` and ``use_collectives=False`` each rank plans alone.
    With ``enable_plan_caching`` a plan is reused where everything in it is equal, dtypes too.
    """

    def __init__(
        self, *args: Any, delegates: Delegates | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.delegates = dict(delegates or {})

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = _delegated(self.state_dict, self.delegates)
        check_known(self.state_dict)

    def create_local_plan(self) -> SavePlan:
        cache, key = self._cached_save_plan, self._cached_plans_key
        before = {key: cache[key]} if key in cache else {}
        vars(self).pop("_pending_local_plan", None)  # of a save that failed
        plan: SavePlan = super().create_local_plan()
        if self._enable_plan_caching:
            # Up to 2.11 torch has cached the new plan already, though the save may fail.
            cache.pop(key, None)
            cache.update(before)
            if plan.usable or self.plan != before[key]:  # torch compares no dtypes
                self._pending_local_plan = plan = self.plan
        return plan

    def _create_global_plan_with_caching(
        self, all_plans: list[SavePlan]
    ) -> tuple[list[SavePlan], list[SavePlan], Metadata]:
        key = self._cached_plans_key
        caches: tuple[dict[str, Any], ...] = (
            self._cached_all_plans,
            self._cached_global_plan,
            self._cached_metadata,
        )
        before = _unfinished.setdefault(key, [cache.get(key) for cache in caches])
        reused = [rank for rank, plan in enumerate(all_plans) if not plan.usable]
        for cache, kept in zip(caches, before, strict=True):
            cache.pop(key, None)
            if reused and kept is not None:
                cache[key] = kept
        if reused and len(self._cached_all_plans.get(key, ())) != len(all_plans):
            raise CheckpointingException(
                f"ranks {reused} reuse the plans of an earlier save, but this coordinator planned none with these "
                f"{len(all_plans)} ranks: save over one process group, or without enable_plan_caching"
            )
        _, plans, metadata = super()._create_global_plan_with_caching(all_plans)
        olds = before[1] if reused else [None] * len(all_plans)
        delta = [
            SavePlan([], usable=False) if not given.usable and plan == old else plan
            for given, plan, old in zip(all_plans, plans, olds, strict=True)
        ]
        return delta, plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan: SavePlan = super().finish_plan(new_plan)
        if self._enable_plan_caching:
            _unfinished.pop(self._cached_plans_key, None)
            pending = vars(self).pop("_pending_local_plan", None)
            if pending is not None:  # up to torch 2.11
                self._cached_save_plan[self._cached_plans_key] = pending
        return plan

    def _create_global_plan(
        self, all_plans: list[SavePlan]
    ) -> tuple[list[SavePlan], Metadata]:
        alone = len(all_plans) == 1  # of several, perhaps, that do not talk
        once = (
            all_plans
            if alone
            else _deduplicated(all_plans, not self.dedup_save_to_lowest_rank)
        )
        plans, metadata = create_default_global_save_plan(once)
        if self.flatten_state_dict:
            mappings = dict(ChainMap(*(plan.planner_data for plan in all_plans)))
            metadata = dataclasses.replace(metadata, planner_data=mappings)
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The object that an index names: a tensor, a shard of one, or what a delegate makes of it."""
        found = self.state_dict.get(index.fqn)
        if isinstance(found, _Delegated):
            return found.delegate.lookup_object(found.value, index)
        return super().lookup_object(index)

    def transform_object(
        self, write_item: WriteItem, object: Any
    ) -> torch.Tensor | io.BytesIO:
        found = self.state_dict.get(write_item.index.fqn)
        if isinstance(found, _Delegated):
            return found.delegate.transform_object(write_item, object)
        made: torch.Tensor | io.BytesIO = super().transform_object(write_item, object)
        return made

    def extensions(self, write_item: WriteItem) -> Sequence[StreamTransformExtension]:
        """What the item's bytes are to pass through on their way to the storage."""
        found = self.state_dict.get(write_item.index.fqn)
        return (
            found.delegate.extensions(write_item)
            if isinstance(found, _Delegated)
            else ()
        )

    @property
    def transforms(self) -> _StorageWriterTransforms | None:
        """``extensions`` as a storage writer takes them: ours asks, stock's is given them. None without delegates."""
        return _Transforms(self) if self.delegates else None


class LoadPlanner(DefaultLoadPlanner):
    """torch's default planner, and: delegates; objects are read without running what their bytes ask for.

    ``trusted``: classes and functions that objects may name, beside plain data of Python, numpy and torch.
    ``delegates`` as in SavePlanner. Other arguments are those of ``DefaultLoadPlanner``.
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
        given = (
            flatten_state_dict(state_dict)[0]
            if self.flatten_state_dict
            else dict(state_dict)
        )
        super().set_up_planner(state_dict, metadata, is_coordinator)
        for key, value in given.items():
            # torch 2.13 has put None where it does not know the type.
            if key in self.state_dict and not isinstance(value, torch.Tensor):
                self.state_dict[key] = value
                self._put(key, value)
        self.state_dict = _delegated(self.state_dict, self.delegates)
        check_known(self.state_dict)

    def _put(self, key: str, value: Any) -> None:
        """Into the caller's state dict; self.state_dict is a copy."""
        path = self.mappings[key] if self.flatten_state_dict else (key,)
        set_element(self.original_state_dict, path, value)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found = self.state_dict.get(index.fqn)
        tensor: torch.Tensor = (
            found.delegate.lookup_object(found.value, index)
            if isinstance(found, _Delegated)
            else super().lookup_tensor(index)
        )
        return tensor

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        found = self.state_dict.get(read_item.dest_index.fqn)
        if isinstance(found, _Delegated):
            return found.delegate.resolve_tensor(found.value, read_item)
        tensor: torch.Tensor = super().resolve_tensor(read_item)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        found = self.state_dict.get(read_item.dest_index.fqn)
        if isinstance(found, _Delegated):
            found.delegate.commit_tensor(found.value, read_item, tensor)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        found = self.state_dict[key]
        if isinstance(found, _Delegated):
            loaded = found.delegate.load_bytes(found.value, read_item, value)
        else:
            loaded = serialization.load(
                value.read(), trusted=self.trusted, where=repr(key)
            )
        self._put(key, loaded)


class _Transforms(_StorageWriterTransforms):
    """What stock's writer asks about each item, answered by a planner."""

    def __init__(self, planner: SavePlanner) -> None:
        super().__init__()
        self._planner = planner

    def transform_save_stream(
        self, write_item: WriteItem, raw_stream: io.IOBase
    ) -> tuple[IO[bytes], list[str]]:
        own = _StorageWriterTransforms(self._planner.extensions(write_item))
        through: tuple[IO[bytes], list[str]] = own.transform_save_stream(
            write_item, raw_stream
        )
        return through


def _deduplicated(plans: Sequence[SavePlan], balance: bool) -> list[SavePlan]:
    """Each box in one plan, after a look whether they tile every tensor."""
    chosen, _ = plan_save(_declared(plans), SavePolicy(balance=balance))
    return [
        dataclasses.replace(
            plan, items=[plan.items[row] for row in sorted(mine.source.tolist())]
        )
        for plan, mine in zip(plans, chosen, strict=True)
    ]


def _declared(plans: Sequence[SavePlan]) -> list[Declarations]:
    """What ranks offer to write, in our words. DCP numbers no replicas: the first that offers a box is the main one."""
    copies: Counter[ShardId] = Counter()

    def declaration(item: WriteItem, rank: int) -> Declaration:
        shard, meta, nbytes = _described(item)
        copies[shard] += 1
        return Declaration(shard, meta, copies[shard] - 1, False, nbytes, rank)

    return [
        Declarations.of([declaration(item, rank) for item in plan.items])
        for rank, plan in enumerate(plans)
    ]


def _described(item: WriteItem) -> tuple[ShardId, TensorMeta, int]:
    key, data = item.index.fqn, item.tensor_data
    if data is None:
        nbytes = item.bytes_io_data.nbytes if item.bytes_io_data else NOMINAL_OBJECT
        return ShardId(key, Box((), ())), TensorMeta((), OBJECT), nbytes
    try:
        meta = TensorMeta(tuple(data.size), dtype_name(data.properties.dtype))
    except ShardingError as error:
        raise ShardingError(f"{key!r}: {error}") from error
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return ShardId(key, box), meta, box.volume * meta.itemsize
