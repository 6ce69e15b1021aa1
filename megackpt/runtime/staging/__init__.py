"""The device: planned shards to the host on a save, at once or in pieces, and back to where they live on a load."""

from __future__ import annotations

from megackpt.runtime.memory import carried_dtype
from megackpt.runtime.staging.landing import Landing
from megackpt.runtime.staging.snapshot import Snapshot
from megackpt.runtime.staging.source import PIECE, Staged, host_array, plain, region, settle

__all__ = [
    "PIECE",
    "Landing",
    "Snapshot",
    "Staged",
    "carried_dtype",
    "host_array",
    "plain",
    "region",
    "settle",
]
