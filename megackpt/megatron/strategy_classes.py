"""Megatron's strategy classes: each is a megackpt Strategy that also saves or loads when called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from megackpt import converter, saver, strategies
from megackpt.async_save import AsyncCallsQueue, AsyncRequest
from megackpt.errors import CheckpointingException
from megackpt.loader import load_operation, metadata as loader_metadata
from megackpt.megatron import own_load, own_save, own_strategies, shard_distribution
from megackpt.state import ShardedStateDict, ShardedTensor
from megackpt.strategies import Strategy, StrategyAction, StrategyLike

Directory = str | Path

async_calls = AsyncCallsQueue(staging_bytes=0)


class _OpenStrategy(Strategy):
    """A Strategy that takes any attribute, compares by identity, and may have custom code.

    Callers set attributes on Megatron's strategies and keep them in sets. A Strategy is frozen;
    attributes have no effect on a save or load. A derived class with a method ``save``,
    ``async_save`` or ``load`` saves or loads by that method: see ``own_strategies``.
    """

    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    # A derived class need not call __init__.
    options: Any = MappingProxyType({})
    base_strategy: Any = None

    @property
    def can_handle_sharded_objects(self) -> Any:
        """False: Megatron's common strategy stores objects, the strategy gets tensors only."""
        if isinstance(self.base_strategy, _OpenStrategy):
            return self.base_strategy.can_handle_sharded_objects
        return isinstance(self, _FORMATS) or not self._has_own(
            "save", "async_save", "load"
        )

    def own(self, method: str) -> Callable[..., Any] | None:
        if own_strategies.is_inner():
            return None
        if method == "save" and self._has_own("save", "async_save"):
            return partial(own_save.save, self)
        if method == "load" and self._has_own("load"):
            return partial(own_load.load, self)
        return None

    def _has_own(self, *methods: str) -> bool:
        """Does a custom class define one of these methods, itself or in a base?"""
        for kind in type(self).__mro__:
            is_ours = kind.__module__.startswith("megackpt.")
            if not is_ours and not vars(kind).keys().isdisjoint(methods):
                return True
        base = self.base_strategy
        return isinstance(base, _OpenStrategy) and base._has_own(*methods)


class SaveStrategyBase(_OpenStrategy):
    """The base of strategies that save."""


class SaveShardedStrategy(SaveStrategyBase):
    def save(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: Directory,
        async_strategy: str = "nvrx",
    ) -> None:
        """Save a separate checkpoint, which is complete when this returns.

        Called from an overriding ``save`` with the directory of that save, it writes to the running
        save.
        """
        run = own_strategies.outer_run(checkpoint_dir, saver.save)
        run(sharded_state_dict, checkpoint_dir, self)


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """The attributes are for callers that read and set them. Plans are always kept and compared."""

    use_cached_ckpt_structure = False
    validated_cache_reuse = False
    validated_loaded_metadata_reuse = False
    cached_central_plan: Any = None
    cached_local_plan: Any = None
    cached_global_metadata: Any = None
    cached_distribution: Any = None

    def async_save(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: Directory,
        async_strategy: str = "nvrx",
    ) -> AsyncRequest:
        """Begin to save this; the request is for an AsyncCallsQueue."""
        run = own_strategies.outer_run(checkpoint_dir, saver.save)
        request = run(sharded_state_dict, checkpoint_dir, self, async_sharded_save=True)
        return cast("AsyncRequest", request)


class LoadStrategyBase(_OpenStrategy):
    """The base of strategies that load."""

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        """No effect: a load raises if it cannot read a format."""

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """No effect: a load raises if it cannot read a version."""


class LoadShardedStrategy(LoadStrategyBase):
    cached_global_metadata: Any = None

    def load(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: Directory,
        async_strategy: str = "nvrx",
    ) -> Any:
        """Load what the state asks for, without the rest of the common state."""
        alone = partial(load_operation.load, validate_access_integrity=False)
        run = own_strategies.outer_run(checkpoint_dir, alone)
        return _select(
            sharded_state_dict, run(sharded_state_dict, checkpoint_dir, self)
        )

    def load_tensors_metadata(
        self, checkpoint_dir: Directory, metadata: Any = None
    ) -> dict[str, ShardedTensor]:
        return loader_metadata.load_tensors_metadata(checkpoint_dir, self)

    def load_sharded_metadata(
        self, checkpoint_dir: Directory
    ) -> loader_metadata.CkptShardedMetadata:
        if not self.can_handle_sharded_objects:
            return dict(self.load_tensors_metadata(checkpoint_dir))
        return loader_metadata.load_sharded_metadata(checkpoint_dir, self)

    def remove_sharded_tensors(
        self, checkpoint_dir: Directory, key_prefix: str
    ) -> None:
        converter.remove_sharded_tensors(checkpoint_dir, key_prefix)


class TorchDistSaveShardedStrategy(AsyncSaveShardedStrategy):
    """Saves torch_dist: ``thread_count`` files for each rank.

    Keys that begin with ``separation_hint`` get separate files. All further arguments have no
    effect: one rank writes each shard, and a plan is used again if it fits.
    """

    keep_only_main_replica = True
    thread_count = 2
    separation_hint: str | None = None

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int | None = 1,
        keep_only_main_replica: bool = True,
        thread_count: int = 2,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
        cpu_shm_mode: Any = None,
    ) -> None:
        options = {"files_per_rank": thread_count, "separation_hint": separation_hint}
        super().__init__(backend, version, options)
        self.keep_only_main_replica = keep_only_main_replica
        self.thread_count = thread_count
        self.separation_hint = separation_hint
        self.use_cached_ckpt_structure = cached_metadata


class TorchDistLoadShardedStrategy(LoadShardedStrategy):
    """Loads torch_dist. The arguments have no effect: each load opens the checkpoint itself, and
    destinations of TransformerEngine's float8 are not supported."""

    def __init__(
        self,
        cache_metadata: bool = False,
        checkpoint_name: Any = None,
        stream_ckpt_dequant: bool = True,
    ) -> None:
        super().__init__("torch_dist", 1)


class ZarrSaveShardedStrategy(AsyncSaveShardedStrategy):
    """Saves zarr. Version 2 is zarr v3; to save version 1 (Megatron's zarr v2) raises."""

    def __init__(self, backend: str = "zarr", version: int | None = None) -> None:
        super().__init__(backend, version)


class ZarrLoadShardedStrategy(LoadShardedStrategy):
    """Loads zarr of every version."""

    def __init__(self) -> None:
        super().__init__("zarr")


class TensorStoreLoadShardedStrategy(ZarrLoadShardedStrategy):
    """Loads zarr. Tensors are loaded to the caller's device, whatever the argument is."""

    def __init__(self, load_directly_on_device: bool = False) -> None:
        super().__init__()


class FullyParallelSaveStrategyWrapper(
    AsyncSaveShardedStrategy, strategies.FullyParallelSaveStrategyWrapper
):
    """``megackpt.FullyParallelSaveStrategyWrapper`` with Megatron's further arguments.

    Around a custom strategy with ``save``, it distributes the main replicas like Megatron.
    """

    def __init__(
        self,
        strategy: StrategyLike,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
        validate_access_integrity: bool = True,
        pg_cache_path: Any = None,
        pg_cache_create: Any = False,
        backend: Any = None,
        version: Any = None,
    ) -> None:
        strategies.FullyParallelSaveStrategyWrapper.__init__(
            self, strategy, parallelization_group, do_cache_distribution
        )

    def save(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: Directory,
        async_strategy: str = "nvrx",
    ) -> None:
        save = super().save
        if self._has_own("save", "async_save"):
            self.apply_saving_parallelization(sharded_state_dict)
            save = self.base_strategy.save
        save(sharded_state_dict, checkpoint_dir)

    def async_save(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: Directory,
        async_strategy: str = "nvrx",
    ) -> AsyncRequest:
        if not self._has_own("save", "async_save"):
            return super().async_save(sharded_state_dict, checkpoint_dir)
        if not isinstance(self.base_strategy, AsyncSaveShardedStrategy):
            raise CheckpointingException(
                f"Cannot apply async_save to non-async base strategy {self.base_strategy}"
            )
        self.apply_saving_parallelization(sharded_state_dict)
        return self.base_strategy.async_save(sharded_state_dict, checkpoint_dir)

    def apply_saving_parallelization(
        self, sharded_state_dict: ShardedStateDict
    ) -> None:
        """Set the replica ids, in place: 0 on the rank that saves a shard. Collective."""
        _apply_distribution(self, sharded_state_dict, ignore_groups=False)


class FullyParallelLoadStrategyWrapper(
    LoadShardedStrategy, strategies.FullyParallelLoadStrategyWrapper
):
    """``megackpt.FullyParallelLoadStrategyWrapper`` with Megatron's further arguments.

    Around a custom strategy with ``load``, it loads each shard on one rank of the group, and
    exchanges them.
    """

    cached_distribution: Any = None

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
        self.exchange_algo = exchange_algo

    def load(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: Directory,
        async_strategy: str = "nvrx",
    ) -> Any:
        if not self._has_own("load"):
            return super().load(sharded_state_dict, checkpoint_dir)
        distribution = self.apply_loading_parallelization(sharded_state_dict)
        if distribution is None:
            return self.base_strategy.load(sharded_state_dict, checkpoint_dir)
        return shard_distribution.load_and_exchange(
            self.base_strategy.load,
            sharded_state_dict,
            checkpoint_dir,
            distribution,
            self.parallelization_group,
            self.exchange_algo,
        )

    def apply_loading_parallelization(
        self, sharded_state_dict: ShardedStateDict
    ) -> shard_distribution.ShardDistribution | None:
        """Set the replica ids, in place: 0 on the rank that loads a shard. Collective.

        Returns the distribution; None for a group of one rank.
        """
        return _apply_distribution(self, sharded_state_dict, ignore_groups=True)

    def load_tensors_metadata(
        self, checkpoint_dir: Directory, metadata: Any = None
    ) -> dict[str, ShardedTensor]:
        if not self._has_own("load"):
            return super().load_tensors_metadata(checkpoint_dir)
        return dict(self.base_strategy.load_tensors_metadata(checkpoint_dir))

    def load_sharded_metadata(
        self, checkpoint_dir: Directory
    ) -> loader_metadata.CkptShardedMetadata:
        if not self._has_own("load"):
            return super().load_sharded_metadata(checkpoint_dir)
        return dict(self.base_strategy.load_sharded_metadata(checkpoint_dir))

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        if self._has_own("load"):
            self.base_strategy.check_backend_compatibility(loaded_backend)

    def check_version_compatibility(self, loaded_version: Any) -> None:
        if self._has_own("load"):
            self.base_strategy.check_version_compatibility(loaded_version)


def _apply_distribution(
    wrapper: Any, state: ShardedStateDict, *, ignore_groups: bool
) -> shard_distribution.ShardDistribution | None:
    group = wrapper.parallelization_group
    distribution: shard_distribution.ShardDistribution | None
    distribution = wrapper.cached_distribution
    if distribution is None:
        distribution = shard_distribution.determine_main_replica_uniform_distribution(
            state, group, ignore_groups
        )
    shard_distribution.distribute_main_replicas_with_precomputed_distribution(
        state, group, distribution
    )
    if wrapper.do_cache_distribution:
        wrapper.cached_distribution = distribution
    return distribution


class TwoStageDataParallelLoadShardedStrategy(FullyParallelLoadStrategyWrapper):
    """Loads any format. The ranks of the group exchange data, on every file system."""

    def __init__(self, data_parallel_group: Any, cpu_transfer: bool = True) -> None:
        super().__init__(None, data_parallel_group, exchange_algo="always")


class LoadCommonStrategy(LoadStrategyBase):
    def load_common(self, checkpoint_dir: Directory) -> dict[Any, Any]:
        return loader_metadata.load_common_state_dict(checkpoint_dir)

    def load_sharded_objects(
        self, sharded_objects_state_dict: Any, checkpoint_dir: Directory
    ) -> Any:
        loaded = load_operation.load(
            sharded_objects_state_dict, checkpoint_dir, validate_access_integrity=False
        )
        return _select(sharded_objects_state_dict, loaded)

    def load_sharded_metadata(
        self, checkpoint_dir: Directory
    ) -> loader_metadata.CkptShardedMetadata:
        return loader_metadata.load_sharded_metadata(checkpoint_dir)


class TorchCommonLoadStrategy(LoadCommonStrategy):
    """Loads the common state of any format."""


class SaveCommonStrategy(SaveStrategyBase):
    def save_common(self, common_state_dict: Any, checkpoint_dir: Directory) -> None:
        raise CheckpointingException(strategies.COMMON_IS_KEPT)

    def save_sharded_objects(
        self, sharded_objects_state_dict: Any, checkpoint_dir: Directory
    ) -> None:
        self.save_common(sharded_objects_state_dict, checkpoint_dir)


class TorchCommonSaveStrategy(SaveCommonStrategy):
    """An object to hold: its methods raise."""


class MCoreMetadata:
    """For pickles of up to 0.15 that name it."""


class MCoreSavePlan:
    """For pickles of up to 0.15 that name it."""


def register_default_common_strategies() -> None:
    """No effect: the formats are registered."""


def register_default_torch_strategies() -> None:
    """No effect: the formats are registered."""


_FORMATS = (
    TorchDistSaveShardedStrategy,
    TorchDistLoadShardedStrategy,
    ZarrSaveShardedStrategy,
    ZarrLoadShardedStrategy,
)
_CLASSES: dict[tuple[StrategyAction, str], type[_OpenStrategy]] = {
    (StrategyAction.SAVE_SHARDED, "torch_dist"): TorchDistSaveShardedStrategy,
    (StrategyAction.SAVE_SHARDED, "zarr"): ZarrSaveShardedStrategy,
    (StrategyAction.LOAD_SHARDED, "torch_dist"): TorchDistLoadShardedStrategy,
    (StrategyAction.LOAD_SHARDED, "zarr"): ZarrLoadShardedStrategy,
}


def callable_strategy(action: StrategyAction, given: Any) -> Any:
    """``given`` as a strategy of Megatron's class for its format and this action.

    Objects of such a class, and strategies of other classes, are returned unchanged.
    """
    strategy = strategies.as_strategy(given)
    if isinstance(given, _OpenStrategy) or type(strategy) is not Strategy:
        return given
    default: type[_OpenStrategy] = LoadShardedStrategy
    if action is StrategyAction.SAVE_SHARDED:
        default = AsyncSaveShardedStrategy
    kind = _CLASSES.get((action, strategy.backend), default)
    # Not by its __init__, which takes Megatron's arguments.
    result = kind.__new__(kind)
    for field in fields(Strategy):
        setattr(result, field.name, getattr(strategy, field.name))
    return result


def get_default_strategy(
    action: StrategyAction,
    backend: str,
    version: int | None = None,
) -> Any:
    """The strategy registered for these arguments, else the default of the format.

    ``version`` None: the format's newest. Raises BackendError if the format is not registered.
    """
    found = strategies.get_default_strategy(action, backend, version)
    return callable_strategy(action, found)


def _select(asked: Any, loaded: Any) -> Any:
    """The part of ``loaded`` at the places where ``asked`` has something."""
    if isinstance(asked, dict) and isinstance(loaded, dict):
        return {
            key: _select(value, loaded[key])
            for key, value in asked.items()
            if key in loaded
        }
    if isinstance(asked, list) and isinstance(loaded, list):
        return [_select(*pair) for pair in zip(asked, loaded, strict=True)]
    return loaded
