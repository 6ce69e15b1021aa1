"""Megatron's names for torch DCP that its training calls: a writer, readers, classes by name."""

from __future__ import annotations

from typing import Any, NoReturn

from megackpt import dcp
from megackpt.async_save import AsyncCallsQueue, AsyncRequest
from megackpt.errors import CheckpointingException
from megackpt.megatron.async_names import _results_queue, get_write_results_queue
from megackpt.megatron.table import REFUSALS


def _refuse_buckets(*_: Any, **__: Any) -> NoReturn:
    raise CheckpointingException(
        "buckets of FileSystemWriterAsync are not offered by megackpt: "
        + REFUSALS["refused-writer"]
    )


class FileSystemWriterAsync(dcp.FileSystemWriterAsync):
    """``megackpt.dcp.FileSystemWriterAsync`` with Megatron's arguments.

    It has no buckets: the methods of Megatron's writer that make or write them are refused.
    """

    def __init__(
        self,
        path: Any,
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        **kwargs: Any,
    ) -> None:
        if separation_hint is not None:
            raise CheckpointingException(
                "FileSystemWriterAsync does not support separation_hint: give it to "
                "TorchDistSaveShardedStrategy, and call save"
            )
        if use_msc:
            raise CheckpointingException(
                "FileSystemWriterAsync: the multi-storage client is not supported: megackpt.save "
                "takes s3://, gs:// and az:// paths itself"
            )
        super().__init__(path, *args, **kwargs)

    preload_tensors = staticmethod(_refuse_buckets)
    write_preloaded_data = staticmethod(_refuse_buckets)
    write_preloaded_data_multiproc = staticmethod(_refuse_buckets)
    write_preloaded_data_multithread = staticmethod(_refuse_buckets)
    prepare_decentralized_global_plan = staticmethod(_refuse_buckets)


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
        """No effect: no metadata is cached."""


def _get_filesystem_reader(
    checkpoint_dir: Any, cache_metadata: bool = False, async_strategy: str = "mcore"
) -> CachedMetadataFileSystemReader:
    """The reader. Megatron-Bridge calls this for the names that a checkpoint holds."""
    return CachedMetadataFileSystemReader(checkpoint_dir, cache_metadata)
