"""Megatron's ``strategies.torch``: the format torch_dist, torch DCP's own bytes."""

from __future__ import annotations

from typing import Any

from megackpt.megatron.refused import refusing
from megackpt.megatron.strategies.base import AsyncSaveShardedStrategy, LoadShardedStrategy
from megackpt.megatron.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader as CachedMetadataFileSystemReader,
)
from megackpt.megatron.strategies.checkpointable import (
    CheckpointableShardedTensor as CheckpointableShardedTensor,
    LocalShardsContainer as LocalShardsContainer,
)
from megackpt.megatron.strategies.filesystem_async import FileSystemWriterAsync as FileSystemWriterAsync

__getattr__ = refusing(__name__)


class MCoreMetadata:
    """For pickles of up to 0.15 that name it."""


class MCoreSavePlan:
    """For pickles of up to 0.15 that name it."""


class TorchDistSaveShardedStrategy(AsyncSaveShardedStrategy):
    """``thread_count`` files of each rank; a file of their own for keys that begin with ``separation_hint``.

    The other arguments are taken, and have no effect: copies are written once, and plans used again where they fit.
    """

    keep_only_main_replica = True
    thread_count = 2
    separation_hint: str | None = None

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int | None = 1,
        keep_only_main_replica: bool = True,
        thread_count: int = 2,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
        cpu_shm_mode: Any = None,
    ) -> None:
        options = {"files_per_rank": thread_count, "separation_hint": separation_hint}
        super().__init__(backend, version, options)
        self.keep_only_main_replica = keep_only_main_replica
        self.thread_count = thread_count
        self.separation_hint = separation_hint
        self.use_cached_ckpt_structure = cached_metadata


class TorchDistLoadShardedStrategy(LoadShardedStrategy):
    """The arguments are taken, and have no effect: a checkpoint is opened anew by each load."""

    def __init__(self, cache_metadata: bool = False, checkpoint_name: Any = None) -> None:
        super().__init__("torch_dist", 1)


def register_default_torch_strategies() -> None:
    """They are there."""
