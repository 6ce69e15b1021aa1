"""Storage formats, and the interface that a plug-in implements: docs/adding-a-backend.md.

A backend knows planning's values and a storage. It does not know ranks, process groups or models.
"""

from megackpt.backends.base import (
    CONFIG,
    Backend,
    Finished,
    Layout,
    Properties,
    Source,
    Target,
    config_file,
)

__all__ = [
    "CONFIG",
    "Backend",
    "Finished",
    "Layout",
    "Properties",
    "Source",
    "Target",
    "config_file",
]
