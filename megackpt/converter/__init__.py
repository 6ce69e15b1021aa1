"""Conversion of checkpoints from format to format, in bounded memory, resumable."""

from __future__ import annotations

from megackpt.converter.conversion import Converted as Converted
from megackpt.converter.conversion_request import (
    convert as convert,
    remove_sharded_tensors as remove_sharded_tensors,
)
from megackpt.converter.huggingface_export import (
    export_huggingface as export_huggingface,
)
