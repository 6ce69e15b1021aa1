"""The other ranks: every message between them passes here, and one rank's error becomes everybody's."""

from __future__ import annotations

from megackpt.runtime.collectives.failures import Attempt, attempt
from megackpt.runtime.collectives.gloo import DEFAULT_TIMEOUT, domain_of, group_over
from megackpt.runtime.collectives.group import Busy, Group, Mark, RankGroup, SingleGroup, Streams
from megackpt.runtime.collectives.streams import Stream

__all__ = [
    "DEFAULT_TIMEOUT",
    "Attempt",
    "Busy",
    "Group",
    "Mark",
    "RankGroup",
    "SingleGroup",
    "Stream",
    "Streams",
    "attempt",
    "domain_of",
    "group_over",
]
