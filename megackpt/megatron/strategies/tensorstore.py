"""Megatron's ``strategies.tensorstore`` (up to 0.15): the format zarr, too."""

from __future__ import annotations

from megackpt.megatron.strategies.zarr import ZarrLoadShardedStrategy


class TensorStoreLoadShardedStrategy(ZarrLoadShardedStrategy):
    """Tensors land on the device where the caller has them, whatever is asked for here."""

    def __init__(self, load_directly_on_device: bool = False) -> None:
        super().__init__()
