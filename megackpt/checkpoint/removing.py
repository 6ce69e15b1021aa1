"""Removing: a checkpoint, or what dead saves left. Half of one is never taken for a whole, by whatever reader.

In a directory a marker names what is to go, as if it were what a dead save had written: with it the checkpoint is none
any more, and where the remover dies, whoever clears up goes on. In a bucket the record goes first.
"""

from __future__ import annotations

import os
from functools import partial
from uuid import uuid4

from megackpt.backends.base import CONFIG
from megackpt.checkpoint import buckets
from megackpt.checkpoint.committing import refuse_rivals
from megackpt.checkpoint.index import INDEX
from megackpt.checkpoint.marker import (
    PREFIX,
    SILENCE,
    Heartbeat,
    Marker,
    active,
    siblings,
    staging_name,
    touched,
    turn,
)
from megackpt.checkpoint.opening import Directory, absolute, incomplete, stored_manifest
from megackpt.checkpoint.ownership import files_of
from megackpt.checkpoint.records import RECORD, folder_of, folders_among, read_record
from megackpt.checkpoint.replacing import clean_up, discard, folder_of as folder_in
from megackpt.errors import NotACheckpoint, SaveInProgress, StorageError
from megackpt.storage import TEMPORARY, BucketStorage, LocalStorage, is_url

_AT_ONCE = 100  # files that are removed between two looks at the marker


def remove(directory: Directory) -> None:
    """Remove the checkpoint of ours that is complete here, and what dead saves left; files of others in it stay.

    Whoever reads it at this moment fails, or has read it to its end.

    Raises:
        NotACheckpoint: nothing complete is here, or it was not written by this library.
        CorruptCheckpoint: what belongs to it cannot be told.
        SaveInProgress: somebody saves to it, or removes it.
        StorageError: the storage refused; whoever clears up here goes on.
    """
    target = absolute(directory)
    if is_url(target):
        _emptied(target, whole=True)
        return
    outer, name = _at(target)
    with turn(outer):
        _cleared(outer, name)
        folder = folder_in(outer, name)
        if folder is None:
            raise NotACheckpoint(f"directory {target} does not exist")
        marker = Marker(uuid4().hex, names=_ours(folder), removes=True)
        active.add(marker.save_id)
        try:
            marker.put(folder)
        except BaseException:
            active.discard(marker.save_id)
            raise
    beat = Heartbeat(folder.location, partial(touched, folder, marker.name))
    try:
        _removed(outer, name, folder, marker)
    finally:
        beat.stop()
        active.discard(marker.save_id)


def clear(directory: Directory) -> None:
    """Remove what dead saves and removals left here, and nothing else. SaveInProgress if one is alive."""
    target = absolute(directory)
    if is_url(target):
        _emptied(target, whole=False)
        return
    outer, name = _at(target)
    with turn(outer):
        _cleared(outer, name)


def _cleared(outer: LocalStorage, name: str) -> None:
    refuse_rivals(outer, name)
    entries = [] if (folder := folder_in(outer, name)) is None else folder.list()
    begun = any(entry.startswith((PREFIX, TEMPORARY)) for entry in entries)
    if begun or siblings(outer, name):
        clean_up(outer, name)
    if begun or (folder is not None and not entries and _is_old(outer, name)):
        outer.remove_folder(name)


def _is_old(outer: LocalStorage, name: str) -> bool:
    """An empty directory may be that of a save of others, which has just begun."""
    made = outer.modified(name)
    return made is not None and outer.now() - made > SILENCE


def _at(target: str) -> tuple[LocalStorage, str]:
    above, name = os.path.split(os.path.realpath(target))
    try:
        return LocalStorage(above), name
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotACheckpoint(f"directory {target} does not exist") from error


def _ours(folder: LocalStorage) -> tuple[str, ...]:
    """The entries of a checkpoint that this library has written: what readers look for first goes first."""
    if (reason := incomplete(folder)) is not None:
        raise NotACheckpoint(reason)
    if folder.size(INDEX) is None:
        raise NotACheckpoint(
            f"{folder.location} was not written by megackpt, and is left alone"
        )
    backend, manifest, small = stored_manifest(folder)
    own = files_of(folder, backend, manifest, small)
    return tuple(
        sorted(own, key=lambda name: (name != CONFIG, name not in small, name))
    )


def _removed(
    outer: LocalStorage, name: str, folder: LocalStorage, marker: Marker
) -> None:
    # The first one by itself: what readers look for first is durably gone before anything else.
    starts = range(1, len(marker.names), _AT_ONCE)
    for batch in (marker.names[:1], *(marker.names[i : i + _AT_ONCE] for i in starts)):
        if folder.size(marker.name) is None:
            raise StorageError(
                f"the marker {folder.location}/{marker.name} of this removal is gone: another job goes on with it"
            )
        folder.remove_files(batch)
    with turn(outer):
        if folder.list() == [
            marker.name
        ]:  # once it is away, nobody finds an empty directory
            hidden = staging_name(name, marker.save_id)
            outer.rename(name, hidden)
            discard(outer, hidden, marker.name)
        else:
            folder.delete(marker.name)


def _emptied(url: str, whole: bool) -> None:
    """``whole``: of the checkpoint, too. What a store cannot do is exchanged by the lock: see ``buckets``."""
    outer = BucketStorage(url)
    lock = buckets.Lock(outer, uuid4().hex)
    active.add(lock.save_id)
    try:
        lock.take()
        beat = Heartbeat(url, lock.renew)
        try:
            record, version = read_record(outer)
            kept = "" if whole or record is None else folder_of(record.save_id)
            gone = [folder for folder in folders_among(outer.list()) if folder != kept]
            if whole and record is not None:
                _still_alone(outer, lock)
                if read_record(outer)[1] != version:
                    raise SaveInProgress(
                        f"{url} was saved to by another job meanwhile, and is left alone"
                    )
                outer.delete(RECORD)
            for folder in gone:
                _still_alone(outer, lock)
                outer.delete(folder)
            if whole and record is None:
                raise NotACheckpoint(f"no save of megackpt is complete in {url}")
        finally:
            beat.stop()
            beat.join()  # a renewal under way could put the lock back
            lock.release()
    finally:
        active.discard(lock.save_id)


def _still_alone(outer: BucketStorage, lock: buckets.Lock) -> None:
    """A remover that was stopped and taken for dead does not remove what came after it."""
    if not lock.held():
        raise SaveInProgress(
            f"another job took the removal in {outer.location} for dead, and goes on with it"
        )
