"""The registry of formats, the format of a directory, and the policy of one save or load."""

from __future__ import annotations

from megackpt.backends.base import (
    CheckpointingConfig as CheckpointingConfig,
    read_config as read_config,
)
from megackpt.strategies.formats import backend_named as backend_named
from megackpt.strategies.policy import (
    COMMON_IS_KEPT as COMMON_IS_KEPT,
    CheckValues as CheckValues,
    FullyParallelLoadStrategyWrapper as FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper as FullyParallelSaveStrategyWrapper,
    Strategy as Strategy,
    StrategyAction as StrategyAction,
    StrategyLike as StrategyLike,
    as_strategy as as_strategy,
    asked_format as asked_format,
    default_strategies as default_strategies,
    find_backend as find_backend,
    get_default_save_sharded_strategy as get_default_save_sharded_strategy,
    get_default_strategy as get_default_strategy,
    loading as loading,
    reader_of as reader_of,
    register_default_strategy as register_default_strategy,
    resolve as resolve,
)
