"""Where one save writes, from its beginning to its commit: the verbs, whatever is behind them, and their order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from megackpt.backends.base import Backend
from megackpt.checkpoint.chunk_checks import damage
from megackpt.checkpoint.opening import shortfalls
from megackpt.errors import CorruptCheckpoint, StorageError, join_truncated
from megackpt.planning.manifest import Manifest
from megackpt.storage import Storage


class Place(ABC):
    """On the coordinator. Ranks write below ``path``, which each finds by ``place_of``."""

    save_id: str
    storage: Storage
    resumed = False
    """A dead save of this id is gone on with: what it has written is there (see ``keep_only``)."""

    @property
    def path(self) -> str:
        """What ranks write to: a directory, or a URL."""
        return self.storage.location

    @abstractmethod
    def announce(
        self,
        names: Iterable[str],
        scratch: Iterable[str] = (),
        replaces: Iterable[str] = (),
    ) -> None:
        """Note the top-level names that this save may make, before any is made.

        ``scratch`` are files for the time of the save only: the commit removes them. ``replaces``: foreign files
        (full names) that have the bytes which this save writes: they stay, and are no collision.

        Raises StorageError where foreign files have such names: nothing has been changed.
        """

    def keep_only(self, files: Collection[str]) -> None:
        """Of all that this save has made so far (being a resumed one), keep these files and its scratch."""
        raise NotImplementedError(f"no save in {self.path} is resumed")

    @abstractmethod
    def abort(self) -> None:
        """Remove what this save made, and nothing else. What cannot be removed is left to the next save."""

    @abstractmethod
    def abandon(self) -> None:
        """End without touching a file, for ranks that were lost may still write: the next save clears up."""

    @abstractmethod
    def fill(
        self, small: dict[str, bytes], manifest: Manifest, confirm: Callable[[], None]
    ) -> None:
        """Write the small files and the index; the last one completes the directory."""

    @abstractmethod
    def publish(self, confirm: Callable[[], None]) -> None:
        """Make what is complete the checkpoint that readers find, and leave nothing behind."""


def commit(
    place: Place,
    backend: Backend,
    manifest: Manifest,
    reread: bool = False,
    confirm: Callable[[], None] = lambda: None,
) -> None:
    """All ranks have written: make it a checkpoint, in one atomic step.

    ``manifest`` has the locations that the ranks reported. When this raises, nothing is committed, and
    ``place.abort()`` is the caller's next call; when it returns, the checkpoint is complete and durable.
    With ``reread`` all that was written is read once more before, and compared with its digests. ``confirm`` is
    called last of all before the atomic step, and stops the commit by raising.

    Raises:
        StorageError: the disk refused, or files that ranks wrote are not to be seen from here.
        CorruptCheckpoint: what is read again is not what was written.
        SaveInProgress: another save has come first, where nobody could keep it out (object stores).
    """
    properties = backend.properties
    manifest = replace(
        manifest,
        backend=(properties.name, properties.version),
        encoding=properties.encoding,
        save_id=place.save_id,
    )
    _check_files(place.storage, manifest)
    result = backend.finish(place.storage, manifest)
    if reread and (problems := damage(place.storage, backend, result.manifest)):
        raise CorruptCheckpoint(
            "what was written is not what is read again:\n" + "\n".join(problems)
        )
    place.fill(dict(result.files), result.manifest, confirm)
    place.publish(confirm)


def _check_files(storage: Storage, manifest: Manifest) -> None:
    """Are the files that the ranks report here, in full?"""
    missing = shortfalls(storage, manifest)
    if missing:
        raise StorageError(
            f"{len(missing)} of {len(manifest.files)} files that ranks wrote cannot be seen by the "
            f"coordinator in {storage.location}: {join_truncated(missing, 5)}. "
            "Is the directory shared between all hosts?"
        )
