"""Reads planned regions of raw C-order chunks: exact ranges, few calls, few copies. All formats use
it.

Regions are cut into pieces of bounded size, sorted by their place in the files, and distributed
over threads. A piece that is consecutive in the file is read directly into the target's memory,
small neighbours by one call. Others pass through a small scratch memory. With ``verify``, whole
digest blocks are read and hashed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from megackpt.backends.base import THREADS, Target
from megackpt.backends.ranges.pieces import Pieces
from megackpt.backends.ranges.reader import (
    Job,
    octets as octets,
    refuse_sparse as refuse_sparse,
)
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.manifest import LoadPlan, itemsizes
from megackpt.storage import Storage


def read_raw(root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
    """Read every region of a plan. The encoding of the manifest is "raw".

    With ``verify``, whole digest blocks are read and compared if the manifest has digests.
    Otherwise only the bytes needed are read, and gaps that are cheaper than a call. Raises
    CorruptCheckpoint naming key, box, file and block, for all failures at once.
    """
    if not len(plan):
        return
    manifest = plan.manifest
    job = Job(root, plan, into, verify and len(manifest.chunks.digests) > 0)
    itemsize = itemsizes(manifest.tensors)[manifest.chunks.tensor[plan.chunk]]
    blobs = np.flatnonzero(itemsize == 0)
    file = manifest.chunks.file[plan.chunk[blobs]]
    pieces = Pieces.of(plan, np.flatnonzero(itemsize))
    with ThreadPoolExecutor(THREADS, "megackpt-read") as pool:
        jobs = [
            pool.submit(job.read_objects, blobs[file == number])
            for number in np.unique(file)
        ]
        shares = pieces.shares(THREADS, job.checked)
        jobs += [pool.submit(job.read_pieces, *share) for share in shares]
    errors = [error for j in jobs if (error := j.exception())]
    if not errors:
        return
    texts = list(dict.fromkeys(map(str, errors)))
    if len(texts) == 1 or any(type(e) is not CorruptCheckpoint for e in errors):
        raise errors[0]
    raise CorruptCheckpoint("\n".join(texts)) from errors[0]
