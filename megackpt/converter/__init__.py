"""Conversion of checkpoints from format to format, in bounded memory, resumable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megackpt.converter.conversion import Converted as Converted
from megackpt.converter.conversion_request import (
    convert as convert,
    remove_sharded_tensors as remove_sharded_tensors,
)
from megackpt.lazy_names import lazily

if TYPE_CHECKING:
    from megackpt.huggingface import export_huggingface as export_huggingface
else:  # its former place
    __getattr__, _ = lazily(globals(), {"megackpt.huggingface": ["export_huggingface"]})
