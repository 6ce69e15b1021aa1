"""For authors of plug-ins, and for us: ranks without processes, and the laws that every format must hold."""

from __future__ import annotations

from megackpt.testing.suite import BackendSuite, MemorySource, MemoryTarget, Whole, World
from megackpt.testing.threads import ThreadedGroup

__all__ = ["BackendSuite", "MemorySource", "MemoryTarget", "ThreadedGroup", "Whole", "World"]
