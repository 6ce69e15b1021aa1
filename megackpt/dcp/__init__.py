"""megackpt for callers of ``torch.distributed.checkpoint``: storage writers, readers, planners.

The names are imported when they are first used, as those of ``megackpt`` are.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    "dcp.installation": ("install", "uninstall"),
    "dcp.planner": ("Delegate", "LoadPlanner", "SavePlanner"),
    "dcp.state_dict_saver": (
        "save_state_dict_async_finalize",
        "save_state_dict_async_plan",
        "verify_global_md_reuse",
    ),
    "dcp.storage_reader": ("FileSystemReader",),
    "dcp.storage_writer": ("FileSystemWriter", "FileSystemWriterAsync"),
    "huggingface.dcp_storage": ("HuggingFaceStorageReader", "HuggingFaceStorageWriter"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605 - the names are strings


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'megackpt.dcp' has no attribute {name!r}")
        value = getattr(import_module(f"megackpt.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
