"""Format to format: a load walked straight into a save, a bounded piece at a time, by several processes, resumable."""

from __future__ import annotations

from megackpt.converter.asking import convert, remove_sharded_tensors
from megackpt.converter.exporting import export_huggingface
from megackpt.converter.order import Converted

__all__ = ["Converted", "convert", "export_huggingface", "remove_sharded_tensors"]
