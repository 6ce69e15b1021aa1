"""Fixtures for tests of formats."""

from __future__ import annotations

import pytest

from megackpt.backends.zarr import grid


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """zarr's shards as large tensors have them, in small ones: chunks of some tens of bytes."""
    monkeypatch.setattr(grid, "LARGEST_CHUNK", 48)
    monkeypatch.setattr(grid, "SMALLEST_CHUNK", 4)
