"""Retention: which steps of a run stay, and the removal of the others and of what crashed saves have left.

By one process alone, and only after a newer step is complete. Removed is what bears the run's own kind of name, is
complete and was written by this library; the rest is left alone.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from megackpt.checkpoint import clear, open_checkpoint, remove, verify
from megackpt.checkpoint.marker import SILENCE
from megackpt.checkpoint.opening import shortfalls
from megackpt.errors import (
    CheckpointingException,
    CheckpointReplaced,
    CorruptCheckpoint,
    NotACheckpoint,
    SaveInProgress,
)
from megackpt.manager.finding import Naming, Step, list_run
from megackpt.runtime.storage import TEMPORARY, LocalStorage, root_at

logger = logging.getLogger("megackpt.manager")

_SIBLING = re.compile(r"\.(.+)\.megackpt-[^./]+(?:\.old)?")


def damage_of(path: str, *, whole: bool = False) -> str:
    """What is wrong with the checkpoint here, if anything. Unless ``whole``, no byte of its tensors is read: the index,
    the digests of the small files, and the sizes of all others tell.
    """
    try:
        if whole:
            return "; ".join(verify(path).problems[:3])
        opened = open_checkpoint(path)
        return "; ".join(map(str, shortfalls(opened.storage, opened.manifest)[:3]))
    except CheckpointReplaced:
        raise
    except (NotACheckpoint, CorruptCheckpoint, FileNotFoundError) as error:
        return str(error)


@dataclass(frozen=True)
class Retention:
    """``last``: so many undamaged steps stay (None: all). ``every``: so do those whose number this divides."""

    root: str
    naming: Naming
    last: int | None = None
    every: int | None = None
    _complete: dict[str, Step] = field(default_factory=dict, repr=False, compare=False)
    """Steps that were seen complete, by their entries: they are not opened again at each save."""

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.last), ("keep_every", self.every)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is a number of steps, 1 or more, or None, not {value!r}")
        if self.every is not None and self.last is None:
            raise ValueError(
                "keep_every says which of the older steps stay; give keep_last, too (None keeps all)"
            )

    def superfluous(self, steps: Iterable[int], is_good: Callable[[int], bool]) -> list[int]:
        """Of these steps, those that need not stay, oldest first. No more are looked at than have to stay."""
        ordered = sorted(steps)
        if self.last is None or len(ordered) <= self.last:
            return []
        good = tuple(islice(filter(is_good, reversed(ordered)), self.last))
        if len(good) < self.last:
            return []
        return [step for step in ordered if step < good[-1] and (self.every is None or step % self.every)]

    def tidy(self, newest: int) -> None:
        """``newest`` has just been committed. What cannot be removed is left to the next time, with a warning."""
        try:
            root = root_at(self.root)
            self._clear_torn(root)
            entries = root.list()
            steps = list_run(self.root, weigh=False, only=lambda name: name not in self._complete).steps
            self._clear({s.name for s in steps if s.complete is False} | _hidden(entries))
            known = self._complete | {s.name.split("/")[0]: s for s in steps if s.complete}
            self._complete.clear()
            self._complete.update((name, known[name]) for name in entries if name in known)
            self._remove(list(self._complete.values()), newest)
        except Exception as error:
            expected = isinstance(error, (CheckpointingException, OSError))
            text = "%s is not tidied up, the next save tries again: %s"
            logger.warning(text, self.root, error, exc_info=not expected)

    def path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    def owns(self, name: str) -> bool:
        """Is it a name that this manager gives?"""
        match = self.naming.pattern.fullmatch(name)
        return match is not None and self.naming.name(int(match[1])) == name

    def _removable(self, name: str) -> bool:
        return self.owns(name) and not os.path.islink(
            self.path(name)
        )  # what is behind a link is somebody else's

    def _clear(self, names: Iterable[str]) -> None:
        for name in sorted(filter(self._removable, names)):
            try:
                clear(self.path(name))
            except (SaveInProgress, NotACheckpoint):
                continue  # somebody is at work on it, or has been
            except CheckpointingException as error:
                logger.warning("what a dead save left of %s stays: %s", self.path(name), error)

    def _clear_torn(self, root: object) -> None:
        """Files that were to become a tracker, of processes that died."""
        if isinstance(root, LocalStorage) and (torn := [n for n in root.list() if n.startswith(TEMPORARY)]):
            now = root.now()
            for name in torn:
                if now - (root.modified(name) or now) > SILENCE:
                    root.delete(name)

    def _remove(self, steps: Sequence[Step], newest: int) -> None:
        numbers = {step.step: step.name for step in steps if self.owns(step.name) and step.step is not None}
        later = [step.step for step in steps if step.step is not None and step.step > newest]
        if later:
            logger.warning(
                "%s holds step %d, which is after step %d that was saved now: it stays, and is what restore() finds; "
                "where the run was set back, remove what is after it",
                self.root,
                max(later),
                newest,
            )
        before = [number for number in numbers if number <= newest]
        for number in self.superfluous(before, self._is_good):
            if not self._removable(numbers[number]):
                continue
            try:
                remove(self.path(numbers[number]))
            except (CheckpointingException, OSError) as error:
                logger.warning("%s stays: %s", self.path(numbers[number]), error)

    def _is_good(self, step: int) -> bool:
        path = self.path(self.naming.name(step))
        if problem := damage_of(path):
            logger.warning("%s is damaged, so an older one stays in its place: %s", path, problem)
        return not problem


def _hidden(names: Iterable[str]) -> set[str]:
    """The steps to which saves have left siblings."""
    return {match[1] for name in names if (match := _SIBLING.fullmatch(name))}
