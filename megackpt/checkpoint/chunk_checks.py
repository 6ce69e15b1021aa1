"""Read the chunks of a checkpoint and compare them with their digests.

Damaged chunks and chunks that the storage refuses to read are reported separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.backends.base import Backend, Target
from megackpt.errors import (
    BackendError,
    CheckpointingException,
    CorruptCheckpoint,
    StorageError,
)
from megackpt.planning.box import Box, Int64
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    Chunk,
    LoadPlan,
    Manifest,
    ShardId,
    TensorParts,
    carried_dtype,
    digest_rows,
)
from megackpt.storage import FileReader, Storage, digest, digest_blocks

_READ = 8 * DIGEST_BLOCK  # bytes that one thread reads at once
_SHARE = 64  # chunks that one thread takes at a time
_SMALL_SHARE = 4096  # small chunks
_GAP = 4 << 10  # bytes between small chunks that are read along

Count = Callable[[int], None]


def ignore_progress(_nbytes: int) -> None:
    """The default ``Count``: ignores the progress."""


def damage(
    storage: Storage, backend: Backend, manifest: Manifest, threads: int = 2
) -> list[str]:
    """Compare all chunks of a manifest with their digests. Returns the problems.

    Raises StorageError if the storage refuses to read some chunks and all other chunks are intact.
    """
    work = ChunkChecks(storage, backend, manifest)
    work.compare(np.arange(len(manifest.chunks)), threads)
    if work.unread and not work.problems:
        raise StorageError("; ".join(work.unread))
    return list(work.problems)


class ChunkChecks:
    """The chunks of one checkpoint, read and compared with their digests by several threads."""

    def __init__(
        self,
        storage: Storage,
        backend: Backend,
        manifest: Manifest,
        advance: Count = ignore_progress,
    ) -> None:
        self.storage = storage
        self.advance = advance
        self.backend = backend
        self.manifest = manifest
        self.parts = TensorParts(manifest)
        self.bad: set[int] = set()  # rows of chunks with problems
        self.problems: dict[str, None] = {}  # error messages, each once
        self.unread: dict[str, None] = {}
        self.untrusted: dict[str, None] = {}

    @contextmanager
    def recorded(self, *rows: int, named: bool = False) -> Iterator[None]:
        """Record an error of this block, which checks these chunks.

        An error of the storage or of the backend shows no damage: its message goes to ``unread``.
        ``named``: the message begins with the name of the first chunk.
        """
        try:
            yield
        except (CheckpointingException, OSError) as error:
            self.bad.update(rows)
            text = str(error)
            if named:
                text = f"{self.name(rows[0])}: {text}"
            messages = self.problems
            if isinstance(error, (StorageError, BackendError, OSError)):
                messages = self.unread
            if isinstance(error, FileNotFoundError):
                messages = self.problems
            messages[text] = None

    def compare(self, rows: Int64, threads: int) -> None:
        """Compare these chunks with their digests."""
        chunks = self.manifest.chunks
        rows = rows[np.lexsort((chunks.start[rows], chunks.file[rows]))]
        raw = self.backend.decoded_bytes(self.manifest)[rows] == 0
        small = raw & (chunks.length[rows] <= DIGEST_BLOCK)
        self.in_threads(threads, self.compare_raw, rows[small], _SMALL_SHARE)
        self.in_threads(threads, self.compare_raw, rows[raw & ~small])
        self.in_threads(threads, self.compare_native, rows[~raw])

    def in_threads(
        self,
        threads: int,
        check: Callable[[list[int]], None],
        rows: Int64,
        size: int = _SHARE,
    ) -> None:
        """Check these chunks in shares of ``size``."""
        shares = [
            rows[start : start + size].tolist() for start in range(0, len(rows), size)
        ]
        with ThreadPoolExecutor(threads, "megackpt-check") as pool:
            list(pool.map(check, shares))

    def plan(self, row: int) -> LoadPlan:
        """The plan that reads one chunk."""
        chunks = self.manifest.chunks
        number = int(chunks.tensor[row])
        within = np.flatnonzero(self.parts.rows(number) == row)
        return LoadPlan(
            self.parts.excerpt([number]),
            within,
            chunks.boxes.take([row]),
            np.zeros(1, np.int64),
        )

    def compare_raw(self, rows: list[int]) -> None:
        """Check chunks whose files hold their bytes unencoded."""
        buffer = np.empty(_READ, np.uint8).data
        for number, group in groupby(rows, self.manifest.chunks.file.__getitem__):
            if number < 0:
                continue  # empty chunks
            name, same = self.manifest.files[number], list(group)
            with self.recorded(*same), ExitStack() as opened:
                try:
                    reader = opened.enter_context(self.storage.open(name))
                except FileNotFoundError as error:
                    raise CorruptCheckpoint(
                        f"{self.storage.location}/{name} is missing"
                    ) from error
                for near in self.neighbours(np.array(same)):
                    left = near
                    if len(near) > 1:
                        left = self.compare_together(near, reader, buffer)
                    for row in left.tolist():
                        with self.recorded(row, named=True):
                            self.compare_blocks(row, reader, buffer)

    def neighbours(self, rows: Int64) -> list[Int64]:
        """Chunks of one file in groups: small chunks that one call reads, and each larger chunk."""
        chunks = self.manifest.chunks
        start, length = chunks.start[rows], chunks.length[rows]
        gap = start[1:] - (start + length)[:-1]
        together = (gap >= 0) & (gap <= _GAP) & (np.diff(start // DIGEST_BLOCK) == 0)
        small = (length > 0) & (length <= DIGEST_BLOCK)
        apart = ~(together & small[1:] & small[:-1])
        return np.split(rows, np.flatnonzero(apart) + 1)

    def compare_together(
        self, rows: Int64, reader: FileReader, buffer: memoryview
    ) -> Int64:
        """Compare small neighbours, of one block each. Returns chunks to be read separately."""
        chunks = self.manifest.chunks
        begin = int(chunks.start[rows[0]])
        starts = chunks.start[rows] - begin
        stops = starts + chunks.length[rows]
        part = buffer[: int(stops[-1])]
        try:
            reader.read_into(begin, [part])
        except (CheckpointingException, OSError):
            return rows  # which ones cannot be read?
        places = zip(starts.tolist(), stops.tolist(), strict=True)
        found = digest_rows(b"".join(digest(part[a:b]) for a, b in places))
        wrong = (found != chunks.digests[chunks.block_bounds[rows]]).any(axis=1)
        damaged: Int64 = rows[wrong]
        again = damaged[:0]
        if len(damaged) and reader.refetch():
            again, damaged = damaged, again
        for row in damaged.tolist():
            self.record_damage(row, 0)
        self.advance(int(chunks.length[rows].sum() - chunks.length[again].sum()))
        return again

    def compare_blocks(self, row: int, reader: FileReader, buffer: memoryview) -> None:
        """Record each block of this chunk that does not match its digest."""
        chunk = self.manifest.chunk(row)
        start, length = chunk.location.start, chunk.location.length
        for done in range(0, length, _READ):
            part = buffer[: min(_READ, length - done)]
            first = done // DIGEST_BLOCK
            reader.read_into(start + done, [part])
            wrong = self.wrong_blocks(chunk, first, part)
            if wrong.any() and reader.refetch():
                reader.read_into(start + done, [part])
                wrong = self.wrong_blocks(chunk, first, part)
            self.advance(len(part))
            for block in (np.flatnonzero(wrong) + first).tolist():
                self.record_damage(row, block)

    def record_damage(self, row: int, block: int) -> None:
        chunk = self.manifest.chunk(row)
        start, length = chunk.location.start, chunk.location.length
        at = start + block * DIGEST_BLOCK
        end = min(at + DIGEST_BLOCK, start + length)
        self.bad.add(row)
        damaged = (
            f"{self.name(row)}: block {block} of {len(chunk.digests)} is damaged: "
            f"{self.storage.location}/{chunk.location.file}, bytes {at} to {end}"
        )
        self.problems[damaged] = None

    def wrong_blocks(self, chunk: Chunk, first: int, part: memoryview) -> Any:
        """For each block of ``part``, from the block ``first`` on: has it another digest?"""
        found = digest_rows(digest_blocks(part))
        return (found != chunk.digests[first : first + len(found)]).any(axis=1)

    def compare_native(self, rows: list[int]) -> None:
        """Check chunks that only the backend can read. It compares digests like a load."""
        chunks = self.manifest.chunks
        for row in rows:
            itemsize = self.manifest.tensors[chunks.tensor[row]].meta.itemsize
            with self.recorded(row, named=True):
                self.backend.read(self.storage, self.plan(row), Nowhere(itemsize), True)
            self.advance(int(chunks.length[row]))

    def name(self, row: int) -> str:
        chunks = self.manifest.chunks
        key, meta = self.manifest.tensors[chunks.tensor[row]]
        return str(ShardId(key, chunks.boxes.row(row, len(meta.shape))))


@dataclass(frozen=True)
class Nowhere(Target):
    """A Target that discards tensors and keeps blobs."""

    itemsize: int
    blobs: list[bytes] = field(default_factory=list)

    def open(self, target: int, box: Box) -> NDArray[Any]:  # noqa: ARG002
        return np.empty(box.shape, carried_dtype(self.itemsize))

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None: ...

    def blob(self, target: int, data: bytes) -> None:  # noqa: ARG002
        self.blobs.append(data)
