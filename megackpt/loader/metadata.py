"""The contents of a checkpoint for one process alone: metadata, common state, whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megackpt.checkpoint import find_storage
from megackpt.distributed import DEFAULT_TIMEOUT
from megackpt.errors import NotACheckpoint
from megackpt.loader.comparison import trusted_classes
from megackpt.loader.load_session import LoadSession, common_row, destination, whole
from megackpt.state import ShardedObject, ShardedTensor, declare
from megackpt.strategies import (
    Strategy,
    StrategyAction,
    StrategyLike,
    as_strategy,
    asked_format,
    get_default_strategy,
)

CONTENT_METADATA = "content_metadata"
CkptShardedMetadata = dict[str, ShardedTensor | ShardedObject]


def load_common_state_dict(
    checkpoint_dir: str | Path,
    *,
    trusted: Sequence[type] = (),
    sharded_strategy: StrategyLike = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> dict[Any, Any]:
    """The common state of a checkpoint: all unsharded values; {} where none is stored.

    For files with notes of their author, such as the header of safetensors:
    ``{"__metadata__": notes}``. StorageError if the storage does not answer for ``timeout``.
    """
    classes = trusted_classes(trusted)
    with closing(LoadSession(timeout)) as session:
        _, opened = session.open(checkpoint_dir, asked_format(sharded_strategy))
        wanted = common_row(opened.manifest)
        values = session.rows(opened, wanted, trusted=classes)
    if values:
        return dict(values[0])
    return {}


def load_content_metadata(
    checkpoint_dir: str | Path | None = None,
    *,
    preloaded_state_dict: Mapping[str, Any] | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> dict[str, Any] | None:
    """The value of ``save(content_metadata=...)``; None if none was given.

    Read from a checkpoint, or from a loaded state dict. Raises ValueError if neither is given, and
    StorageError if the storage does not answer for ``timeout``.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise ValueError(
                "give checkpoint_dir or preloaded_state_dict: both are None"
            )
        preloaded_state_dict = load_common_state_dict(checkpoint_dir, timeout=timeout)
    return preloaded_state_dict.get(CONTENT_METADATA)


def load_tensors_metadata(
    checkpoint_dir: str | Path,
    sharded_strategy: StrategyLike = None,
    *,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> dict[str, ShardedTensor]:
    """Every stored tensor by key, as an unsharded ShardedTensor without data.

    The local shape is the global shape. The result can be given to
    ``load(..., validate_access_integrity=False)`` on every rank. StorageError if the storage does
    not answer for ``timeout``.
    """
    with closing(LoadSession(timeout)) as session:
        _, opened = session.open(checkpoint_dir, asked_format(sharded_strategy))
    entries = opened.manifest.tensors
    return {entry.key: whole(entry) for entry in entries if not entry.meta.is_object}


def load_sharded_metadata(
    checkpoint_dir: str | Path,
    sharded_strategy: StrategyLike = None,
    common_strategy: Any = None,  # noqa: ARG001 - Megatron's signature
    *,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> CkptShardedMetadata:
    """Tensors by key, as ``load_tensors_metadata`` gives them, and objects by unique key.

    None of them has data. StorageError if the storage does not answer for ``timeout``.
    """
    with closing(LoadSession(timeout)) as session:
        _, opened = session.open(checkpoint_dir, asked_format(sharded_strategy))
    manifest = opened.manifest
    found: CkptShardedMetadata = {}
    for i, number in enumerate(manifest.chunks.tensor.tolist()):
        entry = manifest.tensors[number]
        if not entry.meta.is_object:
            found[entry.key] = found.get(entry.key) or whole(entry)
        elif not entry.is_common:
            shape = entry.meta.shape
            held = ShardedObject(
                entry.key, None, shape, manifest.chunks.boxes.row(i, len(shape)).offset
            )
            found[held.unique_key] = held
    return found


def load_plain_tensors(
    checkpoint_dir: str | Path,
    *,
    verify: bool = True,
    sharded_strategy: StrategyLike = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> dict[str, torch.Tensor]:
    """Every stored tensor, whole, by key. Each caller reads everything.

    StorageError if the storage does not answer for ``timeout``.
    """
    with closing(LoadSession(timeout)) as session:
        _, opened = session.open(checkpoint_dir, asked_format(sharded_strategy))
        entries = opened.manifest.tensors
        shards = [whole(entry) for entry in entries if not entry.meta.is_object]
        tensors = [destination(shard) for shard in shards]
        session.rows(opened, declare(shards, rank=0), tensors, verify=verify)
    return {shard.key: tensor for shard, tensor in zip(shards, tensors, strict=True)}


def check_is_distributed_checkpoint(
    checkpoint_dir: str | Path, *, timeout: timedelta = DEFAULT_TIMEOUT
) -> bool:
    """Does this directory hold a complete checkpoint of any format?

    StorageError if the storage does not answer for ``timeout``.
    """
    with closing(LoadSession(timeout)) as session:
        try:
            session.call(
                f"opening {checkpoint_dir}",
                find_storage,
                checkpoint_dir,
                moved=session.alive,
            )
        except NotACheckpoint:
            return False
    return True


def get_default_load_sharded_strategy(
    checkpoint_dir: str | Path, *, timeout: timedelta = DEFAULT_TIMEOUT
) -> Strategy:
    """The strategy that reads this checkpoint.

    StorageError if the storage does not answer for ``timeout``.
    """
    with closing(LoadSession(timeout)) as session:
        _, opened = session.open(checkpoint_dir)
        name, version = opened.manifest.backend
    return as_strategy(get_default_strategy(StrategyAction.LOAD_SHARDED, name, version))
