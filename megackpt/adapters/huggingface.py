"""The former place of ``megackpt.huggingface``: its names, imported when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megackpt.huggingface import *  # noqa: F403 - all names of the new place
else:

    def __getattr__(name: str) -> Any:
        if name != "__all__" and name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("megackpt.huggingface"), name)
