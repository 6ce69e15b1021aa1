"""For tests of plug-ins and of megackpt: ranks as threads, and conformance tests of a backend."""

from __future__ import annotations

from megackpt.testing.conformance import BackendSuite
from megackpt.testing.fixtures import MemorySource, MemoryTarget, Whole, World
from megackpt.testing.threaded_group import ThreadedGroup
from megackpt.testing.tracing import WatchedStorage

__all__ = [
    "BackendSuite",
    "MemorySource",
    "MemoryTarget",
    "ThreadedGroup",
    "WatchedStorage",
    "Whole",
    "World",
]
