"""The device: planned shards to the host on a save, at once or in pieces, and back to where they live on a load."""

from __future__ import annotations

from megackpt.runtime.staging.landing import Landing as Landing
from megackpt.runtime.staging.snapshot import Snapshot as Snapshot
from megackpt.runtime.staging.source import (
    PIECE as PIECE,
    Staged as Staged,
    host_array as host_array,
    octets_of as octets_of,
    overlaps_itself as overlaps_itself,
    plain as plain,
    settle as settle,
)
