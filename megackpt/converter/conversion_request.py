"""The calls of the converter: ``convert`` and ``remove_sharded_tensors``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING

from megackpt import limits
from megackpt.backends.base import Backend
from megackpt.checkpoint import Directory, absolute, in_run, open_checkpoint
from megackpt.checkpoint.ownership import is_replaceable
from megackpt.converter.budget import parse_size
from megackpt.converter.conversion import (
    Conversion,
    ConversionOptions,
    Converted,
    Progress,
)
from megackpt.converter.selection import Renames, Selection
from megackpt.converter.single_file import check_free, is_single_file, run_to_file
from megackpt.errors import BackendError, StorageError
from megackpt.planning.manifest import Manifest
from megackpt.storage import Executor, is_url
from megackpt.strategies import Strategy, StrategyLike, resolve

if TYPE_CHECKING:
    from megackpt.huggingface import Table

_MAP_CHECKPOINT = EntryPoint(
    "table", "megackpt.huggingface.mapped_checkpoint:map_checkpoint", "megackpt.tables"
)
"""The function for ``table``. It needs torch, and workers start faster without."""


def convert(
    source: str | Path,
    target: str | Path,
    to: StrategyLike,
    *,
    overwrite: bool = False,
    verify: bool = True,
    verify_target: bool = False,
    max_memory: str | int = limits.CONVERT_MAX_MEMORY,
    workers: int | None = None,
    select: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    rename: Renames = (),
    cast: object = None,
    state: bool = True,
    shards: int | None = None,
    progress: Progress | None = None,
    resume: bool = True,
    table: Table | None = None,
    beside: Mapping[str, bytes]
    | Callable[[Manifest], Mapping[str, bytes]]
    | None = None,
    timeout: timedelta = timedelta(seconds=limits.RANK_TIMEOUT_SECONDS),
) -> Converted:
    """Write a checkpoint of any readable format as a checkpoint of another format.

    The target is committed atomically: it is complete when this returns, and untouched when this
    raises. A run that was killed, or that failed for want of disk space, is resumed by the same
    call. The target is the same, byte for byte, as after a run without interruption. A torch file
    ("torch") is written by one process, and starts from zero if it was interrupted while writing.

    Args:
        source: a checkpoint directory, URL or file.
        target: a directory or URL; or the path of one file, such as ``x.safetensors`` or ``x.pt``.
        to: the target's format; see ``save``.
        overwrite: replace a complete checkpoint at ``target`` (else CheckpointExists).
        verify: check the source's digests while reading.
        verify_target: read everything that was written again, and check it, before the commit.
        max_memory: bytes ("64MiB", "1GB", or a number) that this process and its workers may take
            together, above their idle usage.
        workers: processes that do the work. 1: this process alone. None: by size and processors.
            Never more than fit into ``max_memory``; one for a torch file.
        select, exclude: patterns of keys (``*``, ``?``, ``[...]``) to carry (default: all), and to
            leave out. The common state has the key "common_state"; only ``exclude`` leaves it out.
        rename: "OLD=NEW", or pairs, or a mapping. Each ``*`` in OLD matches any text, as short as
            possible; the n-th ``*`` in NEW is the text that the n-th one matched. The first rule
            that matches a whole key renames it.
        cast: a floating dtype ("bf16", "fp32", torch.float16) for all floating tensors.
        state: False leaves out everything but tensors.
        shards: how many files hold the tensors, for formats in which that can be chosen.
        progress: called with the bytes done and the bytes in all, every few MiB.
        resume: False starts from zero, and removes all files of the run on failure.
        table: convert the tensors under Hugging Face's names (``as_huggingface``); objects and the
            common state are left out.
        beside: small files, name -> content, that are committed together with the checkpoint; or a
            function that makes them of the source's manifest (as mapped by ``table``). A file of
            the target with such a name stays if its bytes are the same; else it is an error.
        timeout: how long the storage of either checkpoint may not answer.

    Raises:
        NotACheckpoint, CorruptCheckpoint: the source is absent or damaged.
        CheckpointExists, SaveInProgress: the target is complete already, or being written.
        StorageError: the file system refused, or did not answer for ``timeout``.
        BackendError: the format cannot hold this, or a part does not fit into ``max_memory``.
        MismatchError: no tensor is selected, or two tensors get the same name.
        RankLost: a worker process died.
        ValueError: an argument cannot be understood.
    """
    selection = Selection(select, exclude, rename, cast, state)
    options = ConversionOptions(
        verify,
        verify_target,
        parse_size(max_memory),
        workers,
        progress,
        resume,
        timeout,
    )
    source_path = _resolve_path(source)
    target_path = _resolve_path(target)
    for inner, outer in ((source_path, target_path), (target_path, source_path)):
        if f"{inner}/".startswith(f"{outer.rstrip('/')}/"):
            raise StorageError(
                f"cannot convert {source_path} to {target_path}: {inner} is in {outer}; "
                "choose another target"
            )
    single = is_single_file(target_path, resolve(to).backend)
    if single:
        if beside:
            raise BackendError(
                f"{target_path} is one file, and other files go beside it: name a directory"
            )
        if shards not in (None, 1):
            raise BackendError(
                f"{target_path} is one file, and shards is {shards}: name a directory"
            )
        if verify_target and is_url(target_path):
            raise BackendError(
                f"{target_path} appears as soon as it is complete, so that verify_target has no "
                "time to read it: leave out verify_target, or name a folder"
            )
        check_free(target_path, overwrite)
        shards = 1
    backend, tasks = _target_backend(to, shards)

    with closing(Executor(timeout)) as executor:
        opened_at = partial(open_checkpoint, moved=executor.alive)
        place, opened = executor.call(
            f"opening {source_path}", in_run, source, opened_at, executor.alive
        )
    source_path = _resolve_path(place)
    if table is not None:
        opened = _MAP_CHECKPOINT.load()(table, opened)
    if callable(beside):
        beside = beside(opened.manifest)
    entries = selection.entries(opened.manifest)
    conversion = Conversion(
        opened,
        source_path,
        entries,
        backend,
        tasks,
        options,
        beside,
        in_order=is_url(target_path),
    )
    if single:
        return run_to_file(conversion, target_path, overwrite)
    return conversion.run(target_path, overwrite)


def remove_sharded_tensors(checkpoint_dir: str | Path, key_prefix: str) -> None:
    """Remove all tensors and objects whose keys begin with ``key_prefix`` from a checkpoint.

    The rest is written again and replaces the checkpoint in one atomic step. Call it on one
    process. The common state stays. If no key begins with the prefix, the checkpoint is unchanged.

    Raises like ``convert``, and BackendError for files that no save replaces, such as Hugging
    Face's.
    """
    opened = open_checkpoint(checkpoint_dir)
    kept = {
        number: entry
        for number, entry in enumerate(opened.manifest.tensors)
        if entry.is_common or not entry.key.startswith(key_prefix)
    }
    if len(kept) == len(opened.manifest.tensors):
        return
    path = _resolve_path(checkpoint_dir)
    if not is_replaceable(opened.storage):
        raise BackendError(
            f"{path} is read as {opened.backend.properties.name!r}, but nothing in it says that "
            "it is a checkpoint which may be replaced (no megackpt.index, no metadata.json of "
            "a known format): convert it to another directory, and leave out the keys by exclude="
        )
    backend, tasks = _target_backend(opened.backend.properties.name, None)
    Conversion(opened, path, kept, backend, tasks).run(path, overwrite=True)


def _resolve_path(path: Directory) -> str:
    location = absolute(path)
    if is_url(location):
        return location
    return os.path.realpath(location)


def _target_backend(to: StrategyLike, shards: int | None) -> tuple[Backend, int | None]:
    """Return the format to write, and the number of tasks if that is the number of files."""
    strategy = resolve(to)
    if shards is not None and shards < 1:
        raise ValueError(f"shards must be at least 1, not {shards}")
    if strategy.backend == "torch_dist":
        # Each task writes one file: with more, a thread for each would hold a cell.
        return _with_option(strategy, "files_per_rank", 1).make_backend(), shards
    if shards is None or (shards == 1 and strategy.backend == "torch"):
        return strategy.make_backend(), None
    try:
        return _with_option(strategy, "shards", shards).make_backend(), None
    except BackendError as error:
        raise BackendError(f"the number of files cannot be chosen: {error}") from error


def _with_option(strategy: Strategy, name: str, value: int) -> Strategy:
    """Add an option that the caller left open. A strategy around the caller's backend stays."""
    if type(strategy) is not Strategy:
        return strategy
    return replace(strategy, options={name: value, **strategy.options})
