"""Megatron's ``strategies.two_stage`` (up to 0.15): what several ranks want is read by one of them."""

from __future__ import annotations

from typing import Any

from megackpt.megatron.strategies.fully_parallel import FullyParallelLoadStrategyWrapper


class TwoStageDataParallelLoadShardedStrategy(FullyParallelLoadStrategyWrapper):
    """The ranks of the group read for one another, on every file system."""

    def __init__(self, data_parallel_group: Any, cpu_transfer: bool = True) -> None:
        super().__init__(None, data_parallel_group, exchange_algo="always")
