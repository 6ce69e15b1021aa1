"""Read the chunks of a checkpoint and compare them with their digests.

Damaged chunks and chunks that the storage refuses to read are reported apart.
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

from megackpt.backends.base import Backend
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
from megackpt.storage import FileReader, Storage, digest_blocks

_READ = 8 * DIGEST_BLOCK  # bytes that one thread reads at once
_SHARE = 64  # chunks that one thread takes at a time

Count = Callable[[int], None]


def ignore_progress(_nbytes: int) -> None:
    """The default ``Count``: ignores the progress."""


def damage(
    storage: Storage, backend: Backend, manifest: Manifest, threads: int = 2
) -> list[str]:
    """Compare all chunks of a manifest with their digests. Returns the problems.

    Raises StorageError if the storage refuses to read some chunks and all others are intact.
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
        self.in_threads(threads, self.compare_raw, rows[raw])
        self.in_threads(threads, self.compare_native, rows[~raw])

    def in_threads(
        self, threads: int, check: Callable[[list[int]], None], rows: Int64
    ) -> None:
        shares = [
            rows[start : start + _SHARE].tolist()
            for start in range(0, len(rows), _SHARE)
        ]
        with ThreadPoolExecutor(threads) as pool:
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
        buffer = memoryview(bytearray(_READ))
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
                for row in same:
                    with self.recorded(row, named=True):
                        self.compare_blocks(row, reader, buffer)

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
                self.bad.add(row)
                at = start + block * DIGEST_BLOCK
                end = min(at + DIGEST_BLOCK, start + length)
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
        """Check chunks that only the backend can read. It compares digests as in a load."""
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
class Nowhere:
    """A Target that discards tensors and keeps blobs."""

    itemsize: int
    blobs: list[bytes] = field(default_factory=list)

    def open(self, target: int, box: Box) -> NDArray[Any]:  # noqa: ARG002
        return np.empty(box.shape, carried_dtype(self.itemsize))

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None: ...

    def blob(self, target: int, data: bytes) -> None:  # noqa: ARG002
        self.blobs.append(data)
