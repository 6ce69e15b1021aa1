"""Replacing one directory by another at one stroke, and what a dead save leaves behind.

A new checkpoint that replaces one grows in a sibling, ``.NAME.megackpt-ID``, and is exchanged with it when it
is complete. What the old directory holds beyond its checkpoint is foreign and moves over. Each step can be
the last of a dying process; the next save goes on from there, by these signs:

====================================  ===================================================================
sibling holds the marker of ID        it was not published: it is removed
sibling without it, NAME holds it     it is the old directory: its foreign entries are still to be moved
``.NAME.megackpt-ID.old``, no NAME    died between the two renames that stand for an exchange: one step back
====================================  ===================================================================
"""

from __future__ import annotations

import logging
import os
import stat
import uuid

from megackpt.checkpoint.marker import (
    LONGEST,
    PREFIX,
    Marker,
    markers,
    siblings,
    staging_name,
)
from megackpt.checkpoint.opening import shortfalls
from megackpt.checkpoint.ownership import OURS, foreign_entries, is_replaceable
from megackpt.checkpoint.tables import by_its_own_account, native_format
from megackpt.errors import CheckpointExists, SaveInProgress, StorageError
from megackpt.storage import TEMPORARY, LocalStorage

logger = logging.getLogger("megackpt.checkpoint")

_COMPARED = (
    1 << 30
)  # bytes: files beside a checkpoint, as those of an export, are smaller
_PASSES = 5  # over a directory that others still put files into


def check_name(target: str, above: str, name: str, save_id: str) -> None:
    """StorageError where a directory of this name could not be replaced later."""
    if not name:
        raise StorageError(f"cannot save to {target}: name a directory below it")
    spare = LONGEST - len(os.fsencode(staging_name(name, save_id))) - len(".old")
    if spare < 0:
        raise StorageError(
            f"cannot save to {target}: the last part of the path is {-spare} bytes too long, as it has to leave "
            f"room for the name of the directory in {above} in which a replacement grows"
        )


def check_replaceable(target: str, overwrite: bool) -> None:
    """Raises where the complete checkpoint in this directory may not, or cannot, be replaced."""
    if not overwrite:
        raise CheckpointExists(
            f"{target} holds a complete checkpoint: pass overwrite=True to replace it, or save elsewhere"
        )
    if target == _working_directory():
        raise StorageError(
            f"{target} holds a checkpoint and is the working directory of this process, from under which a "
            "replacement would take it: change to another directory first"
        )
    if os.path.ismount(target):
        raise StorageError(
            f"{target} holds a checkpoint and is a mount point, which cannot be replaced atomically: "
            "save to a directory below it"
        )


def _working_directory() -> str | None:
    try:
        return os.path.realpath(os.getcwd())
    except FileNotFoundError:  # somebody has removed it
        return None


def publish(outer: LocalStorage, name: str, marker: Marker) -> None:
    """Put the complete sibling of this save in the place of ``name``; the commit of a replacement."""
    staging = staging_name(name, marker.save_id)
    if outer.stat(name) is None:
        outer.rename(staging, name)
        return
    if not outer.dress_as(staging, name):
        logger.warning(
            "%s/%s: the new checkpoint cannot have the owner of the old one",
            outer.location,
            name,
        )
    if outer.exchange(staging, name):
        return
    aside = f"{staging}.old"
    outer.rename(name, aside)
    try:
        outer.rename(staging, name)
    except StorageError:
        outer.rename(aside, name)
        raise


def retire(outer: LocalStorage, name: str, marker: Marker) -> None:
    """Move what is foreign out of the directory that was replaced, and remove the rest. May be repeated."""
    staging = staging_name(name, marker.save_id)
    for old in (staging, f"{staging}.old"):
        if outer.stat(old) is not None:
            _retire(outer, old, name, marker)


def _retire(outer: LocalStorage, old: str, new: str, marker: Marker) -> None:
    folder = outer.folder(old)
    own = set(marker.retire)
    for _ in range(_PASSES):
        for name in list(foreign_entries(folder, own)):
            _move(
                outer,
                f"{old}/{name}",
                f"{new}/{name}",
                keeps=name.partition("/")[0] in marker.names,
            )
        # Once more before anything is removed: others may hold the old directory open.
        folder.remove_files(
            [
                *marker.retire,
                *(entry for entry in folder.list() if entry.startswith(OURS)),
            ]
        )
        if outer.remove_folder(old):
            return
    raise StorageError(
        f"{outer.location}/{old} cannot be removed: others keep on writing files into it"
    )


def _move(outer: LocalStorage, source: str, target: str, *, keeps: bool) -> None:
    """Move a foreign entry to its old path. If the path has been taken meanwhile, nothing is lost: of two files of the
    same content the foreign one stays; else the one that is there if it ``keeps`` its name, else the newer one.
    """
    there, here = outer.stat(target), outer.stat(source)
    if there and here and stat.S_ISDIR(there.st_mode) and stat.S_ISDIR(here.st_mode):
        for entry in outer.list(source):
            _move(outer, f"{source}/{entry}", f"{target}/{entry}", keeps=keeps)
        outer.remove_folder(source)
    elif there is None or _are_alike(outer, source, target):
        outer.rename(source, target)
    elif here is not None and (keeps or here.st_mtime <= there.st_mtime):
        outer.rename(source, free_name(outer, target))
    else:
        outer.rename(target, free_name(outer, target))
        outer.rename(source, target)


def _are_alike(outer: LocalStorage, one: str, other: str) -> bool:
    size = outer.size(one)
    if size is None or size > _COMPARED or outer.size(other) != size:
        return False
    return outer.get(one) == outer.get(other)


def free_name(storage: LocalStorage, name: str) -> str:
    """``name.old``, or ``name.old2`` and so on where that is taken."""
    number, free = 1, f"{name}.old"
    while storage.stat(free) is not None:
        number += 1
        free = f"{name}.old{number}"
    return free


def clean_up(outer: LocalStorage, name: str, spared: str = "") -> None:
    """Finish or undo what dead saves to ``name`` left behind. No save may be alive there.

    What the unfinished save of the id ``spared`` has written stays.
    """
    target = folder_of(outer, name)
    for marker in markers(target) if target else ():
        if marker.finished(target or outer):
            retire(outer, name, marker)
    for sibling, save_id in siblings(outer, name).items():
        folder = folder_of(outer, sibling)
        if folder is not None and folder.size(PREFIX + save_id) is None:
            _settle(outer, name, sibling, folder)
    for sibling, save_id in siblings(outer, name).items():
        folder = folder_of(outer, sibling)
        marked = folder is not None and folder.size(PREFIX + save_id) is not None
        # A rival that has begun since we looked is left alone: it will be found when we look again.
        if not marked or folder is None or save_id == spared:
            continue
        if not any(marker.lives(folder) for marker in markers(folder)):
            discard(outer, sibling, PREFIX + save_id)
    if (target := folder_of(outer, name)) is not None and _clean_folder(target, spared):
        _renew(outer, name)


def _renew(outer: LocalStorage, name: str) -> None:
    """Put a new directory in the place of an empty one, in which a save has died.

    A rank of that save may be alive, having been stopped for long, and hold the old directory open. What it still
    writes goes with the old one. In the new one it would be a foreign file, over which no later save may write.
    """
    target = folder_of(outer, name)
    if target is None or target.list() or target.location == _working_directory():
        return
    fresh = staging_name(name, uuid.uuid4().hex)
    if not outer.make_folder(fresh, 0o700):
        return
    try:
        if outer.dress_as(fresh, name):
            outer.rename(fresh, name)
            return
    except (
        StorageError
    ) as error:  # a mount point, or somebody has put a file there meanwhile
        logger.debug("%s is used again as it is: %s", target.location, error)
    outer.remove_folder(fresh)


def discard(outer: LocalStorage, staging: str, marker: str) -> None:
    """Remove a directory that was never published; its marker last, for that tells what it is.

    StorageError, and the marker stays, if somebody still writes there: a slow rank of the save that failed.
    """
    sign = outer.get(f"{staging}/{marker}")
    for entry in outer.list(staging):
        if entry != marker:
            outer.delete(f"{staging}/{entry}")
    outer.delete(f"{staging}/{marker}")
    if not outer.remove_folder(staging):
        outer.put(f"{staging}/{marker}", sign)
        raise StorageError(
            f"{outer.location}/{staging} cannot be removed: others keep on writing files into it"
        )


def folder_of(outer: LocalStorage, name: str) -> LocalStorage | None:
    """A folder of the root, or None where there is none."""
    try:
        return outer.folder(name)
    except FileNotFoundError:
        return None


def _settle(outer: LocalStorage, name: str, sibling: str, folder: LocalStorage) -> None:
    """A sibling without marker and without a published successor: empty, or the checkpoint itself."""
    if all(entry.startswith(OURS) for entry in folder.list()):
        outer.delete(sibling)
        return
    target = folder_of(outer, name)
    if not is_replaceable(folder) or (target is not None and is_replaceable(target)):
        logger.warning(
            "%s is a leftover that is left alone: look at it and remove it",
            folder.location,
        )
        return
    if target is not None:
        _clean_folder(target)
        for entry in target.list():
            _move(
                outer,
                f"{name}/{entry}",
                f"{sibling}/{entry}",
                keeps=folder.stat(entry) is not None,
            )
        outer.remove_folder(name)
    logger.warning(
        "%s: going back to the checkpoint that an interrupted save moved away",
        folder.location,
    )
    outer.rename(sibling, name)


def _is_saved_by_another(target: LocalStorage) -> bool:
    """Has another library completed a checkpoint here since a save died that had put no small file yet?

    It may have written over files of the dead save, so that no name tells whose a file is.
    """
    backend = native_format(target)
    return backend is not None and not shortfalls(
        target, by_its_own_account(backend, target)
    )


def _clean_folder(target: LocalStorage, spared: str = "") -> bool:
    """Remove what dead saves left in the directory itself; of a finished one only its marker is left.

    Says whether an unfinished one was among them.
    """
    unfinished = False
    # Listed before the markers: whoever has begun since then is seen by its marker, or has none to lose yet.
    torn = [entry for entry in target.list() if entry.startswith(TEMPORARY)]
    for marker in markers(target):
        if marker.lives(target):
            raise SaveInProgress(
                f"{target.location} is being written by {marker}, which has just begun"
            )
        if not marker.finished(target):
            if marker.save_id == spared:
                continue
            unfinished = True
            if marker.removes:
                target.remove_files(marker.names)
            elif marker.last or not _is_saved_by_another(target):
                for entry in marker.names:
                    target.delete(entry)
        target.delete(marker.name)
    for entry in torn:
        target.delete(entry)
    return unfinished
