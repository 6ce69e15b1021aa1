"""The calls of one rank: the calls that it has started, and the calls that have failed.

A *call* is one save or load, including its asynchronous completion, with the same number on all
ranks. Its collective steps are numbered, too, so messages of several calls do not mix.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import OrderedDict
from weakref import WeakValueDictionary

from megackpt.distributed.diagnosis import Past, explained, merged
from megackpt.distributed.messages import CollectiveStep, Payload, Reason, Verdict

_REMEMBERED = 64  # calls


class Outcome:
    """What a rank knows of the failure of one call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.verdict: asyncio.Future[Verdict] = loop.create_future()
        self.failed = math.inf
        self.reported: Verdict | None = None
        """The reports of this rank and the ranks below, until there is a verdict."""


class Calls:
    """The calls of this rank. The event loop's thread sets failures; other threads begin calls."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.steps: WeakValueDictionary[int, CollectiveStep] = WeakValueDictionary()
        """By call: the collective step in which this rank is, or was last."""
        self.names: OrderedDict[int, str] = OrderedDict()
        """By call: its name, which says its purpose."""
        self._last = 0
        self._refused: set[int] = set()
        self._outcomes: OrderedDict[int, Outcome] = OrderedDict()
        self._worked = 0, 0.0
        self._loop = loop

    # Called by other threads.

    def begin(self, step: CollectiveStep, name: str) -> None:
        """Begin a call. The caller keeps the first collective step as long as the call lasts."""
        self.steps[step.call] = step
        self.names[step.call] = name
        self._last = step.call
        while len(self.names) > _REMEMBERED:
            self.names.popitem(last=False)

    def refuse(self, call: int) -> None:
        """This rank takes no part in a call."""
        self._refused.add(call)
        self._last = call

    def verdict(self, call: int) -> Verdict | None:
        """Why this call has failed, if it has."""
        outcome = self._outcomes.get(call)
        if outcome is None or not outcome.verdict.done():
            return None
        return outcome.verdict.result()

    def failed_at(self, call: int) -> float:
        """When this rank knew of the failure; infinite if it does not."""
        outcome = self._outcomes.get(call)
        return math.inf if outcome is None else outcome.failed

    def other_failed(self, call: int, name: str) -> bool:
        """Whether a call of another name has failed under this number, without this rank."""
        verdict = self.verdict(call)
        return verdict is not None and verdict.name not in (None, name)

    def last_failure(self) -> int:
        """The highest number of a call that has failed, or 0."""
        failed = [call for call in tuple(self._outcomes) if self.verdict(call)]
        return max(failed, default=0)

    # Called by the thread of the event loop.

    def current(self) -> list[CollectiveStep]:
        """The collective step of each call in which this rank is, or was last.

        Other threads may begin calls meanwhile.
        """
        return [step for found in self.steps.valuerefs() if (step := found())]

    def awaits(self, call: int, number: int) -> bool:
        """Whether a message of this collective step is wanted here, now or later."""
        step = self.steps.get(call)
        passed = step is not None and step.number > number
        return not passed and not self.left(call) and self.verdict(call) is None

    def left(self, call: int) -> str:
        """How this rank has left a call that it had started; empty if it has not left the call."""
        if call > self._last or call in self.steps:
            return ""
        return Reason.REFUSED if call in self._refused else Reason.GAVE_UP

    def worked(self, call: int) -> None:
        """A collective step of this call has messages of all ranks."""
        self._worked = call, time.monotonic()

    def report(self, call: int, verdict: Verdict) -> Verdict | None:
        """Merge a report with the earlier ones. Returns None if it holds no news."""
        outcome = self.outcome(call)
        if outcome.verdict.done():
            return None
        found = explained(verdict, self._past(), time.monotonic())
        known = outcome.reported
        both = merged(known or Verdict({}), found, self.names.get(call))
        if both == known:
            return None
        outcome.reported = both
        return both

    def fail(self, call: int, verdict: Verdict) -> None:
        outcome = self.outcome(call)
        if not outcome.verdict.done():
            outcome.failed, outcome.reported = time.monotonic(), None
            outcome.verdict.set_result(verdict)

    def forgotten(self) -> list[int]:
        """Remove the oldest failures; returns their calls."""
        removed = []
        while len(self._outcomes) > _REMEMBERED:
            oldest = next(iter(self._outcomes))
            if self.steps.get(oldest):
                break  # a collective step of it still waits
            del self._outcomes[oldest]
            self._refused.discard(oldest)
            removed.append(oldest)
        return removed

    def outcome(self, call: int) -> Outcome:
        """The record of this call. Only the thread of the event loop may ask for one."""
        if call not in self._outcomes:
            self._outcomes[call] = Outcome(self._loop)
        return self._outcomes[call]

    def _past(self) -> Past:
        last = Past(0, Verdict({}), 0.0, self._worked)
        for call, outcome in self._outcomes.items():
            verdict = self.verdict(call)
            if verdict and verdict.missing and outcome.failed >= last.failed:
                last = Past(call, verdict, outcome.failed, self._worked)
        return last

    def failed(self) -> bytes:
        """All failures, for a neighbour that connects."""
        known = [(call, self.verdict(call)) for call in self._outcomes]
        return json.dumps([pair for pair in known if pair[1] is not None]).encode()


def failures_in(payload: Payload, ranks: int) -> list[tuple[int, Verdict]]:
    """Raises ValueError or TypeError for bytes that ``Calls.failed`` does not make."""
    failures = json.loads(bytes(payload))
    return [(int(call), Verdict.of(fields, ranks)) for call, fields in failures]
