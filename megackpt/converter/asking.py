"""What callers ask of the converter: a conversion, or a checkpoint without some of its tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megackpt.backends.base import Backend
from megackpt.checkpoint import absolute, open_checkpoint
from megackpt.checkpoint.ownership import is_replaceable
from megackpt.converter.budget import DEFAULT, parse_size
from megackpt.converter.landing import LoneFile, is_lone
from megackpt.converter.order import Conversion, Converted, Limits, Progress
from megackpt.converter.selecting import Choice, Renames
from megackpt.errors import BackendError, StorageError
from megackpt.planning.manifest import Manifest
from megackpt.storage import is_url
from megackpt.strategies import Strategy, StrategyLike, resolve

if TYPE_CHECKING:
    from megackpt.adapters.huggingface import Table


def convert(
    source: str | Path,
    target: str | Path,
    to: StrategyLike,
    *,
    overwrite: bool = False,
    verify: bool = True,
    verify_target: bool = False,
    max_memory: str | int = DEFAULT,
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
) -> Converted:
    """Rewrite a checkpoint of any readable format as a checkpoint of another.

    The target is committed atomically: it is complete when this returns, and untouched when this raises. A run
    that was killed, or that failed for want of disk space, is gone on with by the same call, and the target is the
    same, byte for byte, as if it had never been interrupted. A torch file ("torch") is written by one
    process, and a run that is interrupted before everything is written starts from zero.

    Args:
        to: the target's format, as for ``save``.
        overwrite: replace a complete checkpoint at ``target`` (else CheckpointExists).
        verify: check the source's digests on the way.
        verify_target: read all that was written once more, and check it, before it is committed.
        max_memory: bytes ("64MiB", "1GB", or a number) that this process and its workers may take together, above
            what they take when idle.
        workers: processes that do the work (1: this one alone; None: by size and processors). Never more than fit
            into ``max_memory``; for a torch file one.
        select, exclude: patterns of keys (``*``, ``?``, ``[...]``): what is carried (default: everything), and what
            of it is not. The common state goes by the name "common_state", and is left out by ``exclude`` only.
        rename: "OLD=NEW" (or pairs, or a mapping): each ``*`` in OLD stands for any text, as short as possible, and
            the n-th ``*`` in NEW for what the n-th matched. The first that fits a whole key renames it.
        cast: a floating dtype ("bf16", "fp32", torch.float16) for all floating tensors.
        state: False = leave out everything that is no tensor.
        shards: how many files hold the tensors, for formats in which that can be chosen.
        progress: called with the bytes done and the bytes in all, every few MiB.
        resume: False = begin anew, and leave nothing behind on failure.
        table: see the source under Hugging Face's names (``as_huggingface``); objects and common state stay behind.
        beside: small files, name -> content, that come with the checkpoint, in the same step; or what makes them of
            the source's manifest (as ``table`` shows it). A file of the target that has such a name stays if it has
            the same bytes, else the conversion is refused.

    Raises:
        NotACheckpoint, CorruptCheckpoint: the source is none, or is damaged.
        CheckpointExists, SaveInProgress, StorageError: the target is taken, or the disk refused.
        BackendError: the format cannot hold this, or a piece of it does not fit into ``max_memory``.
        MismatchError: nothing is selected, or two tensors get the same name.
        RankLost: a worker process died.
        ValueError: an argument that cannot be understood.
    """
    choice = Choice.of(select, exclude, rename, cast, state)
    limits = Limits(
        verify,
        verify_target,
        parse_size(max_memory),
        workers,
        progress or _nowhere,
        resume,
    )
    origin, place = _real(source), _real(target)
    _refuse_nested(origin, place)
    lone = LoneFile(place) if is_lone(place, resolve(to).backend) else None
    if lone:
        if beside:
            raise BackendError(
                f"{place} is one file, and others are to stand beside it: name a directory"
            )
        lone.check(overwrite)
        if shards not in (None, 1):
            raise BackendError(
                f"{place} is one file: leave shards out, or name a directory"
            )
    backend, tasks = _target(to, 1 if lone else shards)
    opened = open_checkpoint(source)
    if table is not None:
        # It needs torch, which workers start faster without.
        from megackpt.converter.seeing import seen_through

        opened = seen_through(table, opened)
    files = beside(opened.manifest) if callable(beside) else beside
    carried = choice.carried(opened.manifest)
    conversion = Conversion(opened, origin, carried, backend, tasks, limits, files)
    return lone.run(conversion, overwrite) if lone else conversion.run(place, overwrite)


def remove_sharded_tensors(checkpoint_dir: str | Path, key_prefix: str) -> None:
    """Take all tensors and objects whose keys begin with ``key_prefix`` out of a checkpoint.

    What remains is written anew and replaces the checkpoint in one atomic step: readers see the one or the other.
    Call it on one process. The common state stays. Where no key begins so, nothing is written.

    Raises what ``convert`` raises, and BackendError for files that no save replaces, as Hugging Face's.
    """
    opened = open_checkpoint(checkpoint_dir)
    entries = dict(enumerate(opened.manifest.tensors))
    kept = {
        n: e
        for n, e in entries.items()
        if e.is_common or not e.key.startswith(key_prefix)
    }
    if len(kept) == len(entries):
        return
    where = _real(checkpoint_dir)
    if not is_replaceable(opened.storage):
        raise BackendError(
            f"{where} is read as {opened.backend.name!r}, but nothing in it says that it is a checkpoint which may be "
            "replaced (no megackpt.index, no metadata.json of a known format): convert it to another directory, and "
            "leave out the keys by exclude="
        )
    backend, tasks = _target(opened.backend.name, None)
    Conversion(opened, where, kept, backend, tasks, Limits()).run(where, overwrite=True)


def _nowhere(done: int, total: int) -> None:
    """Progress that nobody wants to hear of."""


def _real(path: str | Path) -> str:
    where = absolute(path)
    return where if is_url(where) else os.path.realpath(where)


def _refuse_nested(source: str, target: str) -> None:
    for inner, outer in ((source, target), (target, source)):
        if f"{inner}/".startswith(f"{outer.rstrip('/')}/"):
            raise StorageError(
                f"cannot convert {source} to {target}: one is (in) the other; choose another target"
            )


def _target(to: StrategyLike, shards: int | None) -> tuple[Backend, int | None]:
    """The format to write, and the number of tasks where that is the number of files."""
    strategy = resolve(to)
    if shards is not None and shards < 1:
        raise ValueError(f"shards must be at least 1, not {shards}")
    if strategy.backend == "torch_dist":
        # Each task writes one file: a thread for each of several would hold a cell each.
        return _with(strategy, {"files_per_rank": 1}).make_backend(), shards
    if shards is None or (shards == 1 and strategy.backend == "torch"):
        return strategy.make_backend(), None
    try:
        return _with(strategy, {"shards": shards}).make_backend(), None
    except BackendError as error:
        raise BackendError(
            f"how many files there are cannot be chosen: {error}"
        ) from error


def _with(strategy: Strategy, options: dict[str, int]) -> Strategy:
    """The strategy with these options, where it leaves them open; one around an object of the caller's as it is."""
    return (
        replace(strategy, options={**options, **strategy.options})
        if type(strategy) is Strategy
        else strategy
    )
