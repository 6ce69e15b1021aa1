"""Tensors and objects that name their own shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

Place = tuple[
    tuple[int, ...], tuple[int, ...], tuple[int, ...]
]  # global offset, local offset, size


KNOWS_THE_PROTOCOL = hasattr(dcp, "CheckpointableTensor")


def part_of(
    shape: tuple[int, ...], local: torch.Tensor, *places: Place
) -> torch.Tensor:
    """A local tensor that says what it holds of a global one, as torch 2.15's protocol has it."""
    named: Any = local
    named.global_shape = shape
    named.global_offsets, named.local_offsets, named.local_sizes = zip(
        *places, strict=True
    ) or ((), (), ())
    return local


def halves(rank: int, value: torch.Tensor) -> torch.Tensor:
    """Rank's half of the rows."""
    rows = len(value) // 2
    size = (rows, *value.shape[1:])
    zeros = (0,) * (value.dim() - 1)
    return part_of(
        tuple(value.shape),
        value[rows * rank :][:rows].clone(),
        ((rows * rank, *zeros), (0, *zeros), size),
    )


@contextmanager
def as_rank(
    rank: int, size: int, shape: tuple[int, ...] | None = None
) -> Iterator[DeviceMesh]:
    """This process as one rank of many, without any other one: tensors made here may be used after it."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh("cpu", shape or (size,))
    finally:
        dist.destroy_process_group()


class Chunked:
    """An object, no tensor, that names its chunks by the methods."""

    def __init__(
        self, shape: tuple[int, ...], chunks: dict[tuple[int, ...], torch.Tensor]
    ) -> None:
        self.shape, self.chunks = shape, chunks

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(offset)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(offset), data.shape),
                    TensorProperties(data.dtype),
                    torch.Size(self.shape),
                ),
            )
            for offset, data in self.chunks.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(o), data.shape)
            for o, data in self.chunks.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.chunks[tuple(index.offset or ())]
