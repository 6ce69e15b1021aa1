"""The zip archives of torch.save, for the formats that are made of them: written by hand, described, checked."""

from __future__ import annotations

from megackpt.backends.archives.checksums import Checked
from megackpt.backends.archives.describing import Described, Refused, described
from megackpt.backends.archives.writing import (
    ALIGNMENT,
    LIMIT,
    WIDE,
    Member,
    aligned_start,
    directory,
    header,
    plain_strides,
    tensor_opcodes,
    text,
)

__all__ = [
    "ALIGNMENT",
    "LIMIT",
    "WIDE",
    "Checked",
    "Described",
    "Member",
    "Refused",
    "aligned_start",
    "described",
    "directory",
    "header",
    "plain_strides",
    "tensor_opcodes",
    "text",
]
