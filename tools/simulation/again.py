"""What later saves by the same ranks cost, with the plan of an earlier one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np

from megackpt.backends.base import Backend
from megackpt.checkpoint.finishing import finished
from megackpt.planning.cache import Contents, fingerprint
from megackpt.planning.manifest import Declarations, Manifest
from megackpt.storage import LocalStorage, Storage

_LOOKED_AT = 16


@dataclass(frozen=True)
class Again:
    """CPU seconds."""

    fingerprint: float  # of a rank: the mean of those looked at
    contents: (
        float | None
    )  # the coordinator's: the last save's table of contents, used again. None: not known


def simulate_again(
    backend: Backend, parts: Sequence[Declarations], manifest: Manifest
) -> Again:
    """``manifest``: what is stored, and where."""
    ranks = np.unique(np.linspace(0, len(parts) - 1, _LOOKED_AT).astype(int)).tolist()
    asked = float(
        np.mean(
            [
                _seconds(partial(fingerprint, parts[rank], backend.name))
                for rank in ranks
            ]
        )
    )
    if any(name.startswith("__fragments_") for name in manifest.files):
        return Again(asked, None)
    storage, contents = (
        cast(Storage, LocalStorage("/")),
        Contents(),
    )  # nothing is looked at
    finished(backend, storage, manifest, contents)
    later = replace(manifest, save_id="f" * len(manifest.save_id))
    return Again(asked, _seconds(partial(finished, backend, storage, later, contents)))


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
