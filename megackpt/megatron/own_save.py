"""A save by a custom strategy: see ``own_strategies``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from megackpt import checkpoint, saver, serialization, strategies, tree
from megackpt.async_save import AsyncRequest, Pending
from megackpt.backends.base import CONFIG
from megackpt.backends.object_files import COMMON_FILE
from megackpt.distributed import attempt, group_over, name_here
from megackpt.errors import (
    BackendError,
    CheckpointingException,
    join_truncated,
    name_ranks,
)
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
    COMMON,
    DIGEST_BLOCK,
    OBJECT,
    Manifest,
    TensorEntry,
    TensorMeta,
    digest_rows,
)
from megackpt.saver.save_operation import begin, make_plan
from megackpt.saver.save_request import SaveRequest
from megackpt.state import ShardedBase, ShardedObject
from megackpt.storage import LocalStorage, read_digested
from megackpt.strategies import Strategy

File = tuple[str, int, bytes]
"""Name, size, digests."""


def save(
    strategy: Any,
    state: Any,
    directory: Any,
    *,
    asynchronous: bool,
    process_group: Any,
    timeout: Any,
    **options: Any,
) -> AsyncRequest | None:
    """A save by the strategy. ``options`` are the options of ``SaveRequest.of``."""
    group = group_over(process_group, timeout, f"save {directory}")
    session = checkpoint.SaveSession(
        str(directory), timeout, name_here(group.rank), group
    )
    backend = OwnFormat(strategy.backend, strategy.version or 1)
    with session.running():
        declared = attempt(
            lambda: SaveRequest.of(
                state, local_path(directory), backend, group, **options
            )
        )
        started = begin(session, declared, None)
        request, part = make_plan(session, declared, started)
    own = _OwnSave(
        strategy,
        backend,
        session,
        request,
        part.save_id,
        process_group,
        timeout,
        asynchronous,
    )
    written = attempt(own.write)
    own.agree(written.get)
    if own.outer.inner:
        session.withdraw()  # the engine has committed its save, or its request will
        return written.value
    if not asynchronous:
        own.commit()
        return None
    later = cast(AsyncRequest, written.get())
    task = later.prepare(process_group).task

    def outcome() -> None:
        task.get()
        for function in later.finalize_fns:
            function()

    def conclude() -> None:
        own.agree(outcome)
        own.commit()

    pending = Pending(task, group, conclude, session.give_up)
    return AsyncRequest(pending, (), [pending.conclude])


@dataclass(eq=False)
class _OwnSave:
    """One save by a strategy, on one rank, after the declarations have been checked."""

    strategy: Any
    backend: OwnFormat
    session: checkpoint.SaveSession
    request: SaveRequest
    save_id: str
    process_group: Any
    timeout: Any
    asynchronous: bool
    outer: Outer = field(init=False)
    root: LocalStorage = field(init=False)

    @property
    def folder(self) -> str:
        """The name of the strategy's directory in the staging directory."""
        return os.path.basename(self.request.directory)

    def write(self) -> AsyncRequest | None:
        """Call the strategy. Returns its request if the save is asynchronous."""
        strategy = self.strategy
        self.outer = Outer("", self.run_engine)
        request = None
        with checkpoint.staging_storage(self.request.directory, self.save_id) as root:
            self.root = cast(LocalStorage, root)
            # A separate directory in the staging directory, with the name of the final directory.
            self.root.make_folder(self.folder)
            path = os.path.join(root.location, self.folder)
            self.outer.path = os.path.realpath(path)
            # The strategy does not write the common state or, if it handles tensors only, objects.
            asked = self.request
            files: dict[str, bytes] = {}
            for row in np.flatnonzero(asked.declared.main).tolist():
                if row == len(asked.shards):
                    files[COMMON_FILE] = asked.held()[row]()  # type: ignore[operator]
                    continue
                shard = asked.shards[row]
                if not strategy.can_handle_sharded_objects and isinstance(
                    shard, ShardedObject
                ):
                    files[f"{shard.unique_key}.pt"] = serialization.dump(shard.data)
            root.put_new(files)
            # Copies of the declarations, which the strategy may change.
            given = tree.dict_list_map_outplace(copy, handled(strategy, asked.state))
            with running(self.outer):
                if not self.asynchronous:
                    strategy.save(given, path)
                elif not hasattr(strategy, "async_save"):
                    raise CheckpointingException(
                        f"Cannot apply async_save to non-async strategy {strategy}"
                    )
                else:
                    request = strategy.async_save(given, path)
        if self.asynchronous and not isinstance(request, AsyncRequest):
            raise CheckpointingException(
                f"async_save of {strategy} must return an AsyncRequest, not {request!r}"
            )
        if self.outer.inner:
            self.refuse_others()
        elif (
            strategy.check_values != "off"
            or strategy.audit != "off"
            or strategy.reuse_unchanged
        ):
            raise BackendError(
                f"audit={strategy.audit!r}, check_values={strategy.check_values!r} and "
                f"reuse_unchanged={strategy.reuse_unchanged} have no effect in {strategy}, which "
                "writes the tensors itself: leave them out, or call the method that it overrides"
            )
        return request

    def run_engine(self, given: Any, _: Any, inner: Strategy, **chosen: Any) -> Any:
        """The save of the engine, to the same directory and with the same common state."""
        self.refuse_others()
        request = self.request
        state = dict(request.common)
        for leaf in tree.nested_values(given):
            if isinstance(leaf, ShardedBase):
                state[f"megackpt.{len(state)}"] = leaf
        return saver.save(
            state,
            request.directory,
            inner,
            validate_access_integrity=request.checked,
            overwrite=request.overwrite,
            allow_large_common_state=True,
            # It has been compared.
            preprocess_common_before_consistancy_check=lambda _: {},
            process_group=self.process_group,
            timeout=self.timeout,
            **chosen,
        )

    def refuse_others(self) -> None:
        """BackendError for files that the strategy writes in addition to a save of the engine."""
        found: list[str] = []
        if self.root.is_current():  # until the engine has committed
            found = files_below(self.root, self.folder)
        extra = [os.path.basename(name) for name in found]
        if extra:
            raise BackendError(
                f"the strategy has written {join_truncated(extra, 5, ', ')} beside the save of the "
                "method that it overrides, which commits a directory of its own: write these "
                "files into the directory after the save"
            )

    def agree(self, outcome: Callable[[], object]) -> None:
        """Raise the error of any rank on all ranks, and end the save then. Collective.

        The collective step is a separate call, since the strategy may have called the engine
        before. Either all ranks have called the engine, or none.
        """

        def work() -> bool:
            outcome()
            return bool(self.outer.inner)

        def decide(found: list[bool]) -> None:
            if len(set(found)) > 1:
                ranks = [rank for rank, inner in enumerate(found) if inner]
                raise BackendError(
                    f"the strategy calls the method that it overrides on {name_ranks(ranks)}, and "
                    "not on the others"
                )

        try:
            with group_over(self.process_group, self.timeout) as group:
                group.reduce_broadcast("write", work, decide)
        except BaseException:
            with self.session.running():
                raise

    def collect(self) -> list[str]:
        """On rank 0: move the strategy's files up, and list all. Ours have priority."""
        if self.folder not in self.root.list():
            raise CheckpointingException(
                f"{self.strategy} has removed the directory that it saves to, {self.outer.path}"
            )
        self.root.merge_folder(self.folder, (checkpoint.INDEX, CONFIG, COMMON_FILE))
        return files_below(self.root)

    def synced(self, names: Sequence[str]) -> list[File]:
        """Make files durable, and read them for their digests."""
        files = []
        with closing(self.root.folder("", self.session.alive)) as root:
            for name in names:
                with root.open(name) as reader:
                    reader.sync()
                    block = memoryview(bytearray(min(reader.size, DIGEST_BLOCK)))
                    found = [
                        read_digested(reader, start, block[: reader.size - start])
                        for start in range(0, reader.size, DIGEST_BLOCK)
                    ]
                    files.append((name, reader.size, b"".join(found)))
        return files

    def commit(self) -> None:
        """Make the files of all ranks the checkpoint. Collective; each rank reads a part."""
        session, backend = self.session, self.backend
        group = session.group
        name, version = backend.properties.name, backend.properties.version
        known = attempt(lambda: strategies.reader_of(name, version)).value

        def commit(parts: Sequence[Sequence[File]]) -> int:
            if known is None or known.properties.name != name:
                manifest = _manifest(part for rank in parts for part in rank)
            else:
                manifest = known.read_manifest(self.root)
                backend.properties = replace(  # type: ignore[misc]
                    backend.properties, encoding=manifest.encoding
                )
            return session.commit(backend, manifest)

        with session.running():
            names = group.broadcast(
                "files", lambda: session.call("commit", self.collect)
            )
            share = names[group.rank :: group.size]
            nbytes = group.reduce_broadcast(
                "write", lambda: session.call("commit", self.synced, share), commit
            )
            session.finish(nbytes)


def _manifest(files: Iterable[File]) -> Manifest:
    entries, rows, digests = [], [], []
    for number, (name, size, found) in enumerate(sorted(files)):
        entry = TensorEntry(name, TensorMeta((), OBJECT))
        entries.append(COMMON if name == COMMON_FILE else entry)
        rows.append((number, Box((), ()), name, 0, size))
        digests.append(found)
    manifest = Manifest.of(entries, rows)
    chunks = replace(manifest.chunks, digests=digest_rows(b"".join(digests)))
    return replace(manifest, chunks=chunks)
