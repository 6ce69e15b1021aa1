"""Records that others wrote, against the CRC32 that their zip directories keep. Reads everything, changes nothing."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import numpy as np

from megackpt.errors import CheckpointingException
from megackpt.objects import archive
from megackpt.planning.box import Int64
from megackpt.planning.manifest import Manifest, ShardId
from megackpt.runtime.storage import FileReader, Storage

THREADS = 2
WINDOW = 4 << 20  # bytes read at once
_SHARE = 64  # records that one thread takes at a time


def problems(root: Storage, manifest: Manifest) -> list[str] | None:
    """What is wrong with these records; None if nothing is, but some were written without checksums."""
    chunks = manifest.chunks
    order = np.lexsort((chunks.start, chunks.file))
    order = order[chunks.file[order] >= 0]
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
            continue  # told already, once for the file
        with root.open(name) as reader:
            for row in group:
                record = _Record(reader, int(chunks.start[row]), int(chunks.length[row]))
                try:
                    found += [
                        f"{_label(manifest, row)}: {p}: {root.location}/{name}" for p in record.damage()
                    ]
                except CheckpointingException as error:
                    found.append(f"{_label(manifest, row)}: {error}: {root.location}/{name}")
                unchecked = unchecked or record.unchecked
    return found, unchecked


def _label(manifest: Manifest, row: int) -> str:
    key, meta = manifest.tensors[manifest.chunks.tensor[row]]
    return str(ShardId(key, manifest.chunks.boxes.row(row, len(meta.shape))))


class _Record:
    """One archive in a file, seen through a window."""

    def __init__(self, reader: FileReader, start: int, length: int) -> None:
        self.unchecked = False
        self._reader = reader
        self._start = start
        self._length = length
        self._at = 0
        self._window = b""

    def damage(self) -> Iterator[str]:
        for name, member in archive.members(self._read, self._length).items():
            start = member.start(self._read)
            if not member.crc:  # so torch writes it where it was told to compute none
                self.unchecked = self.unchecked or member.size > 0
            elif self._crc(start, member.size) != member.crc:
                first = self._start + start
                yield f"{name} does not match its checksum, bytes {first} to {first + member.size}"

    def _crc(self, start: int, size: int) -> int:
        value = 0
        for at in range(start, start + size, WINDOW):
            value = zlib.crc32(self._read(at, min(WINDOW, start + size - at)), value)
        return value

    def _read(self, start: int, length: int) -> bytes:
        """These bytes of the record, fewer where it ends: out of the window, which moves to where they are."""
        inside = start - self._at
        if inside < 0 or inside + length > len(self._window):
            self._at, inside = max(0, min(start, self._length)), 0
            data = bytearray(max(0, min(max(length, WINDOW), self._length - self._at)))
            self._reader.read_into(self._start + self._at, [memoryview(data)])
            self._window = bytes(data)
        return self._window[inside : inside + length]
