"""Megatron's ``strategies.fully_parallel``: the work shared among the ranks of a group."""

from __future__ import annotations

from typing import Any

from megackpt import strategies
from megackpt.megatron.refused import refusing
from megackpt.megatron.strategies.base import AsyncSaveShardedStrategy, LoadShardedStrategy
from megackpt.strategies import StrategyLike

__getattr__ = refusing(__name__)


class FullyParallelSaveStrategyWrapper(AsyncSaveShardedStrategy, strategies.FullyParallelSaveStrategyWrapper):
    """``megackpt.FullyParallelSaveStrategyWrapper``; a distribution is found anew where shards have changed."""

    def __init__(
        self,
        strategy: StrategyLike,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
        validate_access_integrity: bool = True,
        pg_cache_path: Any = None,
        pg_cache_create: Any = False,
    ) -> None:
        strategies.FullyParallelSaveStrategyWrapper.__init__(
            self, strategy, parallelization_group, do_cache_distribution
        )


class FullyParallelLoadStrategyWrapper(LoadShardedStrategy, strategies.FullyParallelLoadStrategyWrapper):
    """``megackpt.FullyParallelLoadStrategyWrapper``."""

    def __init__(
        self,
        strategy: StrategyLike,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
        validate_access_integrity: bool = True,
        pg_cache_path: Any = None,
        pg_cache_create: Any = False,
        per_rank_object_load: bool = False,
    ) -> None:
        strategies.FullyParallelLoadStrategyWrapper.__init__(
            self, strategy, parallelization_group, do_cache_distribution, exchange_algo
        )
