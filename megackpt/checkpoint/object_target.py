"""The target of a transaction in an object store: a record, and a folder for each save.

    URL/megackpt.commit      the record: its put is the commit
    URL/megackpt-<save id>/  all files of one save, a complete checkpoint

A save reads the version of the record when it begins, writes into a separate folder, and puts
its record on the condition that the record still has that version. The store decides which save
wins. No object is renamed or written twice. The folders that existed before the put belong to
saves that began before it. None of them can commit any more, so they are removed afterwards.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from megackpt.checkpoint.marker import (
    PREFIX,
    Marker,
    logger,
    read_marker,
    refuse_working,
)
from megackpt.checkpoint.ownership import is_replaceable, own_files
from megackpt.checkpoint.records import (
    FORMAT,
    LARGEST_RECORD,
    RECORD,
    Record,
    read_record,
    save_folder,
    save_folders,
)
from megackpt.errors import (
    CheckpointExists,
    CheckpointingException,
    CorruptCheckpoint,
    NotACheckpoint,
    SaveInProgress,
    StorageError,
)
from megackpt.storage import (
    PROBE,
    SINGLE_WRITER,
    BucketStorage,
    Storage,
    Version,
    conditional_puts,
)

PROBE_SECONDS = 3600.0
"""An older probe is of a process that died. Stores refuse requests whose clock differs by less."""


class ObjectTarget:
    """A URL as the target of a save. ``base``: the version of the record that it replaces."""

    def __init__(self, url: str) -> None:
        self.outer = BucketStorage(url)
        self.location = self.outer.location
        self._base: Version | None = None
        self._replaced: list[str] = []  # folders of saves
        self._foreign: tuple[str, ...] = ()
        self.uncertain = False
        """Whether it is unknown if the record was put. No folder may be removed then."""

    def check_name(self, save_id: str) -> None:
        """StorageError where no save of this id can be committed here."""
        if not save_folders([save_folder(save_id)]):
            raise StorageError(
                f"{save_id!r} is not an id for a save in an object store: give "
                f"uuid.uuid4().hex. Folders of other programs in {self.location} are "
                f"recognised by it"
            )
        if not conditional_puts(self.outer):
            raise StorageError(
                f"{self.location}: this store ignores the conditions of puts, so of two "
                f"jobs that save to one place both could win. If there is never more than "
                f"one, set {SINGLE_WRITER}=1 in the environment"
            )

    @property
    def replaces_something(self) -> bool:
        """Did a record exist when the save began?"""
        return self._base is not None

    def begin(self, marker: Marker, overwrite: bool, resume: bool) -> bool:
        """Read the record to replace, and make the folder of this save.

        Returns False: a save in an object store does not continue a dead one.
        """
        del resume
        names = self.outer.list()
        current = self._read_base(overwrite, names)
        if current is not None:
            self._remove_dead(names, current, abandoned=False)
        self.staging_folder(marker.save_id).put(marker.name, marker.encode())
        return False

    def refuse_collisions(
        self, names: Collection[str], replaces: Collection[str]
    ) -> None:
        """No collision is possible: each save has a separate folder."""

    def staging_folder(
        self, save_id: str, moved: Callable[[], object] = int
    ) -> BucketStorage:
        return self.outer.folder(save_folder(save_id), moved)

    def holds(self, save_id: str) -> bool:
        """Is the marker of this save where it was put?"""
        return self.staging_folder(save_id).size(PREFIX + save_id) is not None

    def _read_base(self, overwrite: bool, names: list[str]) -> str | None:
        """The folder of the current checkpoint, "" without one, None if the record is damaged."""
        try:
            record, self._base = read_record(self.outer)
        except CorruptCheckpoint as error:
            if not overwrite:
                raise CorruptCheckpoint(
                    f"{error}. Pass overwrite=True to replace it, or remove "
                    f"{self.outer.url(RECORD)}"
                ) from error
            logger.warning("%s; replacing it", error)
            self._base = self.outer.version(RECORD)
            return None  # any folder may hold the checkpoint
        # Other objects stay: no save uses their names. A checkpoint uploaded under the URL
        # itself, without a record, is a checkpoint too.
        others = set(names).difference(save_folders(names), [RECORD])
        if record is None and others and is_replaceable(self.outer):
            self._foreign = own_files(self.outer)
        if (record or self._foreign) and not overwrite:
            raise CheckpointExists(f"{self.location} holds a complete checkpoint")
        return "" if record is None else save_folder(record.save_id)

    def _remove_dead(
        self, names: list[str], current: str, abandoned: bool
    ) -> list[Marker]:
        """Remove folders that no record can name any more. Returns the markers of live saves."""
        for name in names:
            made = self.outer.modified(name) if name.startswith(PROBE) else None
            if made is not None and time.time() - made > PROBE_SECONDS:
                self.outer.remove_objects([name])
        alive = []
        for folder in save_folders(names):
            if folder == current:
                continue
            save_id = folder.removeprefix("megackpt-")
            marker = read_marker(self.outer.folder(folder), PREFIX + save_id, save_id)
            if marker is not None and not marker.is_dead(abandoned):
                alive.append(marker)
                continue
            # It may have been committed since the record was read. A folder without a marker
            # was committed once: if the record does not name it now, it never will again.
            record, _ = read_record(self.outer)
            if record is None or save_folder(record.save_id) != folder:
                self.outer.delete(folder)
        return alive

    def staging(
        self,
        save_id: str,
        moved: Callable[[], object] = int,
        direct: bool = False,  # noqa: ARG002
    ) -> Storage:
        """Where the ranks write. StorageError where this rank does not see it.

        ``direct`` has no effect: no page cache is in the way to an object store.
        """
        if not self.holds(save_id):
            raise StorageError(
                f"the save {save_id}, which the coordinator began in {self.location}, "
                f"is not visible from here: do all ranks reach the same store "
                f"(AWS_ENDPOINT_URL, region, account)?"
            )
        return self.staging_folder(save_id, moved)

    def publish(
        self,
        record: Record,
        names: Collection[str],
        replaces: Collection[str],
        confirm: Callable[[], None],
    ) -> None:
        """Replace the record by the record of this save.

        ``confirm`` is called right before the put. If it raises, the record is unchanged.

        Raises:
            SaveInProgress: another save has put its record meanwhile.
            StorageError: the store refused, or it is not known whether the record was put.
        """
        del names, replaces  # see refuse_collisions
        save_id, data = record.save_id, record.encode()
        own = save_folder(save_id)
        # Listed before the put: later folders may be of saves that replace this one.
        found = save_folders(self.outer.list())
        self._replaced = [folder for folder in found if folder != own]
        if own not in found:
            raise SaveInProgress(
                f"another job has removed the save in {self.outer.url(own)}: nothing is "
                f"committed"
            )
        url = self.outer.url(RECORD)
        confirm()
        self.uncertain = True
        try:
            committed = self.outer.put_if_match(RECORD, data, self._base)
        except StorageError as error:
            # The answer to a put that succeeded may have been lost.
            with suppress(CheckpointingException):
                found_record, _ = read_record(self.outer)
                if found_record is not None and found_record.save_id == save_id:
                    return
            raise StorageError(
                f"it is not known whether {url} was put, so nothing is removed. If it "
                f"names {save_id} later, the save is complete: {error}"
            ) from error
        if not committed:
            self.uncertain = False
            raise SaveInProgress(
                f"another save has written to {self.location} since this one began: {url} "
                f"is the other's, and nothing of this save is committed"
            )

    def settle(self, marker: Marker) -> None:
        """Remove the files that the new record no longer names."""
        try:
            for folder in self._replaced:
                self.outer.delete(folder)
            self.outer.remove_objects(self._foreign)
            self.staging_folder(marker.save_id).delete(marker.name)
        except CheckpointingException as error:
            logger.warning(
                "%s is committed, but clearing up is left to the next save: %s",
                self.location,
                error,
            )

    def discard(self, save_id: str) -> None:
        """Remove the folder of a save that is not committed."""
        if not self.uncertain:
            self.outer.delete(save_folder(save_id))

    def completed(self, save_id: str) -> bool:  # noqa: ARG002
        """Did a save of this id publish the target, and die before ``settle``? It is not known."""
        return False

    def remove(self, marker: Marker) -> None:
        """Remove the checkpoint, and the leftovers of saves that are dead or cannot commit.

        A record of the removal replaces its record, on the condition that it has not changed.
        """
        self.check_name(marker.save_id)
        self.clear()
        record, self._base = read_record(self.outer)
        if record is None:
            raise NotACheckpoint(f"no save of megackpt is complete in {self.location}")
        found = save_folders(self.outer.list())
        removed = {"format": FORMAT, "removed": True, "save_id": marker.save_id}
        if not self.outer.put_if_match(
            RECORD, json.dumps(removed).encode(), self._base
        ):
            raise SaveInProgress(
                f"{self.location} was saved to by another job meanwhile, and is left alone"
            )
        for folder in found:
            self.outer.delete(folder)
        # Stores have no conditional removal. A save that puts its record between these two
        # requests would lose it.
        data, _ = self.outer.get_version(RECORD, LARGEST_RECORD)
        if data == json.dumps(removed).encode():
            self.outer.delete(RECORD)

    def clear(self) -> None:
        """Remove leftovers of dead saves."""
        record, _ = read_record(self.outer)
        current = "" if record is None else save_folder(record.save_id)
        names = self.outer.list()
        refuse_working(self.location, self._remove_dead(names, current, abandoned=True))
