"""The zip archives of torch.save: headers and directories, the tensors in them, checksums."""

from __future__ import annotations

from megackpt.backends.archives.archive_reader import (
    StoredTensor as StoredTensor,
    UnsupportedTensor as UnsupportedTensor,
    check_archive as check_archive,
    load_structure as load_structure,
)
from megackpt.backends.archives.zip_writer import (
    ALIGNMENT as ALIGNMENT,
    LIMIT as LIMIT,
    WIDE as WIDE,
    Member as Member,
    aligned_start as aligned_start,
    directory as directory,
    header as header,
    tensor_opcodes as tensor_opcodes,
    text as text,
)
