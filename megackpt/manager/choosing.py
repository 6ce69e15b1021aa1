"""Choosing: the step that a run goes on from: the newest that is complete and undamaged. By rank 0 for all."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace

from megackpt.errors import BackendError, CheckpointReplaced, CorruptCheckpoint, NotACheckpoint, StorageError
from megackpt.manager.finding import Names, Run, Step, list_run, was_complete
from megackpt.manager.retention import Retention, damage_of

logger = logging.getLogger("megackpt.manager")

ATTEMPTS = 3  # at a run of which all that was seen is removed or replaced meanwhile


def newest_first(retention: Retention, only: int | None = None) -> Iterator[Step]:
    """The numbered ones, each looked at when it is asked for; of several of one number first the one that bears the
    manager's own name. Also a step that only a tracker names.
    """
    try:
        names = Names.of(retention.root)
    except (FileNotFoundError, NotADirectoryError) as error:
        if isinstance(error, NotADirectoryError) or os.path.islink(retention.root):
            raise StorageError(f"{retention.root} is no directory: is the disk away?") from error
        return
    for number, named in names.numbers().items():
        if only in (None, number):
            steps = [replace(step, step=number) for step in names.steps(named)]
            told = [
                f"{t.name} names step {t.says!r}: {t.problem}" for t in names.trackers if t.number == number
            ]
            if told and not steps:
                steps = [Step(retention.naming.name(number), "", number, None, "; ".join(told))]
            yield from sorted(steps, key=lambda step: not retention.owns(step.name))


def newest_good(retention: Retention, verify: bool) -> tuple[Step | None, tuple[Step, ...]]:
    """The newest step that can be loaded, as far as a look tells, and newer ones that cannot."""
    found: Step | None = None
    skipped: tuple[Step, ...] = ()
    for attempt in range(ATTEMPTS):
        try:
            found, skipped = _looked_for(retention, verify)
        except CheckpointReplaced:
            if attempt == ATTEMPTS - 1:
                raise
            continue
        if found is not None or all(step.complete is False for step in skipped):
            break
        # What was complete a moment ago may have been removed, because there is a newer one.
    for step in (step for step in skipped if step.name not in retention.damaged):
        logger.warning("%s is skipped: %s", retention.path(step.name), step.reason)
    return found, skipped


def _looked_for(retention: Retention, verify: bool) -> tuple[Step | None, tuple[Step, ...]]:
    skipped: list[Step] = []
    for step in newest_first(retention):
        if step.complete is False and step.style == "plain" != retention.naming.style:
            continue  # a directory of something else, which is a number by chance
        problem = retention.damaged.get(step.name, step.reason)
        if step.complete is not False and step.name not in retention.damaged:
            try:  # what cannot be read now, but perhaps later, is raised: going back would be for good
                damage = damage_of(retention.path(step.name), whole=verify)
                problem = damage and (step.reason or damage)
            except BackendError:
                if retention.owns(step.name):
                    raise
        if not problem:
            return step, tuple(skipped)
        skipped.append(replace(step, reason=problem))
    return None, tuple(skipped)


def refuse_to_begin_anew(root: str, skipped: tuple[Step, ...]) -> None:
    """What a first save left when it died is nothing to go on from; what is, or once was, complete is."""
    try:
        run = list_run(root, weigh=False)
    except NotACheckpoint:
        run = Run(root, None, (), ())
    told = [f"{s.name}: {s.reason}" for s in skipped if s.complete is not False or was_complete(root, s)]
    if run.itself:
        told.append(f"{root} is a checkpoint itself: the directory above it may be the one that is meant")
    if told:
        raise CorruptCheckpoint(
            f"none of the checkpoints in {root} can be loaded as the latest step. To begin anew, move them away.\n  "
            + "\n  ".join(told)
        )
    for name in (
        s.name for s in run.steps if s.step is None and s.complete
    ):  # weights to begin from, for example
        logger.warning("the run in %s begins anew: the name of the checkpoint %s tells no step", root, name)
