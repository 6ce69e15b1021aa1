"""Verify a checkpoint: read all its bytes, compare them with digests, report all problems."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt import events, serialization, strategies
from megackpt.backends.base import CONFIG, Backend, Target
from megackpt.backends.object_files import COMMON_FILE
from megackpt.backends.torch_dist import extension_keys
from megackpt.checkpoint.opening import (
    Directory,
    as_read_by,
    in_run,
    shortfalls,
    stored_manifest,
    unreplaced,
)
from megackpt.checkpoint.ownership import files_of, foreign_entries
from megackpt.checkpoint.tables import small_file_problems
from megackpt.distributed import DEFAULT_TIMEOUT
from megackpt.errors import (
    BackendError,
    CheckpointingException,
    CorruptCheckpoint,
    StorageError,
    UntrustedClass,
)
from megackpt.planning.box import Box, Int64
from megackpt.planning.load_plan import check_whole
from megackpt.planning.manifest import (
    COMMON_KEY,
    DIGEST_BLOCK,
    Chunk,
    LoadPlan,
    Manifest,
    ShardId,
    TensorParts,
    carried_dtype,
    digest_rows,
)
from megackpt.storage import Executor, FileReader, Storage, digest, digest_blocks

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


@dataclass(frozen=True)
class Report:
    """The problems of a checkpoint, and its sizes. ``str()`` gives the text for users."""

    location: str
    files: int
    tensors: int  # entries: tensors and objects
    bytes: int  # of all chunks
    checked: bool  # all bytes were compared with digests or checksums
    problems: tuple[str, ...]
    foreign: tuple[str, ...] = ()
    """Entries of the directory that do not belong to the checkpoint."""
    unread: tuple[str, ...] = ()
    """Parts that the storage refused to read (no permission, input/output errors), or that this
    installation cannot decode. It is not known whether they are damaged."""
    untrusted: tuple[str, ...] = ()
    """Objects that a load restores only if their classes are trusted, or with an extension of DCP.

    They are not damaged. ``verify`` runs none of their code, so it did not open them."""

    @property
    def ok(self) -> bool:
        """Whether everything could be read, without damage.

        A load works, with ``trusted=`` for the objects in ``untrusted``.
        """
        return not self.problems and not self.unread

    def __str__(self) -> str:
        found = []
        if self.problems:
            found.append(f"{len(self.problems)} problems")
        if self.unread:
            found.append(f"{len(self.unread)} parts that could not be read")
        verdict = ", ".join(found) or "all good"
        if self.ok and not self.checked:
            verdict += " (it has no digests: sizes were checked, not the content)"
        what = f"{self.tensors} tensors and objects, {self.bytes} bytes in {self.files} files"
        lines = [f"{self.location}: {what}: {verdict}"]
        lines += [f"  {problem}" for problem in self.problems]
        lines += [f"  could not be read: {part}" for part in self.unread]
        lines += [f"  needs trusted=: {one}" for one in self.untrusted]
        if self.foreign:
            lines.append(f"  not part of the checkpoint: {', '.join(self.foreign)}")
        return "\n".join(lines)


def verify(
    directory: Directory,
    threads: int = 2,
    *,
    whole: bool = True,
    start: Count = ignore_progress,
    advance: Count = ignore_progress,
    timeout: timedelta | None = DEFAULT_TIMEOUT,
) -> Report:
    """Check that a load of all tensors and objects would work.

    In the directory of a run the latest complete step is checked, with a WARNING that names it.
    Compares all bytes with their digests, in parallel, checks all file sizes, and opens all
    objects, including the common state. A checkpoint without digests is checked by its format's
    checksums, if it has any (torch_dist: the checksums of its zip records), and encoded chunks are
    decoded. A checkpoint that is replaced meanwhile is checked again.

    Problems of a checkpoint are reported, not raised. So are parts that cannot be read, if the
    checkpoint could be opened.

    Args:
        whole: check that the chunks cover all tensors. False for the shards of one rank.
        start: called with the number of bytes to compare with digests.
        advance: called with the number of bytes just compared, from several threads.
        timeout: how long the storage may not answer. None: the caller bounds the call.

    Raises:
        NotACheckpoint: the directory holds no checkpoint.
        CheckpointReplaced: other saves replace the checkpoint at every attempt.
        StorageError: the checkpoint cannot be opened, or the storage does not answer.
        BackendError: the format is unknown or needs a missing package.
    """
    with (
        events.operation("verify", directory) as running,
        closing(Executor(timeout)) as executor,
    ):

        def verified_at(place: Directory) -> Report:
            return unreplaced(
                place, verified, lambda report: report.ok, moved=executor.alive
            )

        def verified(storage: Storage) -> Report:
            try:
                with events.stage("open"):
                    backend, manifest, small = stored_manifest(storage)
                    running.id = manifest.save_id
            except CorruptCheckpoint as error:
                return Report(storage.called, 0, 0, 0, False, (str(error),))
            with events.stage("read") as reading:

                def moved(count: int) -> None:
                    executor.alive()
                    reading.advance(count)
                    advance(count)

                work = _Work(as_read_by(backend, storage), backend, manifest, moved)
                reading.todo = int(manifest.chunks.length.sum())
                report = work.report(small, threads, start, whole)
                reading.done = report.bytes
                return report

        _, report = executor.call(
            f"verifying {directory}", in_run, directory, verified_at, executor.alive
        )
        running.bytes = report.bytes
        if report.problems:
            running.problem = f"{len(report.problems)} problems: {report.problems[0]}"
        elif report.unread:
            running.problem = (
                f"{len(report.unread)} parts could not be read: {report.unread[0]}"
            )
        return report


class _Work(ChunkChecks):
    """Reads, compares and opens all of one checkpoint with several threads."""

    def report(
        self,
        small: Mapping[str, tuple[int, bytes]],
        threads: int,
        start: Count,
        whole: bool,
    ) -> Report:
        """Run all checks. ``small``: the small files that the index names."""
        storage, manifest, chunks = self.storage, self.manifest, self.manifest.chunks
        rows = np.arange(len(chunks), dtype=np.int64)
        with self.recorded():
            found = small_file_problems(storage, small, self.backend)
            self.problems.update(dict.fromkeys(found))
        with self.recorded():
            for short in shortfalls(storage, manifest):
                self.problems[f"{storage.location}/{short}"] = None
                if short.size is None:
                    file = manifest.files.index(short.name)
                    self.bad.update(np.flatnonzero(chunks.file == file).tolist())
        if whole:
            with self.recorded():
                check_whole(self.manifest)
        total = int(chunks.length.sum())
        checked = len(chunks.digests) > 0 or total == 0
        compared = rows
        if not checked:
            with self.recorded():
                native = self.backend.verify_native(storage, manifest)
                checked = native is not None
                damaged = set()
                for problem in native or ():
                    self.problems[problem] = None
                    damaged.add(problem.partition(": ")[0])
                # What the format has found damaged is not read, and reported again.
                if damaged:
                    self.bad.update(r for r in rows.tolist() if self.name(r) in damaged)
            # Without digests a read of raw bytes is no check, but decoding encoded bytes is one.
            compared = rows[self.backend.decoded_bytes(manifest) > 0]
        compared = compared[~np.isin(compared, list(self.bad))]
        start(int(chunks.length[compared].sum()))
        self.compare(compared, threads)
        is_object = np.array([entry.meta.is_object for entry in manifest.tensors], bool)
        objects = rows[is_object[chunks.tensor] & ~np.isin(rows, list(self.bad))]
        self.in_threads(threads, self.open_objects, objects)
        own = {*files_of(manifest, small)}
        if not small and strategies.read_config(storage) is not None:
            own.add(CONFIG)
        return Report(
            storage.called,
            len(manifest.files) + len(small),
            len(manifest.tensors),
            total,
            checked,
            tuple(self.problems),
            tuple(foreign_entries(storage, own)),
            tuple(self.unread),
            tuple(sorted(self.untrusted)),
        )

    @cached_property
    def extension_keys(self) -> Collection[str]:
        if self.backend.properties.name != "torch_dist":
            return ()
        try:
            return extension_keys(self.storage)
        except (CheckpointingException, FileNotFoundError):
            return ()  # another check reports the damaged table

    def open_objects(self, rows: list[int]) -> None:
        """Open these objects, as a load does."""
        for row in rows:
            with self.recorded():
                self.open_object(row)

    def open_object(self, row: int) -> None:
        chunks = self.manifest.chunks
        key = self.manifest.tensors[chunks.tensor[row]].key
        where = f"{self.storage.location}: {self.name(row)}"
        blobs = Nowhere(0)
        try:
            self.backend.read(self.storage, self.plan(row), blobs, False)
            value = serialization.load(b"".join(blobs.blobs), where=where)
        except UntrustedClass as error:
            try:
                serialization.check(b"".join(blobs.blobs))
            except CorruptCheckpoint:  # a load fails whatever is trusted
                raise error from None
            self.untrusted[str(error).split("\n")[0]] = None
            return
        except CorruptCheckpoint:
            if key not in self.extension_keys:
                raise
            extended = f"{where} went through an extension of DCP's, which has to be registered"
            self.untrusted[extended] = None
            return
        file = self.manifest.files[chunks.file[row]]
        in_distcp = self.backend.properties.name == "torch_dist" and file != COMMON_FILE
        if in_distcp and isinstance(value, list) and len(value) == 1:
            value = value[0]  # DCP's planner gets an object as a list of one
        if key == COMMON_KEY and not isinstance(value, dict):
            raise CorruptCheckpoint(f"{where} is a {type(value).__name__}, not a dict")
