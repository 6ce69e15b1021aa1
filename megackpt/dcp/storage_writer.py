"""``megackpt.dcp.FileSystemWriter``: a storage writer for torch DCP, with our files and commit."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageInfo,
    _StorageWriterTransforms,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from megackpt import serialization
from megackpt.adapters.checkpointable import ChunkShape
from megackpt.backends.base import CONFIG, Backend
from megackpt.backends.object_files import COMMON_FILE
from megackpt.backends.torch_dist import METADATA
from megackpt.backends.torch_dist.distcp_writer import (
    Records,
    file_name as default_file_name,
)
from megackpt.backends.torch_dist.metadata_reader import LISTED_COMMON
from megackpt.checkpoint import (
    INDEX,
    SaveSession,
    absolute,
    staging_storage,
)
from megackpt.dcp.item_writer import (
    Assignment,
    ItemWriter,
    Resolve,
    Resolved,
    StoredItem,
    assignment_of,
    copy_to_host,
    name_files,
    refuse_wrappers,
    resolve,
    stable_resolver,
)
from megackpt.dcp.planner import check_plan, copy_fields, named_chunks
from megackpt.dcp.torch_metadata import (
    PlannedByDcp,
    check_common,
    encode_metadata,
    manifest_of,
)
from megackpt.distributed import DEFAULT_TIMEOUT, Attempt, Group, attempt, name_here
from megackpt.errors import (
    CheckpointExists,
    CheckpointingException,
    SaveInProgress,
    ShardingError,
    join_truncated,
)
from megackpt.planning.manifest import (
    ITEMSIZE,
    OBJECT,
    Manifest,
    TensorEntry,
    TensorMeta,
)
from megackpt.planning.save_plan import refuse_unstorable
from megackpt.saver import save
from megackpt.staging.devices import synchronize_current_stream
from megackpt.state.storable import layout_problem
from megackpt.storage import Executor

Path = str | os.PathLike[str]
HostItems = dict[MetadataIndex, Resolved]

_JOIN_TIMEOUT = 1.0
"""Seconds in which a thread whose save has ended is expected to end."""


class FileSystemWriter(BlockingAsyncStager, StorageWriter):
    """Saves through ``torch.distributed.checkpoint.save`` and ``async_save``, with any planner.

    The checkpoint appears in one step when all ranks have written. Until then the directory holds
    no checkpoint, or the earlier one. In addition to ``.metadata`` it has digests, an index and the
    files that Megatron-Core expects (``metadata.json``, an empty ``common.pt``), so stock's reader,
    ``megackpt.load``, ``verify`` and Megatron open it::

        import torch
        import torch.distributed.checkpoint as dcp
        from megackpt.dcp import FileSystemReader, FileSystemWriter

        state = {"model": {"w": torch.ones(4)}, "step": 3}
        dcp.save(state, storage_writer=FileSystemWriter("checkpoints/3"))
        dcp.load(state, storage_reader=FileSystemReader("checkpoints/3"))

    Rank 0 of the process group begins and commits the save, and names the files: override
    ``file_name`` for other names. ``async_save`` stages like stock's writer, and works in a thread
    and in a process (which pickles the writer: a subclass must be importable there).
    ``enable_plan_caching`` and ``no_dist`` work; ``use_collectives=False`` is refused. With plan
    caching and without ``install``, an override of ``write_data`` calls the method of this class in
    the thread of its caller.

    Args:
        path: the directory. A ``checkpoint_id`` given to ``save`` takes its place.
        single_file_per_rank: no effect. A rank's bytes are in ``thread_count`` files either way.
        sync_files: no effect. A committed checkpoint is durable.
        thread_count: files, and threads that write them, of each rank. Rank 0's number counts.
        per_thread_copy_ahead: no effect. The host memory for copies is bounded anyway.
        cache_staged_state_dict: keep the copies that ``async_save`` stages for the next save.
        overwrite: False = raise CheckpointExists instead of replacing a complete checkpoint.
        _extensions: torch's stream extensions, for all items. Only DCP's readers read such records.
        serialization_format: TORCH_SAVE; any other format is refused (``HuggingFaceStorageWriter``
            and ``megackpt.convert`` write safetensors).
        timeout: how long the storage may not answer in one stage of a save, before that raises
            StorageError.
    """

    _item_writer = ItemWriter
    _indexed = True

    def __init__(
        self,
        path: Path,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 2,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__(cache_staged_state_dict=cache_staged_state_dict)
        if type(thread_count) is not int or thread_count < 1:
            raise CheckpointingException(
                f"thread_count is a whole number from 1 on, not {thread_count!r}"
            )
        if serialization_format != SerializationFormat.TORCH_SAVE:
            raise CheckpointingException(
                f"this writer keeps torch DCP's own format, not {serialization_format}: save with "
                "it and megackpt.convert the checkpoint, or save by HuggingFaceStorageWriter"
            )
        self.path = path
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.overwrite = overwrite
        self.timeout = timeout
        self.transforms = _StorageWriterTransforms(_extensions)
        """Gives the extensions of each item. Stock's writer has the same attribute."""
        self.save_id = uuid.uuid4().hex
        self._spent = False
        """Whether ``save_id`` belongs to a save that has ended."""
        self.rank: int | None = None
        self._session: SaveSession | None = None
        self._thread: threading.Thread | None = None
        """The thread of the save that this writer has started, unless that save has failed."""
        self._prepared: _PreparedWrite | None = None
        self._named_chunks: dict[str, list[ChunkShape]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For the process of an ``async_save``: without the save of this process."""
        own = dict.fromkeys(("_session", "_thread", "_prepared", "state_dict_cache"))
        return {**vars(self), **own}

    def file_name(self, rank: int, n: int) -> str:
        """The name of a rank's ``n``-th file (from 0): unique and safe. Called on rank 0."""
        return default_file_name(rank, n)

    @property
    def checkpoint_id(self) -> Path:
        """The directory, as it was given."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Whether the path can be a checkpoint's."""
        return is_checkpoint_path(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=os.fspath(self.path), save_id=self.save_id)

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """Prepare for a new save. Removes the files of this writer's failed save.

        A save that another thread is in stays; planning raises SaveInProgress then.
        """
        if self._is_busy():
            return
        self._abort()
        if checkpoint_id:
            self.path = checkpoint_id
        self._renew()

    def perform(self, state: Any, state_dict: dict[str, Any], group: Group) -> None:
        """Save as ``megackpt.save`` does, by declarations of the state dict. Collective.

        ``save_id`` is rank 0's afterwards: the id in ``StorageMeta``.
        """
        if self._session or self._named_chunks or self.transforms.extensions:
            state = None  # ShardingError on all ranks: these may differ between ranks
        if self._spent:
            self._renew()
        self.save_id = group.broadcast("declare", lambda: self.save_id)
        files, meta = self.thread_count, self.storage_meta()
        backend = PlannedByDcp(files, state_dict=state_dict, storage_meta=meta)
        save(
            state,
            os.fspath(self.path),
            backend,
            overwrite=self.overwrite,
            process_group=group,
            timeout=self.timeout,
        )
        self._spent = True

    def _renew(self) -> None:
        self.save_id, self._spent = uuid.uuid4().hex, False

    def _is_busy(self) -> bool:
        """Whether another thread may be in a save of this writer.

        torch does not call a writer whose save failed on another rank, so only the end of the
        thread shows the end of the save. The main thread outlives its saves.
        """
        thread = self._thread
        if thread in (None, threading.current_thread(), threading.main_thread()):
            return False
        thread.join(_JOIN_TIMEOUT)
        return thread.is_alive()

    def _abort(self) -> None:
        session, self._session = self._session, None
        self._thread = self._prepared = None
        if session is not None:
            session.end()

    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: ARG002
        *args: Any,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        self.rank = kwargs.get("rank")
        if not kwargs.get("use_collectives", True):
            raise CheckpointingException(
                "this writer needs use_collectives=True: without messages no rank knows when all "
                "have written, so nothing could make their files one checkpoint"
            )

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Stage like stock's writer. Copies of tensors that name their shards name them, too."""
        self._named_chunks = named_chunks(state_dict)
        staged: dict[str, Any] = super().stage(state_dict)
        copy_fields(state_dict, staged)
        return staged

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        chunks, self._named_chunks = self._named_chunks, {}
        check_plan(chunks, plan)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, in every save (also with cached plans): begin the checkpoint."""
        if self._session is not None and (self._prepared or self._is_busy()):
            thread = ""
            if self._thread:
                thread = f" in {self._thread.name}"
            raise SaveInProgress(
                f"this writer is saving to {self._session.directory}{thread}: finish that "
                "first. If it has failed, reset() the writer in the thread that began it"
            )
        self._abort()
        if self._spent:
            self._renew()
        _refuse_unstorable(plans)
        directory = absolute(self.path)
        names, assignments = self._assign(directory, plans)
        self._session = SaveSession(directory, self.timeout, name_here(self.rank or 0))
        try:
            self._session.begin(
                self.save_id, overwrite=self.overwrite, indexed=self._indexed
            )
            self._session.announce(names)
        except BaseException as error:
            self._abort()
            if isinstance(error, CheckpointExists):  # in the words of stock's writer
                raise CheckpointExists(f"Checkpoint already exists: {error}") from error
            raise
        self._thread = threading.current_thread()
        result = []
        for plan, assignment in zip(plans, assignments, strict=True):
            result.append(dataclasses.replace(plan, storage_data=assignment))
        return result

    def _assign(
        self, directory: str, plans: Sequence[SavePlan]
    ) -> tuple[Sequence[str], list[Assignment]]:
        """The names that the save may write, and the part of each rank."""
        own = METADATA, CONFIG, COMMON_FILE, INDEX
        names = name_files(self.file_name, len(plans), self.thread_count, own)
        parts = []
        for rank, files in enumerate(names):
            parts.append(Assignment(directory, self.save_id, rank, files))
        return [*own, *itertools.chain(*names)], parts

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        try:
            synchronize_current_stream()
            prepared = self._prepare(plan, planner)
            future.set_result(prepared.write(stable_resolver(planner)))
        except Exception as error:  # noqa: BLE001 - raised by the caller
            self._thread = None
            future.set_exception(error)  # type: ignore[arg-type] # torch's annotation
        return future

    def finish(
        self,
        metadata: Metadata,
        results: list[list[WriteResult]],
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        """On the coordinator, when all ranks have written: commit. See ``Transaction.commit``."""
        session = self._session
        if session is None:
            raise CheckpointingException(
                f"no save to {os.fspath(self.path)} has been begun by this writer"
            )
        try:
            backend, manifest = session.call(
                "commit", self._contents, session.directory, metadata, results
            )
            session.commit(backend, manifest, confirm)
        finally:
            self._abort()  # which has no effect after a commit
            self._spent = True

    def _contents(
        self, directory: Path, metadata: Metadata, results: list[list[WriteResult]]
    ) -> tuple[Backend, Manifest]:
        """The manifest of all ranks' results, and the backend that completes the checkpoint."""
        with staging_storage(directory, self.save_id) as storage:
            common = None
            is_listed = LISTED_COMMON in metadata.state_dict_metadata
            if not is_listed:
                # The empty common state that Megatron-Core expects.
                with storage.create(COMMON_FILE) as writer:
                    records = Records(writer)
                    empty = memoryview(serialization.dump({}))
                    stored = records.blob(iter([empty]))
                    records.end()
                info = _StorageInfo(COMMON_FILE, stored.start, stored.length)
                common = StoredItem(info, *stored)
            manifest = manifest_of(metadata, results, common)
            if is_listed:
                check_common(storage, results)
        table = encode_metadata(metadata, results, self.storage_meta())
        return PlannedByDcp(table=table), manifest

    # ---- The stages of save_state_dict_async_plan and its kin

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Keep the plan of this rank, without a copy or a write."""
        self._prepared = self._prepare(plan, planner)
        self._thread = None  # The last stage may run in any thread.

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., None] | None, Callable[[], Any] | None, list[Any]]:
        """``(function, preload, args)``; (None, None, []) if this rank has no items to write.

        ``preload()`` copies the tensors to the host; put its result into ``args[1]``. From then on
        the tensors may be changed. ``function(*args)`` writes, in any thread of this process. Its
        errors are raised by ``save_state_dict_async_finalize``, on all ranks.
        """
        prepared = self._get_prepared()
        if not prepared.plan.items:
            return None, None, []
        rank = prepared.assignment.rank
        return _write_prepared, prepared.preload, [rank, prepared.planner, prepared]

    def retrieve_write_results(self) -> list[WriteResult]:
        """The results of ``function``, or its error. CheckpointingException if it has not run."""
        prepared = self._get_prepared()
        if not prepared.plan.items:
            return []
        if prepared.outcome is None:
            raise CheckpointingException(
                f"rank {prepared.assignment.rank} has not written yet: call the function of "
                "get_save_function_and_args, in this process, and finalize when it has returned"
            )
        return prepared.outcome.get()

    def _prepare(self, plan: SavePlan, planner: SavePlanner) -> _PreparedWrite:
        refuse_wrappers(getattr(planner, "state_dict", {}))
        assignment = assignment_of(plan, absolute(self.path), self.rank)
        transforms = [self.transforms]
        of_planner = getattr(planner, "transforms", None)
        if isinstance(of_planner, _StorageWriterTransforms):
            transforms.insert(0, of_planner)
        return _PreparedWrite(
            self._item_writer, assignment, plan, planner, transforms, self.timeout
        )

    def _get_prepared(self) -> _PreparedWrite:
        if self._prepared is None:
            raise CheckpointingException(
                "nothing was planned with this writer: call save_state_dict_async_plan first"
            )
        return self._prepared


FileSystemWriterAsync = FileSystemWriter
"""Megatron-Core's name."""


@dataclass(eq=False)
class _PreparedWrite:
    """The write of one rank in one save, and the outcome of the second of three stages."""

    item_writer: type[ItemWriter]
    assignment: Assignment
    plan: SavePlan
    planner: SavePlanner
    transforms: Sequence[_StorageWriterTransforms]
    timeout: timedelta
    outcome: Attempt[list[WriteResult]] | None = None

    def write(self, resolve: Resolve) -> list[WriteResult]:
        assignment = self.assignment
        directory, save_id = assignment.directory, assignment.save_id

        def work() -> list[WriteResult]:
            with staging_storage(directory, save_id, executor.alive) as root:
                writer = self.item_writer(root, assignment, resolve, self.transforms)
                return writer.write(self.plan.items)

        with closing(Executor(self.timeout)) as executor:
            return executor.call(
                f"writing of the save to {directory} ({name_here(assignment.rank)})",
                work,
            )

    def preload(self) -> HostItems:
        items = {}
        for item in self.plan.items:
            items[item.index] = copy_to_host(resolve(self.planner, item))
        return items

    def __reduce__(self) -> Any:
        raise CheckpointingException(
            "the second stage of a save runs in its own process, in any thread. To write in "
            "another process, use megackpt.save with async_sharded_save, or torch's async_save"
        )


def _write_prepared(
    _rank: int, source: SavePlanner | HostItems, prepared: _PreparedWrite
) -> None:
    if isinstance(source, dict):
        items: HostItems = source
        prepared.outcome = attempt(lambda: prepared.write(lambda it: items[it.index]))
    else:
        prepared.outcome = attempt(lambda: prepared.write(stable_resolver(source)))


def _refuse_unstorable(plans: Sequence[SavePlan]) -> None:
    """Before anything is written: ShardingError for keys, sizes and layouts that cannot be kept."""
    entries = set()
    sparse = {}
    for plan in plans:
        for item in plan.items:
            meta = TensorMeta((), OBJECT)
            if item.tensor_data is not None:
                properties = item.tensor_data.properties
                if problem := layout_problem(properties.layout):
                    sparse[item.index.fqn] = problem
                dtype = str(properties.dtype).removeprefix("torch.")
                if dtype not in ITEMSIZE:
                    dtype = "uint8"  # torch pickles it
                meta = TensorMeta(tuple(item.tensor_data.size), dtype)
            entries.add(TensorEntry(item.index.fqn, meta))
    if sparse:
        found = [f"{key!r}: {problem}" for key, problem in sparse.items()]
        raise ShardingError(join_truncated(found, separator="\n"))
    refuse_unstorable(tuple(entries))


def is_checkpoint_path(checkpoint_id: Path) -> bool:
    try:
        absolute(checkpoint_id)
    except CheckpointingException:
        return False
    return True
