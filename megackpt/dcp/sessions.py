"""``dcp.save`` and ``dcp.load`` after ``install``: torch's steps, as sessions of ours.

torch calls a planner and a storage writer or reader in a fixed order, and sends messages between
these steps. Here the order is the same, and the messages are ours: they are bounded, a lost rank is
named on all ranks, and the coordinator asks all ranks once more before it commits.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from megackpt import events, gc_pause
from megackpt.dcp.huggingface_writer import HuggingFaceStorageWriter
from megackpt.dcp.item_writer import Assignment
from megackpt.dcp.planner import LoadPlanner, SavePlanner
from megackpt.dcp.storage_reader import FileSystemReader, HuggingFaceStorageReader
from megackpt.dcp.storage_writer import FileSystemWriter
from megackpt.distributed import Group, group_over
from megackpt.distributed.group import SingleGroup
from megackpt.errors import (
    CheckpointingException,
    NotACheckpoint,
    RankFailure,
    RankLost,
)

# Others may need torch's own flow: their classes may override any step.
_READERS: dict[type[Any], type[FileSystemReader]] = {
    FileSystemWriter: FileSystemReader,
    HuggingFaceStorageWriter: HuggingFaceStorageReader,
}
_SAVE_PLANNERS = type(None), DefaultSavePlanner, SavePlanner
_LOAD_PLANNERS = (
    type(None),
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
    LoadPlanner,
)

stock_save = state_dict_saver._save_state_dict
stock_load = state_dict_loader._load_state_dict

in_flight: dict[Future[Any], Any] = {}
"""The results of calls of ``async_save`` that have not ended -> their writers."""


def save_state_dict(
    state_dict: dict[str, Any],
    storage_writer: Any,
    process_group: Any = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: Any = None,
    **others: Any,
) -> Metadata:
    """In the place of torch's ``_save_state_dict``.

    A planner or a writer of another class, or another coordinator, has torch's own flow. The
    metadata that other ranks than the coordinator get is read when it is first accessed.
    """
    made = planner or DefaultSavePlanner()
    reader = _READERS.get(type(storage_writer))
    if (
        reader is None
        or type(made) not in _SAVE_PLANNERS
        or coordinator_rank != 0
        or not others.get("use_collectives", True)
    ):
        return stock_save(
            state_dict,
            storage_writer,
            process_group,
            coordinator_rank,
            no_dist,
            planner,
            **others,
        )
    metadata: Metadata | None = None

    @events.stage("declare")
    def declare() -> SavePlan:
        made.set_up_planner(
            state_dict=state_dict,
            storage_meta=storage_writer.storage_meta(),
            is_coordinator=group.is_coordinator,
        )
        storage_writer.set_up_storage_writer(
            group.is_coordinator, rank=group.rank, use_collectives=True
        )
        planned: SavePlan = storage_writer.prepare_local_plan(made.create_local_plan())
        return planned

    @events.stage("plan")
    def decide(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        plans, metadata = made.create_global_plan(plans)
        prepared: list[SavePlan] = storage_writer.prepare_global_plan(plans)
        return prepared

    @events.stage("write")
    def write() -> list[WriteResult]:
        written = storage_writer.write_data(made.finish_plan(plan), made)
        results: list[WriteResult] = written.value()
        return results

    @events.stage("commit")
    def finish(results: list[list[WriteResult]]) -> int:
        storage_writer.finish(metadata, results, group.confirm)
        return sum(result.size_in_bytes for part in results for result in part)

    path = os.fspath(storage_writer.path)
    with _session("save", path, storage_writer, process_group, no_dist) as group:
        try:
            plan = group.reduce_scatter("plan", declare, decide)
            assignment: Assignment = plan.storage_data
            assignment.receive()
            operation = events.current().operation
            operation.id = assignment.save_id
            operation.bytes = group.reduce_broadcast("write", write, finish)
        except RankLost:  # which may be writing still
            raise
        except BaseException:
            storage_writer.reset()
            raise
    if metadata is not None:
        return metadata
    return _StoredMetadata(partial(reader(path).read_metadata))


def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: Any,
    process_group: Any = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: Any = None,
    **others: Any,
) -> None:
    """In the place of torch's ``_load_state_dict``, as ``save_state_dict``."""
    made = planner or DefaultLoadPlanner()
    if (
        type(storage_reader) not in _READERS.values()
        or type(made) not in _LOAD_PLANNERS
        or coordinator_rank != 0
    ):
        stock_load(
            state_dict,
            storage_reader,
            process_group,
            coordinator_rank,
            no_dist,
            planner,
            **others,
        )
        return

    plan = LoadPlan([])

    def open_checkpoint() -> tuple[Metadata, bool]:
        """The metadata, and whether it is that of all ranks."""
        try:
            return storage_reader.read_metadata(), True
        except NotACheckpoint as error:
            try:  # what stock's writer has stored without collectives
                return storage_reader.read_metadata(rank=group.rank), False
            except NotACheckpoint:
                raise error from None

    @events.stage("compare")
    def declare() -> tuple[str, bool]:
        """Make the plan. These planners change none globally, so it stays on this rank."""
        nonlocal plan
        metadata, of_all = open_checkpoint()
        made.set_up_planner(state_dict, metadata, group.is_coordinator)
        storage_reader.set_up_storage_reader(
            metadata, group.is_coordinator, rank=group.rank, use_collectives=of_all
        )
        plan = storage_reader.prepare_local_plan(made.create_local_plan())
        events.current().operation.id = plan.storage_data
        return plan.storage_data, of_all

    def decide(found: list[tuple[str, bool]]) -> None:
        if any(of_all for _, of_all in found):
            storage_reader.refuse_different([save_id for save_id, _ in found])

    @events.stage("read")
    def read() -> None:
        storage_reader.read_data(made.finish_plan(plan), made).value()

    path = os.fspath(storage_reader.path)
    with _session("load", path, storage_reader, process_group, no_dist) as group:
        group.reduce_broadcast("plan", declare, decide)
        group.reduce_broadcast("read", read, lambda _: None)


@contextmanager
def _session(
    kind: str, path: str, storage: Any, process_group: Any, no_dist: bool
) -> Iterator[Group]:
    """The ranks of one call. Errors have torch's class: CheckpointException, from ours."""
    rank = 0
    try:
        group: Group = SingleGroup()
        if not no_dist:
            # The messages of one call must not mix with those of an async_save.
            others = [*in_flight.items()]
            wait([result for result, writer in others if writer is not storage])
            name = f"dcp.{kind} {path}"
            group = group_over(process_group, storage.timeout, name, lane="dcp")
        rank = group.rank
        with (
            group,
            gc_pause.paused(),
            events.operation(kind, path, rank, group.size),
        ):
            yield group
    except CheckpointingException as error:
        failed = [rank]
        if isinstance(error, RankFailure) and error.failures:
            failed = sorted(error.failures)
        stack = traceback.extract_tb(error.__traceback__)
        failures = dict.fromkeys(failed, (error, stack))
        raise CheckpointException(kind, failures) from error  # type: ignore[arg-type]


_FIELDS = frozenset(field.name for field in fields(Metadata))


class _StoredMetadata(Metadata):
    """The metadata of a checkpoint, read when a field of it is first accessed."""

    def __init__(self, read: Callable[[], Metadata]) -> None:
        self._read: Callable[[], Metadata] | None = read

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELDS:
            read, self._read = self._read, None
            if read is not None:
                vars(self).update(vars(read()))
        return super().__getattribute__(name)
