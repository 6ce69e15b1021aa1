"""Finds the step from which a run continues: the newest good one, or a given one. On rank 0."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

from megackpt.checkpoint import INDEX, find_storage
from megackpt.checkpoint.marker import PREFIX
from megackpt.errors import (
    BackendError,
    CheckpointReplaced,
    CorruptCheckpoint,
    NotACheckpoint,
    RankLost,
    RefusedObject,
    StorageError,
    UntrustedClass,
)
from megackpt.manager.retention import Retention, find_problems
from megackpt.manager.run_directory import Run, RunDirectory, Step, list_run
from megackpt.planning.strict import StrictHandling, Strictness, parse_strict_flag
from megackpt.storage import Advance, root_at

logger = logging.getLogger("megackpt.manager")

ATTEMPTS = 3
"""Attempts at a run in which other jobs remove and replace steps at the same time."""

Found = tuple[Step | None, tuple[Step, ...]]
"""The step, and the newer ones that were skipped."""


def newest_first(
    retention: Retention, lowest: int = 0, highest: float = math.inf
) -> Iterator[Step]:
    """The steps of a run; each is examined when the iterator reaches it.

    If several checkpoints have one number, the one with the manager's naming comes first. A
    step that only a tracker names is included, as incomplete.
    """
    root = retention.root
    try:
        run = RunDirectory(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        if isinstance(error, NotADirectoryError) or os.path.islink(root):
            raise StorageError(
                f"{root} is not a directory: is its file system mounted?"
            ) from error
        return
    for number, names in run.names_by_step().items():
        if not lowest <= number <= highest:
            continue
        steps = []
        for name in names:
            steps += [replace(step, step=number) for step in run.examine(name)]
        lost = [
            f"{tracker.name} names step {tracker.says!r}: there is no such step"
            for tracker in run.trackers
            if tracker.number == number
        ]
        if lost and not steps:
            name = retention.naming.name(number)
            steps = [Step(name, "", number, False, "; ".join(lost))]
        yield from sorted(steps, key=lambda step: not retention.is_own_name(step.name))


def find_latest(
    retention: Retention,
    damage: Callable[[Step], str | None],
    advance: Advance | None = None,
    own: bool = False,
    finite: bool = False,
) -> Found:
    """The newest good step.

    Args:
        damage: returns the damage that an earlier check has found; such a step is skipped.
        advance: check all data, instead of sizes, and report the bytes.
        own: consider only names that the manager gives.
        finite: skip steps whose save has noted values that are NaN or infinite.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            found, skipped = _search(retention, damage, advance, own, finite)
        except CheckpointReplaced:
            continue
        # A step that was complete a moment ago may have been removed because of a newer one.
        if found or all(step.complete is False for step in skipped):
            return found, skipped
    return _search(retention, damage, advance, own, finite)


def _search(
    retention: Retention,
    damage: Callable[[Step], str | None],
    advance: Advance | None,
    own: bool,
    finite: bool,
) -> Found:
    skipped: list[Step] = []
    for step in newest_first(retention):
        if own and not retention.is_own_name(step.name):
            continue
        if step.complete is False and step.style == "plain" != retention.naming.style:
            # A directory whose name is a number, for another purpose.
            continue
        problem = damage(step)
        if not problem:
            path = retention.path(step.name)
            problem = step.reason
            nonfinite = ""
            if step.complete is not False:
                try:
                    # StorageError is raised: going back to an older step would be final.
                    found, nonfinite = find_problems(path, advance)
                    problem = found and (step.reason or found)
                except BackendError:
                    if retention.is_own_name(step.name):
                        raise
            if problem and step.complete is not False:
                retention.note_damage(step, problem)
            if finite:
                problem = problem or nonfinite
            if not problem:
                return step, tuple(skipped)
            logger.warning("%s is skipped: %s", path, problem)
        skipped.append(replace(step, reason=problem))
    return None, tuple(skipped)


def find_step(retention: Retention, step: int) -> Step:
    """The step of this number, in any style. Warns if there are later complete ones."""
    steps = newest_first(retention, step, step)
    found = [other for other in steps if other.complete is not False]
    if not found:
        return Step(retention.naming.name(step), "", step, False, "")
    # Checkpoints of supported formats come first.
    found.sort(key=lambda s: s.complete is None)
    for later in newest_first(retention, step + 1):
        if later.complete:
            logger.warning(
                "%s holds step %d, which is after step %d: it stays, and restore() without a "
                "step will find it; if the run is set back, remove the later steps",
                retention.root,
                later.step,
                step,
            )
            break
    return found[0]


def check_damage(error: Exception, find: Callable[[], str], strict: Strictness) -> None:
    """Raise the error of a load, unless it is damage and an older step may be loaded.

    ``find`` returns the damage that rank 0 sees: a step that it sees undamaged, but another rank
    does not see, is not damaged.
    """
    if isinstance(error, (UntrustedClass, RefusedObject, RankLost)):
        raise error
    if not isinstance(error, CorruptCheckpoint) and not find():
        raise error
    if StrictHandling.requires_returning_mismatch_keys(parse_strict_flag(strict)):
        error.add_note(
            "with strict=RETURN_* no older step is loaded: ask for one by step="
        )
        raise error


def is_new_run(root: str, skipped: tuple[Step, ...]) -> bool:
    """Whether the run has only leftovers of dead saves. False: a step was completed meanwhile.

    Raises CorruptCheckpoint if a step is, or once was, complete: starting again would lose it.
    """
    # Without a style: a tracker names a step that is gone.
    lost = [
        f"{step.name}: {step.reason}"
        for step in skipped
        if step.complete is not False or not step.style or _was_complete(root, step)
    ]
    # Listed after that: a step that was completed meanwhile would look like a damaged one.
    try:
        run = list_run(root)
    except NotACheckpoint:
        run = Run(root, None, (), ())
    complete = {step.name for step in run.steps if step.complete}
    if any(step.name in complete for step in skipped if step.complete is False):
        return False
    tables = {INDEX, "metadata.json", ".metadata"}
    if run.itself and tables & set(find_storage(root).list()):
        lost.append(f"{root} is a checkpoint itself: is the directory above it meant?")
    if lost:
        raise CorruptCheckpoint(
            f"none of the checkpoints in {root} can be loaded as the latest step. To start the "
            "run again, move them away.\n  " + "\n  ".join(lost)
        )
    for step in (*run.steps, *filter(None, [run.itself])):
        if step.step is None and step.complete:
            text = "the run in %s starts again: the name of the %s checkpoint %s has no step"
            logger.warning(text, root, step.format, step.name)
    logger.info("no checkpoint in %s: the run begins", root)
    return True


def _was_complete(root: str, step: Step) -> bool:
    """Whether an incomplete step shows that it once was complete."""
    try:
        entries = root_at(f"{root.rstrip('/')}/{step.name}").list()
    except (NotADirectoryError, FileNotFoundError):
        return False
    # The leftovers of a dead save have the marker of the save.
    if any(entry.startswith(PREFIX) for entry in entries):
        return False
    return any(entry == INDEX or entry.endswith(".distcp") for entry in entries)
