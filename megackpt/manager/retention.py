"""Removes old steps of a run, and leftovers of dead saves.

Retention runs on rank 0, after a newer step is complete. It removes only complete checkpoints that
have the naming of the run and were written by this library.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from datetime import timedelta
from functools import cache, partial
from itertools import islice

from megackpt.checkpoint import (
    INDEX,
    clear,
    find_storage,
    open_checkpoint,
    remove,
    verify,
)
from megackpt.checkpoint.opening import shortfalls
from megackpt.checkpoint.run_directory import (
    METRICS,
    TRACKERS,
    Naming,
    RunDirectory,
    Step,
    parse_name,
    read_metrics,
)
from megackpt.errors import (
    CheckpointingException,
    CheckpointReplaced,
    CorruptCheckpoint,
    NotACheckpoint,
    SaveInProgress,
    StorageError,
)
from megackpt.manager.keep_rules import KeepRules
from megackpt.storage import (
    TEMPORARY,
    Advance,
    Call,
    Executor,
    LocalStorage,
    Storage,
    root_at,
)

logger = logging.getLogger("megackpt.manager")

STALE_AFTER = 300.0
"""Seconds after which a temporary file of a tracker belongs to a process that died."""


def find_problems(path: str, advance: Advance | None = None) -> tuple[str, str]:
    """Describe the damage of a checkpoint, and its tensors with NaN or infinite values.

    The second text comes from the notes of the save. Both texts may be empty. The function checks
    the index, the digests of small files, and the sizes of all large files. With ``advance`` it
    reads everything, and reports the bytes read. Raises StorageError if something cannot be read
    now, which is not damage.
    """
    try:
        if advance is not None:
            report = verify(path, advance=advance, timeout=None)
            if report.problems:
                return "; ".join(report.problems[:3]), ""
            if report.unread:
                raise StorageError("; ".join(report.unread[:3]))
        opened = open_checkpoint(path)
        nonfinite = opened.manifest.nonfinite()
        missing = shortfalls(opened.storage, opened.manifest)
        return "; ".join(map(str, missing[:3])), nonfinite
    except CheckpointReplaced:
        raise
    except (NotACheckpoint, CorruptCheckpoint, FileNotFoundError) as error:
        return str(error), ""


def find_damage(path: str) -> str:
    """Describe the damage of the checkpoint at ``path``; see ``find_problems``."""
    return find_problems(path)[0]


class Retention:
    """Which steps of a run stay.

    Args:
        root: the directory or URL of the run.
        naming: of the steps that may be removed.
        rules: which of these steps stay.
        is_rehearsal: only report; the directory stays as it is.
    """

    def __init__(
        self, root: str, naming: Naming, rules: KeepRules, is_rehearsal: bool = False
    ) -> None:
        self.root = root
        self.naming = naming
        self.rules = rules
        self._is_rehearsal = is_rehearsal
        # The damage found in a step; empty if the step is undamaged. The sizes and times of the
        # files are fields of a step, so a step that has changed is checked again.
        self.damage: dict[Step, str] = {}
        self._nonfinite: dict[Step, str] = {}  # of steps that were found to be good
        self._reported: set[str] = set()  # names of steps that cannot be removed
        self._next: int | None = None  # the step at which to remove again
        self._removal: tuple[Executor, Call[None]] | None = None

    def superfluous(
        self, steps: Iterable[int], is_good: Callable[[int], bool]
    ) -> list[int]:
        """The steps that need not stay, oldest first. Calls ``is_good`` for as few as possible."""
        ordered = sorted(steps)
        # Look at two steps at least: leftovers of dead saves are between them.
        keep_last = self.rules.keep_last
        needed = max(keep_last or 0, 2)
        good = list(islice(filter(is_good, reversed(ordered)), needed))
        if keep_last is None or len(good) < keep_last:
            return []
        oldest = good[keep_last - 1]
        every, keeps = self.rules.keep_every, self.rules.keep_fn
        older = [s for s in ordered if s < oldest and (every is None or s % every)]
        return [s for s in older if keeps is None or not keeps(s)]

    def start(self, newest: int, timeout: timedelta) -> None:
        """Let a separate thread ``apply`` this; a thread that is at work does it next."""
        self._next = newest
        if self._removal is None or self._removal[1].ended.is_set():
            name = f"remove steps in {self.root} (rank 0)"
            with closing(Executor(timeout)) as executor:  # its thread ends after this
                work = partial(self._remove_all, executor.progress.advance)
                self._removal = executor, executor.start(name, work)

    def _remove_all(self, advance: Advance) -> None:
        while self._next is not None:
            newest, self._next = self._next, None
            self.apply(newest, advance)

    def wait(self, timeout: timedelta, quiet: bool = False) -> None:
        """Wait for the removals that ``start`` has started.

        StorageError if the storage does not answer; ``quiet`` logs it instead.
        """
        removal, self._removal = self._removal, None
        if removal is None:
            return
        executor, call = removal
        try:
            executor.result(call)
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
            self.prune(newest, advance)
        except Exception as error:
            is_expected = isinstance(error, (CheckpointingException, OSError))
            text = "old steps of %s are not removed, the next save tries again: %s"
            logger.warning(text, self.root, error, exc_info=not is_expected)

    def prune(self, newest: int, advance: Advance) -> list[str]:
        """As ``apply``, but raises. Returns the names of the steps that were removed."""
        run = RunDirectory(self.root)
        advance(0)  # raises if the storage was given up
        self._remove_temporary_files(run.storage)
        for name in sorted(run.replaced_names()):
            advance(0)
            self._clear(name)
        own: dict[int, str] = {}
        for number, found in run.names_by_step().items():
            name = self.naming.name(number)
            if number <= newest and name in found:
                own[number] = name

        @cache
        def good_steps(number: int) -> list[Step]:
            steps = run.examine(own[number])
            advance(0)
            return list(filter(self._is_good, steps))

        def is_good(number: int) -> bool:
            return bool(good_steps(number))

        def is_finite(number: int) -> bool:
            return not all(self._nonfinite.get(step) for step in good_steps(number))

        superfluous = self.superfluous(own, is_good)
        if superfluous and self.rules.keep_best:
            metrics = read_metrics(run.storage)
            known = {step: metrics[step] for step in own if step in metrics}
            ranked = filter(is_good, self.rules.by_metric(known))
            best = set(islice(ranked, self.rules.keep_best))
            superfluous = [step for step in superfluous if step not in best]
        if superfluous:
            # A run that has diverged goes back to it.
            newest_finite = next(filter(is_finite, sorted(own, reverse=True)), None)
            superfluous = [step for step in superfluous if step != newest_finite]
        names = [own[number] for number in superfluous]
        if self.rules.keep_for is not None:
            since = time.time() - self.rules.keep_for.total_seconds()
            names = [
                name
                for name in names
                if all(step.saved < since for step in run.examine(name))
            ]
        removed = []
        for name in names:
            advance(0)
            if self._remove(run, name):
                removed.append(name)
        return removed

    def note_complete(
        self, step: int, metrics: dict[str, float], advance: Advance
    ) -> None:
        """Write the tracker of the naming, and ``note_metrics``."""
        if self.naming.style == "megatron":
            root = root_at(self.root)
            advance(0)  # raises if the storage was given up
            root.put(TRACKERS[0], str(step).encode())
        self.note_metrics(step, metrics, advance)

    def note_metrics(
        self, step: int, metrics: dict[str, float], advance: Advance
    ) -> None:
        """Note the metrics of a complete step, and forget metrics of steps that are gone.

        Without metrics, and if no step stays by a metric, return. ``advance`` raises if the
        storage was given up.
        """
        if not (metrics or self.rules.keep_best):
            return
        run = RunDirectory(self.root)
        known = read_metrics(run.storage)
        kept = {n: known[n] for n in run.names_by_step() if n in known and n != step}
        if metrics:
            kept[step] = metrics
        if kept != known:
            advance(0)
            run.storage.put(METRICS, json.dumps(kept).encode())

    def path(self, name: str) -> str:
        """The path or URL of a step."""
        return f"{self.root.rstrip('/')}/{name}"

    def is_own_name(self, name: str) -> bool:
        """Whether a manager with this naming gives this name."""
        number = parse_name(name)[1]
        return number is not None and self.naming.name(number) == name

    def _is_removable(self, name: str) -> bool:
        # The target of a link does not belong to the run.
        return self.is_own_name(name) and not os.path.islink(self.path(name))

    def _clear(self, name: str) -> None:
        """Remove what dead saves to this step left."""
        try:
            if self._is_removable(name) and not self._is_rehearsal:
                clear(self.path(name))
        except (SaveInProgress, NotACheckpoint):
            # Another job is working on it, or has finished to.
            return
        except CheckpointingException as error:
            text = "the leftovers of a dead save to %s stay: %s"
            logger.warning(text, self.path(name), error)

    def _remove_temporary_files(self, root: Storage) -> None:
        """Remove trackers that dead processes have not finished."""
        if not isinstance(root, LocalStorage) or self._is_rehearsal:
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
        damage = self.damage.get(step)
        if damage is None and self.rules.keep_last is not None:
            damage, self._nonfinite[step] = find_problems(self.path(step.name))
            self.damage[step] = damage
            if damage:
                text = "%s is damaged, so it does not count: %s"
                logger.warning(text, self.path(step.name), damage)
        return not damage

    def _remove(self, run: RunDirectory, name: str) -> bool:
        """Whether the step was removed."""
        if not self._is_removable(name):
            return False
        try:
            if self._is_rehearsal:
                is_ours = find_storage(self.path(name)).size(INDEX) is not None
                return is_ours and any(step.complete for step in run.examine(name))
            remove(self.path(name))
        except SaveInProgress:
            return False
        except (CheckpointingException, OSError) as error:
            is_complete = any(step.complete for step in run.examine(name))
            if is_complete and name not in self._reported:
                self._reported.add(name)
                logger.warning("%s stays: %s", self.path(name), error)
            return False
        return True
