"""The storage of a place that a user names: a directory's path, or the URL of a bucket."""

from __future__ import annotations

import os
import re

from megackpt.errors import StorageError
from megackpt.storage.bucket import BucketStorage
from megackpt.storage.interface import Storage
from megackpt.storage.local import LocalStorage

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SPOILT = re.compile(r"(?:s3a?|gs|az|azure|abfss?):/[^/]")


def is_url(place: str | os.PathLike[str]) -> bool:
    """Return whether this is a URL rather than a path. StorageError for a URL that Path damaged."""
    if _SPOILT.match(str(place)):
        raise StorageError(
            f"{str(place)!r} was a URL, and a Path has made one slash of two: "
            "give it as a str"
        )
    return isinstance(place, str) and _SCHEME.match(place) is not None


def root_at(place: str | os.PathLike[str], create: bool = False) -> Storage:
    """Return the storage of a directory or a bucket. ``create`` makes an absent directory."""
    return BucketStorage(str(place)) if is_url(place) else LocalStorage(place, create)
