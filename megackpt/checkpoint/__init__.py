"""What makes a directory a checkpoint: begin, commit, open, verify, and the index that they keep."""

from __future__ import annotations

from megackpt.checkpoint.committing import begin, place_of
from megackpt.checkpoint.index import INDEX, decode_index, encode_index
from megackpt.checkpoint.opening import (
    Opened,
    absolute,
    as_read_by,
    backend_of,
    find_storage,
    open_checkpoint,
    open_same,
)
from megackpt.checkpoint.place import Place, commit
from megackpt.checkpoint.removing import clear, remove
from megackpt.checkpoint.verifying import Report, verify

__all__ = [
    "INDEX",
    "Opened",
    "Place",
    "Report",
    "absolute",
    "as_read_by",
    "backend_of",
    "begin",
    "clear",
    "commit",
    "decode_index",
    "encode_index",
    "find_storage",
    "open_checkpoint",
    "open_same",
    "place_of",
    "remove",
    "verify",
]
