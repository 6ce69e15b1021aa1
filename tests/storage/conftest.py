"""Fixtures for tests of storage."""

from __future__ import annotations

import pytest

from megackpt.storage import (
    BucketStorage,
    client,
)
from tests.buckets import Bucket, Line


@pytest.fixture
def faulty(
    bucket: Bucket, line: Line, monkeypatch: pytest.MonkeyPatch
) -> BucketStorage:
    """The same bucket, by a line that can be cut; asked again without long pauses."""
    monkeypatch.setattr(client, "PAUSE", 0.01)
    monkeypatch.setattr(client, "LONGEST_PAUSE", 0.02)
    return BucketStorage(f"{bucket.url}/run")
