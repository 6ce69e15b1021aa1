"""Directories beside the target of a save: their files, and how they are removed."""

from __future__ import annotations

import json
import os
import stat
import time
from contextlib import suppress

from megackpt.backends.base import CONFIG
from megackpt.checkpoint.index import INDEX
from megackpt.checkpoint.marker import (
    PREFIX,
    Marker,
    Sibling,
    logger,
    markers,
    owner_suffix,
    read_marker,
    siblings,
)
from megackpt.checkpoint.ownership import (
    OURS,
    foreign_entries,
    is_replaceable,
    own_files,
)
from megackpt.checkpoint.tables import METADATA
from megackpt.storage import TEMPORARY, LocalStorage, unsafe_names

_COMPARED = 1 << 30  # bytes; files beside a checkpoint, as of an export, are smaller
_PASSES = 5  # over a directory into which others still write
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


class SiblingDirectories:
    """The directory NAME in ``outer``, which is open, and those beside it."""

    def __init__(self, path: str, *, create: bool) -> None:
        """``path``: absolute, without links. ``create``: make its parents."""
        above, self.name = os.path.split(path)
        self.outer = LocalStorage(above, create=create)
        self.location = path
        self._owned: tuple[str, tuple[str, ...]] | None = None

    def _remove_taken(self, save_id: str) -> None:
        """Remove the directories that this save has taken from others."""
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
        """Move the entries of others from a replaced directory to the target, and remove it."""
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

        A file records them before the first is removed. Later, nothing else would name them all.
        """
        if folder.size(_OWN_FILES) is not None:
            try:
                names = json.loads(folder.get(_OWN_FILES))
            except ValueError:
                names = None  # not ours: we write this file atomically
            if isinstance(names, list) and all(isinstance(n, str) for n in names):
                return set(names).difference(unsafe_names(names))
        own = self._own_files(folder)
        if own:
            folder.put(_OWN_FILES, json.dumps(own).encode())
        return set(own)

    def _move(self, source: str, target: str) -> None:
        """Move an entry of others back to its path.

        If the path is taken meanwhile, no content is lost. Of two files with the same content,
        the moved one stays. A file of the new checkpoint keeps its name. Otherwise the newer file
        gets the name, and the other one becomes NAME.old.
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
            self._owned = known, files  # nothing is kept where the files are unknown
        return self._owned[1]

    def _marker_in(self, sibling: Sibling) -> Marker | None:
        """The marker of the directory's own id. With it, the directory is not published."""
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
