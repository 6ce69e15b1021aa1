"""Fixtures for tests of formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megackpt.backends.zarr import grid


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """zarr's shards as large tensors have them, in small ones: chunks of some tens of bytes."""
    monkeypatch.setattr(grid, "LARGEST_CHUNK", 48)
    monkeypatch.setattr(grid, "SMALLEST_CHUNK", 4)


@pytest.fixture
def file(tmp_path: Path) -> Callable[[object], Path]:
    """Writes a value as torch.save does, and gives the path."""

    def written(value: object) -> Path:
        torch.save(value, tmp_path / "theirs.ckpt")
        return tmp_path / "theirs.ckpt"

    return written
