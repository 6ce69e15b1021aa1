"""What later saves by the same ranks cost: with the plan of an earlier one, or with that of a checkpoint loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar, cast

import numpy as np

from megackpt.backends.base import Backend, plan_of_stored
from megackpt.checkpoint import decode_index, encode_index
from megackpt.checkpoint.finishing import finished
from megackpt.planning.cache import Contents, Resumed, fingerprint
from megackpt.planning.manifest import Declarations, Manifest, SavePlan
from megackpt.planning.save_plan import SavePolicy
from megackpt.runtime.storage import LocalStorage, Storage

T = TypeVar("T")
_LOOKED_AT = 16


@dataclass(frozen=True)
class Again:
    """CPU seconds, of the coordinator and of other ranks (the mean of those looked at). None: only a save can tell."""

    fingerprint: float  # of a rank
    contents: float | None  # the coordinator's: the table of contents of the last save, used again
    kept: float | None  # of a rank, in the load: what it remembers
    derived: float | None  # of a rank, in the first save after the load: its plan
    coordinator: float | None  # the same on the coordinator, which looks at all chunks
    same: bool  # are the derived plans those that were planned?


def simulate_again(
    backend: Backend, parts: Sequence[Declarations], plans: Sequence[SavePlan], manifest: Manifest
) -> Again:
    """``manifest``: what is stored, and where; with the fingerprints of all ranks."""
    ranks = np.unique(np.linspace(0, len(parts) - 1, _LOOKED_AT).astype(int)).tolist()
    asked = _mean([_timed(partial(fingerprint, parts[rank], backend.name)) for rank in ranks])
    if any(name.startswith("__fragments_") for name in manifest.files):
        return Again(asked, None, None, None, None, same=False)
    storage, contents = cast(Storage, LocalStorage("/")), Contents()  # nothing is looked at
    finished(backend, storage, manifest, contents)
    later = replace(manifest, save_id="f" * len(manifest.save_id))
    renewed = _timed(partial(finished, backend, storage, later, contents))[0]
    stored = decode_index(encode_index(manifest, {}))[0]
    kept, derived, same = [], [], True
    for rank in ranks:
        declared, count = parts[rank], len(parts)
        kept.append(_timed(partial(Resumed.of, stored, "", rank, count, declared.tensors)))
        resumed = cast(Resumed, kept[-1][1])
        derived.append(
            _timed(partial(plan_of_stored, backend, declared, resumed, SavePolicy(), count, validate=True))
        )
        found = derived[-1][1]
        same = same and found is not None and list(found.rows()) == list(plans[rank].rows())
    return Again(asked, renewed, _mean(kept), _mean(derived[1:] or derived), derived[0][0], same)


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.process_time()
    value = work()
    return time.process_time() - start, value


def _mean(timed: Sequence[tuple[float, object]]) -> float:
    return float(np.mean([seconds for seconds, _ in timed]))
