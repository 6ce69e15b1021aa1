"""The transaction of a save: it makes a directory, or a URL of an object store, a checkpoint.

========== ============================== ==================== ============================
state      what has happened              a reader finds       recovery, if the save dies
========== ============================== ==================== ============================
BEGUN      staging directory and marker;  the old checkpoint,  removes the staging
           the ranks write                or none              directory
FILLED     the files of all ranks are     the same             the same
           there, in full
COMPLETE   table of contents and index    the same             the same
           are durable
PUBLISHED  staging is the target          the new checkpoint   removes the old files, moves
                                                               files of other programs back
RETIRED    the old directory is removed   the new checkpoint   is not needed
ABORTED    the staging directory is gone  the old checkpoint,  is not needed
                                          or none
========== ============================== ==================== ============================

Readers see only ``publish``, and it is exclusive: of two saves that reach it, one wins and the
other raises, however late its process continues. ``begin`` removes saves that are provably dead
(their process ran on this host, since this boot, and has ended). The next commit removes other
leftovers. No save waits for another one. ``directory_target`` and ``object_target`` describe how
each change of state is done.
"""

from __future__ import annotations

import enum
import os
import socket
import time
import weakref
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import ParamSpec, Protocol, TypeVar
from uuid import uuid4

from megackpt import events, limits
from megackpt.backends.base import Backend, Finished, Links, Source
from megackpt.checkpoint.directory_target import DirectoryTarget
from megackpt.checkpoint.index import INDEX, sealed_index
from megackpt.checkpoint.marker import Marker, active, logger
from megackpt.checkpoint.object_target import ObjectTarget
from megackpt.checkpoint.opening import (
    Directory,
    absolute,
    open_checkpoint,
    open_same,
    shortfalls,
    still_short,
)
from megackpt.checkpoint.records import Record
from megackpt.checkpoint.verifying import damage
from megackpt.errors import (
    CheckpointExists,
    CheckpointingException,
    CorruptCheckpoint,
    NotACheckpoint,
    SaveInProgress,
    StorageError,
    join_truncated,
)
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    Manifest,
    SavePlan,
    WriteResult,
)
from megackpt.planning.unchanged import Reuse, StepBefore
from megackpt.staging.buffers import HostCopy
from megackpt.storage import Storage, digest, direct_where_faster, is_url

P = ParamSpec("P")
T = TypeVar("T")

COUNTED_AT_ONCE = 16 * DIGEST_BLOCK
"""Bytes: the largest block that is passed on. Progress is visible, and a cancelled task stops,
between blocks."""

TIMED_FILES = 4
"""Times ``limits.DIRECT_BYTES``: synchronous saves that write fewer bytes on a rank are buffered.
Larger saves bypass the page cache where that is faster."""

_FIRST_PAUSE = 0.05  # seconds; each further one is twice as long


class State(enum.Enum):
    BEGUN = "begun"
    FILLED = "filled"
    COMPLETE = "complete"
    PUBLISHED = "published"
    RETIRED = "retired"
    ABORTED = "aborted"


_NEXT = {
    State.BEGUN: (State.FILLED, State.ABORTED),
    State.FILLED: (State.COMPLETE, State.ABORTED),
    State.COMPLETE: (State.PUBLISHED, State.ABORTED),
    State.PUBLISHED: (State.RETIRED,),
    State.RETIRED: (),
    State.ABORTED: (),
}


class Transaction:
    """One save, on the coordinator. Ranks write below ``path``: see ``staging_storage``.

    ``resumed``: a save of this id died, and the files that it wrote are there.
    """

    def __init__(
        self,
        target: DirectoryTarget | ObjectTarget,
        save_id: str,
        *,
        overwrite: bool = True,
        resume: bool = False,
        moved: Callable[[], object] = int,
    ) -> None:
        self.target = target
        self.save_id = save_id
        self.state = State.BEGUN
        self.resumed = False
        self._names: set[str] = set()
        self._replaces: set[str] = set()
        self._scratch: tuple[str, ...] = ()
        target.check_name(save_id)
        if save_id in active:
            raise SaveInProgress(
                f"this process is saving under the id {save_id} already, see "
                f"{target.location}"
            )
        self.marker = Marker(save_id)
        active.add(save_id)
        # A transaction that is garbage collected is a dead save, too.
        self._ended = weakref.finalize(self, _end, save_id, os.getpid())
        try:
            self.resumed = target.begin(self.marker, overwrite, resume)
            self.storage: Storage = target.staging_folder(save_id, moved)
        except BaseException:
            self._ended()
            raise

    @property
    def path(self) -> str:
        """Where the ranks write: a directory, or a URL."""
        return self.storage.location

    def announce(
        self,
        names: Iterable[str],
        scratch: Iterable[str] = (),
        replaces: Iterable[str] = (),
    ) -> None:
        """Check that the names that this save writes are free in the target.

        Args:
            names: the files that the save may make; their first parts count.
            scratch: files that exist only during the save. The commit removes them.
            replaces: files of other programs, by full name, with the bytes that this save writes.
                They stay, and do not collide.

        Raises:
            StorageError: files of other programs have such names. No file has been changed.
        """
        self._scratch = (*self._scratch, *scratch)
        self._replaces.update(replaces)
        new = {name.partition("/")[0] for name in (*names, INDEX)} - self._names
        self._names.update(new)
        self.target.refuse_collisions(new, self._replaces)

    def keep_only(self, files: Collection[str]) -> None:
        """In a resumed save: remove all files but these and its scratch files."""
        kept = {*files, *self._scratch, self.marker.name}
        folders = {""}
        for name in kept:
            parts = name.split("/")
            folders.update("/".join(parts[:end]) for end in range(1, len(parts)))
        waiting = self.storage.list()
        while waiting:
            name = waiting.pop()
            if name in folders:
                waiting += [f"{name}/{entry}" for entry in self.storage.list(name)]
            elif name not in kept:
                self.storage.delete(name)

    def commit(
        self,
        backend: Backend,
        manifest: Manifest,
        reread: bool = False,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the save the checkpoint, complete and durable, after all ranks have written.

        If this raises, the caller calls ``abort``. Then the save is not committed, or another save
        has replaced it already.

        Args:
            manifest: with the locations that the ranks reported.
            reread: first read all chunks back, and compare them with their digests.
            confirm: called right before the change that readers see; raises to stop the commit.

        Raises:
            StorageError: the disk refused, or files of ranks are not visible from here.
            CorruptCheckpoint: the data read back differs from the data written.
            SaveInProgress: another save has committed since this one began.
        """
        properties = backend.properties
        manifest = replace(
            manifest,
            backend=(properties.name, properties.version),
            encoding=properties.encoding,
            save_id=self.save_id,
        )
        try:
            finished = self._fill(backend, manifest, reread)
            record = self._complete(finished, properties.indexed)
        except (CheckpointingException, FileNotFoundError) as error:
            if self.target.holds(self.save_id):
                raise
            raise _taken_over(self.target.location, error) from error
        confirm()  # a save that must fail takes nothing from other saves
        kind = "publishing a checkpoint"
        if self.target.replaces_something:
            kind = "replacing the checkpoint"
        logger.debug("%s in %s", kind, self.target.location)
        self.target.publish(record, self._names, self._replaces, confirm)
        self._enter(State.PUBLISHED)
        self.target.settle(self.marker)
        self._enter(State.RETIRED)
        self._ended()

    def _fill(self, backend: Backend, manifest: Manifest, reread: bool) -> Finished:
        """Check the files of the ranks. Returns the small files and the final manifest."""
        missing = shortfalls(self.storage, manifest)
        # Network file systems are late.
        pause, deadline = _FIRST_PAUSE, time.monotonic() + limits.LATE_FILE_SECONDS
        while missing and time.monotonic() < deadline:
            if not self.target.holds(self.save_id):
                break  # another save has taken the directory
            events.count_retry()
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause *= 2
            missing = still_short(self.storage, missing)
        if missing:
            raise StorageError(
                f"{len(missing)} of {len(manifest.files)} files that ranks wrote are missing or "
                f"too short where the coordinator reads them, {self.path}: "
                f"{join_truncated(missing, 5)}. Is the directory shared between all hosts?"
            )
        self._enter(State.FILLED)
        result = backend.finish(self.storage, manifest)
        if reread and (problems := damage(self.storage, backend, result.manifest)):
            raise CorruptCheckpoint(
                "the data read back differs from the data written:\n"
                + "\n".join(problems)
            )
        return result

    def _complete(self, finished: Finished, indexed: bool) -> Record:
        """Write the small files and the index. Returns the record of this save."""
        small, manifest = finished.files, finished.manifest
        self.announce(small)
        digests = {name: (len(data), digest(data)) for name, data in small.items()}
        index = sealed_index(manifest, digests)
        # No reader sees these files before the publication, so they are synced together.
        new = dict(small)
        if indexed or isinstance(self.target, ObjectTarget):
            new[INDEX] = index
        for name in self._intact({name: small[name] for name in finished.written}):
            del new[name]
        self.storage.put_new(new)
        for name in self._scratch:
            self.storage.delete(name)
        self._enter(State.COMPLETE)
        nbytes = int(manifest.chunks.length.sum()) + len(index)
        nbytes += sum(map(len, small.values()))
        count = len(manifest.files) + len(small) + 1
        checksum = len(index), digest(index)
        return Record(self.save_id, time.time(), checksum, count, nbytes)

    def _intact(self, files: Mapping[str, bytes]) -> list[str]:
        """The files that ranks wrote as the coordinator would. Removes files that differ.

        A rank may have had other options. Files may be absent: a resumed save has removed them.
        """
        # There may be very many, each of which is opened once if all is well.
        with suppress(FileNotFoundError, CorruptCheckpoint):
            found = self.storage.contents([*files], list(map(len, files.values())))
            if list(found) == list(files.values()):
                return list(files)
        intact = []
        sizes = self.storage.sizes([*files])
        for (name, content), size in zip(files.items(), sizes, strict=True):
            if size is None:
                continue
            if size == len(content) and self.storage.get(name) == content:
                intact.append(name)
            else:
                self.storage.delete(name)
        return intact

    def _enter(self, state: State) -> None:
        if state not in _NEXT[self.state]:
            raise StorageError(
                f"the save in {self.path} is {self.state.value}, and cannot be "
                f"{state.value}"
            )
        self.state = state

    def abort(self) -> None:
        """Remove the files of this save. The next save removes files that cannot be removed now."""
        if not self._ended() or self.state in (State.PUBLISHED, State.RETIRED):
            return
        self._enter(State.ABORTED)
        try:
            self.target.discard(self.save_id)
        except (CheckpointingException, OSError) as error:
            logger.warning(
                "the failed save in %s is not removed, the next save will: %s",
                self.path,
                error,
            )

    def abandon(self) -> None:
        """End without touching a file: lost ranks or a hanging worker may still write.

        The next save removes the files.
        """
        self._ended()


def _taken_over(location: str, error: Exception) -> SaveInProgress:
    return SaveInProgress(
        f"another save has committed to {location}, or is about to, and has taken over "
        f"from this one: {error}"
    )


def _end(save_id: str, process: int) -> bool:
    """False in a forked process: the save is its parent's."""
    if os.getpid() != process:
        return False
    active.discard(save_id)
    return True


def begin(
    directory: Directory,
    *,
    save_id: str,
    overwrite: bool = True,
    resume: bool = False,
    indexed: bool = True,
    moved: Callable[[], object] = int,
) -> Transaction:
    """Begin a save to this directory. No reader sees it before it is committed.

    It makes parent directories and follows a symbolic link. It removes leftovers of dead saves,
    except leftovers of this id with ``resume``: then the save continues from them. A save that will
    not be ``indexed`` replaces no checkpoint, as a later save could not know which files belong to
    it. The storage of the files calls ``moved`` (see Storage).

    Raises:
        CheckpointExists: a complete checkpoint is there, and it may not be replaced.
        SaveInProgress: ``resume``, and the save of this id may be alive.
        StorageError: the directory cannot be made, or cannot be replaced.
    """
    target = _target(directory, create=True)
    try:
        may_replace = overwrite and indexed
        return Transaction(
            target, save_id, overwrite=may_replace, resume=resume, moved=moved
        )
    except CheckpointExists as error:
        ways = "pass overwrite=True to replace it"
        if not indexed:
            ways = (
                "save with an index (index=True), or remove that checkpoint first: a save without "
                "index replaces nothing"
            )
        raise CheckpointExists(f"{error}: save elsewhere, or {ways}") from None


def _target(
    directory: Directory, create: bool = False
) -> DirectoryTarget | ObjectTarget:
    """The target of a save or removal. NotACheckpoint if the parent directory does not exist."""
    path = absolute(directory)
    if is_url(path):
        return ObjectTarget(path)
    try:
        return DirectoryTarget(os.path.realpath(path), create=create)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotACheckpoint(f"directory {path} does not exist") from error


@contextmanager
def staging_storage(
    directory: Directory,
    save_id: str,
    moved: Callable[[], object] = int,
    direct: bool = False,
) -> Iterator[Storage]:
    """The storage into which any rank writes, after the coordinator began the save of this id.

    ``moved``, ``direct``: see Storage.

    Raises:
        StorageError: it is not visible from this rank.
        SaveInProgress: a write failed because another save has committed meanwhile.
    """
    try:
        target = _target(directory)
    except NotACheckpoint as error:
        raise StorageError(
            f"{error} on host {socket.gethostname()!r}: is it shared between all hosts?"
        ) from error
    try:
        storage = target.staging(save_id, moved, direct)
    except StorageError as error:
        # This process began it, so the directory is visible here unless it was taken over.
        if save_id in active:
            raise _taken_over(target.location, error) from error
        raise
    try:
        yield storage
    except (StorageError, FileNotFoundError) as error:
        if target.holds(save_id):
            raise
        raise _taken_over(target.location, error) from error


class CheckedSource(Source, Protocol):
    """A source that notices when its memory is freed or resized."""

    def check(self) -> None:
        """Called when all is written. Raises ShardingError if memory is not what it was."""


@dataclass(frozen=True, eq=False)
class CountedSource(Source):
    """Calls ``advance`` with the size of each block."""

    source: Source
    advance: Callable[[int], None]

    def views(
        self, rows: Sequence[int], sizes: Sequence[int]
    ) -> Sequence[memoryview | None]:
        views = self.source.views(rows, sizes)
        self.advance(sum(len(view) for view in views if view is not None))
        return views

    def blocks(self, row: int) -> Iterator[memoryview]:
        for block in self.source.blocks(row):
            for start in range(0, len(block), COUNTED_AT_ONCE):
                part = block[start : start + COUNTED_AT_ONCE]
                self.advance(len(part))
                yield part


@dataclass(frozen=True, eq=False)
class Writing:
    """The write stage of a save on one rank: write its rows into the staging storage.

    It can be sent to a writer process, and needs no torch there.
    """

    directory: str
    save_id: str
    backend: Backend
    plan: SavePlan
    source: CheckedSource
    reuse: Reuse | None = None

    def __call__(self, advance: Callable[[int], None]) -> WriteResult:
        counted = CountedSource(self.source, advance)
        moved = partial(advance, 0)
        choice: AbstractContextManager[bool] = nullcontext(False)
        if isinstance(self.source, HostCopy):
            # Training continues meanwhile, and needs the page cache for its own files.
            choice = nullcontext(True)
        elif 0 < TIMED_FILES * limits.DIRECT_BYTES <= self.plan.nbytes:
            name = self.backend.properties.name
            choice = direct_where_faster(self.directory, name, self.plan.nbytes)
        with (
            choice as direct,
            staging_storage(self.directory, self.save_id, moved, direct) as root,
        ):
            if self.reuse is None:
                written = self.backend.write(root, self.plan, counted)
            else:
                links = self._links(self.reuse, moved)
                written = self.backend.write_linking(root, self.plan, counted, links)
                linked, refused = tuple(links.linked), next(iter(links.refused), "")
                written = replace(written, linked=linked, refused=refused)
            self.source.check()
            return written

    def _links(self, reuse: Reuse, moved: Callable[[], object]) -> Links:
        """The files of the step before. They cannot be linked if it was removed or replaced."""
        before: StepBefore | None = None
        source: Storage | None = None
        refused = []
        properties = self.backend.properties
        try:
            if reuse.steps:
                before = reuse.steps[0]
                source = open_same(before.directory, before.save_id, moved=moved)
            elif reuse.directory is not None:
                opened = open_checkpoint(reuse.directory, moved=moved)
                source = opened.storage
                kind = properties.name, properties.version
                before = StepBefore.of("", opened.manifest, self.plan, kind)
        except (CheckpointingException, FileNotFoundError) as error:
            text = str(error)
            if before is not None:
                text = f"{before.directory} was removed, replaced or damaged"
            refused.append(text)
        rows = reuse.rows(self.plan, before)
        return Links(rows, before, source, properties.encoding == "raw", refused)


def remove(directory: Directory) -> None:
    """Remove a complete checkpoint of this library. Files of other programs stay.

    For readers it disappears at once. A load that has opened it may fail.

    Raises:
        NotACheckpoint: no complete checkpoint is here, or another library wrote it.
        CorruptCheckpoint: the files that belong to it cannot be determined.
        SaveInProgress: another process writes to it, or has written meanwhile.
        StorageError: the storage refused. The next save or removal continues.
    """
    target = _target(directory)
    marker = Marker(uuid4().hex, removes=True)
    active.add(marker.save_id)
    try:
        target.remove(marker)
    finally:
        active.discard(marker.save_id)


def clear(directory: Directory) -> None:
    """Remove only the leftovers of dead saves and removals.

    A save whose process this one cannot inspect counts as dead after a day. Raises SaveInProgress
    if a save may be alive.
    """
    _target(directory).clear()


def completed(directory: Directory, save_id: str) -> bool:
    """Did a save of this id complete this directory before it died?"""
    try:
        return _target(directory).completed(save_id)
    except NotACheckpoint:
        return False
