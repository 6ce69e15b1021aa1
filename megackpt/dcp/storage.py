"""torch DCP's two doors to the disk, with our bytes, digests, commit and reads behind them."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.checkpoint._extension import (
    ExtensionRegistry,
    StreamTransformExtension,
)
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageWriterTransforms,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import (
    StorageReader,
    StorageWriter,
    WriteResult,
)
from torch.futures import Future

from megackpt import serialization
from megackpt.backends.base import CONFIG
from megackpt.backends.torch_dist import METADATA
from megackpt.backends.torch_dist.distcp_writer import (
    COMMON_FILE,
    Records,
    file_name as usual_name,
)
from megackpt.backends.torch_dist.object_names import LISTED_COMMON
from megackpt.checkpoint import INDEX, Place, absolute, begin, commit
from megackpt.dcp.begun import Begun, clear_ended
from megackpt.dcp.contents import (
    PlannedByDcp,
    check_common,
    manifest_of,
    metadata_of,
    table_of,
)
from megackpt.dcp.protocol import ChunkPlace, check_plan, keep_names, named_places
from megackpt.dcp.reading import Contents, read_items
from megackpt.dcp.stages import Work
from megackpt.dcp.writing import Ticket, Written, named_files, settle_all, ticket_of
from megackpt.errors import CheckpointingException, CheckpointReplaced
from megackpt.planning.manifest import ITEMSIZE, OBJECT, TensorEntry, TensorMeta
from megackpt.planning.save_plan import refuse_unstorable
from megackpt.torch_versions import DROPS_ERRORS_OF_READERS

_log = logging.getLogger("megackpt.dcp")

Path = str | os.PathLike[str]


class FileSystemWriter(BlockingAsyncStager, StorageWriter):
    """Saves through ``torch.distributed.checkpoint.save`` and ``async_save``, whatever the planner, with our engine.

    The checkpoint appears at one stroke, when all ranks have written: until then the directory holds none, or the
    one that was there before. It has digests and an index beside ``.metadata``, and what Megatron-Core wants to see
    (``metadata.json``, an empty ``common.pt``), so that stock's reader, ``megackpt.load``, ``verify`` and Megatron
    open it::

        import torch
        import torch.distributed.checkpoint as dcp
        from megackpt.dcp import FileSystemReader, FileSystemWriter

        state = {"model": {"w": torch.ones(4)}, "step": 3}
        dcp.save(state, storage_writer=FileSystemWriter("checkpoints/3"))
        dcp.load(state, storage_reader=FileSystemReader("checkpoints/3"))

    Rank 0 of the process group begins and commits the save, and names the files: to name them otherwise,
    override ``file_name``. With ``async_save`` it stages as stock's writer does, and works in a thread and in a
    process (which pickles it: a subclass must be importable there). ``enable_plan_caching`` and ``no_dist`` work;
    ``use_collectives=False`` is refused.

    Args:
        path: the directory; where ``save`` is given a ``checkpoint_id``, that one counts.
        single_file_per_rank: has no effect: a rank's bytes are spread over ``thread_count`` files either way.
        sync_files: has no effect: what is committed is durable.
        thread_count: files, and threads that write them, of each rank; rank 0's number counts.
        per_thread_copy_ahead: has no effect: what is copied to the host at a time is bounded anyway.
        cache_staged_state_dict: keep the copies that ``async_save`` stages, for the next save of this writer.
        overwrite: False = raise CheckpointExists instead of replacing a complete checkpoint.
        _extensions: torch's stream extensions, for all items; their records can be read by DCP's readers only.
        serialization_format: torch's TORCH_SAVE; others are refused (``megackpt.convert`` writes safetensors).
    """

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
    ) -> None:
        super().__init__(cache_staged_state_dict=cache_staged_state_dict)
        if type(thread_count) is not int or thread_count < 1:
            raise CheckpointingException(
                f"thread_count is a whole number from 1 on, not {thread_count!r}"
            )
        if serialization_format != SerializationFormat.TORCH_SAVE:
            raise CheckpointingException(
                f"this writer keeps torch DCP's own format, not {serialization_format}: save with it and "
                "megackpt.convert the checkpoint, or megackpt.save it as 'safetensors'"
            )
        self.path = path
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.overwrite = overwrite
        self.transforms = _StorageWriterTransforms(_extensions)
        """As in stock's writer: asked for each item which extensions it goes through."""
        self.save_id = uuid.uuid4().hex
        self.rank: int | None = None
        self._begun: Begun | None = None
        self._work: Work | None = None
        self._named: dict[str, list[ChunkPlace]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """As it travels to the process of an ``async_save``: without the save that this process may be at."""
        return {
            **self.__dict__,
            "_begun": None,
            "_work": None,
            "state_dict_cache": None,
        }

    def file_name(self, rank: int, n: int) -> str:
        """The name of the ``n``-th file (from 0) of a rank, asked on rank 0: unique, and safe in a directory."""
        return usual_name(rank, n)

    @property
    def checkpoint_id(self) -> Path:
        """The directory, as it was given."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Can a checkpoint be kept there?"""
        return _is_directory(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=os.fspath(self.path), save_id=self.save_id)

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """A new save begins. What is left of one that failed is cleared away; of another thread's, when planning."""
        if self._begun is not None and self._begun.is_here:
            self._begun.clear()
            self._begun = None
        if checkpoint_id:
            self.path = checkpoint_id
        self.save_id = uuid.uuid4().hex

    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: ARG002
        *args: Any,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        self.rank = kwargs.get("rank")
        if not kwargs.get("use_collectives", True):
            raise CheckpointingException(
                "this writer needs use_collectives=True: ranks that do not talk have no moment at which all of them "
                "have written, and so nothing that could make it one checkpoint"
            )

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """As stock's writer does, but the copies of tensors that say which shards they are say so, too."""
        self._named = named_places(state_dict)
        staged: dict[str, Any] = super().stage(state_dict)
        keep_names(state_dict, staged)
        return staged

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        named, self._named = self._named, {}
        check_plan(named, plan)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, of every save, also where the planner sends no plan anew: begin."""
        _refuse_unstorable(plans)
        directory = absolute(self.path)
        own = METADATA, CONFIG, COMMON_FILE, INDEX
        names = named_files(self.file_name, len(plans), self.thread_count, own)
        clear_ended(directory, self._begun)
        place = begin(directory, save_id=self.save_id, overwrite=self.overwrite)
        try:
            place.announce([*own, *(name for those in names for name in those)])
        except BaseException:
            place.abort()
            raise
        self._begun = Begun(place, directory, threading.current_thread())
        tickets = [
            Ticket(directory, place.save_id, rank, those)
            for rank, those in enumerate(names)
        ]
        tickets[self.rank or 0].arrive()
        return [
            dataclasses.replace(plan, storage_data=ticket)
            for plan, ticket in zip(plans, tickets, strict=True)
        ]

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        try:
            settle_all()
            work = self._work_of(plan, planner)
            future.set_result(work.written(planner))
        except Exception as error:  # noqa: BLE001 - it is the caller's
            if self._begun is not None:
                self._begun.over = True
            future.set_exception(error)  # type: ignore[arg-type] # torch's annotation
        return future

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """For ``save_state_dict_async_plan``: what this rank is to write; nothing is copied or written yet."""
        self._work = self._work_of(plan, planner)
        if self._begun is not None:
            self._begun.thread = None

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., None] | None, Callable[[], Any] | None, list[Any]]:
        """What was prepared, as ``(function, preload, args)``; (None, None, []) where this rank writes nothing.

        ``preload()`` copies tensors to the host, and belongs into ``args[1]``: from then on they may be changed.
        ``function(*args)`` writes, in any thread of this process. What goes wrong in it is raised by
        ``save_state_dict_async_finalize``, on all ranks.
        """
        return self._prepared().function_and_args()

    def retrieve_write_results(self) -> list[WriteResult]:
        """What was written; or raises what went wrong, or CheckpointingException where nothing has been yet."""
        return self._prepared().results()

    def _work_of(self, plan: SavePlan, planner: SavePlanner) -> Work:
        ticket = ticket_of(plan, absolute(self.path), self.rank)
        own = getattr(planner, "transforms", None)
        first = [own] if isinstance(own, _StorageWriterTransforms) else []
        return Work(ticket, plan, planner, [*first, self.transforms])

    def _prepared(self) -> Work:
        if self._work is None:
            raise CheckpointingException(
                "nothing was planned with this writer: save_state_dict_async_plan is first"
            )
        return self._work

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all ranks have written: commit."""
        begun, self._begun = self._begun, None
        if begun is None:
            raise CheckpointingException(
                f"no save to {os.fspath(self.path)} has been begun by this writer"
            )
        place = begun.place
        try:
            listed = LISTED_COMMON in metadata.state_dict_metadata
            common = None if listed else _written_common(place)
            manifest = manifest_of(metadata, results, common)
            if listed:
                check_common(place.storage, manifest)
            table = table_of(metadata, results, self.storage_meta())
            commit(place, PlannedByDcp(table=table), manifest)
        except BaseException:
            place.abort()
            raise
        finally:
            begun.finished()
            self.save_id = uuid.uuid4().hex


FileSystemWriterAsync = FileSystemWriter
"""Megatron-Core's name for it."""


def _refuse_unstorable(plans: Sequence[SavePlan]) -> None:
    """Before anything is written: ShardingError for keys and sizes that no index can hold."""
    entries: set[TensorEntry] = set()
    for plan in plans:
        for item in plan.items:
            meta = TensorMeta((), OBJECT)
            if item.tensor_data is not None:
                dtype = str(item.tensor_data.properties.dtype).removeprefix("torch.")
                known = (
                    dtype if dtype in ITEMSIZE else "uint8"
                )  # others are pickled by torch
                meta = TensorMeta(tuple(item.tensor_data.size), known)
            entries.add(TensorEntry(item.index.fqn, meta))
    refuse_unstorable(tuple(entries))


def _written_common(place: Place) -> Written:
    """The common state that Megatron-Core wants: none."""
    blob = memoryview(serialization.dump({}))
    with place.storage.create(COMMON_FILE) as writer:
        records = Records(writer)
        landed = records.blob(iter([blob]))
        records.end()
    return Written(COMMON_FILE, *landed, "", (0, 0), ())


def _is_directory(checkpoint_id: Path) -> bool:
    try:
        absolute(checkpoint_id)
    except CheckpointingException:
        return False
    return True


class FileSystemReader(StorageReader):
    """Loads through ``torch.distributed.checkpoint.load``: our checkpoints, stock's and Megatron-Core's.

    Only the bytes that the planner asks for are read, straight into its tensors where their memory allows, several
    ranges at a time. ``.metadata`` is understood by a reader that runs nothing of it: a planner's data in it must
    be plain values. What objects are unpickled by is the planner's affair: torch's own trusts them. Records that
    went through an extension of torch's are read as stock does.

    Args:
        path: the directory; where ``load`` is given a ``checkpoint_id``, that one counts.
        _extension_registry: torch's extensions that records may have gone through (None: its own).
        verify: compare what is read with the digests of the index, where there is one; whole blocks of 1 MiB are
            read then. False reads the exact ranges.
    """

    def __init__(
        self,
        path: Path,
        _extension_registry: ExtensionRegistry | None = None,
        *,
        verify: bool = True,
    ) -> None:
        super().__init__()
        self.path = path
        self.verify = verify
        self.load_id = uuid.uuid4().hex
        self._registry = _extension_registry or ExtensionRegistry()
        self._contents: Contents | None = None

    @property
    def checkpoint_id(self) -> Path:
        """The directory, as it was given."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Can a checkpoint be kept there?"""
        return _is_directory(checkpoint_id)

    def reset(self, checkpoint_id: Path | None = None) -> None:
        if checkpoint_id:
            self.path = checkpoint_id
        self._contents, self.load_id = None, uuid.uuid4().hex

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """Open the checkpoint: what is read later is read from this one, even if it is replaced meanwhile.

        Raises NotACheckpoint, CorruptCheckpoint or UntrustedClass. With ``rank``: what stock's writer left there for
        this rank alone, and nothing else; torch talks to no other rank then. The metadata has no ``all_local_plans``.
        With torch 2.9 to 2.11, whose ``load`` drops these errors, they are logged as warnings, too.
        """
        try:
            self._contents = Contents.of(self.path, kwargs.get("rank"))
            return metadata_of(
                self._contents.listing, self._contents.items, self.load_id
            )
        except CheckpointingException as error:
            if DROPS_ERRORS_OF_READERS:
                _log.warning("%s: %s", type(error).__name__, error)
            raise

    def set_up_storage_reader(
        self,
        metadata: Metadata,  # noqa: ARG002
        is_coordinator: bool,  # noqa: ARG002
        *args: Any,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        if self._contents is None:  # the caller has the metadata from somewhere else
            alone = not kwargs.get("use_collectives", True)
            self._contents = Contents.of(
                self.path, kwargs.get("rank") if alone else None
            )

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._opened().manifest.save_id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: have all ranks opened the same one?"""
        seen = {plan.storage_data for plan in plans}
        if len(seen) > 1:
            raise CheckpointReplaced(
                f"{os.fspath(self.path)} was replaced while it was being opened, ranks see the saves "
                f"{sorted(map(str, seen))}: load again, and where that does not help: is the directory shared "
                "between all hosts?"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        future: Future[None] = Future()
        try:
            read_items(self._opened(), plan, planner, self._registry, self.verify)
            future.set_result(None)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            future.set_exception(error)  # type: ignore[arg-type] # torch's annotation
        return future

    def _opened(self) -> Contents:
        if self._contents is None:
            raise CheckpointingException(
                "read_metadata or set_up_storage_reader opens a checkpoint: call it first"
            )
        return self._contents
