"""Megatron's functions that save, load and check a checkpoint, as 0.16 to 0.19 call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack, cast

from megackpt import checkpoint, saver
from megackpt.async_save import AsyncRequest
from megackpt.backends.base import CONFIG
from megackpt.backends.object_files import COMMON_FILE
from megackpt.distributed import GroupLike
from megackpt.errors import CorruptCheckpoint, NotACheckpoint
from megackpt.loader import load_operation, metadata as loader_metadata
from megackpt.loader.comparison import KeyMap
from megackpt.megatron.strategy_classes import (
    Directory,
    TorchCommonSaveStrategy,
    callable_strategy,
    get_default_strategy,
)
from megackpt.planning.strict import StrictHandling, Strictness
from megackpt.state import ShardedStateDict
from megackpt.storage import root_at
from megackpt.strategies import (
    CheckpointingConfig,
    StrategyAction,
    StrategyLike,
    read_config,
)

CONFIG_FNAME = CONFIG
COMMON_STATE_FNAME = COMMON_FILE
load_common = loader_metadata.load_common_state_dict


def _legacy_common_state_exists(checkpoint_dir: Directory) -> bool:
    """Whether the common state is a separate file (Megatron up to 0.18, and megackpt)."""
    try:
        storage = root_at(checkpoint_dir)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return storage.size(COMMON_STATE_FNAME) is not None


F = TypeVar("F", bound=Callable[..., Any])


class SaveOptions(TypedDict, total=False):
    """The arguments of ``megackpt.save`` that Megatron does not have."""

    overwrite: bool
    allow_large_common_state: bool
    wait_staged: bool
    timeout: timedelta


class LoadOptions(TypedDict, total=False):
    """The arguments of ``megackpt.load`` that Megatron does not have."""

    verify: bool
    dtype_policy: Literal["convert", "error"]
    key_map: KeyMap | None
    trusted: Sequence[type]
    asynchronous: bool
    timeout: timedelta


def _in_either_order(function: F) -> F:
    """Accept the positional arguments of 0.16, and of 0.19, which has no ``common_strategy``.

    0.19 has a bool at that place.
    """

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
    strict: Strictness = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify_integrity: bool = False,  # digests are compared anyway, unless verify=False says no
    process_group: GroupLike = None,
    **further: Unpack[LoadOptions],
) -> Any:
    """Call ``megackpt.load``. ``further`` are its other arguments."""
    return load_operation.load(
        sharded_state_dict,
        checkpoint_dir,
        sharded_strategy,
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
    process_group: GroupLike = None,
    **further: Unpack[SaveOptions],
) -> AsyncRequest | None:
    """Call ``megackpt.save``. ``further`` are its other arguments."""
    return saver.save(
        sharded_state_dict,
        checkpoint_dir,
        sharded_strategy,
        common_strategy,
        validate_access_integrity,
        async_sharded_save,
        preprocess_common_before_consistancy_check,
        content_metadata,
        process_group=process_group,
        **further,
    )


def get_default_save_sharded_strategy(
    backend: str = "torch_dist", version: int | None = None
) -> Any:
    """The strategy that saves in a format. None: its newest version, which for torch_dist is 1."""
    return get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)


def get_default_save_common_strategy(
    backend: str = "torch", version: int = 1
) -> TorchCommonSaveStrategy:
    """An object to hold; ``save`` refuses it: the format keeps the common state itself."""
    return TorchCommonSaveStrategy(backend, version)


def get_default_load_sharded_strategy(checkpoint_dir: str | Path) -> Any:
    """The strategy that reads this checkpoint."""
    found = loader_metadata.get_default_load_sharded_strategy(checkpoint_dir)
    return callable_strategy(StrategyAction.LOAD_SHARDED, found)


def maybe_load_config(checkpoint_dir: str | Path) -> CheckpointingConfig | None:
    """What metadata.json contains; None if there is none."""
    try:
        return read_config(checkpoint.find_storage(checkpoint_dir))
    except NotACheckpoint:
        return None


def verify_checkpoint(checkpoint_dir: str | Path) -> None:
    """Raise NotACheckpoint unless the directory is a complete checkpoint."""
    checkpoint.open_checkpoint(checkpoint_dir)


def verify_checkpoint_and_load_strategy(
    checkpoint_dir: str | Path,
    sharded_strategy: StrategyLike = None,
    common_strategy: Any = None,
) -> tuple[StrategyLike, Any]:
    """The strategies to load with: the given ones, else what reads this checkpoint."""
    default = get_default_load_sharded_strategy(checkpoint_dir)
    return default if sharded_strategy is None else sharded_strategy, common_strategy


def verify_integrity_manifest(checkpoint_dir: str | Path) -> None:
    """Read all data and compare it with its digests. Raises CorruptCheckpoint."""
    report = checkpoint.verify(checkpoint_dir)
    if not report.ok:
        raise CorruptCheckpoint("\n".join(map(str, report.problems)))


def validate_sharded_objects_handling(
    sharded_strategy: Any, common_strategy: Any
) -> None:
    """No effect: every format here stores objects."""
