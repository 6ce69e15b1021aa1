"""A load by a custom strategy: see ``own_strategies``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megackpt import checkpoint, serialization, strategies, tree
from megackpt.adapters.megatron import from_megatron
from megackpt.backends.base import read_config
from megackpt.checkpoint.verifying import damage
from megackpt.distributed import attempt, group_over, name_here
from megackpt.errors import BackendError, CorruptCheckpoint, NotACheckpoint
from megackpt.loader import load_operation, metadata as loader_metadata
from megackpt.loader.comparison import (
    CompareRequest,
    Comparison,
    LoadRequest,
    judge,
)
from megackpt.loader.load_session import LoadSession
from megackpt.megatron.own_strategies import (
    Outer,
    OwnFormat,
    files_below,
    handled,
    local_path,
    running,
)
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    OBJECT,
    Manifest,
    TensorEntry,
    TensorMeta,
)
from megackpt.planning.strict import StrictHandling
from megackpt.state import (
    ABSENT,
    ShardedObject,
    ShardedTensor,
    declare,
    dtype_name,
    extract,
    restore,
)
from megackpt.storage import Storage
from megackpt.strategies import Strategy


def load(
    strategy: Any,
    state: Any,
    directory: Any,
    *,
    strict: StrictHandling,
    validate: bool,
    verify: bool,
    trusted: Sequence[type],
    process_group: Any,
    timeout: Any,
    **unsupported: Any,
) -> Any:
    """A load by the strategy. The arguments have the meaning of ``megackpt.load``."""

    def opened() -> tuple[Storage, Mapping[Any, Any]]:
        given = [name for name, value in unsupported.items() if value]
        if given:
            raise BackendError(
                f"{', '.join(given)} cannot be given with a strategy of your own"
            )
        storage = checkpoint.find_storage(local_path(directory))
        config = read_config(storage)
        if config is None:
            raise NotACheckpoint(f"{storage.called} is not a distributed checkpoint")
        name, version = config.sharded_backend, config.sharded_backend_version
        strategy.check_backend_compatibility(name)
        strategy.check_version_compatibility(version)
        form = None
        if attempt(lambda: strategies.backend_named(name, version)).error is not None:
            form = OwnFormat(name, version)
            found = checkpoint.open_checkpoint(directory, strategies.as_strategy(form))
            rows = np.arange(group.rank, len(found.manifest.chunks), group.size)
            chunks = found.manifest.chunks.take(rows)
            share = replace(found.manifest, chunks=chunks)
            if verify and (problems := damage(found.storage, form, share)):
                raise CorruptCheckpoint("\n".join(problems))
        common = loader_metadata.load_common_state_dict(
            directory, trusted=trusted, sharded_strategy=form
        )
        return storage, common

    def compare() -> _Loading:
        with closing(LoadSession(timeout, name_here(group.rank))) as session:
            storage, common = session.call(f"opening {directory}", opened)
        request = LoadRequest(
            str(directory), state, strict=strict, validate=validate, trusted=trusted
        )
        extracted = extract(state, from_megatron)
        declared = declare(extracted.shards, rank=group.rank)
        every = np.arange(len(declared), dtype=np.int64)
        compared = Comparison(extracted, declared, set(), every, declared)
        stored = Manifest.of([], [])
        if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
            stored = _stored(strategy, storage)
            compared = Comparison.of(request, stored, group.rank)
        return _Loading(request, storage, common, compared, stored)

    with group_over(process_group, timeout) as group:
        found = attempt(compare)
        missing = group.reduce_broadcast(
            "compare",
            lambda: CompareRequest.of(found.get().request, found.get().compared),
            lambda parts: judge(found.get().request, parts, found.get().stored),
        )
    loading = found.get()

    def engine(given: Any, _: Any, inner: Strategy, **chosen: Any) -> Any:
        return load_operation.load(
            given,
            directory,
            inner,
            validate_access_integrity=False,
            verify=verify,
            trusted=trusted,
            process_group=process_group,
            timeout=timeout,
            **chosen,
        )

    def read() -> Any:
        with running(Outer(os.path.realpath(loading.storage.location), engine)):
            return loading.read(strategy)

    result = attempt(read)
    with group_over(process_group, timeout) as group:
        group.reduce_broadcast("read", lambda: len(result.get()), len)
    if StrictHandling.requires_returning_mismatch_keys(strict):
        return result.get(), missing, loading.compared.unexpected
    return result.get()


@dataclass(frozen=True, eq=False)
class _Loading:
    """The request of one rank. ``stored``: what the strategy says is stored; empty if not asked."""

    request: LoadRequest
    storage: Storage
    common: Mapping[Any, Any]
    compared: Comparison
    stored: Manifest

    def read(self, strategy: Any) -> Any:
        """The state. The strategy gets copies of the declarations, which it may change."""
        extracted = self.compared.extracted
        shards = extracted.shards
        values: list[Any] = [ABSENT] * len(shards)
        copies: dict[int, Any] = {}
        numbers: dict[int, list[int]] = {}
        for i in self.compared.kept.tolist():
            shard = shards[i]
            own = copies.setdefault(id(shard), copy(shard))
            numbers.setdefault(id(own), []).append(i)
            if isinstance(shard, ShardedObject):
                file = f"{shard.unique_key}.pt"
                if not strategy.can_handle_sharded_objects:
                    values[i] = serialization.load(
                        self.storage.get(file),
                        trusted=self.request.trusted,
                        where=f"{self.storage.location}/{file}",
                    )
        state = tree.dict_list_map_outplace(
            lambda leaf: copies.get(id(leaf)), extracted.state
        )
        given = handled(strategy, state)
        found = strategy.load(given, self.storage.location)
        for path, leaf in tree.walk(given):
            try:
                value = tree.lookup(found, path)
            except (LookupError, TypeError) as error:
                raise BackendError(
                    f"load() of {strategy} returns nothing for {leaf.key!r}, at {tree.show(path)}"
                ) from error
            for i in numbers[id(leaf)]:
                values[i] = value
        return restore(extracted, values, dict(self.common))


def _stored(strategy: Any, storage: Storage) -> Manifest:
    """What the strategy says is stored, and the objects that it does not handle."""
    found = list(strategy.load_sharded_metadata(storage.location).values())
    if not strategy.can_handle_sharded_objects:
        names = [name.removesuffix(".pt") for name in files_below(storage)]
        cells = [name for name in names if "/shard_" in name]
        found += map(ShardedObject.empty_from_unique_key, cells)
    numbers: dict[TensorEntry, int] = {}
    rows = []
    for shard in found:
        shape = tuple(shard.global_shape)
        meta = TensorMeta(shape, OBJECT)
        box = Box.whole(shape)
        if isinstance(shard, ShardedTensor):
            meta = TensorMeta(shape, dtype_name(shard.dtype))
        else:
            box = Box(tuple(shard.global_offset), (1,) * len(shape))
        number = numbers.setdefault(TensorEntry(shard.key, meta), len(numbers))
        rows.append((number, box, "", 0, 0))
    return Manifest.of(numbers, rows)
