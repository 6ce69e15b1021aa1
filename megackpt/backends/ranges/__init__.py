"""Reads planned regions of raw C-order chunks: exact ranges, few calls, few copies. All formats use it.

Regions are cut into pieces of bounded size, sorted by their place in the files, and distributed over
threads. A piece that is consecutive in the file is read directly into the target's memory, small
neighbours by one call. Others pass through a small scratch memory. With ``verify``, whole digest blocks
are read and hashed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.backends.base import THREADS, Target
from megackpt.backends.ranges.pieces import Pieces
from megackpt.backends.ranges.reader import (
    Job,
    ThreadReader,
    octets as octets,
    refuse_sparse as refuse_sparse,
)
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Int64
from megackpt.planning.manifest import LoadPlan
from megackpt.storage import Storage


def read_raw(root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
    """Read every region of a plan. The encoding of the manifest is "raw".

    With ``verify``, whole digest blocks are read and compared if the manifest has digests. Otherwise
    only the bytes needed are read, and gaps that are cheaper than a call. Raises CorruptCheckpoint naming
    key, box, file and block, for all failures at once.
    """
    if not len(plan):
        return
    job = Job.of(root, plan, into, verify)
    is_object = np.array(
        [entry.meta.is_object for entry in plan.manifest.tensors], np.bool_
    )
    objects = is_object[plan.manifest.chunks.tensor[plan.chunk]]
    pieces = Pieces.of(plan, np.flatnonzero(~objects).astype(np.int64))
    with ThreadPoolExecutor(THREADS, "megackpt-read") as pool:
        jobs = [
            pool.submit(job.read_objects, rows)
            for rows in _by_file(plan, np.flatnonzero(objects))
        ]
        jobs += [
            pool.submit(ThreadReader(job, *share).read)
            for share in pieces.shares(THREADS, job.checked)
        ]
    _raise_all([error for j in jobs if (error := j.exception())])


def _by_file(plan: LoadPlan, rows: NDArray[Any]) -> list[Int64]:
    file = plan.manifest.chunks.file[plan.chunk[rows]]
    return [rows[file == number].astype(np.int64) for number in np.unique(file)]


def _raise_all(errors: Sequence[BaseException]) -> None:
    if not errors:
        return
    texts = list(dict.fromkeys(str(e) for e in errors))
    if len(texts) == 1 or not all(type(e) is CorruptCheckpoint for e in errors):
        raise errors[0]
    raise CorruptCheckpoint("\n".join(texts)) from errors[0]
