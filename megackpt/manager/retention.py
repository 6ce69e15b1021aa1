"""Retention: which steps of a run stay, and the removal of the others and of what crashed saves have left.

By one process alone, and only after a newer step is complete. Removed is what bears the run's own kind of name, is
complete and was written by this library; the rest is left alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from megackpt.checkpoint import INDEX, clear, open_checkpoint, remove, verify
from megackpt.checkpoint.marker import SILENCE
from megackpt.checkpoint.opening import shortfalls
from megackpt.errors import (
    CheckpointingException,
    CheckpointReplaced,
    CorruptCheckpoint,
    NotACheckpoint,
    SaveInProgress,
    StorageError,
)
from megackpt.manager.finding import Names, Naming, Step
from megackpt.storage import TEMPORARY, LocalStorage, Storage

logger = logging.getLogger("megackpt.manager")


def damage_of(path: str, *, whole: bool = False) -> str:
    """What is wrong with the checkpoint here, if anything. Unless ``whole``, no byte of its tensors is read: the index,
    the digests of the small files that it names, and the sizes of all others tell.

    Raises StorageError where nothing is known to be wrong, but something cannot be read: it may be later.
    """
    try:
        if whole:
            report = verify(path)
            if report.unread and not report.problems:
                raise StorageError("; ".join(report.unread[:3]))
            return "; ".join(report.problems[:3])
        opened = open_checkpoint(path)
        if not opened.manifest.save_id and INDEX in opened.storage.list():
            return f"{INDEX} is no regular file"
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
    _known: dict[str, tuple[Step, str | None]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """What is wrong with a step of this weight; empty: nothing; None: it is not to be removed, and may be anything."""

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.last), ("keep_every", self.every)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(
                    f"{name} is a number of steps, 1 or more, or None, not {value!r}"
                )
        if self.every is not None and self.last is None:
            raise ValueError(
                "keep_every says which of the older steps stay; give keep_last, too (None keeps all)"
            )

    def superfluous(
        self, steps: Iterable[int], is_good: Callable[[int], bool]
    ) -> list[int]:
        """Of these steps, those that need not stay, oldest first. No more are looked at than have to stay."""
        ordered = sorted(steps)
        # Of one, too, the one before is looked at: between them may be what dead saves left.
        good = tuple(islice(filter(is_good, reversed(ordered)), max(self.last or 0, 2)))
        if self.last is None or len(good) < self.last:
            return []
        oldest = good[self.last - 1]
        return [
            step
            for step in ordered
            if step < oldest and (self.every is None or step % self.every)
        ]

    def tidy(self, position: Callable[[], tuple[int, Collection[int]]]) -> None:
        """A step has just been committed. What cannot be removed is left to the next time, with a warning.

        ``position``: the step that the run is at, and the steps whose saves it has begun since. It is called once the
        directory is listed: while this works in a thread, the run begins and commits further saves.
        """
        try:
            names = Names.of(self.root)
            self._clear_torn(names.root)
            for name in sorted(names.replaced()):
                self._clear(name)
            newest, begun = position()
            self._tell_of_later(names, newest, begun)
            numbers = names.numbers().items()
            own = {
                n: name
                for n, found in numbers
                if n <= newest and (name := self.naming.name(n)) in found
            }
            for number in self.superfluous(
                own, lambda n: any(self._good_in(names, own[n]))
            ):
                self._remove(names, own[number])
        except Exception as error:
            expected = isinstance(error, (CheckpointingException, OSError))
            text = "%s is not tidied up, the next save tries again: %s"
            logger.warning(text, self.root, error, exc_info=not expected)

    def known(self, step: Step) -> str | None:
        """What was found wrong with it. None: nobody has looked since its files got these sizes and times."""
        seen, found = self._known.get(step.name, (None, None))
        return found if seen == step else None

    def note(self, step: Step, found: str) -> None:
        self._known[step.name] = step, found

    def path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    def owns(self, name: str) -> bool:
        """Is it a name that this manager gives?"""
        match = self.naming.pattern.fullmatch(name)
        return match is not None and self.naming.name(int(match[1])) == name

    def _removable(self, name: str) -> bool:
        """What is behind a link is somebody else's."""
        return self.owns(name) and not os.path.islink(self.path(name))

    def _clear(self, name: str) -> None:
        try:
            if self._removable(name):
                clear(self.path(name))
        except (SaveInProgress, NotACheckpoint):
            return  # somebody is at work on it, or has been
        except CheckpointingException as error:
            logger.warning(
                "what a dead save left of %s stays: %s", self.path(name), error
            )

    def _clear_torn(self, root: Storage) -> None:
        """Files that were to become a tracker, of processes that died."""
        if isinstance(root, LocalStorage) and (
            torn := [n for n in root.list() if n.startswith(TEMPORARY)]
        ):
            now = root.now()
            for name in torn:
                if now - (root.modified(name) or now) > SILENCE:
                    root.delete(name)

    def _tell_of_later(self, names: Names, newest: int, begun: Collection[int]) -> None:
        numbers = names.numbers().items()
        later = (
            name
            for n, named in numbers
            if n > newest and n not in begun
            for name in named
        )
        text = (
            "%s holds step %d, which is after step %d that was saved now: it stays, and is what restore() finds; where "
            "the run was set back, remove what is after it"
        )
        for step in islice(
            chain.from_iterable(self._good_in(names, name) for name in later), 1
        ):
            logger.warning(text, self.root, step.step, newest)

    def _good_in(self, names: Names, name: str) -> Iterator[Step]:
        return filter(
            self._is_good,
            names.steps([name], weigh=self.last is not None or bool(self._known)),
        )

    def _is_good(self, step: Step) -> bool:
        """What a dead save left of it is cleared."""
        if not step.complete:
            self._clear(step.name)
            return False
        problem = self.known(step)
        if problem is None and self.last is not None:
            problem = damage_of(self.path(step.name))
            self.note(step, problem)
            if problem:
                logger.warning(
                    "%s is damaged, so it does not count: %s",
                    self.path(step.name),
                    problem,
                )
        return not problem

    def _remove(self, names: Names, name: str) -> None:
        """What stays for good is told once."""
        seen, found = self._known.get(name, (None, ""))
        if found is None and seen in names.steps([name], weigh=True):
            return
        try:
            if self._removable(name):
                remove(self.path(name))
        except SaveInProgress:
            return  # somebody is at work on it
        except (CheckpointingException, OSError) as error:
            if any(step.complete for step in names.steps([name])):
                logger.warning("%s stays: %s", self.path(name), error)
            if not isinstance(error, (NotACheckpoint, CorruptCheckpoint)):
                return
        self._known.pop(name, None)
        for step in names.steps([name], weigh=True):
            self._known[name] = step, None
