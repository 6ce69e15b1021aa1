"""Megatron's names for torch DCP: tensors that it saves and loads, planners, a writer, a reader."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import _create_write_items

from megackpt import dcp, serialization, tree
from megackpt.async_save import AsyncCallsQueue, AsyncRequest
from megackpt.errors import CheckpointingException, ShardingError
from megackpt.megatron.bucket_writer import (
    FileSystemWriterAsync,
    _results_queue,
    get_write_results_queue,
)
from megackpt.state import ShardedTensor, is_main_replica


class _Checkpointable(torch.Tensor):
    """Shards of one tensor, which torch DCP handles as a tensor of the global shape.

    Any operation on it raises ShardingError.
    """

    _shards: Sequence[ShardedTensor]
    """Those of ``_sh_ten`` or ``_local_shards``, which callers read."""

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        items = []
        for number, (shard, chunk) in enumerate(
            zip(self._shards, self.__create_chunk_list__(), strict=True)
        ):
            index = MetadataIndex(
                fqn, chunk.offsets, number if len(self._shards) > 1 else None
            )
            properties = TensorProperties.create_from_tensor(_data_of(shard))
            data = TensorWriteData(chunk, properties, torch.Size(shard.global_shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(shard.global_offset), _data_of(shard).shape)
            for shard in self._shards
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for shard in self._shards:
            if index.offset is None or torch.Size(shard.global_offset) == index.offset:
                return _data_of(shard)
        raise ShardingError(
            f"{index.fqn!r}: this rank holds no shard at {index.offset}"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> NoReturn:
        raise ShardingError(
            f"{cls.__name__} is a placeholder for torch DCP: {func} cannot be applied to it"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({', '.join(map(repr, self._shards))})"


def _wrapper(kind: type[Any], shards: Sequence[ShardedTensor]) -> Any:
    first = shards[0]
    if any(shard.data is None for shard in shards):
        raise ShardingError(f"{first.key!r}: torch DCP needs data, also to load into")
    shape = torch.Size(first.global_shape)
    made = torch.Tensor._make_wrapper_subclass(kind, shape, dtype=first.dtype)
    made._shards = tuple(shards)
    return made


def _data_of(shard: ShardedTensor) -> torch.Tensor:
    """The shard's data, with the prepended axes."""
    data: Any = shard.data
    viewed: torch.Tensor = data.detach().view(
        (1,) * shard.prepend_axis_num + tuple(data.shape)
    )
    return viewed


class CheckpointableShardedTensor(_Checkpointable):
    """One shard."""

    _data: torch.Tensor
    _sh_ten: ShardedTensor

    @staticmethod
    def __new__(
        cls, data: torch.Tensor, sh_ten: ShardedTensor
    ) -> CheckpointableShardedTensor:
        made: CheckpointableShardedTensor = _wrapper(cls, [sh_ten])
        made._data, made._sh_ten = data, sh_ten
        return made

    @classmethod
    def from_sh_ten(cls, sh_ten: ShardedTensor) -> CheckpointableShardedTensor:
        return cls(sh_ten.data, sh_ten)  # type: ignore[arg-type] # refused where there is none


class LocalShardsContainer(_Checkpointable):
    """Several shards of one tensor on one rank."""

    _local_shards: Sequence[CheckpointableShardedTensor]

    @staticmethod
    def __new__(
        cls, local_shards: Sequence[CheckpointableShardedTensor]
    ) -> LocalShardsContainer:
        if not local_shards:
            raise ShardingError(
                "a LocalShardsContainer holds one CheckpointableShardedTensor at least"
            )
        made: LocalShardsContainer = _wrapper(cls, [s._sh_ten for s in local_shards])
        made._local_shards = local_shards
        return made


def flatten_state_dict(state_dict: Any) -> tuple[dict[str, Any], dict[str, tree.Path]]:
    """The leaves by their paths, joined by dots; and the paths by these names.

    Raises ValueError for two paths of one name.
    """
    flattened, mappings = {}, {}
    for path, leaf in tree.walk(state_dict):
        name = ".".join(map(str, path))
        if name in flattened:
            raise ValueError(f"duplicated flatten key {name}")
        flattened[name], mappings[name] = leaf, path
    return flattened, mappings


def _replace_state_dict_keys_with_sharded_keys(
    sharded_state_dict: Any, keep_only_main_replica: bool = False
) -> tuple[dict[str, list[Any]], dict[str, tree.Path], dict[str, list[str]]]:
    """The shards by their keys (objects: unique keys), and what restores the state from them."""
    flattened, mappings = flatten_state_dict(sharded_state_dict)
    shards: dict[str, list[Any]] = {}
    names: dict[str, list[str]] = {}
    for name, shard in flattened.items():
        if is_main_replica(shard.replica_id) or not keep_only_main_replica:
            key = getattr(shard, "unique_key", shard.key)
            shards.setdefault(key, []).append(shard)
            names.setdefault(key, []).append(name)
    return shards, mappings, names


def _replace_sharded_keys_with_state_dict_keys(
    state_dict: Mapping[str, list[Any]],
    flat_mapping: Mapping[str, tree.Path],
    rename_mapping: Mapping[str, list[str]],
) -> Any:
    """Undo ``_replace_state_dict_keys_with_sharded_keys``."""
    found: dict[str, Any] = {}
    for key, values in state_dict.items():
        found.update(zip(rename_mapping[key], values, strict=True))
    return unflatten_state_dict(found, dict(flat_mapping))


def mcore_to_pyt_state_dict(
    state_dict: Mapping[str, list[Any]],
    is_loading: bool = False,
    init_device: Any = "cpu",
    load_legacy_1d_flatten_tensors: bool = False,
) -> dict[str, Any]:
    """For torch DCP: tensors as Checkpointable ones, objects as the bytes of their list.

    For a load, absent data is made on ``init_device``; tensors that allow a shape mismatch are
    zeroed.
    """
    result: dict[str, Any] = {}
    for key, shards in state_dict.items():
        if not isinstance(shards[0], ShardedTensor):
            values = [shard.data for shard in shards]
            result[key] = io.BytesIO(serialization.dump(values))
            continue
        for shard in shards:
            if is_loading:
                shard.init_data(init_device)
            if is_loading and shard.allow_shape_mismatch:
                shard.data.detach().zero_()
        held = [CheckpointableShardedTensor.from_sh_ten(shard) for shard in shards]
        result[key] = held[0] if len(held) == 1 else LocalShardsContainer(held)
    return result


def _unwrap_pyt_sharded_tensor(sh_ten: Any) -> Any:
    """The data of the shards; other values stay."""
    if isinstance(sh_ten, _Checkpointable):
        return [shard.data for shard in sh_ten._shards]
    return sh_ten


class MCoreSavePlanner(dcp.SavePlanner):
    """``megackpt.dcp.SavePlanner`` for what ``mcore_to_pyt_state_dict`` returns.

    Every rank plans its own bytes. ``dedup_replicated_tensors`` has no effect.
    """

    def __init__(
        self,
        *args: Any,
        dedup_replicated_tensors: bool | None = None,
        can_run_decentralized_global_plan: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.can_run_decentralized_global_plan = can_run_decentralized_global_plan
        if can_run_decentralized_global_plan and self.flatten_state_dict:
            raise CheckpointingException(
                "MCoreSavePlanner takes flatten_state_dict=False, or "
                "can_run_decentralized_global_plan=False"
            )

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, value in self.state_dict.items():
            items += _create_write_items(key, value)
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        return local_plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """The object: it is bytes already, or a tensor."""
        return object


class MCoreLoadPlanner(dcp.LoadPlanner):
    """``megackpt.dcp.LoadPlanner`` that compares global shapes.

    Those of ``shapes_validation_sharded_tensors`` must be the stored ones; the tensors of
    ``allow_shape_mismatch_sharded_tensors``, by key, may have others.
    Raises CheckpointingException ("Global shape mismatch"), KeyError for a key that is not stored.
    """

    def __init__(
        self,
        *args: Any,
        shapes_validation_sharded_tensors: Iterable[ShardedTensor] = (),
        allow_shape_mismatch_sharded_tensors: Mapping[str, ShardedTensor] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.shapes_validation_sharded_tensors = shapes_validation_sharded_tensors
        self.allow_shape_mismatch_sharded_tensors = allow_shape_mismatch_sharded_tensors

    def create_local_plan(self) -> LoadPlan:
        stored: dict[str, Any] = cast(Metadata, self.metadata).state_dict_metadata
        for shard in self.shapes_validation_sharded_tensors:
            if shard.key not in stored:
                raise KeyError(
                    f"{shard.key} from model not in state dict: {sorted(stored)}"
                )
            if tuple(stored[shard.key].size) != tuple(shard.global_shape):
                raise CheckpointingException(
                    f"Global shape mismatch for loaded ({stored[shard.key].size}) and expected "
                    f"({shard.global_shape}) tensor for key {shard.key}"
                )
        flexible = dict(self.allow_shape_mismatch_sharded_tensors or {})
        sizes = {key: stored[key].size for key in flexible}
        try:
            # torch compares the sizes of tensors with the stored ones.
            for key, shard in flexible.items():
                stored[key].size = torch.Size(shard.global_shape)
            return super().create_local_plan()
        finally:
            for key, size in sizes.items():
                stored[key].size = size


def get_async_strategy(async_strategy: str = "nvrx", module: str | None = None) -> Any:
    """("mcore", our counterparts by name), or one of these by name: one engine serves both.

    TypeError for another ``async_strategy`` than "nvrx" and "mcore".
    """
    if async_strategy not in ("nvrx", "mcore"):
        raise TypeError(
            f"async_strategy is 'nvrx' or 'mcore', not {async_strategy!r}: megackpt serves both"
        )
    names: dict[str, Any] = {
        "AsyncCallsQueue": AsyncCallsQueue,
        "AsyncRequest": AsyncRequest,
        "CachedMetadataFileSystemReader": CachedMetadataFileSystemReader,
        "FileSystemWriterAsync": FileSystemWriterAsync,
        "_results_queue": _results_queue,
        "get_write_results_queue": get_write_results_queue,
        "save_state_dict_async_finalize": dcp.save_state_dict_async_finalize,
        "save_state_dict_async_plan": dcp.save_state_dict_async_plan,
    }
    return "mcore", names[module] if module else names


class CachedMetadataFileSystemReader(dcp.FileSystemReader):
    """``megackpt.dcp.FileSystemReader``. It opens the checkpoint in each load, without a cache."""

    def __init__(
        self,
        path: Any,
        cache_metadata: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(path, **options)

    @classmethod
    def clear_metadata_cache(cls) -> None:
        """Do nothing: nothing is cached."""
