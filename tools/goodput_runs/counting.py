"""What is counted, from the log of a run. docs/goodput.md has the rule for human actions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

RESTARTS = 3
"""So many restarts in a row without a new step, and a person has to act."""
SILENCE = 90.0
"""Seconds without a step and without an end of a rank, after which a person has to act."""
ACTIONS = 3
"""After so many actions in a run, the person gives up."""


class Watch:
    """Applies the rule for human actions while a run goes on."""

    def __init__(self) -> None:
        self.actions: list[str] = []
        self._restarts = 0
        self._furthest = 0
        self._acted_at = -1

    def restarted(self, furthest: int) -> str | None:
        """The job has ended, and its furthest step is this one. What must a person do, if anything?

        "wait": until the storage is well. "remove": the newest step as well, since waiting has not helped.
        """
        self._restarts = 0 if furthest > self._furthest else self._restarts + 1
        self._furthest = max(furthest, self._furthest)
        if self._restarts < RESTARTS:
            return None
        self._restarts = 0
        action = "remove" if self._acted_at == self._furthest else "wait"
        self._acted_at = self._furthest
        self.actions.append(
            f"{action}: {RESTARTS} restarts without a new step at {furthest}"
        )
        return action

    def silent(self, seconds: float, furthest: int) -> bool:
        """No rank has made a step or ended for so long. Must a person end the job?"""
        if seconds < SILENCE:
            return False
        self.actions.append(f"no step for {SILENCE:.0f} s after step {furthest}")
        return True

    @property
    def gives_up(self) -> bool:
        return len(self.actions) >= ACTIONS


@dataclass(frozen=True)
class Figures:
    """What one run has earned.

    ``seconds``: from the first start of the ranks to the end of the run. ``seconds_of_training``: the
    useful steps, each with the median seconds of a step in the undisturbed run.
    """

    finished: bool
    useful: int
    run: int
    wrong: int
    restarts: int
    actions: tuple[str, ...]
    seconds: float
    seconds_of_training: float

    @property
    def lost(self) -> int:
        """Steps that had to be run again, or never came back."""
        return self.run - self.useful

    @property
    def useful_share(self) -> float:
        return self.useful / self.run if self.run else 0.0

    @property
    def time_share(self) -> float:
        return self.seconds_of_training / self.seconds if self.seconds else 0.0


def steps_of(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The entries that are steps, in the order in which they were run."""
    return [entry for entry in entries if "step" in entry]


def losses_of(entries: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in steps_of(entries)}


def count(
    entries: Sequence[Mapping[str, Any]],
    undisturbed: Sequence[Mapping[str, Any]],
    last: int,
    seconds: float,
    restarts: int,
    actions: Sequence[str],
) -> Figures:
    """The figures of a run that ought to reach step ``last``.

    A step is useful once, however often it was run. A run is finished if it has run each step. A
    loss is wrong if it is not, bit for bit, the loss of this step in the undisturbed run.
    """
    right = losses_of(undisturbed)
    steps = steps_of(entries)
    done = {entry["step"] for entry in steps}
    wrong = sum(entry["loss"] != right[entry["step"]] for entry in steps)
    each = median(entry["seconds"] for entry in steps_of(undisturbed))
    return Figures(
        done == set(range(1, last + 1)),
        len(done),
        len(steps),
        wrong,
        restarts,
        tuple(actions),
        seconds,
        len(done) * each,
    )
