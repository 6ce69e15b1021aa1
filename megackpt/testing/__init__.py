"""For authors of plug-ins, and for us: ranks without processes, and the laws that every format must hold."""

from __future__ import annotations

from megackpt.testing.suite import BackendSuite
from megackpt.testing.threads import ThreadedGroup
from megackpt.testing.watched import WatchedStorage
from megackpt.testing.worlds import MemorySource, MemoryTarget, Whole, World

__all__ = [
    "BackendSuite",
    "MemorySource",
    "MemoryTarget",
    "ThreadedGroup",
    "WatchedStorage",
    "Whole",
    "World",
]
