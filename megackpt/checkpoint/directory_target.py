"""The target of a transaction in a file system: a directory and its siblings.

A save writes into ``.NAME.megackpt-ID``, which only it uses. It becomes NAME by one rename that
does not replace an entry, or by one exchange with the existing NAME. Both operations name the
save's directory by its path, so the path is the right to commit: before a save commits, it renames
the directories of all other saves. A save that was suspended meanwhile, at any point, no longer
finds a directory under its path, and its rename fails. This needs no lock, no clock and no guess
about which process is alive. A save first waits at most ``PATIENCE`` seconds for a lock on the
parent directory, so that one of several live saves wins; without the lock all may lose.

The content of a sibling directory determines its state:

===================================  =======================================================
it holds the marker of its id        not published. Removed when its process is dead, or
                                     when another save has taken it (suffix)
no such marker, no suffix            it was exchanged with NAME. Swapped back if it is not
                                     the checkpoint at that save's begin, else retired
no such marker, suffix ``old``       NAME, renamed away where no exchange exists; renamed
                                     back if NAME is missing, else retired
no such marker, another suffix       to be retired: foreign entries move to NAME, the
                                     files of its checkpoint are removed
===================================  =======================================================
"""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from megackpt.backends.base import CONFIG
from megackpt.checkpoint.index import INDEX
from megackpt.checkpoint.marker import (
    ASIDE,
    LONGEST_NAME,
    PREFIX,
    Marker,
    Sibling,
    logger,
    markers,
    owner_suffix,
    read_marker,
    refuse_working,
    siblings,
    staging_name,
)
from megackpt.checkpoint.opening import incomplete
from megackpt.checkpoint.ownership import (
    OURS,
    foreign_entries,
    is_replaceable,
    own_files,
    refuse_collisions,
)
from megackpt.checkpoint.records import Record
from megackpt.checkpoint.recovery import ACTIONS, Action, Fit, Holds, Owner, Suffix
from megackpt.checkpoint.tables import METADATA
from megackpt.errors import (
    CheckpointExists,
    CheckpointingException,
    CorruptCheckpoint,
    NotACheckpoint,
    SaveInProgress,
    StorageError,
)
from megackpt.storage import TEMPORARY, LocalStorage, unsafe_names

PATIENCE = 2.0
"""Seconds that a save waits for the lock of the parent directory; then it continues without."""

_PAUSES = (0.0, 0.2, 1.0, 3.0)  # seconds; network file systems show new entries late
_COMPARED = 1 << 30
"""Bytes. Foreign files in a checkpoint, such as the files of an export, are smaller."""
_PASSES = 5  # over a directory into which other processes still write
_PAUSE = 0.02  # seconds
_OWN_FILES = f"{TEMPORARY}own-files"  # in a directory that is being removed


def version(folder: LocalStorage | None) -> str:
    """Identifies the checkpoint in a directory, by its tables of contents; "" for none."""
    found: list[str] = []
    if folder is None:
        return ""
    for name in (METADATA, CONFIG, INDEX):
        status = folder.stat(name)
        if status is not None:
            found.append(
                f"{name}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
            )
    return " ".join(found)


class DirectoryTarget:
    """The directory NAME in ``outer``, which is open, and the siblings of NAME."""

    def __init__(self, path: str, *, create: bool) -> None:
        """``path``: absolute, without links. ``create``: make its parents."""
        above, self.name = os.path.split(path)
        self.outer = LocalStorage(above, create=create)
        self.location = path
        self._owned: tuple[str, tuple[str, ...]] | None = None
        self._begins = ""  # the id of a save that has no marker yet
        self._patience = PATIENCE
        self._base = ""  # the version of the directory that the save replaces

    @property
    def replaces_something(self) -> bool:
        """Did the directory exist when the save began?"""
        return bool(self._base)

    def check_name(self, save_id: str) -> None:
        """StorageError where no save to a directory of this name can be committed."""
        if not self.name:
            raise StorageError(
                f"cannot save to {self.location}: name a directory below it"
            )
        longest = f"{staging_name(self.name, save_id)}.{owner_suffix(save_id)}"
        excess = len(os.fsencode(longest)) - LONGEST_NAME
        if excess > 0:
            raise StorageError(
                f"cannot save to {self.location}: the last part of the path is {excess} "
                f"bytes too long. The save writes into a directory beside it, whose "
                f"name is longer"
            )
        if self.outer.size(self.name) is not None:
            raise StorageError(f"cannot save to {self.location}: a file is in the way")

    def check_replaceable(self) -> None:
        """StorageError where the directory exists and cannot be exchanged."""
        if self._folder(self.name) is None:
            return
        try:
            working = os.path.realpath(os.getcwd())
        except FileNotFoundError:
            working = ""
        if self.location == working:
            raise StorageError(
                f"{self.location} is the working directory of this process, and a save "
                f"replaces it by a new directory: change to another directory first"
            )
        if os.path.ismount(self.location):
            raise StorageError(
                f"{self.location} is a mount point, which cannot be replaced: save to a "
                f"directory below it"
            )

    def begin(self, marker: Marker, overwrite: bool, resume: bool) -> bool:
        """Make the directory of this save. Returns whether it resumes a dead save of its id."""
        self._begins = marker.save_id
        with self._turn(), self._others_meanwhile():
            self.recover(spared=marker.save_id if resume else "")
            self.check_replaceable()
            folder = self._folder(self.name)
            self._base = version(folder)
            if folder is not None and is_replaceable(folder):
                if not overwrite:
                    raise CheckpointExists(
                        f"{self.location} holds a complete checkpoint"
                    )
                self._own_files(folder)  # raises if they cannot be determined
            # A new target gets the usual mode. One that replaces a directory gets its mode later.
            mode = 0o777 if folder is None else 0o700
            staging = staging_name(self.name, marker.save_id)
            resumed = resume and self._take_over(marker.save_id)
            if not resumed and not self.outer.make_folder(staging, mode):
                raise SaveInProgress(
                    f"another save with the id {marker.save_id} is running in "
                    f"{self.outer.location}/{staging}: wait for it, or remove that "
                    f"directory if its job is gone"
                )
            self._put_marker(marker, self._base)
            self._begins = ""
            return resumed

    def _put_marker(self, marker: Marker, base: str) -> None:
        fields = Marker(marker.save_id, base=base, removes=marker.removes)
        staging = staging_name(self.name, marker.save_id)
        self.outer.folder(staging).put(marker.name, fields.encode())

    def _take_over(self, save_id: str) -> bool:
        """Take the directory of a dead save of this id, if there is one. Only one process can."""
        staging = staging_name(self.name, save_id)
        marker = self._marker_in(Sibling(staging, save_id, ""))
        if marker is None:
            return False
        if not self._is_over(marker):
            raise SaveInProgress(
                f"{marker} may be running in {self.outer.location}/{staging}: wait for "
                f"it, or remove that directory if its job is gone"
            )
        taken = f"{staging}.{os.getpid()}"
        self.outer.rename(staging, taken)
        self.outer.rename(taken, staging)
        return True

    def staging_folder(
        self, save_id: str, moved: Callable[[], object] = int
    ) -> LocalStorage:
        with self._others_meanwhile():
            return self.outer.folder(staging_name(self.name, save_id), moved)

    def holds(self, save_id: str) -> bool:
        """Is the directory of this save where it was made?"""
        marker = f"{staging_name(self.name, save_id)}/{PREFIX}{save_id}"
        return self.outer.size(marker) is not None

    def staging(
        self, save_id: str, moved: Callable[[], object] = int, direct: bool = False
    ) -> LocalStorage:
        """Where the ranks write. StorageError where this host does not see it."""
        path = os.path.join(self.outer.location, staging_name(self.name, save_id))
        for pause in _PAUSES:
            time.sleep(pause)
            try:
                storage = LocalStorage(path, moved=moved, direct=direct)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if f"{PREFIX}{save_id}" in storage.list():
                return storage
        raise StorageError(
            f"the save {save_id}, which the coordinator began in {self.location}, "
            f"is not visible on host {socket.gethostname()!r}: is the directory shared "
            f"between all hosts? (Or another save to it has committed meanwhile.)"
        )

    def refuse_collisions(
        self, names: Collection[str], replaces: Collection[str]
    ) -> None:
        """StorageError if foreign files in the target have these names."""
        folder = self._folder(self.name)
        if folder is None or not set(names).intersection(folder.list()):
            return
        foreign = set(foreign_entries(folder, self._own_files(folder), names))
        refuse_collisions(self.location, foreign.difference(replaces), names)

    def publish(
        self,
        record: Record,
        names: Collection[str],
        replaces: Collection[str],
        confirm: Callable[[], None],
    ) -> None:
        """Make the directory of the save that ``record`` names the target, at once.

        ``confirm`` is called right before that. If it raises, the target is unchanged.

        Raises:
            SaveInProgress: another save has committed since this one began, or is about to.
            StorageError: foreign files have names of this save, or the file system refused.
        """
        save_id, base = record.save_id, self._base
        with self._turn(), self._others_meanwhile():
            if self._folder(self.name) is not None:
                self._require(base)  # a save that must fail takes no directories
            self._take_from_others(save_id)
            if not self.holds(save_id):
                raise SaveInProgress(
                    f"another save has taken over {self.location} from this one, or "
                    f"{self.outer.location}/{staging_name(self.name, save_id)} was "
                    f"removed: nothing is committed"
                )
            # From here on, no other save that began earlier can commit. One that begins now
            # takes our directory before it commits, and then the rename below fails.
            self._require(base)
            self.refuse_collisions(names, replaces)
            confirm()
            self._swap_in(save_id, base)

    def _swap_in(self, save_id: str, base: str) -> None:
        staging = staging_name(self.name, save_id)
        if self.outer.stat(self.name) is None:
            if self.outer.rename_new(staging, self.name):
                return
            self._require(base)  # another process has made the directory meanwhile
        if not self.outer.copy_owner_and_mode(self.name, staging):
            logger.warning(
                "%s: the new directory cannot have the owner of the old one",
                self.location,
            )
        if self.outer.exchange(staging, self.name):
            taken = self.outer.folder(staging)
            if version(taken) != base:
                self.outer.exchange(staging, self.name)
                self._refuse_changed()
            self.outer.rename(staging, f"{staging}.{owner_suffix(save_id)}")
            return
        # The file system cannot exchange: rename twice. Each rename fails if another save was
        # first: the first finds no directory, the second finds one that is not empty.
        aside = f"{staging}.{ASIDE}"
        self.outer.rename(self.name, aside)
        if version(self.outer.folder(aside)) != base:
            self.outer.rename_new(aside, self.name)
            self._refuse_changed()
        try:
            published = self.outer.rename_new(staging, self.name)
        except StorageError:
            self.outer.rename_new(aside, self.name)
            raise
        if not published:
            self._refuse_changed()
        self.outer.rename(aside, f"{staging}.{owner_suffix(save_id)}")

    def settle(self, marker: Marker) -> None:
        """Remove the old checkpoint, and the directories taken from other saves.

        Raises SaveInProgress if another save has already replaced this one.
        """
        save_id = marker.save_id
        with self._turn(), self._others_meanwhile():
            folder = self.outer.folder(self.name)
            if folder.size(PREFIX + save_id) is None:
                self._refuse_changed()
            try:
                self._remove_taken(save_id)
                self._remove_marker(folder, marker)
            except (CheckpointingException, FileNotFoundError) as error:
                logger.warning(
                    "%s is committed, but clearing up is left to the next save: %s",
                    self.location,
                    error,
                )
            if not marker.removes and not folder.is_current():
                self._refuse_changed()

    def discard(self, save_id: str) -> None:
        """Remove the directory of a save that is not published."""
        with self._turn():
            self._discard(save_id)

    def _discard(self, save_id: str) -> None:
        for sibling in siblings(self.outer, self.name):
            if sibling.save_id != save_id:
                continue
            # Without its marker, the directory is the one that this save replaced.
            if self._marker_in(sibling) is not None:
                self._remove_unpublished(sibling)

    def recover(self, *, spared: str = "", abandoned: bool = False) -> list[Marker]:
        """Finish or undo dead saves to this directory. Returns the markers of all other saves.

        ``spared``: the directory of the unpublished save of this id stays, but not where its
        process died while it took the directory over. ``abandoned``: a save counts as dead
        after a day, too, if its process cannot be inspected.
        """
        found = siblings(self.outer, self.name)
        unpublished = {}
        for sibling in found:
            unpublished[sibling.entry] = self._marker_in(sibling)
        # Read after the siblings: an exchange moves a marker from a sibling to the target.
        here = self._markers_here()
        there = [marker for marker in unpublished.values() if marker is not None]
        alive = [m for m in (*there, *here) if not self._is_over(m, abandoned)]
        working = {owner_suffix(marker.save_id) for marker in alive}
        by_id = {marker.save_id: marker for marker in here}
        for sibling in found:
            owner, holds, fit = Owner.DEAD, Holds.MARKER, Fit.SPARE
            suffix = _kind(sibling.suffix)
            took = sibling.suffix or owner_suffix(sibling.save_id)
            if took in working and suffix is not Suffix.OLD:
                owner = Owner.ALIVE
            try:
                if unpublished[sibling.entry] is None:
                    holds = Holds.CHECKPOINT
                    fit = self._fit(sibling, by_id.get(sibling.save_id))
                elif sibling.save_id == spared and not sibling.suffix:
                    continue
                action = ACTIONS[holds, suffix, owner, fit]
                _FUNCTIONS[action](self, sibling)
            except (CheckpointingException, FileNotFoundError) as error:
                # A leftover does not stop a save.
                logger.warning(
                    "%s/%s is left alone: %s",
                    self.outer.location,
                    sibling.entry,
                    error,
                )
        folder = self._folder(self.name)
        for marker in here:
            if folder is not None and owner_suffix(marker.save_id) not in working:
                self._remove_marker(folder, marker)
        return alive

    def remove(self, marker: Marker) -> None:
        """Replace the checkpoint by an empty directory, then remove that, too."""
        with self._turn(), self._others_meanwhile():
            refuse_working(self.location, self.recover(abandoned=True))
            folder = self._folder(self.name)
            if folder is None:
                raise NotACheckpoint(f"directory {self.location} does not exist")
            if (reason := incomplete(folder)) is not None:
                raise NotACheckpoint(reason)
            if folder.size(INDEX) is None:
                raise NotACheckpoint(
                    f"{self.location} was not written by megackpt, and is left alone"
                )
            self.check_replaceable()
            if not self._own_files(folder):
                raise CorruptCheckpoint(
                    f"{self.location} is damaged; its files are unknown: remove it by hand"
                )
            base = version(folder)
            self.outer.make_folder(staging_name(self.name, marker.save_id), 0o700)
            self._put_marker(marker, base)
            try:
                self._take_from_others(marker.save_id)
                self._require(base)
                # First: without a checkpoint in the target, recovery would take one of them for it.
                self._remove_taken(marker.save_id)
                self._swap_in(marker.save_id, base)
            except BaseException:
                self._discard(marker.save_id)
                raise
        self.settle(marker)

    def clear(self) -> None:
        """Remove leftovers of dead saves, see ``transaction.clear``."""
        with self._turn(), self._others_meanwhile():
            refuse_working(self.location, self.recover(abandoned=True))

    def completed(self, save_id: str) -> bool:
        """Did a save of this id publish the target, and die before ``settle``?"""
        if self.outer.size(self.name) is not None:
            return False  # a file
        with self._turn(), self._others_meanwhile():
            for marker in self._markers_here():
                if marker.save_id == save_id and marker.is_dead():
                    self.recover()
                    return True
            return False

    def _is_over(self, marker: Marker, abandoned: bool = False) -> bool:
        own = marker.is_local() and marker.pid == os.getpid()
        if own and marker.save_id == self._begins:
            return True  # of an earlier save of this id: the new one has no marker yet
        return marker.is_dead(abandoned)

    def _fit(self, sibling: Sibling, published: Marker | None) -> Fit:
        """Does this directory hold the checkpoint that belongs in the target?"""
        folder = self._folder(sibling.entry)
        if folder is None or _kind(sibling.suffix) is Suffix.TAKEN:
            return Fit.SPARE
        if published is not None:
            exchanged = not sibling.suffix and not published.removes
            if exchanged and version(folder) != published.base:
                return Fit.CHANGED
            return Fit.SPARE
        target = self._folder(self.name)
        if target is not None and is_replaceable(target):
            return Fit.SPARE
        if sibling.suffix == ASIDE or is_replaceable(folder):
            return Fit.NEEDED
        return Fit.SPARE

    def _leave(self, sibling: Sibling) -> None:
        """A save that may be alive needs it."""

    def _exchange_back(self, sibling: Sibling) -> None:
        """Undo the publication of a save that found an unexpected version."""
        self._warn_of(sibling)
        self.outer.exchange(sibling.entry, self.name)
        self._remove_sibling(sibling)

    def _rename_back(self, sibling: Sibling) -> None:
        """Undo the publication of a save that died in it."""
        self._warn_of(sibling)
        target = self._folder(self.name)
        if target is not None:
            # Another process has made the directory again. Move its entries.
            for entry in target.list():
                self._move(f"{self.name}/{entry}", f"{sibling.entry}/{entry}")
            self.outer.remove_folder(self.name)
        self.outer.rename_new(sibling.entry, self.name)

    def _warn_of(self, sibling: Sibling) -> None:
        logger.warning(
            "%s: going back to the checkpoint that an interrupted save moved to %s",
            self.location,
            sibling.entry,
        )

    def _take_from_others(self, save_id: str) -> None:
        """Rename the directories of all other saves, so that none of them can commit."""
        for entry, other, suffix in siblings(self.outer, self.name):
            if other == save_id:
                continue
            if suffix == ASIDE and self.outer.stat(self.name) is None:
                # Its save was suspended between two renames. Undo its first one.
                self.outer.rename_new(entry, self.name)
                continue
            taken = f"{staging_name(self.name, other)}.{owner_suffix(save_id)}"
            if entry != taken:
                self.outer.rename(entry, taken)

    def _require(self, base: str) -> None:
        if version(self._folder(self.name)) != base:
            self._refuse_changed()

    def _refuse_changed(self) -> None:
        raise SaveInProgress(
            f"another save has written to {self.location} since this one began: the "
            f"directory is the other's now, and nothing of this save is committed"
        )

    def _remove_marker(self, folder: LocalStorage, marker: Marker) -> None:
        if marker.removes and folder.list() == [marker.name]:
            # The empty directory of a removal goes with its marker.
            hidden = Sibling(
                staging_name(self.name, marker.save_id), marker.save_id, ""
            )
            self.outer.rename(self.name, hidden.entry)
            self._remove_unpublished(hidden)
        else:
            folder.delete(marker.name)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock of the parent directory, if it is free soon."""
        deadline = time.monotonic() + self._patience
        while not self.outer.lock():
            if time.monotonic() > deadline:
                self._patience = 0.0  # its holder may be stopped
                break
            time.sleep(0.01)
        try:
            yield
        finally:
            self.outer.unlock()

    @contextmanager
    def _others_meanwhile(self) -> Iterator[None]:
        """SaveInProgress if another save has moved a directory; StorageError without the parent."""
        try:
            yield
        except (FileNotFoundError, StorageError) as error:
            causes = error, error.__cause__
            if not any(isinstance(cause, FileNotFoundError) for cause in causes):
                raise
            if not self.outer.is_current():
                raise StorageError(
                    f"{self.outer.location} was removed or moved during the save: {error}"
                ) from error
            raise SaveInProgress(
                f"another save is writing to {self.location}, and has taken over from "
                f"this one: {error}"
            ) from error

    def _remove_taken(self, save_id: str) -> None:
        """Remove the directories that this save has taken from other saves."""
        for sibling in siblings(self.outer, self.name):
            if sibling.suffix == owner_suffix(save_id):
                # Without the lock, the save that lost it may be removing it now.
                with suppress(FileNotFoundError):
                    self._remove_sibling(sibling)

    def _remove_sibling(self, sibling: Sibling) -> None:
        if self._marker_in(sibling) is not None:
            self._remove_unpublished(sibling)
        else:
            self._retire(sibling.entry)

    def _remove_unpublished(self, sibling: Sibling) -> None:
        """Remove a directory that no reader has seen. Its marker says so, and is removed last."""
        entry, marker = sibling.entry, PREFIX + sibling.save_id
        content = self.outer.get(f"{entry}/{marker}")
        for _ in range(_PASSES):
            for name in self.outer.list(entry):
                if name != marker:
                    self.outer.delete(f"{entry}/{name}")
            self.outer.delete(f"{entry}/{marker}")
            if self.outer.remove_folder(entry):
                return
            # Not by its path: a folder that another save removes meanwhile must not come back.
            with suppress(FileNotFoundError):
                self.outer.folder(entry).put(marker, content)
            time.sleep(_PAUSE)
        logger.warning(
            "%s/%s cannot be removed, the next save will: a rank of the save that "
            "failed still writes into it",
            self.outer.location,
            entry,
        )

    def _retire(self, entry: str) -> None:
        """Move the foreign entries of a replaced directory to the target, and remove it."""
        folder = self._folder(entry)
        if folder is None:
            return
        own = self._files_to_remove(folder)
        for _ in range(_PASSES):
            for name in list(foreign_entries(folder, own)):
                self._move(f"{entry}/{name}", f"{self.name}/{name}")
            folder.remove_files(own)
            folder.remove_files([n for n in folder.list() if n.startswith(OURS)])
            if self.outer.remove_folder(entry):
                return
        logger.warning(
            "%s/%s cannot be removed, the next save will: others write files into it",
            self.outer.location,
            entry,
        )

    def _files_to_remove(self, folder: LocalStorage) -> set[str]:
        """The files of the checkpoint in a replaced directory.

        A file records their names before the first one is removed. Later, no other file would name
        them all.
        """
        if folder.size(_OWN_FILES) is not None:
            try:
                names = json.loads(folder.get(_OWN_FILES))
            except ValueError:
                names = None  # a foreign file: megackpt writes this file atomically
            if isinstance(names, list) and all(isinstance(n, str) for n in names):
                return set(names).difference(unsafe_names(names))
        own = self._own_files(folder)
        if own:
            folder.put(_OWN_FILES, json.dumps(own).encode())
        return set(own)

    def _move(self, source: str, target: str) -> None:
        """Move a foreign entry back to its path.

        If the path is taken meanwhile, no content is lost. If both files have the same content, the
        moved one stays. A file of the new checkpoint keeps its name. Otherwise the newer file gets
        the name, and the older file becomes NAME.old.
        """
        outer = self.outer
        here, there = outer.stat(source), outer.stat(target)
        if here is None:
            return
        if there is None or self._are_alike(source, target):
            outer.rename(source, target)
        elif stat.S_ISDIR(here.st_mode) and stat.S_ISDIR(there.st_mode):
            for entry in outer.list(source):
                self._move(f"{source}/{entry}", f"{target}/{entry}")
            outer.remove_folder(source)
        elif self._is_own(target) or here.st_mtime <= there.st_mtime:
            outer.rename(source, free_name(outer, target))
        else:
            outer.rename(target, free_name(outer, target))
            outer.rename(source, target)

    def _is_own(self, path: str) -> bool:
        """Is this a file of the checkpoint in the target, or a folder of such files?"""
        top, _, name = path.partition("/")
        folder = self._folder(self.name)
        if top != self.name or folder is None:
            return False
        return any(f"{own}/".startswith(f"{name}/") for own in self._own_files(folder))

    def _are_alike(self, one: str, other: str) -> bool:
        size = self.outer.size(one)
        if size is None or size > _COMPARED or self.outer.size(other) != size:
            return False
        return self.outer.get(one) == self.outer.get(other)

    def _own_files(self, folder: LocalStorage) -> tuple[str, ...]:
        """The files of the checkpoint in a directory; none without a checkpoint."""
        known = version(folder)
        if self._owned is None or self._owned[0] != known:
            files: tuple[str, ...] = ()
            if is_replaceable(folder):
                files = own_files(folder)
            self._owned = known, files  # an error leaves the earlier value
        return self._owned[1]

    def _marker_in(self, sibling: Sibling) -> Marker | None:
        """The marker of the directory's id. With it, the directory is not published."""
        folder = self._folder(sibling.entry)
        if folder is None:
            return None
        return read_marker(folder, PREFIX + sibling.save_id, sibling.save_id)

    def _markers_here(self) -> list[Marker]:
        """The markers in the target."""
        folder = self._folder(self.name)
        if folder is None:
            return []
        return markers(folder)

    def _folder(self, name: str) -> LocalStorage | None:
        try:
            return self.outer.folder(name)
        except FileNotFoundError:
            return None


def free_name(storage: LocalStorage, name: str) -> str:
    """``name.old``, or ``name.old2`` and so on where that is taken."""
    number, free = 1, f"{name}.old"
    while storage.stat(free) is not None:
        number += 1
        free = f"{name}.old{number}"
    return free


_FUNCTIONS = {
    Action.LEAVE: DirectoryTarget._leave,
    Action.REMOVE: DirectoryTarget._remove_sibling,
    Action.EXCHANGE: DirectoryTarget._exchange_back,
    Action.RENAME: DirectoryTarget._rename_back,
}


def _kind(suffix: str) -> Suffix:
    if suffix == ASIDE:
        return Suffix.OLD
    return Suffix.TAKEN if suffix else Suffix.NONE
