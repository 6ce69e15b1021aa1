"""The calls of one rank: the calls that it has started, and the failed ones.

A *call* is one save or load, including its asynchronous completion, with the same number on all
ranks. Its steps are numbered, too, so messages of several calls do not mix.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from weakref import WeakValueDictionary

from megackpt.distributed.messages import GAVE_UP, REFUSED, Payload, Step, Verdict

_REMEMBERED = 64  # calls


class Calls:
    """Failures are set on the thread of the event loop; other threads begin calls."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.steps: WeakValueDictionary[int, Step] = WeakValueDictionary()
        """By call: the step in which this rank is, or was last."""
        self.names: OrderedDict[int, str] = OrderedDict()
        """By call: its name, which says its purpose."""
        self.failed_at: dict[int, float] = {}
        self._last = 0
        self._refused: set[int] = set()
        self._failures: OrderedDict[int, asyncio.Future[Verdict]] = OrderedDict()
        self._loop = loop

    # Called by other threads.

    def begin(self, step: Step, name: str) -> None:
        """Begin a call with a first step, which is kept by the caller as long as the call lasts."""
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
        failure = self._failures.get(call)
        if failure is None or not failure.done():
            return None
        return failure.result()

    def other_failed(self, call: int, name: str) -> bool:
        """Whether another call has failed under this number: this rank has left that one out."""
        verdict = self.verdict(call)
        return verdict is not None and verdict.name not in (None, name)

    def last_failure(self) -> int:
        """The highest number of a call that has failed, or 0."""
        failed = [call for call in tuple(self._failures) if self.verdict(call)]
        return max(failed, default=0)

    # Called by the thread of the event loop.

    def current(self) -> list[Step]:
        """The steps in which this rank is, or was last. Other threads may begin calls meanwhile."""
        return [step for found in self.steps.valuerefs() if (step := found())]

    def awaits(self, call: int, number: int) -> bool:
        """Whether a message of this step is wanted here, now or later."""
        step = self.steps.get(call)
        passed = step is not None and step.number > number
        return not passed and not self.left(call) and self.verdict(call) is None

    def left(self, call: int) -> str:
        """How this rank has left a call that it had started; empty if it has not left the call."""
        if call > self._last or call in self.steps:
            return ""
        return REFUSED if call in self._refused else GAVE_UP

    def fail(self, call: int, verdict: Verdict) -> None:
        if not self.failure(call).done():
            self.failed_at[call] = time.monotonic()
            self.failure(call).set_result(verdict)

    def failure(self, call: int) -> asyncio.Future[Verdict]:
        return self._failures.setdefault(call, self._loop.create_future())

    def forgotten(self) -> list[int]:
        """Remove the oldest failures; returns their calls."""
        removed = []
        while len(self._failures) > _REMEMBERED:
            oldest = next(iter(self._failures))
            if self.steps.get(oldest):
                break  # a step of it still waits
            del self._failures[oldest]
            self._refused.discard(oldest)
            self.failed_at.pop(oldest, None)
            removed.append(oldest)
        return removed

    def failed(self) -> bytes:
        """All failures, for a neighbour that connects."""
        known = [(call, self.verdict(call)) for call in self._failures]
        return json.dumps([pair for pair in known if pair[1] is not None]).encode()


def failures_in(payload: Payload, ranks: int) -> list[tuple[int, Verdict]]:
    """Raises ValueError or TypeError for bytes that ``Calls.failed`` does not make."""
    failures = json.loads(bytes(payload))
    return [(int(call), Verdict.of(fields, ranks)) for call, fields in failures]
