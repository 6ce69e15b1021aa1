"""megackpt: save and load the sharded state of a distributed PyTorch job.

The public names are imported when they are first used (PEP 562), so ``import megackpt.planning``
needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

from megackpt.lazy_names import lazily as _lazily

__version__ = "0.1.0"

if TYPE_CHECKING:
    from megackpt.adapters.dtensor import sharded as sharded
    from megackpt.async_save import (
        AsyncCallsQueue as AsyncCallsQueue,
        AsyncRequest as AsyncRequest,
    )
    from megackpt.checkpoint import verify as verify
    from megackpt.converter import (
        convert as convert,
        remove_sharded_tensors as remove_sharded_tensors,
    )
    from megackpt.errors import (
        BackendError as BackendError,
        CheckpointExists as CheckpointExists,
        CheckpointingException as CheckpointingException,
        CheckpointReplaced as CheckpointReplaced,
        CorruptCheckpoint as CorruptCheckpoint,
        CoverageError as CoverageError,
        MismatchError as MismatchError,
        NonfiniteValues as NonfiniteValues,
        NotACheckpoint as NotACheckpoint,
        RankFailure as RankFailure,
        RankLost as RankLost,
        RefusedObject as RefusedObject,
        ReplicaMismatch as ReplicaMismatch,
        SaveInProgress as SaveInProgress,
        ShardingError as ShardingError,
        StorageError as StorageError,
        UntrustedClass as UntrustedClass,
    )
    from megackpt.events import Event as Event, watching as watching
    from megackpt.loader.load_operation import (
        AsyncLoadRequest as AsyncLoadRequest,
        load as load,
    )
    from megackpt.loader.metadata import (
        check_is_distributed_checkpoint as check_is_distributed_checkpoint,
        get_default_load_sharded_strategy as get_default_load_sharded_strategy,
        load_common_state_dict as load_common_state_dict,
        load_content_metadata as load_content_metadata,
        load_plain_tensors as load_plain_tensors,
        load_sharded_metadata as load_sharded_metadata,
        load_tensors_metadata as load_tensors_metadata,
    )
    from megackpt.manager import CheckpointManager as CheckpointManager
    from megackpt.manager.local import LocalTier as LocalTier
    from megackpt.planning.strict import StrictHandling as StrictHandling
    from megackpt.progress_line import progress as progress
    from megackpt.saver import save as save
    from megackpt.state import (
        LocalNonpersistentObject as LocalNonpersistentObject,
        PerRank as PerRank,
        ShardedObject as ShardedObject,
        ShardedTensor as ShardedTensor,
        ShardedTensorFactory as ShardedTensorFactory,
        register_tensor_subclass as register_tensor_subclass,
    )
    from megackpt.strategies import (
        FullyParallelLoadStrategyWrapper as FullyParallelLoadStrategyWrapper,
        FullyParallelSaveStrategyWrapper as FullyParallelSaveStrategyWrapper,
        Strategy as Strategy,
        get_default_save_sharded_strategy as get_default_save_sharded_strategy,
    )

_MODULES = {
    "adapters.dtensor": ("sharded",),
    "checkpoint": ("verify",),
    "converter": ("convert", "remove_sharded_tensors"),
    "errors": (
        "BackendError",
        "CheckpointExists",
        "CheckpointingException",
        "CheckpointReplaced",
        "CorruptCheckpoint",
        "CoverageError",
        "MismatchError",
        "NonfiniteValues",
        "NotACheckpoint",
        "RankFailure",
        "RankLost",
        "RefusedObject",
        "ReplicaMismatch",
        "SaveInProgress",
        "ShardingError",
        "StorageError",
        "UntrustedClass",
    ),
    "events": ("Event", "watching"),
    "loader.load_operation": ("AsyncLoadRequest", "load"),
    "loader.metadata": (
        "check_is_distributed_checkpoint",
        "get_default_load_sharded_strategy",
        "load_common_state_dict",
        "load_content_metadata",
        "load_plain_tensors",
        "load_sharded_metadata",
        "load_tensors_metadata",
    ),
    "manager": ("CheckpointManager",),
    "manager.local": ("LocalTier",),
    "planning.strict": ("StrictHandling",),
    "progress_line": ("progress",),
    "async_save": ("AsyncCallsQueue", "AsyncRequest"),
    "saver": ("save",),
    "state": (
        "LocalNonpersistentObject",
        "PerRank",
        "ShardedObject",
        "ShardedTensor",
        "ShardedTensorFactory",
        "register_tensor_subclass",
    ),
    "strategies": (
        "FullyParallelLoadStrategyWrapper",
        "FullyParallelSaveStrategyWrapper",
        "Strategy",
        "get_default_save_sharded_strategy",
    ),
}
_PACKAGES = ("dcp", "megatron")
"""Packages that are attributes without an import of their own."""

__all__ = ["__version__", *sorted(chain(*_MODULES.values()))]  # noqa: PLE0604 - strings


if not TYPE_CHECKING:
    _get, __dir__ = _lazily(
        globals(), {f"megackpt.{home}": names for home, names in _MODULES.items()}
    )

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return import_module(f"megackpt.{name}")
        return _get(name)
