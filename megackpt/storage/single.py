"""One file as a storage: a checkpoint that is a single file in a directory with others."""

from __future__ import annotations

import errno
import os

from megackpt.storage.files import LocalReader
from megackpt.storage.local import LocalStorage


class SingleFile(LocalStorage):
    """The directory of a file, with only that file visible.

    The file is opened once, so this storage stays with it even when another one takes its name.
    Raises FileNotFoundError if it is absent, and CorruptCheckpoint if it is not a regular file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        above, self.only = os.path.split(os.path.realpath(path))
        super().__init__(above)
        self._file = super().open(self.only)

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[str]]:
        return SingleFile, (self.called,)

    @property
    def called(self) -> str:
        return os.path.join(self.location, self.only)

    def following(self) -> LocalStorage:
        return self  # the file itself, where every link to it ends

    def list(self, name: str = "") -> list[str]:
        return [] if name else [self.only]

    def stat(self, name: str) -> os.stat_result | None:
        return self._file.status() if name == self.only else None

    def open(self, name: str) -> LocalReader:
        if name != self.only:
            path = os.path.join(self.location, name)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self._file.again()

    def close(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()
        super().close()

    def is_current(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.called), self._file.status())
        except FileNotFoundError:
            return False
