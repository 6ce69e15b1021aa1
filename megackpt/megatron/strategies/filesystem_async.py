"""Megatron's ``strategies.filesystem_async``: a storage writer for torch DCP, in three stages."""

from __future__ import annotations

from typing import Any

from megackpt import dcp
from megackpt.errors import CheckpointingException
from megackpt.megatron.refused import refusing

__getattr__ = refusing(__name__)


class FileSystemWriterAsync(dcp.FileSystemWriterAsync):
    """``megackpt.dcp.FileSystemWriterAsync``, with Megatron's arguments."""

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
                "this writer knows no separation_hint (give it to TorchDistSaveShardedStrategy, and save) and no "
                "multi-storage client (megackpt.save takes s3://, gs:// and az:// itself)"
            )
        super().__init__(path, *args, **kwargs)
