"""The registry: which format a name or a directory means, and the policy of a save. Values: others act."""

from __future__ import annotations

from megackpt.backends.base import CheckpointingConfig, read_config
from megackpt.strategies.formats import BUILT_IN, ENTRY_POINTS, backend_named
from megackpt.strategies.policy import (
    COMMON_IS_KEPT,
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
    Strategy,
    StrategyAction,
    StrategyLike,
    as_strategy,
    asked_format,
    default_strategies,
    get_default_save_sharded_strategy,
    get_default_strategy,
    loading,
    reader_of,
    register_default_strategy,
    resolve,
)
from megackpt.strategies.recognising import find_backend

__all__ = [
    "BUILT_IN",
    "COMMON_IS_KEPT",
    "ENTRY_POINTS",
    "CheckpointingConfig",
    "FullyParallelLoadStrategyWrapper",
    "FullyParallelSaveStrategyWrapper",
    "Strategy",
    "StrategyAction",
    "StrategyLike",
    "as_strategy",
    "asked_format",
    "backend_named",
    "default_strategies",
    "find_backend",
    "get_default_save_sharded_strategy",
    "get_default_strategy",
    "loading",
    "read_config",
    "reader_of",
    "register_default_strategy",
    "resolve",
]
