"""Verify a checkpoint: read all its bytes, compare them with digests, report all problems."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import numpy as np

from megackpt import events, serialization, strategies
from megackpt.backends.base import CONFIG
from megackpt.backends.object_files import COMMON_FILE
from megackpt.backends.torch_dist import extension_keys
from megackpt.checkpoint.chunk_checks import (
    ChunkChecks,
    Count,
    Nowhere,
    ignore_progress,
)
from megackpt.checkpoint.opening import (
    Directory,
    as_read_by,
    shortfalls,
    stored_manifest,
    unreplaced,
)
from megackpt.checkpoint.ownership import files_of, foreign_entries
from megackpt.checkpoint.tables import small_file_problems
from megackpt.distributed import DEFAULT_TIMEOUT
from megackpt.errors import (
    CheckpointingException,
    CorruptCheckpoint,
    UntrustedClass,
)
from megackpt.planning.load_plan import check_whole
from megackpt.planning.manifest import COMMON_KEY
from megackpt.storage import Executor, Storage


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

        report: Report = executor.call(
            f"verifying {directory}",
            unreplaced,
            directory,
            verified,
            lambda report: report.ok,
            moved=executor.alive,
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
