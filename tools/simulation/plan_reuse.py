"""What later saves by the same ranks cost, with the plan of an earlier one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from megackpt.backends.base import Backend
from megackpt.planning.cache import fingerprint
from megackpt.planning.manifest import Declarations

_LOOKED_AT = 16


@dataclass(frozen=True)
class Again:
    """CPU seconds."""

    fingerprint: float  # of a rank: the mean of those looked at


def simulate_again(backend: Backend, parts: Sequence[Declarations]) -> Again:
    ranks = np.unique(np.linspace(0, len(parts) - 1, _LOOKED_AT).astype(int)).tolist()
    name = backend.properties.name
    times = [_seconds(partial(fingerprint, parts[rank], name)) for rank in ranks]
    return Again(float(np.mean(times)))


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
