"""Which fault strikes at which step. A seed gives the same schedule to every contestant."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

RANKS_PER_HOST = 2
HOSTS = ("one", "two")
RANKS = RANKS_PER_HOST * len(HOSTS)

KINDS = {
    "kill": "a rank is killed (SIGKILL)",
    "stop": "a rank is stopped for 30 s (SIGSTOP)",
    "host": "a host is lost: all of its processes, and its memory",
    "full": "the storage is full (ENOSPC)",
    "quota": "a quota of the storage is exceeded (EDQUOT)",
    "slow": "the storage takes 1 MB/s",
    "hang": "the storage does not answer",
}


@dataclass(frozen=True)
class Fault:
    """One fault. It strikes when the training first completes ``step``.

    ``rank``: which rank "kill" and "stop" strike; "host" strikes the host of this rank.
    """

    step: int
    kind: str
    rank: int

    @property
    def host(self) -> str:
        return HOSTS[self.rank // RANKS_PER_HOST]


@dataclass(frozen=True)
class Schedule:
    """The faults of a run, by step, and the number of its steps."""

    faults: tuple[Fault, ...]
    steps: int


def schedule(
    seed: int, every: int = 50, count: int = 7, kinds: Sequence[str] = tuple(KINDS)
) -> Schedule:
    """``count`` faults, one in ``every`` steps. Each kind strikes once before any strikes again.

    The fault of a window of ``every`` steps strikes in its first half, and not in its first fifth:
    there is a checkpoint before the first fault, and the effects of one are over before the next.
    """
    dice = random.Random(seed)
    faults: list[Fault] = []
    order: list[str] = []
    for number in range(count):
        if not order:
            order = list(kinds)
            dice.shuffle(order)
        step = number * every + every // 5 + dice.randrange(max(1, every * 3 // 10))
        faults.append(Fault(step, order.pop(), dice.randrange(RANKS)))
    return Schedule(tuple(faults), every * count)
