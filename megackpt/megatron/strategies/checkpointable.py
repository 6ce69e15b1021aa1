"""Megatron's ``strategies.checkpointable``: ShardedTensors that stock torch DCP saves and loads in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megackpt.errors import ShardingError
from megackpt.state import ShardedTensor


class _Checkpointable(torch.Tensor):
    """Shards of one tensor, to torch DCP's eyes a tensor of the global shape. Nothing can be computed with it."""

    _shards: Sequence[ShardedTensor]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets, number if len(self._shards) > 1 else None),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(_held(shard)), torch.Size(shard.global_shape)
                ),
            )
            for number, (chunk, shard) in enumerate(
                zip(self.__create_chunk_list__(), self._shards, strict=True)
            )
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(shard.global_offset), _held(shard).shape)
            for shard in self._shards
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for shard in self._shards:
            if index.offset is None or torch.Size(shard.global_offset) == index.offset:
                return _held(shard)
        raise ShardingError(f"{index.fqn!r}: this rank holds no shard at {index.offset}")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        raise ShardingError(f"{cls.__name__} stands for a tensor in torch DCP: {func} cannot be done with it")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({', '.join(map(repr, self._shards))})"


def _standing_for(kind: type[Any], shards: Sequence[ShardedTensor]) -> Any:
    first = shards[0]
    if any(shard.data is None for shard in shards):
        raise ShardingError(f"{first.key!r}: torch DCP needs data, also to load into")
    made = torch.Tensor._make_wrapper_subclass(kind, torch.Size(first.global_shape), dtype=first.dtype)
    made._shards = tuple(shards)
    return made


def _held(shard: ShardedTensor) -> torch.Tensor:
    """The data, with the prepended axes."""
    data: Any = shard.data
    held: torch.Tensor = data.detach().view((1,) * shard.prepend_axis_num + tuple(data.shape))
    return held


class CheckpointableShardedTensor(_Checkpointable):
    """One shard."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, sh_ten: ShardedTensor) -> CheckpointableShardedTensor:
        made: CheckpointableShardedTensor = _standing_for(cls, [sh_ten])
        return made

    @classmethod
    def from_sh_ten(cls, sh_ten: ShardedTensor) -> CheckpointableShardedTensor:
        return cls(sh_ten.data, sh_ten)  # type: ignore[arg-type] # refused where there is none


class LocalShardsContainer(_Checkpointable):
    """Several shards of one tensor on one rank."""

    @staticmethod
    def __new__(cls, local_shards: Sequence[CheckpointableShardedTensor]) -> LocalShardsContainer:
        if not local_shards:
            raise ShardingError("a LocalShardsContainer holds one CheckpointableShardedTensor at least")
        made: LocalShardsContainer = _standing_for(cls, [s._shards[0] for s in local_shards])
        return made
