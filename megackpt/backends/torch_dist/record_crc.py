"""Records that others wrote, against the CRC32 that their zip directories keep. Reads everything, changes nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import numpy as np

from megackpt.backends.archives import check_archive
from megackpt.backends.base import THREADS
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Int64
from megackpt.planning.manifest import Manifest, ShardId
from megackpt.storage import Storage

_SHARE = 64  # records that one thread takes at a time


def problems(root: Storage, manifest: Manifest) -> list[str] | None:
    """What is wrong with these records; None if nothing is, but some were written without checksums."""
    chunks = manifest.chunks
    placed = np.flatnonzero(chunks.file >= 0)
    places = np.stack([chunks.file[placed], chunks.start[placed]])
    order = placed[
        np.unique(places, axis=1, return_index=True)[1]
    ]  # several chunks may share a record
    shares = [order[i : i + _SHARE] for i in range(0, len(order), _SHARE)]
    with ThreadPoolExecutor(THREADS, "megackpt-checksums") as pool:
        done = list(pool.map(lambda rows: _share(root, manifest, rows), shares))
    found = [problem for problems, _ in done for problem in problems]
    return None if not found and any(unchecked for _, unchecked in done) else found


def _share(root: Storage, manifest: Manifest, rows: Int64) -> tuple[list[str], bool]:
    """Problems of these records, and whether any had bytes without a checksum."""
    found: list[str] = []
    unchecked = False
    chunks = manifest.chunks
    for number, group in groupby(rows.tolist(), lambda row: int(chunks.file[row])):
        name = manifest.files[number]
        if root.size(name) is None:
            continue  # reported once for the file
        with root.open(name) as reader:
            for row in group:
                start, length = int(chunks.start[row]), int(chunks.length[row])
                damage, without = list[str](), False
                try:
                    damage, without = check_archive(reader, start, length)
                except CorruptCheckpoint as error:
                    damage = [str(error)]
                for problem in damage:
                    label = _label(manifest, row)
                    found.append(f"{label}: {problem}: {root.location}/{name}")
                unchecked = unchecked or without
    return found, unchecked


def _label(manifest: Manifest, row: int) -> str:
    key, meta = manifest.tensors[manifest.chunks.tensor[row]]
    return str(ShardId(key, manifest.chunks.boxes.row(row, len(meta.shape))))
