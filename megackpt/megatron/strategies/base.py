"""Megatron's ``strategies.base``: a Strategy of ours, which saves or loads by itself when it is called."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from megackpt import converter, loader, saver, strategies
from megackpt.errors import BackendError, CheckpointingException as CheckpointingException
from megackpt.runtime.async_calls import AsyncCallsQueue as AsyncCallsQueue, AsyncRequest as AsyncRequest
from megackpt.state import ShardedStateDict, ShardedTensor
from megackpt.strategies import (
    Strategy,
    StrategyAction as StrategyAction,
    default_strategies as default_strategies,
    register_default_strategy as register_default_strategy,
)

Directory = str | Path

async_calls = AsyncCallsQueue()


class _Open(Strategy):
    """Callers set attributes on Megatron's strategies, and keep them in sets; nothing of ours looks at those."""

    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True


class SaveStrategyBase(_Open):
    """What saves."""


class SaveShardedStrategy(SaveStrategyBase):
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory) -> None:
        """Save this: a checkpoint of its own, complete when this returns."""
        saver.save(sharded_state_dict, checkpoint_dir, self)


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """With what callers look at, and set, which has no effect: plans are kept, and compared, anyway."""

    use_cached_ckpt_structure = False
    validated_cache_reuse = False
    validated_loaded_metadata_reuse = False
    cached_central_plan: Any = None
    cached_local_plan: Any = None
    cached_global_metadata: Any = None
    cached_distribution: Any = None

    def save(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: Directory,
        async_strategy: str = "nvrx",
    ) -> None:
        super().save(sharded_state_dict, checkpoint_dir)

    def async_save(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: Directory,
        async_strategy: str = "nvrx",
    ) -> AsyncRequest:
        """Begin to save this; the request is for an AsyncCallsQueue."""
        request = saver.save(sharded_state_dict, checkpoint_dir, self, async_sharded_save=True)
        return cast("AsyncRequest", request)


class LoadStrategyBase(_Open):
    """What loads."""

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        """A load says by itself what it cannot read."""

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """A load says by itself what it cannot read."""


class LoadShardedStrategy(LoadStrategyBase):
    cached_global_metadata: Any = None

    def load(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: Directory,
        async_strategy: str = "nvrx",
    ) -> Any:
        """What is asked for, without the rest of the common state."""
        found = loader.load(sharded_state_dict, checkpoint_dir, self, validate_access_integrity=False)
        return _asked(sharded_state_dict, found)

    def load_tensors_metadata(
        self,
        checkpoint_dir: Directory,
        metadata: Any = None,
    ) -> dict[str, ShardedTensor]:
        return loader.load_tensors_metadata(checkpoint_dir, self)

    def load_sharded_metadata(self, checkpoint_dir: Directory) -> loader.contents.CkptShardedMetadata:
        return loader.load_sharded_metadata(checkpoint_dir, self)

    def remove_sharded_tensors(self, checkpoint_dir: Directory, key_prefix: str) -> None:
        converter.remove_sharded_tensors(checkpoint_dir, key_prefix)


class LoadCommonStrategy(LoadStrategyBase):
    def load_common(self, checkpoint_dir: Directory) -> dict[Any, Any]:
        return loader.load_common_state_dict(checkpoint_dir)

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Directory) -> Any:
        found = loader.load(sharded_objects_state_dict, checkpoint_dir, validate_access_integrity=False)
        return _asked(sharded_objects_state_dict, found)

    def load_sharded_metadata(self, checkpoint_dir: Directory) -> loader.contents.CkptShardedMetadata:
        return loader.load_sharded_metadata(checkpoint_dir)


class SaveCommonStrategy(SaveStrategyBase):
    def save_common(self, common_state_dict: Any, checkpoint_dir: Directory) -> None:
        raise CheckpointingException(strategies.COMMON_IS_KEPT)

    def save_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Directory) -> None:
        self.save_common(sharded_objects_state_dict, checkpoint_dir)


def _asked(asked: Any, found: Any) -> Any:
    """Of what was found that which stands where something was asked for."""
    if isinstance(asked, dict) and isinstance(found, dict):
        return {key: _asked(value, found[key]) for key, value in asked.items() if key in found}
    if isinstance(asked, list) and isinstance(found, list):
        return [_asked(*pair) for pair in zip(asked, found, strict=True)]
    return found


_KINDS = {
    (StrategyAction.SAVE_SHARDED, "torch_dist"): "torch.TorchDistSaveShardedStrategy",
    (StrategyAction.LOAD_SHARDED, "torch_dist"): "torch.TorchDistLoadShardedStrategy",
    (StrategyAction.SAVE_SHARDED, "zarr"): "zarr.ZarrSaveShardedStrategy",
    (StrategyAction.LOAD_SHARDED, "zarr"): "zarr.ZarrLoadShardedStrategy",
}


def callable_strategy(action: StrategyAction, given: Any) -> Any:
    """A strategy of the class that Megatron has for it; what can be called already stays as it is."""
    strategy = strategies.as_strategy(given)
    if isinstance(given, _Open) or type(strategy) is not Strategy:
        return given
    general = (
        "base.AsyncSaveShardedStrategy"
        if action is StrategyAction.SAVE_SHARDED
        else "base.LoadShardedStrategy"
    )
    module, _, name = _KINDS.get((action, strategy.backend), general).partition(".")
    kind = getattr(import_module(f"megackpt.megatron.strategies.{module}"), name)
    made = kind.__new__(kind)
    for each in fields(Strategy):
        setattr(made, each.name, getattr(strategy, each.name))
    return made


def checked(given: Any) -> Any:
    """What a caller gives as a strategy, unless it has methods of the caller's own, which nobody would call."""
    inner = given
    while getattr(inner, "base_strategy", None) is not None:
        inner = inner.base_strategy
    for kind in type(inner).__mro__ if isinstance(inner, _Open) else ():
        own = {"save", "async_save", "load"}.intersection(vars(kind))
        if own and not kind.__module__.startswith("megackpt."):
            raise BackendError(
                f"{kind.__module__}.{kind.__qualname__} has a {min(own)}() of its own, which is not called here: a "
                "format of your own is a megackpt.backends.base.Backend (docs/adding-a-backend.md)"
            )
    return given


def get_default_strategy(action: StrategyAction, backend: str, version: int | None = None) -> Any:
    """What was registered for this, else the format itself; None: its newest version. Raises BackendError."""
    return callable_strategy(action, strategies.get_default_strategy(action, backend, version))
