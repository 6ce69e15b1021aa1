"""AsyncRequest: the remaining stages of an asynchronous save, with the fields of Megatron-Core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from megackpt.async_save.task import Task
from megackpt.distributed import Attempt, Group, attempt, group_over
from megackpt.errors import CheckpointingException


@dataclass(eq=False)
class Pending:
    """A request on this rank between its first and its last stage; calling it performs its task."""

    task: Task[Any]
    group: Group | None
    """None when the request has ended, so that it does not keep the memory of the save."""
    finish: Callable[[], None] | None = None
    """The last stage, collective over the group."""
    abandon: Callable[[], None] | None = None
    """Undo the first stage, on this rank alone, after the task has ended."""
    hold: Callable[[], object] = lambda: None
    """See ``AsyncRequest.wait_staged``."""
    scheduled: bool = False
    ended: str = ""
    """"done" (on all ranks) or "failed"; empty before that."""

    def __call__(self) -> None:
        self.task.run()

    def meet(self) -> Group:
        """The group for the next stage."""
        if self.group is None:
            raise CheckpointingException(
                f"{self.task.name}: this save has already ended ({self.ended})"
            )
        return self.group

    def conclude(self) -> None:
        """The last stage, collective: an error of any rank's task is raised on all."""
        group = self.meet()
        try:
            if self.finish is not None:
                self.finish()
            else:
                group.reduce_broadcast("write", self.task.get, _nothing)
            self.ended = "done"
        finally:
            self._end()

    def give_up(self) -> None:
        """End the request as failed, on this rank alone."""
        try:
            if self.abandon is not None:
                self.abandon()
            elif self.group is not None:
                self.group.give_up()
        finally:
            self._end()

    def _end(self) -> None:
        self.ended = self.ended or "failed"
        self.group = self.finish = self.abandon = None


class AsyncRequest(NamedTuple):
    """Two stages: ``async_fn``, without communication, and then the collective ``finalize_fns`` in
    order.

    ``save(..., async_sharded_save=True)`` returns one. Pass it to
    ``AsyncCallsQueue.schedule_async_request``, or call ``execute_sync``, on all ranks. The fields
    are Megatron-Core's (0.16, ``strategies/async_utils.py``), so other requests can be made by
    hand. ``preload_fn``, if given, is called when the request is scheduled; its result replaces the
    second of ``async_fn_args``.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: Iterable[Any]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: Mapping[str, Any] = MappingProxyType({})
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def __repr__(self) -> str:
        if not isinstance(self.async_fn, Pending):
            return f"<AsyncRequest: {self.async_fn!r}>"
        task = self.async_fn.task
        state = self.async_fn.ended or "not finalized"
        return f"<AsyncRequest {task.name}: {state}, {task.done} of {task.todo} bytes>"

    @property
    def task(self) -> Task[Any] | None:
        """The task of a save on this rank, with progress and outcome; None for other requests."""
        if isinstance(self.async_fn, Pending):
            return self.async_fn.task
        return None

    def wait_staged(self) -> None:
        """Have work that is queued after this wait until the save has copied the tensors.

        Work on CUDA devices waits, on the streams that are current now; the caller does not. Call
        it before ``optimizer.step`` after ``save(..., wait_staged=False)``. It may be repeated.
        """
        if isinstance(self.async_fn, Pending):
            self.async_fn.hold()

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Call ``fn`` after the earlier finalize functions.

        Raises RuntimeError if the request is frozen, or the save is scheduled.
        """
        is_taken = self.is_frozen
        if isinstance(self.async_fn, Pending):
            is_taken |= self.async_fn.scheduled
        if is_taken:
            raise RuntimeError(
                "this request is scheduled already: add finalize functions before scheduling it"
            )
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """A copy that takes no more finalize functions."""
        return self._replace(is_frozen=True)

    def execute_sync(self) -> None:
        """Perform all stages now; collective. An error of any rank is raised on all."""
        pending = self.prepare()
        pending.task.run()
        self.finalize(pending)

    def prepare(self, process_group: Any = None) -> Pending:
        """The request as a task; ``preload_fn`` is called now.

        ``process_group``: the ranks of the last stage, where the request does not know them.
        """
        if isinstance(self.async_fn, Pending):
            self.async_fn.scheduled = True
            return self.async_fn
        # Now, because the process group may not exist any more when the request is finalized.
        with group_over(process_group) as group:
            pass
        work = attempt(self._work)
        task: Task[None] = Task(work.value or _nothing, "async call")
        if work.error is not None:
            task.finish(Attempt(None, work.error))
        return Pending(task, group)

    def _work(self) -> Callable[..., None]:
        if self.async_fn is None:
            return _nothing
        args = list(self.async_fn_args)
        if self.preload_fn is not None:
            if len(args) < 2:
                raise CheckpointingException(
                    "the result of preload_fn replaces the second of async_fn_args, but there are "
                    "fewer than two"
                )
            args[1] = self.preload_fn()
        return _WithoutProgress(partial(self.async_fn, *args, **self.async_fn_kwargs))

    def finalize(self, pending: Pending) -> None:
        """The last stage, collective: an error of any rank's task is raised on all.

        Without such an error, all finalize functions are called, and then the first error of a
        function is raised.
        """
        if pending.conclude not in self.finalize_fns:
            pending.conclude()
        failed: BaseException | None = None
        for finish in self.finalize_fns:
            error = attempt(finish).error
            if error is not None and pending.ended != "done":
                raise error
            failed = failed or error
        if failed is not None:
            failed.add_note(
                f"{pending.task.name} had succeeded on all ranks before that: the save is committed"
            )
            raise failed


@dataclass(frozen=True)
class _WithoutProgress:
    """A function that reports no progress, as the work of a task."""

    function: Callable[[], Any]

    def __call__(self, advance: Callable[[int], None]) -> None:
        self.function()
        advance(0)


def _nothing(*_: Any, **__: Any) -> None:
    """No work."""
