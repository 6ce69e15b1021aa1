"""The former place of ``DataPosition``, which is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megackpt.integrations.data_position import (
        DataPosition as DataPosition,  # noqa: PLC0414 - exported
    )
else:

    def __getattr__(name: str) -> Any:
        if name != "DataPosition":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module("megackpt.integrations.data_position").DataPosition
