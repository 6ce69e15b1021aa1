"""A request: what is still to be done of a save when training goes on. Megatron's tuple, with a task of ours in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from megackpt.async_save.task import Task
from megackpt.distributed import Attempt, Busy, Group, Mark, attempt, group_over
from megackpt.errors import CheckpointingException


@dataclass(eq=False)
class Pending:
    """A request on this rank between its first stage and its last; to call it is to do the one between."""

    task: Task[Any]
    group: Group | None
    """None when this is over: whoever keeps the request keeps nothing else."""
    mark: Mark
    """When that group began the request."""
    finish: Callable[[Callable[[], Group]], None] | None = None
    """The last stage, collective over the group that is given: all ranks hear what became of the task."""
    abandon: Callable[[], None] | None = None
    """Give up what the first stage began. The task has ended by then; no other rank takes part."""
    scheduled: bool = False
    over: str = ""
    """"done", on all ranks, or "failed"."""

    def __call__(self) -> None:
        self.task.run()

    def meet(self) -> Group:
        """For the ranks to come together once more. Busy: nothing has happened, and this may be tried again."""
        if self.group is None:
            raise CheckpointingException(
                f"{self.task.name}: this save is over, {self.over}, already"
            )
        return self.group.resumed(self.mark)

    def conclude(self) -> None:
        """The last stage, collective: a failure of any rank's work is raised on all. Busy as of ``meet``."""
        met = attempt(self.meet)
        if self.group is None or isinstance(met.error, Busy):
            met.get()
        try:
            if self.finish is not None:
                self.finish(met.get)
            else:
                with met.get() as group:
                    group.reduce_broadcast("write", self.task.get, _nothing)
            self.over = "done"
        finally:
            self._end()

    def give_up(self) -> None:
        """On this rank alone."""
        try:
            if self.abandon is not None:
                self.abandon()
        finally:
            self._end()

    def _end(self) -> None:
        self.over = self.over or "failed"
        self.group = self.finish = self.abandon = None


class AsyncRequest(NamedTuple):
    """Two more stages: ``async_fn``, which talks to no other rank, and then ``finalize_fns``, in their order.

    ``save(..., async_sharded_save=True)`` gives one; give it to ``AsyncCallsQueue.schedule_async_request``, or call
    ``execute_sync``, alike on all ranks. Others may be made by hand: the fields are Megatron-Core's (0.16,
    ``strategies/async_utils.py``). ``preload_fn``, if any, is called when the request is scheduled, and makes the
    second of ``async_fn_args``.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: Iterable[Any]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: Mapping[str, Any] = MappingProxyType({})
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    @property
    def task(self) -> Task[Any] | None:
        """Of a save: what ``async_fn`` does, how far it is, and what became of it on this rank."""
        return self.async_fn.task if isinstance(self.async_fn, Pending) else None

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Call ``fn`` last of all when this is finalized. RuntimeError once a save is scheduled, or this is frozen."""
        if self.is_frozen or (
            isinstance(self.async_fn, Pending) and self.async_fn.scheduled
        ):
            raise RuntimeError(
                "this request is scheduled already: add its finalize functions before that"
            )
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """The same, to which nothing can be added any more."""
        return self._replace(is_frozen=True)

    def execute_sync(self) -> None:
        """Do all of it now, on all ranks alike. Raises on all of them what went wrong on any."""
        pending = self.begun()
        pending.task.run()
        self.finalize(pending)

    def begun(self, process_group: Any = None) -> Pending:
        """The work to be done; what ``preload_fn`` makes is made now. ``process_group``: whose, if nothing tells."""
        if isinstance(self.async_fn, Pending):
            self.async_fn.scheduled = True
            return self.async_fn
        with group_over(
            process_group
        ) as group:  # found now, for it may be gone when this is finalized
            mark = group.mark()
        work = attempt(self._work)
        task: Task[None] = Task(work.value or _nothing, "async call")
        if work.error is not None:
            task.finish(Attempt(None, work.error))
        return Pending(task, group, mark)

    def _work(self) -> Callable[..., None]:
        if self.async_fn is None:
            return _nothing
        args = list(self.async_fn_args)
        if self.preload_fn is not None:
            if len(args) < 2:
                raise CheckpointingException(
                    "preload_fn makes the second of async_fn_args, and there is none"
                )
            args[1] = self.preload_fn()
        return _Unmeasured(partial(self.async_fn, *args, **self.async_fn_kwargs))

    def finalize(self, pending: Pending) -> None:
        """The last stage, collective: a failure of any rank's work is raised on all.

        Where there was none, all functions are called, and the first error of theirs is raised then.
        """
        if pending.conclude not in self.finalize_fns:
            pending.conclude()
        failed: BaseException | None = None
        for finish in self.finalize_fns:
            error = attempt(finish).error
            if error is not None and pending.over != "done":
                raise error
            failed = failed or error
        if failed is not None:
            failed.add_note(
                f"{pending.task.name} was done on all ranks before that: a save is committed"
            )
            raise failed


@dataclass(frozen=True)
class _Unmeasured:
    """A function that knows of no progress, as the work of a task."""

    function: Callable[[], Any]

    def __call__(self, advance: Callable[[int], None]) -> None:
        self.function()
        advance(0)


def _nothing(*_: Any, **__: Any) -> None:
    """There is nothing to do."""
