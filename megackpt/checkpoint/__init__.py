"""Checkpoints in a storage: begin, commit, open and verify them, and the index of each."""

from __future__ import annotations

from megackpt.checkpoint.index import (
    INDEX as INDEX,
    decode_index as decode_index,
    encode_index as encode_index,
)
from megackpt.checkpoint.opening import (
    Directory as Directory,
    Opened as Opened,
    absolute as absolute,
    as_read_by as as_read_by,
    backend_of as backend_of,
    find_storage as find_storage,
    in_run as in_run,
    open_checkpoint as open_checkpoint,
    open_same as open_same,
)
from megackpt.checkpoint.save_session import SaveSession as SaveSession
from megackpt.checkpoint.transaction import (
    Transaction as Transaction,
    Writing as Writing,
    begin as begin,
    clear as clear,
    completed as completed,
    remove as remove,
    staging_storage as staging_storage,
)
from megackpt.checkpoint.verifying import Report as Report, verify as verify
