"""The protocol of a save in a bucket: the lock, the folder of the save, and the record whose put is the commit.

Nothing is ever renamed or written twice. A save holds the lock, reads the record that it is to replace, fills a
folder of its own, and replaces exactly that record, or fails: the store sees to this (a conditional put), whatever the
lock was worth. What is not named by the record is removed by the save that has just put it. Every save that began
before is then unable to commit, alive or not, so nobody can come to miss what is removed.
"""

from __future__ import annotations

import json
import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from megackpt.checkpoint.index import INDEX, sealed_index
from megackpt.checkpoint.marker import (
    LOCK,
    SILENCE,
    Heartbeat,
    Marker,
    active,
    logger,
    parsed,
)
from megackpt.checkpoint.ownership import is_replaceable, own_files
from megackpt.checkpoint.place import Place
from megackpt.checkpoint.records import (
    RECORD,
    Record,
    folder_of,
    folders_among,
    read_record,
)
from megackpt.errors import (
    CheckpointExists,
    CheckpointingException,
    CorruptCheckpoint,
    SaveInProgress,
    StorageError,
)
from megackpt.planning.manifest import Manifest
from megackpt.storage import (
    SINGLE_WRITER,
    BucketStorage,
    Storage,
    Version,
    conditional_puts,
    digest,
)

_TRIES = 5  # at a lock that changes hands at the very moment


class Lock:
    """An object that one save at a time holds, and renews as long as it lives."""

    def __init__(self, outer: BucketStorage, save_id: str) -> None:
        self._outer = outer
        self.save_id = save_id
        self._content = json.dumps(asdict(Marker(save_id))).encode()

    def take(self) -> None:
        """Raises SaveInProgress where a live save has it. That of a dead one is taken over."""
        for _ in range(_TRIES):
            holder, version = _holder(self._outer)
            if holder is not None and holder.save_id == self.save_id:
                return
            if holder is not None and self._lives(holder):
                raise SaveInProgress(
                    f"{self._outer.location} is being written by {holder}: wait for it, or save elsewhere. "
                    f"If that job is gone for good, remove {self._outer.url(LOCK)}"
                )
            if self._outer.put_if_match(LOCK, self._content, version):
                return
        raise SaveInProgress(
            f"others begin to save to {self._outer.location} at this very moment"
        )

    def _lives(self, holder: Marker) -> bool:
        """As Marker.lives, but that the store's clock tells how long a process elsewhere has been silent."""
        certain = holder.runs()
        if certain is not None:
            return certain
        clock = f"{LOCK}-{uuid.uuid4().hex}"
        try:
            self._outer.put(clock, b"")
            now, last = self._outer.modified(clock), self._outer.modified(LOCK)
        finally:
            self._outer.delete(clock)
        return now is not None and last is not None and now - last < SILENCE

    def _mine(self) -> Version | None:
        """The version of the lock, if this save holds it."""
        holder, version = _holder(self._outer)
        return (
            version if holder is not None and holder.save_id == self.save_id else None
        )

    def renew(self) -> bool:
        version = self._mine()
        return version is not None and self._outer.put_if_match(
            LOCK, self._content, version
        )

    def held(self) -> bool:
        return self._mine() is not None

    def release(self) -> None:
        if self.held():
            self._outer.delete(LOCK)


def _holder(outer: BucketStorage) -> tuple[Marker | None, Version | None]:
    try:
        data, version = outer.get_version(LOCK, 1 << 20)
    except FileNotFoundError:
        return None, None
    return parsed(data), version


def save_at_work(outer: BucketStorage) -> Marker | None:
    """Who holds the lock under this URL, dead or alive."""
    return _holder(outer)[0]


class BucketPlace(Place):
    """The folder of one save. ``base``: the version of the record that it may replace (None: there is none).

    ``foreign``: the files of a checkpoint that somebody has uploaded under the URL itself, which is replaced, too.
    """

    def __init__(
        self,
        outer: BucketStorage,
        lock: Lock,
        base: Version | None,
        foreign: Iterable[str],
    ) -> None:
        self.save_id = lock.save_id
        self.outer = outer
        self.storage = outer.folder(folder_of(self.save_id))
        self._lock = lock
        self._base = base
        self._foreign = tuple(foreign)
        self._record: Record | None = None
        self._committed = False  # or perhaps: nothing may be removed any more
        self._beat = Heartbeat(outer.location, lock.renew)
        self._ended = weakref.finalize(
            self, _end, self._beat, self.save_id, os.getpid()
        )

    def announce(
        self,
        names: Iterable[str],
        scratch: Iterable[str] = (),
        replaces: Iterable[str] = (),
    ) -> None:
        """Names need not be noted: the folder is this save's alone."""

    def abort(self) -> None:
        if not self._ended() or self._committed:
            return
        with self._left_to_the_next("the save failed, and"):
            self.outer.delete(folder_of(self.save_id))
            self._release()

    def _release(self) -> None:
        self._beat.join()  # a renewal under way could put the lock back
        self._lock.release()

    def abandon(self) -> None:
        self._ended()

    def fill(
        self,
        small: dict[str, bytes],
        manifest: Manifest,
        confirm: Callable[[], None],  # noqa: ARG002
    ) -> None:
        index = sealed_index(
            manifest, {name: (len(data), digest(data)) for name, data in small.items()}
        )
        *first, last = [*small.items()] or [(INDEX, index)]
        self.storage.put_new(dict(first) | {INDEX: index} if small else {})
        self.storage.put(*last)
        held = (
            int(manifest.chunks.length.sum())
            + sum(map(len, small.values()))
            + len(index)
        )
        count = len(manifest.files) + len(small) + 1
        self._record = Record(
            self.save_id, time.time(), (len(index), digest(index)), count, held
        )

    def publish(self, confirm: Callable[[], None]) -> None:
        if self._record is None:
            raise StorageError(
                f"the save in {self.path} has no index yet: nothing can be published"
            )
        if not self._lock.held():
            raise SaveInProgress(
                f"another job took the save in {self.path} for dead, or {self.outer.url(LOCK)} was removed; "
                "nothing was committed"
            )
        confirm()
        self._put_record(self._record.encode())
        with self._left_to_the_next("the new checkpoint stands, but"):
            self._clear_up()
        self._ended()
        with self._left_to_the_next("the new checkpoint stands, but"):
            self._release()

    @contextmanager
    def _left_to_the_next(self, what: str) -> Iterator[None]:
        try:
            yield
        except CheckpointingException as error:
            logger.warning(
                "%s: %s clearing up is left to the next save: %s",
                self.path,
                what,
                error,
            )

    def _put_record(self, data: bytes) -> None:
        url = self.outer.url(RECORD)
        failure: CheckpointingException | None = None
        self._committed = True
        try:
            if self.outer.put_if_match(RECORD, data, self._base):
                return
        except StorageError as error:
            failure = error
        try:
            found, _ = read_record(self.outer)  # an answer may have been lost
            if found is not None and found.save_id == self.save_id:
                return
        except CheckpointingException as error:
            failure = failure or error
        if failure is not None:
            raise StorageError(
                f"whether {url} was put is not known, so nothing is removed: if it names {self.save_id} later, the "
                f"save is complete: {failure}"
            ) from failure
        self._committed = False
        raise SaveInProgress(
            f"{self.outer.location} was saved to by another job meanwhile: {url} is not the one that this save "
            "was to replace; what stands there is that job's, and this save is removed"
        )

    def _clear_up(self) -> None:
        """Remove what the record does not name. A save that has begun since then has the lock: then leave it all."""
        folders = folders_among(self.outer.list())
        if self._lock.held():
            for name in folders:
                if name != folder_of(self.save_id):
                    self.outer.delete(name)
            self.outer.remove_objects(self._foreign)


def _end(beat: Heartbeat, save_id: str, process: int) -> bool:
    """False in a forked process: the save is its parent's."""
    if os.getpid() != process:
        return False
    beat.stop()
    active.discard(save_id)
    return True


def begin(url: str, save_id: str, overwrite: bool) -> BucketPlace:
    """As ``committing.begin``."""
    outer = BucketStorage(url)
    if not folders_among([folder_of(save_id)]):
        raise StorageError(
            f"{save_id!r} is no id for a save in a bucket: give uuid.uuid4().hex, by which {url} tells its own folders "
            "from those of others"
        )
    if not conditional_puts(outer):
        raise StorageError(
            f"{url}: this store does not keep to conditional puts, so of two jobs that save to one place both could "
            f"win. If there is never more than one, say so by {SINGLE_WRITER}=1 in the environment"
        )
    lock = Lock(outer, save_id)
    active.add(save_id)  # before anybody can see the lock
    try:
        lock.take()
    except BaseException:
        active.discard(save_id)
        raise
    try:
        base, foreign = _replaced(outer, overwrite)
        return BucketPlace(outer, lock, base, foreign)
    except BaseException:
        active.discard(save_id)
        lock.release()
        raise


def _replaced(
    outer: BucketStorage, overwrite: bool
) -> tuple[Version | None, tuple[str, ...]]:
    """The version of the record that a save is to replace, and what else it replaces."""
    try:
        record, base = read_record(outer)
    except CorruptCheckpoint as error:
        if not overwrite:
            raise CorruptCheckpoint(
                f"{error}. Pass overwrite=True to replace it, or remove {outer.url(RECORD)}"
            ) from error
        logger.warning("%s; replacing it", error)
        return outer.version(RECORD), ()
    foreign = () if record else _foreign(outer)
    if (record or foreign) and not overwrite:
        raise CheckpointExists(
            f"{outer.location} holds a complete checkpoint: pass overwrite=True to replace it"
        )
    if record or foreign:
        logger.debug("replacing the checkpoint in %s", outer.location)
    return base, foreign


def _foreign(outer: BucketStorage) -> tuple[str, ...]:
    """The files of a checkpoint that somebody uploaded as it is. Other objects stay: no save has names like theirs."""
    names = outer.list()
    if len(names) == 1 + len(
        folders_among(names)
    ):  # the lock, and what dead saves left
        return ()
    return own_files(outer) if is_replaceable(outer) else ()


def place_of(url: str, save_id: str) -> Storage:
    """As ``committing.place_of``."""
    outer = BucketStorage(url)
    holder = save_at_work(outer)
    if holder is None or holder.save_id != save_id:
        raise StorageError(
            f"the save {save_id} that the coordinator has begun in {url} cannot be seen from here "
            f"({'nobody saves there' if holder is None else f'there is {holder}'}): do all ranks reach the same "
            "store (AWS_ENDPOINT_URL, region, account), and was the lock not removed?"
        )
    return outer.folder(folder_of(save_id))
