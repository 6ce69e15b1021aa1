"""Removes old steps of a run, and leftovers of dead saves.

Runs on rank 0, after a newer step is complete. It removes only complete checkpoints that have the
run's own naming and were written by this library.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import islice

from megackpt.async_save import Advance, Task
from megackpt.checkpoint import INDEX, clear, open_checkpoint, remove, verify
from megackpt.checkpoint.opening import shortfalls
from megackpt.errors import (
    CheckpointingException,
    CheckpointReplaced,
    CorruptCheckpoint,
    NotACheckpoint,
    SaveInProgress,
    StorageError,
)
from megackpt.manager.run_directory import Naming, RunDirectory, Step, parse_name
from megackpt.storage import TEMPORARY, LocalStorage, Storage

logger = logging.getLogger("megackpt.manager")

STALE_AFTER = 300.0
"""Seconds after which a temporary file of a tracker belongs to a process that died."""


def find_damage(path: str, advance: Advance | None = None) -> str:
    """What is wrong with the checkpoint at ``path``; empty if nothing is.

    It checks the index, the digests of small files, and the sizes of all others. With ``advance``
    it reads everything, and reports the bytes read. Raises StorageError if something cannot be
    read now, which is not damage.
    """
    try:
        if advance is not None:
            report = verify(path, advance=advance)
            if report.unread and not report.problems:
                raise StorageError("; ".join(report.unread[:3]))
            return "; ".join(report.problems[:3])
        opened = open_checkpoint(path)
        if not opened.manifest.save_id and INDEX in opened.storage.list():
            return f"{INDEX} is not a regular file"
        return "; ".join(map(str, shortfalls(opened.storage, opened.manifest)[:3]))
    except CheckpointReplaced:
        raise
    except (NotACheckpoint, CorruptCheckpoint, FileNotFoundError) as error:
        return str(error)


class Retention:
    """Which steps of a run stay.

    Args:
        root: the directory or URL of the run.
        naming: of the steps that may be removed.
        keep_last: number of undamaged steps that stay; None keeps all.
        keep_every: steps that this number divides stay as well.
    """

    def __init__(
        self,
        root: str,
        naming: Naming,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(
                    f"{name} is a number of steps, 1 or more, or None, not {value!r}"
                )
        if keep_every is not None and keep_last is None:
            raise ValueError(
                "keep_every says which of the older steps stay; it needs keep_last, as without "
                "keep_last all steps stay"
            )
        self.root = root
        self.naming = naming
        self._keep_last = keep_last
        self._keep_every = keep_every
        # What was found wrong with a step; empty if nothing. The sizes and times of the files are
        # fields of a step, so a step that has changed is checked again.
        self._damage: dict[Step, str] = {}
        self._reported: set[str] = set()  # names of steps that cannot be removed
        self._next: int | None = None  # the step at which to remove again
        self._removal: Task[None] | None = None

    def superfluous(
        self, steps: Iterable[int], is_good: Callable[[int], bool]
    ) -> list[int]:
        """The steps that need not stay, oldest first. Calls ``is_good`` for as few as possible."""
        ordered = sorted(steps)
        # At least two: what dead saves left is between the two newest, and found on the way.
        needed = max(self._keep_last or 0, 2)
        good = list(islice(filter(is_good, reversed(ordered)), needed))
        if self._keep_last is None or len(good) < self._keep_last:
            return []
        oldest = good[self._keep_last - 1]
        every = self._keep_every
        return [s for s in ordered if s < oldest and (every is None or s % every)]

    def start(self, newest: int, timeout: timedelta) -> None:
        """Let a thread of its own ``apply`` this; the one that is at work does it next."""
        self._next = newest
        if self._removal is None or self._removal.outcome is not None:
            name = f"remove steps in {self.root} (rank 0)"
            self._removal = Task(self._remove_all, name, timeout=timeout)
            self._removal.start()

    def _remove_all(self, advance: Advance) -> None:
        while self._next is not None:
            newest, self._next = self._next, None
            self.apply(newest, advance)

    def wait(self, timeout: timedelta, quiet: bool = False) -> None:
        """Wait for the removals that were begun.

        StorageError if the storage does not answer; ``quiet`` logs it instead.
        """
        removal, self._removal = self._removal, None
        if removal is None:
            return
        removal.join()
        try:
            removal.get()
        except StorageError as error:
            if not quiet:
                raise
            logger.warning("older steps are left to the next save: %s", error)
            return
        if self._next is not None:  # its thread was about to end
            self.start(self._next, timeout)
            self.wait(timeout, quiet)

    def apply(self, newest: int, advance: Advance) -> None:
        """Remove what need not stay at the step ``newest`` of the run, which neither counts nor
        removes later steps. A failure is logged, and the next save tries again.
        """
        try:
            run = RunDirectory(self.root)
            self._remove_temporary_files(run.storage)
            for name in sorted(run.replaced_names()):
                self._clear(name)
            own = {}
            for number, names in run.names_by_step().items():
                name = self.naming.name(number)
                if number <= newest and name in names:
                    own[number] = name

            def is_good(number: int) -> bool:
                return any(map(self._is_good, run.examine(own[number])))

            for number in self.superfluous(own, is_good):
                advance(0)  # raises if the storage was given up
                self._remove(run, own[number])
        except Exception as error:
            is_expected = isinstance(error, (CheckpointingException, OSError))
            text = "old steps of %s are not removed, the next save tries again: %s"
            logger.warning(text, self.root, error, exc_info=not is_expected)

    def damage(self, step: Step) -> str | None:
        """The damage that was found earlier; None if the step was not checked since it changed."""
        return self._damage.get(step)

    def note_damage(self, step: Step, damage: str) -> None:
        """Remember the result of a check."""
        self._damage[step] = damage

    def path(self, name: str) -> str:
        """The path or URL of a step."""
        return f"{self.root.rstrip('/')}/{name}"

    def is_own_name(self, name: str) -> bool:
        """Whether a manager with this naming gives this name."""
        number = parse_name(name)[1]
        return number is not None and self.naming.name(number) == name

    def _is_removable(self, name: str) -> bool:
        # The target of a link is not ours.
        return self.is_own_name(name) and not os.path.islink(self.path(name))

    def _clear(self, name: str) -> None:
        """Remove what dead saves to this step left."""
        try:
            if self._is_removable(name):
                clear(self.path(name))
        except (SaveInProgress, NotACheckpoint):
            # Another job is working on it, or has finished to.
            return
        except CheckpointingException as error:
            text = "the leftovers of a dead save to %s stay: %s"
            logger.warning(text, self.path(name), error)

    def _remove_temporary_files(self, root: Storage) -> None:
        """Remove trackers that dead processes have not finished."""
        if not isinstance(root, LocalStorage):
            return
        names = [name for name in root.list() if name.startswith(TEMPORARY)]
        now = 0.0
        if names:
            now = root.now()
        for name in names:
            if now - (root.modified(name) or now) > STALE_AFTER:
                root.delete(name)

    def _is_good(self, step: Step) -> bool:
        if not step.complete:
            self._clear(step.name)
            return False
        damage = self.damage(step)
        if damage is None and self._keep_last is not None:
            damage = find_damage(self.path(step.name))
            self.note_damage(step, damage)
            if damage:
                text = "%s is damaged, so it does not count: %s"
                logger.warning(text, self.path(step.name), damage)
        return not damage

    def _remove(self, run: RunDirectory, name: str) -> None:
        if not self._is_removable(name):
            return
        try:
            remove(self.path(name))
        except SaveInProgress:
            return
        except (CheckpointingException, OSError) as error:
            is_complete = any(step.complete for step in run.examine(name))
            if is_complete and name not in self._reported:
                self._reported.add(name)
                logger.warning("%s stays: %s", self.path(name), error)
