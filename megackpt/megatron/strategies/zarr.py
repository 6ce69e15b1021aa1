"""Megatron's ``strategies.zarr`` (up to 0.15): the format zarr."""

from __future__ import annotations

from megackpt.megatron.strategies.base import AsyncSaveShardedStrategy, LoadShardedStrategy


class ZarrSaveShardedStrategy(AsyncSaveShardedStrategy):
    """Version 2 is zarr v3. Version 1 (zarr v2, Megatron's own) is read and not written: to save raises."""

    def __init__(self, backend: str = "zarr", version: int | None = None) -> None:
        super().__init__(backend, version)


class ZarrLoadShardedStrategy(LoadShardedStrategy):
    """Every version."""

    def __init__(self) -> None:
        super().__init__("zarr")
