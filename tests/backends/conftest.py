"""What tests of formats share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megackpt.backends.zarr import documents, layout


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """zarr's shards as large tensors have them, in small ones: chunks of some tens of bytes."""
    monkeypatch.setattr(layout, "LARGEST_CHUNK", 48)
    monkeypatch.setattr(layout, "SMALLEST_CHUNK", 4)
    documents.array_document.cache_clear()
    yield
    documents.array_document.cache_clear()
