"""Conversion of checkpoints from format to format, in bounded memory, resumable."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megackpt.converter.conversion import Converted as Converted
from megackpt.converter.conversion_request import (
    convert as convert,
    remove_sharded_tensors as remove_sharded_tensors,
)

if TYPE_CHECKING:
    from megackpt.huggingface import export_huggingface as export_huggingface
else:

    def __getattr__(name: str) -> Any:
        """Give ``export_huggingface``, which was here, without an import of it before."""
        if name != "export_huggingface":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module("megackpt.huggingface").export_huggingface
