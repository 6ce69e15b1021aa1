"""Versions of weights, of which each is stored as what changed since the version before."""

from typing import TYPE_CHECKING

from megackpt.lazy_names import lazily

if TYPE_CHECKING:
    from megackpt.deltas.publisher import WeightPublisher
    from megackpt.deltas.readers import (
        Patch,
        apply,
        follow,
        latest_version,
        load,
        materialize,
        patches,
        prune,
        version_of,
    )

__all__ = [
    "Patch",
    "WeightPublisher",
    "apply",
    "follow",
    "latest_version",
    "load",
    "materialize",
    "patches",
    "prune",
    "version_of",
]
# An engine does not import the publisher.
_READERS = [name for name in __all__ if name != "WeightPublisher"]
__getattr__, __dir__ = lazily(
    globals(),
    {
        "megackpt.deltas.readers": _READERS,
        "megackpt.deltas.publisher": ["WeightPublisher"],
    },
)
