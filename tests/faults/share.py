"""How much of the campaign a run makes: FAULTS_SHARE, from 0 to 1. By default all of it.

``make faults`` makes a tenth, ``make campaign`` all. Samples are seeded, so two runs of one share make
the same faults.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

SHARE = float(os.environ.get("FAULTS_SHARE", "1"))


def part(count: int, least: int = 6) -> int:
    """So many of ``count``."""
    return min(count, max(least, round(count * SHARE)))


def sampled(points: Sequence[T], least: int = 6) -> list[T]:
    """A part of these, in their order."""
    chosen = random.Random(17).sample(range(len(points)), part(len(points), least))
    return [points[n] for n in sorted(chosen)]
