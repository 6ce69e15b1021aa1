"""Our engine behind torch DCP's own doors: for stock ``torch.distributed.checkpoint``'s save, async_save and load.

The names of this room, fetched on first use as those of ``megackpt`` are.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from megackpt.dcp.storage import (
        FileSystemReader as FileSystemReader,
        FileSystemWriter as FileSystemWriter,
        FileSystemWriterAsync as FileSystemWriterAsync,
    )

_HOMES = {
    "planner": ("Delegate", "LoadPlanner", "SavePlanner"),
    "state_dict_saver": (
        "save_state_dict_async_finalize",
        "save_state_dict_async_plan",
        "verify_global_md_reuse",
    ),
    "storage": ("FileSystemReader", "FileSystemWriter", "FileSystemWriterAsync"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605 - strings all the same


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        try:
            home = _HOME_OF[name]
        except KeyError:
            raise AttributeError(
                f"module 'megackpt.dcp' has no attribute {name!r}"
            ) from None
        value = getattr(import_module(f"megackpt.dcp.{home}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
