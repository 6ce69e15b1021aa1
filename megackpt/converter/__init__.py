"""Format to format: a load walked straight into a save, a bounded piece at a time, by several processes, resumable."""

from __future__ import annotations

from megackpt.converter.asking import (
    convert as convert,
    remove_sharded_tensors as remove_sharded_tensors,
)
from megackpt.converter.exporting import export_huggingface as export_huggingface
from megackpt.converter.order import Converted as Converted
