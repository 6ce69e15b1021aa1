"""The write stage of a save on one rank, as a value.

It can be sent to a writer process, and needs no torch there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megackpt.backends.base import Backend, Source
from megackpt.checkpoint.transaction import staging_storage
from megackpt.planning.manifest import SavePlan, WriteResult
from megackpt.staging.progress import CountedSource


@dataclass(frozen=True, eq=False)
class Writing:
    """Write this rank's rows into the staging storage of the save."""

    directory: str
    save_id: str
    backend: Backend
    plan: SavePlan
    source: Source

    def __call__(self, advance: Callable[[int], None]) -> WriteResult:
        counted = CountedSource(self.source, advance)
        with staging_storage(self.directory, self.save_id) as root:
            return self.backend.write(root, self.plan, counted)
