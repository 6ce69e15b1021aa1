"""Which local saves count: the lines of the run, in two equal files in the run's directory.

A *line* is the sequence of saves that one job makes between two restores. Each local save has the
id of its line. A host that was away may come back with saves of a line that was left at an earlier
step.
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
from contextlib import suppress
from threading import Lock

from megackpt.checkpoint.run_directory import list_run
from megackpt.errors import CorruptCheckpoint
from megackpt.manager.local.pieces import LocalSave
from megackpt.storage import digest, root_at

logger = logging.getLogger("megackpt.manager")

Lines = dict[str, int]
"""The lines that lead to the present of a run: their ids, and the last step of each that counts."""

_FILES = ".megackpt-run", ".megackpt-run.copy"


class Line:
    """The line that a manager saves. It counts as soon as its first save is complete.

    Args:
        root: the directory or URL of the run.
        former: the lines that count until then.
        last: their last step that counts afterwards.
    """

    def __init__(self, root: str, former: Lines, last: int) -> None:
        self._root, self.former = root, former
        self._left = {line: min(step, last) for line, step in former.items()}
        # Greater than the ids before, whatever the clock says. All ranks use the id of rank 0.
        now = max(time.time_ns(), int(max(former, default="0")[:16], 16) + 1)
        self._id = f"{now:016x}{secrets.token_hex(4)}"
        self.is_begun = self.is_complete = self.is_promised = False
        self._saves = 0
        # The thread of a local save writes the files, too.
        self._lock = Lock()
        self._is_written = False

    def new_save(self, step: int, size: int, is_due: bool) -> LocalSave:
        """A save of ``size`` ranks; ``is_due``: it is drained. On rank 0."""
        self._saves += 2
        return LocalSave(step, f"{self._id}{self._saves + is_due:08x}", size)

    def has_left(self, save_id: str, step: int | None) -> bool:
        """Whether the local save with this id is of a former line, and does not count any more."""
        save = LocalSave(step or 0, save_id, 0)
        return save.counts(self.former) and not save.counts(self._left)

    def promise(self, first: int) -> None:
        """The step ``first`` will be saved in the storage, as the first of this line. On rank 0.

        Steps that the line does not continue count until that is complete.
        """
        with self._lock:
            if not self._is_written:
                before = _saved(self._root, first)
                table = {"lines": self.former, "then": self._left}
                _write(self._root, **table, first=first, before=before)

    def write(self) -> None:
        """A local save is complete: the line counts, steps that it left do not. On rank 0."""
        with self._lock:
            _write(self._root, lines=self._left | {self._id: sys.maxsize})
            self._is_written = True


def _write(root: str, **table: float | Lines) -> None:
    body = json.dumps(table).encode()
    storage = root_at(root, create=True)
    # The copy first: an entry that a reader finds in the file is in both.
    for name in reversed(_FILES):
        if storage.size(name) is None:
            storage.delete(name)  # a directory of this name
        storage.put(name, f"{digest(body).hex()}\n".encode() + body)


def read_lines(root: str) -> Lines:
    """The lines that count: none, if the files are absent or both are damaged.

    The log has a warning about damage. Raises StorageError if the storage refuses to read them.
    """
    for name in _FILES:
        with suppress(FileNotFoundError, NotADirectoryError):
            try:
                head, _, body = root_at(root).get(name).partition(b"\n")
                if head != digest(body).hex().encode():
                    raise CorruptCheckpoint(f"{root}/{name} is damaged")
            except CorruptCheckpoint as error:
                text = "%s. If %s is damaged, too, the steps in the storage alone count"
                logger.warning(text, error, _FILES[1])
                continue
            table = json.loads(body)
            is_kept = (
                "first" in table and _saved(root, table["first"]) > table["before"]
            )
            return dict(table["then" if is_kept else "lines"])
    return {}


def _saved(root: str, first: int) -> float:
    """When the last of the complete steps from ``first`` on was saved; 0 if there is none."""
    steps = list_run(root).steps
    times = [s.saved for s in steps if s.complete and first <= (s.step or 0)]
    return max(times, default=0.0)
