"""The zip archives of torch.save, for the formats that are made of them: written by hand, described, checked."""

from __future__ import annotations

from megackpt.backends.archives.checksums import Checked as Checked
from megackpt.backends.archives.describing import (
    Described as Described,
    Refused as Refused,
    described as described,
)
from megackpt.backends.archives.writing import (
    ALIGNMENT as ALIGNMENT,
    LIMIT as LIMIT,
    WIDE as WIDE,
    Member as Member,
    aligned_start as aligned_start,
    directory as directory,
    header as header,
    plain_strides as plain_strides,
    tensor_opcodes as tensor_opcodes,
    text as text,
)
