"""megackpt for callers of ``torch.distributed.checkpoint``: storage writers, readers, planners.

The names are imported when they are first used, like the names of ``megackpt``.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from megackpt.lazy_names import lazily

if TYPE_CHECKING:
    from megackpt.dcp.installation import install as install, uninstall as uninstall
    from megackpt.dcp.planner import (
        Delegate as Delegate,
        LoadPlanner as LoadPlanner,
        SavePlanner as SavePlanner,
    )
    from megackpt.dcp.state_dict_saver import (
        save_state_dict_async_finalize as save_state_dict_async_finalize,
        save_state_dict_async_plan as save_state_dict_async_plan,
        verify_global_md_reuse as verify_global_md_reuse,
    )
    from megackpt.dcp.storage_reader import FileSystemReader as FileSystemReader
    from megackpt.dcp.storage_writer import (
        FileSystemWriter as FileSystemWriter,
        FileSystemWriterAsync as FileSystemWriterAsync,
    )
    from megackpt.huggingface.dcp_storage import (
        HuggingFaceStorageReader as HuggingFaceStorageReader,
        HuggingFaceStorageWriter as HuggingFaceStorageWriter,
    )

_HOMES = {
    "megackpt.dcp.installation": ("install", "uninstall"),
    "megackpt.dcp.planner": ("Delegate", "LoadPlanner", "SavePlanner"),
    "megackpt.dcp.state_dict_saver": (
        "save_state_dict_async_finalize",
        "save_state_dict_async_plan",
        "verify_global_md_reuse",
    ),
    "megackpt.dcp.storage_reader": ("FileSystemReader",),
    "megackpt.dcp.storage_writer": ("FileSystemWriter", "FileSystemWriterAsync"),
    "megackpt.huggingface.dcp_storage": (
        "HuggingFaceStorageReader",
        "HuggingFaceStorageWriter",
    ),
}

__all__ = sorted(chain(*_HOMES.values()))  # noqa: PLE0605 - the names are strings


if not TYPE_CHECKING:
    __getattr__, __dir__ = lazily(globals(), _HOMES)
