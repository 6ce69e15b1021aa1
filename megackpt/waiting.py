"""One WARNING for each long wait for other ranks or a storage, with the name of the cause."""

from __future__ import annotations

import logging
import os
import threading
from functools import lru_cache

from megackpt import limits

logger = logging.getLogger("megackpt.waiting")

VARIABLE = "MEGACKPT_WAIT_WARNING_SECONDS"
"""The environment variable with another number of seconds; 0 or less: never warn."""


def warn_after() -> float:
    return _seconds(os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=16)
def _seconds(text: str) -> float:
    try:
        seconds = float(text or limits.WAIT_WARNING_SECONDS)
    except ValueError:
        logger.warning(
            "%s is %r, which is not a number of seconds: using %g",
            VARIABLE,
            text,
            limits.WAIT_WARNING_SECONDS,
        )
        return limits.WAIT_WARNING_SECONDS
    if seconds < threading.TIMEOUT_MAX:
        return seconds
    return 0.0  # "inf" and "nan": never


def interval(after: float) -> float:
    """Seconds between two questions to a rank for which this one waits."""
    if after <= 0:
        return 1.0
    return min(max(after / 30, 0.02), 1.0)


def warn(
    rank: int, stage: str, whom: str, operation: str, path: str, timeout: float
) -> None:
    inside = ""
    if operation:
        inside = f" of the {operation} {path}"
    logger.warning(
        "rank %d has waited %g s in the stage %r%s for %s: still at work there, or not in the same "
        "call (all ranks of the process group have to call save, load and the like alike). It "
        "waits for %g s at most (timeout=).",
        rank,
        warn_after(),
        stage,
        inside,
        whom,
        timeout,
    )
