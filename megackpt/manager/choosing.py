"""Choosing: the step that a run goes on from: the newest that is complete and undamaged. By rank 0 for all."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

from megackpt.checkpoint import INDEX, find_storage
from megackpt.errors import (
    BackendError,
    CheckpointReplaced,
    CorruptCheckpoint,
    NotACheckpoint,
    StorageError,
)
from megackpt.manager.finding import Names, Run, Step, list_run, was_complete
from megackpt.manager.retention import Retention, damage_of

logger = logging.getLogger("megackpt.manager")

ATTEMPTS = 3  # at a run of which all that was seen is removed or replaced meanwhile
Known = Callable[
    [Step], str | None
]  # what a step is skipped for without another look, and without a word
Found = tuple[Step | None, tuple[Step, ...]]


def newest_first(retention: Retention, only: int | None = None) -> Iterator[Step]:
    """The numbered ones, each looked at when it is asked for; of several of one number first the one that bears the
    manager's own name. Also a step that only a tracker names.
    """
    try:
        names = Names.of(retention.root)
    except (FileNotFoundError, NotADirectoryError) as error:
        if isinstance(error, NotADirectoryError) or os.path.islink(retention.root):
            raise StorageError(
                f"{retention.root} is no directory: is the disk away?"
            ) from error
        return
    for number, named in names.numbers().items():
        if only in (None, number):
            steps = [
                replace(step, step=number) for step in names.steps(named, weigh=True)
            ]
            told = (t for t in names.trackers if t.number == number)
            if not steps and (
                lost := [f"{t.name} names step {t.says!r}: {t.problem}" for t in told]
            ):
                steps = [
                    Step(
                        retention.naming.name(number),
                        "",
                        number,
                        False,
                        "; ".join(lost),
                    )
                ]
            yield from sorted(steps, key=lambda step: not retention.owns(step.name))


def newest_good(retention: Retention, known: Known, verify: bool = False) -> Found:
    """The newest step that can be loaded, as far as a look tells, and newer ones that cannot."""
    found: Step | None = None
    skipped: tuple[Step, ...] = ()
    for attempt in range(ATTEMPTS):
        try:
            found, skipped = _looked_for(retention, known, verify)
        except CheckpointReplaced:
            if attempt == ATTEMPTS - 1:
                raise
            continue
        if found is not None or all(step.complete is False for step in skipped):
            break
        # What was complete a moment ago may have been removed, because there is a newer one.
    return found, skipped


def _looked_for(retention: Retention, known: Known, verify: bool) -> Found:
    skipped: list[Step] = []
    for step in newest_first(retention):
        if step.complete is False and step.style == "plain" != retention.naming.style:
            continue  # a directory of something else, which is a number by chance
        if not (problem := known(step)):
            problem = step.reason
            if step.complete is not False:
                try:  # what cannot be read now, but perhaps later, is raised: going back would be for good
                    damage = damage_of(retention.path(step.name), whole=verify)
                    problem = damage and (step.reason or damage)
                except BackendError:
                    if retention.owns(step.name):
                        raise
            if not problem:
                return step, tuple(skipped)
            logger.warning("%s is skipped: %s", retention.path(step.name), problem)
            if step.complete is not False:
                retention.note(step, problem)
        skipped.append(replace(step, reason=problem))
    return None, tuple(skipped)


def begins_anew(root: str, skipped: tuple[Step, ...]) -> bool:
    """What a first save left when it died is nothing to go on from; what is, or once was, complete is: that raises
    CorruptCheckpoint. False: a step has been completed since it was skipped.
    """
    # Without a style: a tracker names what is gone.
    lost = [
        s
        for s in skipped
        if s.complete is not False or not s.style or was_complete(root, s)
    ]
    try:  # after that look, which takes a step completed meanwhile for a damaged one
        run = list_run(root, weigh=False)
    except NotACheckpoint:
        run = Run(root, None, (), ())
    if {s.name for s in run.steps if s.complete} & {
        s.name for s in skipped if s.complete is False
    }:
        return False
    told = [f"{s.name}: {s.reason}" for s in lost]
    if run.itself and {INDEX, "metadata.json", ".metadata"} & set(
        find_storage(root).list()
    ):
        told.append(
            f"{root} is a checkpoint itself: the directory above it may be the one that is meant"
        )
    if told:
        raise CorruptCheckpoint(
            f"none of the checkpoints in {root} can be loaded as the latest step. To begin anew, move them away.\n  "
            + "\n  ".join(told)
        )
    text = "the run in %s begins anew: the name of the %s checkpoint %s tells no step"
    for step in (*run.steps, *filter(None, [run.itself])):
        if step.step is None and step.complete:  # weights to begin from, for example
            logger.warning(text, root, step.format, step.name)
    return True
