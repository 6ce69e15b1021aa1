"""Megatron's classes for stock torch DCP: tensors that it saves and loads, a writer, a reader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megackpt import dcp
from megackpt.errors import CheckpointingException, ShardingError
from megackpt.state import ShardedTensor


class _Checkpointable(torch.Tensor):
    """Shards of one tensor, which torch DCP handles as a tensor of the global shape.

    Any operation on it raises ShardingError.
    """

    _shards: Sequence[ShardedTensor]

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

    @staticmethod
    def __new__(
        cls, data: torch.Tensor, sh_ten: ShardedTensor
    ) -> CheckpointableShardedTensor:
        made: CheckpointableShardedTensor = _wrapper(cls, [sh_ten])
        return made

    @classmethod
    def from_sh_ten(cls, sh_ten: ShardedTensor) -> CheckpointableShardedTensor:
        return cls(sh_ten.data, sh_ten)  # type: ignore[arg-type] # refused where there is none


class LocalShardsContainer(_Checkpointable):
    """Several shards of one tensor on one rank."""

    @staticmethod
    def __new__(
        cls, local_shards: Sequence[CheckpointableShardedTensor]
    ) -> LocalShardsContainer:
        if not local_shards:
            raise ShardingError(
                "a LocalShardsContainer holds one CheckpointableShardedTensor at least"
            )
        made: LocalShardsContainer = _wrapper(cls, [s._shards[0] for s in local_shards])
        return made


class FileSystemWriterAsync(dcp.FileSystemWriterAsync):
    """``megackpt.dcp.FileSystemWriterAsync`` with Megatron's arguments."""

    def __init__(
        self,
        path: Any,
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        **kwargs: Any,
    ) -> None:
        if separation_hint is not None or use_msc:
            raise CheckpointingException(
                "FileSystemWriterAsync does not support separation_hint (give it to "
                "TorchDistSaveShardedStrategy, and call save) or the multi-storage client "
                "(megackpt.save takes s3://, gs:// and az:// paths itself)"
            )
        super().__init__(path, *args, **kwargs)


class CachedMetadataFileSystemReader(dcp.FileSystemReader):
    """``megackpt.dcp.FileSystemReader``. It opens the checkpoint in each load, without a cache."""

    @classmethod
    def clear_metadata_cache(cls) -> None:
        """Do nothing: nothing is cached."""
