"""Choosing: the step that a run goes on from: the newest that is complete and undamaged. By rank 0 for all."""

from __future__ import annotations

import logging
from dataclasses import replace

from megackpt.errors import BackendError, CheckpointReplaced, CorruptCheckpoint, NotACheckpoint
from megackpt.manager.finding import Step, list_run, number_in, was_complete
from megackpt.manager.retention import Retention, damage_of

logger = logging.getLogger("megackpt.manager")

ATTEMPTS = 3  # at a run of which all that was seen is removed or replaced meanwhile


def steps_in(root: str, *, weigh: bool = False, step: int | None = None) -> tuple[Step, ...]:
    only = None if step is None else lambda name: number_in(name) == step
    try:
        return list_run(root, weigh=weigh, only=only).steps
    except NotACheckpoint:
        return ()


def newest_first(retention: Retention, step: int | None = None) -> list[Step]:
    """The numbered ones; of several of one number first the one that bears the manager's own name."""
    numbered = [
        (s.step, retention.owns(s.name), s) for s in steps_in(retention.root, step=step) if s.step is not None
    ]
    return [found for *_, found in sorted(numbered, key=lambda entry: entry[:2], reverse=True)]


def newest_good(
    retention: Retention, without: tuple[str, ...], verify: bool
) -> tuple[Step | None, tuple[Step, ...]]:
    """The newest step that can be loaded, as far as a look tells, and newer ones that cannot."""
    found: Step | None = None
    skipped: tuple[Step, ...] = ()
    for attempt in range(ATTEMPTS):
        try:
            found, skipped = _looked_for(retention, without, verify)
        except CheckpointReplaced:
            if attempt == ATTEMPTS - 1:
                raise
            continue
        if found is not None or all(step.complete is False for step in skipped):
            break
        # What was complete a moment ago may have been removed, because there is a newer one.
    for step in skipped:
        logger.warning("%s is skipped: %s", retention.path(step.name), step.reason)
    return found, skipped


def _looked_for(
    retention: Retention, without: tuple[str, ...], verify: bool
) -> tuple[Step | None, tuple[Step, ...]]:
    skipped: list[Step] = []
    for step in newest_first(retention):
        if step.name in without:
            continue
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
        skipped.append(replace(step, reason=problem))
    return None, tuple(skipped)


def refuse_to_begin_anew(root: str, skipped: tuple[Step, ...]) -> None:
    """What a first save left when it died is nothing to go on from; what once was complete is."""
    told = [
        f"{step.name}: {step.reason}"
        for step in skipped
        if step.complete is not False or was_complete(root, step)
    ]
    try:
        trackers = list_run(root, weigh=False).trackers
    except NotACheckpoint:
        trackers = ()
    told += [
        f"{t.name} names step {t.says!r}: {t.problem}"
        for t in trackers
        if t.problem and number_in(t.says) is not None
    ]
    if told:
        raise CorruptCheckpoint(
            f"none of the checkpoints in {root} can be loaded. To begin anew, move them away.\n  "
            + "\n  ".join(told)
        )
