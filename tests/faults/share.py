"""How much of the campaign a run makes: FAULTS_SHARE, from 0 to 1. By default all of it.

``make faults`` makes a tenth, ``make campaign`` all. Samples are seeded, so two runs of one share make
the same faults.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")

SHARE = float(os.environ.get("FAULTS_SHARE", "1"))


def part(count: int, least: int = 6) -> int:
    """So many of ``count``."""
    return min(count, max(least, round(count * SHARE)))


def sampled(points: Sequence[T], least: int = 6) -> list[T]:
    """A part of these, in their order: one at random from each of as many equal stretches."""
    count, dice = part(len(points), least), random.Random(17)
    bounds = [n * len(points) // count for n in range(count + 1)]
    return [points[dice.randrange(*stretch)] for stretch in pairwise(bounds)]
