"""Storage on disks and in object stores: durable writes, ranged reads, digests."""

from __future__ import annotations

from megackpt.storage.bucket import (
    PROBE as PROBE,
    SINGLE_WRITER as SINGLE_WRITER,
    BucketStorage as BucketStorage,
    SingleObject as SingleObject,
    Version as Version,
    conditional_puts as conditional_puts,
    root_at as root_at,
)
from megackpt.storage.executor import (
    Advance as Advance,
    Call as Call,
    Executor as Executor,
    Progress as Progress,
)
from megackpt.storage.files import (
    TEMPORARY as TEMPORARY,
    direct_where_faster as direct_where_faster,
)
from megackpt.storage.interface import (
    Batch as Batch,
    FileReader as FileReader,
    FileUpdater as FileUpdater,
    FileWriter as FileWriter,
    Storage as Storage,
    allocate as allocate,
    digest as digest,
    digest_blocks as digest_blocks,
    is_url as is_url,
    read_again as read_again,
    read_dense as read_dense,
    read_digested as read_digested,
    refuse_holes as refuse_holes,
    unsafe_names as unsafe_names,
)
from megackpt.storage.local import (
    LocalStorage as LocalStorage,
    SingleFile as SingleFile,
)
