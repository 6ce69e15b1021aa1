"""The protocol of a save on a file system (in a bucket: see ``buckets``), by the coordinator: begin to abort.

A directory that holds no checkpoint is written in place: it is none until its last file stands there. A
complete checkpoint is left alone, and the new one grows in a sibling until both are exchanged. So a reader
finds the old one, the new one, or none; and wherever the process dies, the next ``begin`` clears up.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial

from megackpt.checkpoint import buckets
from megackpt.checkpoint.index import INDEX, sealed_index
from megackpt.checkpoint.marker import (
    PREFIX,
    Heartbeat,
    Marker,
    active,
    markers,
    siblings,
    staging_name,
    touched,
    turn,
)
from megackpt.checkpoint.opening import Directory, absolute
from megackpt.checkpoint.ownership import (
    foreign_entries,
    is_replaceable,
    own_files,
    refuse_collisions,
)
from megackpt.checkpoint.place import Place
from megackpt.checkpoint.replacing import (
    check_name,
    check_replaceable,
    clean_up,
    discard,
    folder_of,
    logger,
    publish,
    retire,
)
from megackpt.errors import (
    CheckpointingException,
    CorruptCheckpoint,
    SaveInProgress,
    StorageError,
)
from megackpt.planning.manifest import Manifest
from megackpt.storage import TEMPORARY, LocalStorage, Storage, digest, is_url

_PAUSES = (
    0.0,
    0.2,
    1.0,
    3.0,
)  # seconds; a network file system may show a new file a little later


class DirectoryPlace(Place):
    """A directory, or the sibling of one."""

    def __init__(
        self,
        outer: LocalStorage,
        name: str,
        save_id: str,
        *,
        staged: bool,
        made: bool = False,
        resumed: bool = False,
    ) -> None:
        self.save_id = save_id
        self.name = name
        self.outer = outer
        self.staged = staged
        self.resumed = resumed
        self._made = made
        self._committed = False
        self._scratch: tuple[str, ...] = ()
        self._replaces: tuple[str, ...] = ()
        self._old: set[str] | None = None
        self.storage: LocalStorage = outer.folder(
            staging_name(name, save_id) if staged else name
        )
        self.marker = Marker(save_id, names=self._inherited() if resumed else ())
        active.add(save_id)
        try:
            self.marker.put(self.storage)
            beat = Heartbeat(
                self.path, partial(touched, self.storage, self.marker.name)
            )
        except (
            BaseException
        ):  # or this process would take its own failed save for a live one
            active.discard(save_id)
            raise
        # A place that is dropped without a word is a dead save too.
        self._ended = weakref.finalize(
            self, _end, beat, self.storage, save_id, os.getpid()
        )

    def _inherited(self) -> tuple[str, ...]:
        """The names that the dead save may have made. Of several that would go on with it, one gets the lock."""
        free = self.storage.lock()
        dead = next(
            (
                marker
                for marker in markers(self.storage)
                if marker.save_id == self.save_id
            ),
            None,
        )
        if not free or dead is None or dead.lives(self.storage):
            raise SaveInProgress(
                f"another process goes on with the save {self.save_id} in {self.path}"
            )
        return dead.names

    def announce(
        self,
        names: Iterable[str],
        scratch: Iterable[str] = (),
        replaces: Iterable[str] = (),
    ) -> None:
        self._scratch = (*self._scratch, *scratch)
        self._replaces = (*self._replaces, *replaces)
        new = {
            name.partition("/")[0] for name in (*names, *self._scratch, INDEX)
        } - set(self.marker.names)
        self._refuse_collisions(new)
        self._mark(names=(*self.marker.names, *sorted(new)))

    def _refuse_collisions(self, names: Collection[str]) -> None:
        """StorageError if foreign files of the directory have these names."""
        target = f"{self.outer.location.rstrip('/')}/{self.name}"
        if not self.staged:
            refuse_collisions(target, self.storage.list(), names)
            return
        folder = folder_of(self.outer, self.name)
        if folder is None or not set(names).intersection(folder.list()):
            return
        foreign = set(foreign_entries(folder, self._owned(folder), names))
        refuse_collisions(target, foreign.difference(self._replaces), names)

    def _owned(self, folder: LocalStorage) -> set[str]:
        """The files of the checkpoint that is replaced; asked for before the first byte is written."""
        if self._old is None:
            self._old = set(own_files(folder))
        return self._old

    def keep_only(self, files: Collection[str]) -> None:
        kept = {*files, *self._scratch}
        folders = {
            "/".join(parts[:i])
            for name in kept
            for parts in [name.split("/")]
            for i in range(1, len(parts))
        }
        torn = [name for name in self.storage.list() if name.startswith(TEMPORARY)]
        waiting = [*self.marker.names, *torn]
        while waiting:
            name = waiting.pop()
            if name in folders:
                waiting += [f"{name}/{entry}" for entry in self.storage.list(name)]
            elif name not in kept:
                self.storage.delete(name)

    def abort(self) -> None:
        if self._committed or not self._ended():
            return
        with turn(self.outer):
            self._clear()

    def _clear(self) -> None:
        try:
            if self.staged:
                staging = staging_name(self.name, self.save_id)
                # Without the marker it is the old checkpoint: the exchange took place, and failed after that.
                if self.outer.size(f"{staging}/{self.marker.name}") is not None:
                    discard(self.outer, staging, self.marker.name)
                return
            for name in (self.marker.last, *self.marker.names, self.marker.name):
                if name:
                    self.storage.delete(name)
            if self._made:
                self.outer.remove_folder(self.name)
        except (StorageError, OSError) as error:
            logger.warning(
                "the failed save in %s is not cleared up, the next one will: %s",
                self.path,
                error,
            )

    def abandon(self) -> None:
        self._ended()

    def fill(
        self, small: dict[str, bytes], manifest: Manifest, confirm: Callable[[], None]
    ) -> None:
        self.announce(small)
        index = sealed_index(
            manifest, {name: (len(data), digest(data)) for name, data in small.items()}
        )
        ordered = list(small.items())
        ordered.insert(max(len(ordered) - 1, 0), (INDEX, index))
        *first, last = ordered
        self._mark(last=last[0])
        self.storage.put_new({name: data for name, data in first if "/" in name})
        for name, data in first:
            if "/" not in name:
                self._put(name, data)
        for name in self._scratch:
            self.storage.delete(name)
        if not self.staged:
            self._confirm(confirm)
        self._put(*last)

    def _put(self, name: str, data: bytes) -> None:
        """Put a small file, but not over one that somebody else has put there meanwhile: that one is no longer ours."""
        if self.storage.stat(name) is not None and not self.staged:
            last = "" if self.marker.last == name else self.marker.last
            self._mark(
                names=tuple(n for n in self.marker.names if n != name), last=last
            )
            refuse_collisions(self.path, [name], [name])
        self.storage.put(name, data)

    def publish(self, confirm: Callable[[], None]) -> None:
        if self.staged:
            self._mark(retire=self._retired())
            self._confirm(confirm)
            logger.debug(
                "replacing the checkpoint in %s/%s", self.outer.location, self.name
            )
        with turn(self.outer):
            if self.staged:
                publish(self.outer, self.name, self.marker)
            self._committed = True
            try:
                if self.staged:
                    retire(self.outer, self.name, self.marker)
                self.storage.delete(self.marker.name)
            except (CheckpointingException, FileNotFoundError) as error:
                logger.warning(
                    "the new checkpoint stands, but clearing up is left to the next save: %s",
                    error,
                )
        self._ended()

    def _retired(self) -> tuple[str, ...]:
        """The files that are removed with the old checkpoint. Others may have come while this save went on."""
        folder = folder_of(self.outer, self.name)
        if folder is None:  # somebody removed the old checkpoint meanwhile
            return ()
        owned = self._owned(folder)
        self._refuse_collisions(self.marker.names)
        return tuple(sorted(owned))

    def _confirm(self, confirm: Callable[[], None]) -> None:
        """The last look before the step that readers see: this process may have been stopped for long."""
        self._check_marker()
        confirm()

    def _mark(self, **changes: object) -> None:
        self._check_marker()
        self.marker = replace(self.marker, **changes)  # type: ignore[arg-type]
        self.marker.put(self.storage)

    def _check_marker(self) -> None:
        if self.storage.size(self.marker.name) is None:
            refuse_rivals(self.outer, self.name, self.save_id)
            raise StorageError(
                f"the marker {self.path}/{self.marker.name} of this save has been removed: "
                "another job took the save for dead, or the directory was cleaned; nothing was committed"
            )


def _end(beat: Heartbeat, storage: LocalStorage, save_id: str, process: int) -> bool:
    """False in a forked process: the save, and the lock that both hold, are its parent's."""
    if os.getpid() != process:
        return False
    beat.stop()
    storage.unlock()  # the thread of the heart may keep the directory open for another moment
    active.discard(save_id)
    return True


def begin(
    directory: Directory, *, save_id: str, overwrite: bool = True, resume: bool = False
) -> Place:
    """Prepare the place where a new checkpoint grows, so that no reader takes it for one.

    The directory and its parents are made; a symbolic link is followed. Leftovers of dead saves are removed, but
    for those of this very id with ``resume``: then the save goes on in the dead one's place (``Place.resumed``).

    Raises:
        SaveInProgress: another live save is at work there.
        CheckpointExists: a complete checkpoint is there, and ``overwrite`` is False.
        StorageError: the directory cannot be made or written, or (to replace a checkpoint) not exchanged.
    """
    target = absolute(directory)
    if is_url(target):
        return buckets.begin(target, save_id, overwrite)
    target = os.path.realpath(target)
    above, name = os.path.split(target)
    check_name(target, above, name, save_id)
    outer = LocalStorage(above, create=True)
    if outer.size(name) is not None:
        raise StorageError(f"cannot save to {target}: a file is in the way")
    place = None
    while place is None:
        with turn(outer):
            place = _tried(outer, name, save_id, overwrite, resume)
    return place


def completed(directory: Directory, save_id: str) -> bool:
    """Has a save of this id that died since completed this directory? What it left to be cleared up is cleared up."""
    where = absolute(directory)
    if is_url(where):
        return False  # no save in a bucket is gone on with
    above, name = os.path.split(os.path.realpath(where))
    try:
        outer = LocalStorage(above)
        target = outer.folder(name)
    except (FileNotFoundError, NotADirectoryError, CorruptCheckpoint):
        return False
    if not any(
        m.save_id == save_id and m.finished(target) and not m.lives(target)
        for m in markers(target)
    ):
        return False
    with turn(outer):
        refuse_rivals(outer, name)
        clean_up(outer, name)
    return True


def _tried(
    outer: LocalStorage, name: str, save_id: str, overwrite: bool, resume: bool
) -> DirectoryPlace | None:
    """As ``_begun``; without locks, two that begin at once trip over one another's steps."""
    try:
        return _begun(outer, name, save_id, overwrite, resume)
    except (StorageError, FileNotFoundError) as error:
        refuse_rivals(outer, name, save_id)
        if isinstance(error, FileNotFoundError) or isinstance(
            error.__cause__, FileNotFoundError
        ):
            raise SaveInProgress(
                f"another process is at work on {outer.location}/{name} at this very moment: {error}"
            ) from error
        raise


def _begun(
    outer: LocalStorage, name: str, save_id: str, overwrite: bool, resume: bool
) -> DirectoryPlace | None:
    """The place; None if a checkpoint was completed since we looked, which is to be replaced, not written into."""
    target = f"{outer.location.rstrip('/')}/{name}"
    refuse_rivals(outer, name)
    clean_up(outer, name, spared=save_id if resume else "")
    if resume and (place := _taken_over(outer, name, save_id, overwrite)):
        return place
    made = outer.make_folder(name)
    staged = not made and is_replaceable(outer.folder(name))
    if staged:
        check_replaceable(target, overwrite)
        if not outer.make_folder(staging_name(name, save_id), 0o700):
            raise SaveInProgress(
                f"a save of id {save_id} is at work in {outer.location}"
            )
    place = DirectoryPlace(outer, name, save_id, staged=staged, made=made)
    try:
        refuse_rivals(outer, name, save_id)
    except BaseException:
        place.abort()
        raise
    if not staged and is_replaceable(place.storage, save_id):
        place.abort()
        return None
    return place


def _taken_over(
    outer: LocalStorage, name: str, save_id: str, overwrite: bool
) -> DirectoryPlace | None:
    """The place of a dead save of this id, if there is one."""
    for entry in (staging_name(name, save_id), name):
        folder, target = folder_of(outer, entry), folder_of(outer, name)
        if folder is None or folder.size(PREFIX + save_id) is None:
            continue
        staged = entry != name
        if staged and target is not None and is_replaceable(target):
            check_replaceable(f"{outer.location.rstrip('/')}/{name}", overwrite)
        return DirectoryPlace(outer, name, save_id, staged=staged, resumed=True)
    return None


def place_of(directory: Directory, save_id: str) -> Storage:
    """On any rank, once the coordinator has begun the save of this id: where its files go.

    The save's marker tells. Raises StorageError where it is not to be seen.
    """
    if is_url(directory):
        return buckets.place_of(os.fspath(directory), save_id)
    target = os.path.realpath(directory)
    above, name = os.path.split(target)
    for pause in _PAUSES:
        time.sleep(pause)
        for path in (os.path.join(above, staging_name(name, save_id)), target):
            try:
                storage = LocalStorage(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if f"{PREFIX}{save_id}" in storage.list():
                return storage
    raise StorageError(
        f"the save {save_id} that the coordinator has begun in {target} cannot be seen on host "
        f"{socket.gethostname()!r}: is the directory shared between all hosts?"
    )


def refuse_rivals(outer: LocalStorage, name: str, own: str = "") -> None:
    """SaveInProgress if another save to this directory is alive."""
    for entry in (name, *siblings(outer, name)):
        try:
            folder = outer.folder(entry)
        except FileNotFoundError:
            continue
        for marker in markers(folder):
            if marker.save_id != own and marker.lives(folder):
                raise SaveInProgress(
                    f"{outer.location}/{name} is being written by {marker}: wait for it, or save elsewhere. "
                    f"If that job is gone for good, remove {folder.location}/{marker.name}"
                )
