"""Which ranks are missing in a collective step, and why: pure functions over frozen snapshots.

No function reads a clock or a connection, so tests need no sockets. Times are in seconds of
``time.monotonic``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megackpt.distributed.connection_states import Condition, State
from megackpt.distributed.messages import Reason, Verdict

RETURN_SECONDS = 5.0
"""In the first collective step of a call a rank has this time to connect again, if its last
connection was closed. Both ends close a connection to a silent rank."""
CAUSE_SECONDS = 5.0
"""A call that fails so soon after another one may fail for the same cause."""
_NAMED = 64  # ranks that one answer names

_CONSEQUENCES = {Reason.ENDED, Reason.BROKEN, Reason.GAVE_UP}
"""Ranks that have raised for an earlier failure may end, or give up other calls."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A neighbour for which a collective step waits."""

    rank: int
    condition: Condition
    last_byte: float = 0.0
    """When this rank received its last byte."""
    answer: Mapping[int, str] | None = None
    """The ranks for which the neighbour waits in this collective step, if it has answered."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A collective step that waits, on one rank, at one moment."""

    rank: int
    first: bool
    """Whether it is the first collective step of its call."""
    began: float
    pause: float
    """Seconds between two questions to a neighbour."""
    now: float
    neighbours: tuple[Neighbour, ...]


def missing(step: Waiting, asking: int | None = None) -> dict[int, str]:
    """The ranks for which a collective step waits, each with a word.

    ``asking``: the neighbour that gets the result as an answer. The result is then without the
    ranks behind this neighbour, and may be empty.
    """
    found: dict[int, str] = {}
    for neighbour in step.neighbours:
        if neighbour.rank != asking and len(found) <= _NAMED:
            found |= _missing_behind(neighbour, step)
    found.pop(step.rank, None)
    if not found and asking is None:
        return {neighbour.rank: Reason.SLOW for neighbour in step.neighbours}
    return found


def _missing_behind(neighbour: Neighbour, step: Waiting) -> Mapping[int, str]:
    """The missing ranks that this neighbour shows: itself, or the ranks in its answer."""
    state = neighbour.condition.state
    if state is State.CLOSED:
        return {neighbour.rank: Reason.ENDED}
    if state not in (State.OPEN, State.READY):
        return {neighbour.rank: Reason.ABSENT}
    silence = step.now - max(neighbour.last_byte, step.began)
    if silence > 3 * step.pause + 0.2:
        return {neighbour.rank: Reason.SILENT}
    if neighbour.answer is None:
        return {neighbour.rank: Reason.SLOW}
    return neighbour.answer


def ended(step: Waiting) -> dict[int, str]:
    """The neighbours whose process has ended, so that a collective step waits for them in vain."""
    found: dict[int, str] = {}
    for neighbour in step.neighbours:
        state, since = neighbour.condition
        waited = step.now - max(since, step.began)
        if state is State.CLOSED and not (step.first and waited <= RETURN_SECONDS):
            found[neighbour.rank] = Reason.ENDED
    return found


@dataclass(frozen=True, slots=True)
class Past:
    """What a rank knows of earlier calls."""

    call: int
    """The number of the last call that failed with missing ranks."""
    verdict: Verdict
    failed: float
    """When it failed."""
    worked: tuple[int, float] = (0, 0.0)
    """The last call in which a collective step of all ranks was complete, and when."""


def explained(verdict: Verdict, past: Past, now: float) -> Verdict:
    """The verdict of an earlier call, if this one is a consequence of the same cause.

    A rank that has ended is the cause until a collective step of a later call has messages of all
    ranks.
    Another cause counts for ``CAUSE_SECONDS``.
    """
    causes = past.verdict.reasons
    if not verdict.reasons or verdict.reasons - _CONSEQUENCES:
        return verdict
    later, at = past.worked
    if later > past.call and at > past.failed:
        return verdict
    lately = now - past.failed < CAUSE_SECONDS
    if Reason.ENDED in causes or (lately and causes - _CONSEQUENCES):
        return past.verdict._replace(name=verdict.name)
    return verdict


def merged(known: Verdict, verdict: Verdict, call: str | None) -> Verdict:
    """Two reports on one call. ``call``: its name here, if this rank has begun it."""
    name = None
    if None not in (known.name, verdict.name):
        name = known.name or verdict.name if call is None else call
    missing = verdict.missing | known.missing
    return Verdict(missing, known.text or verdict.text, name)
