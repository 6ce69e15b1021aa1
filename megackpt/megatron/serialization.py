"""Megatron's ``serialization``: save, load and their relatives, as 0.16 to 0.19 call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from megackpt import loader, saver
from megackpt.converter import remove_sharded_tensors as remove_sharded_tensors
from megackpt.loader import (
    load_common_state_dict as load_common_state_dict,
    load_content_metadata as load_content_metadata,
    load_plain_tensors as load_plain_tensors,
    load_sharded_metadata as load_sharded_metadata,
    load_tensors_metadata as load_tensors_metadata,
)
from megackpt.loader.contents import CkptShardedMetadata as CkptShardedMetadata
from megackpt.megatron.strategies.base import StrategyAction, callable_strategy, checked, get_default_strategy
from megackpt.megatron.strategies.common import TorchCommonSaveStrategy
from megackpt.planning.strict import StrictHandling
from megackpt.runtime.async_calls import AsyncRequest
from megackpt.state import ShardedStateDict
from megackpt.strategies import StrategyLike

F = TypeVar("F", bound=Callable[..., Any])


def _in_either_order(function: F) -> F:
    """From 0.19 on there is no ``common_strategy``: the bool behind it stands in its place then."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 3 and isinstance(args[3], bool):
            args = (*args[:3], None, *args[3:])
        return function(*args, **kwargs)

    return cast("F", called)


@_in_either_order
def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: StrategyLike = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: StrictHandling | str | bool = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify_integrity: bool = False,  # digests are compared anyway, unless verify=False says no
    process_group: Any = None,
    **further: Any,
) -> Any:
    """``megackpt.load``, whose further arguments are taken, too."""
    return loader.load(
        sharded_state_dict,
        checkpoint_dir,
        checked(sharded_strategy),
        common_strategy,
        validate_access_integrity,
        strict,
        process_group=process_group,
        **further,
    )


@_in_either_order
def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: StrategyLike = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: Mapping[str, Any] | None = None,
    async_strategy: str = "nvrx",  # an AsyncCallsQueue chooses who writes
    verify_integrity: bool = False,  # digests are always kept
    process_group: Any = None,
    **further: Any,
) -> AsyncRequest | None:
    """``megackpt.save``, whose further arguments are taken, too."""
    return saver.save(
        sharded_state_dict,
        checkpoint_dir,
        checked(sharded_strategy),
        common_strategy,
        validate_access_integrity,
        async_sharded_save,
        preprocess_common_before_consistancy_check,
        content_metadata,
        process_group=process_group,
        **further,
    )


def get_default_save_sharded_strategy(backend: str = "torch_dist", version: int | None = None) -> Any:
    """The strategy that saves in a format. None: its newest version, which for torch_dist is 1."""
    return get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)


def get_default_save_common_strategy(backend: str = "torch", version: int = 1) -> TorchCommonSaveStrategy:
    """Something to hold; ``save`` refuses it, as Megatron's does: the format keeps the common state itself."""
    return TorchCommonSaveStrategy(backend, version)


def get_default_load_sharded_strategy(checkpoint_dir: str | Path) -> Any:
    """The strategy that reads this checkpoint."""
    return callable_strategy(
        StrategyAction.LOAD_SHARDED, loader.get_default_load_sharded_strategy(checkpoint_dir)
    )
