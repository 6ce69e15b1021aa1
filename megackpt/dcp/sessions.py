"""``dcp.save`` and ``dcp.load`` after ``install``: torch's calls, as sessions of megackpt.

torch calls a planner and a storage writer or reader in a fixed order, and sends messages between
these calls. Here the order is the same, and megackpt sends the messages: they are bounded, a lost
rank is named on all ranks, and the coordinator asks all ranks once more before it commits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import fields, replace
from traceback import StackSummary
from typing import Any

from torch.distributed import get_process_group_ranks, get_rank, is_initialized
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

from megackpt import events, gc_pause, tree
from megackpt.dcp.declared_state import declare_plain
from megackpt.dcp.item_writer import Assignment, is_wrapper
from megackpt.dcp.planner import LoadPlanner, SavePlanner
from megackpt.dcp.state_dict_saver import reset_on_error
from megackpt.dcp.storage_reader import FileSystemReader
from megackpt.dcp.storage_writer import FileSystemWriter
from megackpt.distributed import Attempt, Group, SingleGroup, attempt, group_over
from megackpt.distributed.failures import Failure
from megackpt.errors import (
    CheckpointingException,
    CheckpointReplaced,
    CorruptCheckpoint,
    NotACheckpoint,
    RankFailure,
    RankLost,
    SaveInProgress,
    StorageError,
)

# Other classes may override any method, so they need torch's flow.
READERS: dict[type[Any], type[FileSystemReader]] = {FileSystemWriter: FileSystemReader}
"""Classes of writers -> classes of readers. ``megackpt.huggingface`` adds its classes."""
_SAVE_PLANNERS = DefaultSavePlanner, SavePlanner
_LOAD_PLANNERS = DefaultLoadPlanner, _EmptyStateDictLoadPlanner, LoadPlanner

_log = logging.getLogger(__name__)

stock_save = state_dict_saver._save_state_dict
stock_load = state_dict_loader._load_state_dict

in_flight: dict[Future[Any], Any] = {}
"""The results of calls of ``async_save`` that have not ended -> their writers, and None where a
process writes, which has separate messages."""


def save_state_dict(
    state_dict: dict[str, Any],
    storage_writer: Any,
    process_group: Any = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: Any = None,
    use_collectives: bool = True,
) -> Metadata:
    """In the place of torch's ``_save_state_dict``.

    A planner or a writer of another class, or another coordinator, has torch's flow. The
    metadata that other ranks than the coordinator get is read when it is first accessed.
    """
    made = planner or DefaultSavePlanner()
    reader = READERS.get(type(storage_writer))
    _wait_for_others(storage_writer, no_dist)
    is_stock = type(made) not in _SAVE_PLANNERS or coordinator_rank != 0
    if reader is None or is_stock or not use_collectives:
        given = process_group, coordinator_rank, no_dist, planner
        if use_collectives:  # torch 2.8 has no such argument
            return stock_save(state_dict, storage_writer, *given)
        return stock_save(state_dict, storage_writer, *given, use_collectives=False)
    path = os.fspath(storage_writer.path)
    is_default = planner is None and reader is FileSystemReader
    if is_default and _by_engine(
        "save", storage_writer, state_dict, process_group, no_dist
    ):
        return _StoredMetadata(reader(path), storage_writer.save_id)
    metadata: Metadata | None = None

    @events.stage("declare")
    @gc_pause.paused()
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
    @gc_pause.paused()
    def decide(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        plans, metadata = made.create_global_plan(plans)
        prepared: list[SavePlan] = storage_writer.prepare_global_plan(plans)
        return prepared

    @events.stage("write")
    def write() -> list[WriteResult]:
        finished = replace(made.finish_plan(plan), storage_data=assignment)
        written = storage_writer.write_data(finished, made)
        results: list[WriteResult] = written.value()
        return results

    @events.stage("commit")
    def finish(results: list[list[WriteResult]]) -> int:
        storage_writer.finish(metadata=metadata, results=results, confirm=group.confirm)
        return sum(result.size_in_bytes for part in results for result in part)

    with (
        _session("save", path, storage_writer, process_group, no_dist) as group,
        reset_on_error(storage_writer),
    ):
        plan = _step(group, "plan", declare, decide, scatter=True)
        assignment: Assignment = plan.storage_data
        operation = events.current().operation
        operation.id = assignment.save_id
        operation.bytes = _step(group, "write", write, finish)
    return _StoredMetadata(reader(path), assignment.save_id)


def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: Any,
    process_group: Any = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: Any = None,
) -> None:
    """In the place of torch's ``_load_state_dict``, as ``save_state_dict``."""
    made = planner or DefaultLoadPlanner()
    _wait_for_others(storage_reader, no_dist)
    is_ours = type(storage_reader) in READERS.values() and type(made) in _LOAD_PLANNERS
    if not is_ours or coordinator_rank != 0:
        given = process_group, coordinator_rank, no_dist, planner
        stock_load(state_dict, storage_reader, *given)
        return
    is_default = planner is None and type(storage_reader) is FileSystemReader
    if is_default and _by_engine(
        "load", storage_reader, state_dict, process_group, no_dist
    ):
        return
    plan = LoadPlan([])

    def read_metadata() -> tuple[Metadata, bool]:
        """The metadata, and whether it covers all ranks."""
        try:
            return storage_reader.read_metadata(), True
        except NotACheckpoint as error:
            try:  # what stock's writer has stored without collectives
                return storage_reader.read_metadata(rank=group.rank), False
            except NotACheckpoint:
                raise error from None

    @events.stage("compare")
    @gc_pause.paused()
    def declare() -> tuple[str, bool]:
        """Make the plan. These planners change none globally, so it stays on this rank."""
        nonlocal plan
        metadata, of_all = read_metadata()
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
        _step(group, "plan", declare, decide)
        _step(group, "read", read, lambda _: None)


def _by_engine(
    kind: str,
    storage: Any,
    state_dict: dict[str, Any],
    process_group: Any,
    no_dist: bool,
) -> bool:
    """Save or load as ``megackpt.save`` and ``load`` do. Collective.

    False where a planner has to plan: where a state is not plain, or the engine refuses it, since
    a planner's error says more. No byte was written or read then, except where the engine refuses
    an object that it has read.
    """
    path = os.fspath(storage.path)
    ranks = None
    if is_initialized():
        ranks = [get_rank()] if no_dist else get_process_group_ranks(process_group)
    declared = attempt(lambda: declare_plain(state_dict, ranks)).value
    ours = kind, path, storage, process_group, no_dist
    with _session(*ours, is_operation=False) as group:
        if not group.all_agree(declared and declared[1]) or declared is None:
            return False
        try:
            storage.perform(declared[0], state_dict, group)
        except (CorruptCheckpoint, RankFailure, SaveInProgress, StorageError):
            raise
        except CheckpointingException as error:
            if any(map(is_wrapper, tree.nested_values(state_dict))):
                raise
            _log.debug("a planner plans the %s of %s: %s", kind, path, error)
            return False
    return True


class _StepFailed(CheckpointingException):
    """A collective step has failed on some ranks. ``by_rank``: their errors."""

    def __init__(self, stage: str, failures: list[Failure]) -> None:
        super().__init__("\n".join(f"rank {f.rank}: {f.text}" for f in failures))
        self.stage = stage
        self.by_rank: dict[int, Exception] = {}
        for failure in failures:
            error = (failure.kind or CheckpointingException)(failure.text)
            if failure.kind is None:
                error.add_note(failure.details)
            self.by_rank[failure.rank] = error


def _step(
    group: Group,
    name: str,
    work: Callable[[], Any],
    decide: Callable[[list[Any]], Any],
    scatter: bool = False,
) -> Any:
    """A collective step of ``group``. Raises on all ranks the errors of the ranks that have failed.

    ``Group`` does so, too, but its errors do not name the ranks in the form of torch's errors.
    """
    own: Attempt[Any] = Attempt(None)
    failed: list[Failure] = []

    def send() -> tuple[Failure | None, Any]:
        nonlocal own
        own = attempt(work)
        if own.error is not None:
            return Failure.of(group.rank, own.error), None
        return None, own.value

    def judge(parts: list[tuple[Failure | None, Any]]) -> Any:
        failed.extend(failure for failure, _ in parts if failure is not None)
        decided = attempt(
            lambda: None if failed else decide([value for _, value in parts])
        )
        if isinstance(decided.error, RankLost):
            raise decided.error
        if decided.error is not None:
            failed.append(Failure.of(0, decided.error))
        if scatter:
            return [(failed, part) for part in decided.value or [None] * group.size]
        return failed, decided.value

    collective = group.reduce_scatter if scatter else group.reduce_broadcast
    failed, value = collective(name, send, judge)
    if failed:
        raise _StepFailed(name, failed) from own.error
    return value


def _wait_for_others(storage: Any, no_dist: bool) -> None:
    """Wait for each ``async_save`` whose thread uses the same ranks."""
    if not no_dist:
        others = (None, storage)
        running = [*in_flight.items()]
        wait([result for result, writer in running if writer not in others])


@contextmanager
def _session(
    kind: str,
    path: str,
    storage: Any,
    process_group: Any,
    no_dist: bool,
    is_operation: bool = True,
) -> Iterator[Group]:
    """The ranks of one call. Errors have torch's class CheckpointException, ``from`` megackpt's."""
    group: Group = SingleGroup()
    rank = 0 if no_dist else get_rank(process_group)
    try:
        if not no_dist:
            name = f"dcp.{kind} {path}"
            group = group_over(process_group, storage.timeout, name, lane="dcp")
        name = kind if is_operation else ""
        with group, events.operation(name, path, group.rank, group.size):
            yield group
    except _StepFailed as failed:
        raise _torch_error(failed.stage, failed.by_rank) from (
            failed.__cause__ or failed
        )
    except RankFailure as error:
        texts = error.failures or {rank: str(error)}
        failures: dict[int, Exception] = {
            lost: type(error)(f"rank {lost} {text}") for lost, text in texts.items()
        }
        raise _torch_error(kind, failures) from error
    except CheckpointingException as error:
        raise _torch_error(kind, {rank: error}) from error


def _torch_error(stage: str, by_rank: dict[int, Exception]) -> CheckpointException:
    """An error of torch's class, without frames: the frames of other ranks are unknown here."""
    failures = {rank: (error, StackSummary()) for rank, error in by_rank.items()}
    return CheckpointException(stage, failures)  # type: ignore[arg-type]


_FIELDS = frozenset(field.name for field in fields(Metadata))


class _StoredMetadata(Metadata):
    """The metadata of a save, read when a field of it is first accessed.

    Raises CheckpointReplaced then if the path holds another save, and what the reader raises.
    """

    def __init__(self, reader: FileSystemReader, save_id: str) -> None:
        vars(self).update(_reader=reader, _save_id=save_id)

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELDS and name not in vars(self):
            reader: FileSystemReader = self._reader
            found = reader.read_metadata()
            meta = found.storage_meta
            ids = (
                reader.prepare_local_plan(LoadPlan([])).storage_data,
                meta and meta.save_id,
            )
            if any(ids) and self._save_id not in ids:
                raise CheckpointReplaced(
                    f"{os.fspath(reader.path)} holds another save than {self._save_id}, whose "
                    "metadata is asked for: access it before the next save to this path"
                )
            vars(self).update(vars(found))
        return super().__getattribute__(name)

    def __reduce__(self) -> Any:
        return Metadata, tuple(getattr(self, field.name) for field in fields(Metadata))
