"""A request: what is still to be done of a save when training goes on. Megatron's fields, and a task for our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megackpt.runtime.async_calls.task import Task
from megackpt.runtime.collectives import Group, group_over


@dataclass(frozen=True, eq=False)
class AsyncRequest:
    """Two more stages: ``async_fn``, which talks to no other rank, and then ``finalize_fns``, in their order.

    ``save(..., async_sharded_save=True)`` gives one; give it to ``AsyncCallsQueue.schedule_async_request``, or call
    ``execute_sync``, alike on all ranks. Others may be made by hand, with Megatron-Core's fields: ``preload_fn``, if
    any, is called when the request is scheduled, and makes the second of ``async_fn_args``.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: Sequence[Any] = ()
    finalize_fns: list[Callable[[], Any]] = field(default_factory=list)
    async_fn_kwargs: Mapping[str, Any] = field(default_factory=dict)
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0
    task: Task[Any] | None = field(default=None, kw_only=True)
    """Of a save: what ``async_fn`` does. The first of ``finalize_fns`` hears what became of it on all ranks."""
    group: Group | None = field(default=None, kw_only=True)
    """The ranks that take part; None: all of the default process group."""
    since: int = field(default=0, kw_only=True)
    """The mark of that group when it began the request; 0: what happens to the group is not its end."""
    abandon: Callable[[], None] | None = field(default=None, kw_only=True)
    """Give up what the first stage began. The work has ended by then; no other rank takes part."""

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Call ``fn`` last of all when this is finalized. RuntimeError once it is scheduled."""
        if self.is_frozen:
            raise RuntimeError("this request is scheduled already: add its finalize functions before that")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """The same, to which nothing can be added any more."""
        return replace(self, is_frozen=True)

    def execute_sync(self) -> None:
        """Do all of it now, on all ranks alike. Raises on all of them what went wrong on any."""
        task = self.as_task()
        task.run()
        self.finalize(task)

    def as_task(self) -> Task[Any]:
        """The work to be done by a worker; what ``preload_fn`` makes is made now."""
        if self.task is not None:
            return self.task
        args = list(self.async_fn_args)
        if self.preload_fn is not None:
            args[1] = self.preload_fn()
        return Task(_Call(partial(self.async_fn or _nothing, *args, **self.async_fn_kwargs)), "async call")

    def finalize(self, task: Task[Any]) -> None:
        """The last stage, collective: a failure of any rank's work is raised on all."""
        if self.task is None:
            with self.group.resumed(self.since) if self.group else group_over() as group:
                group.reduce_broadcast("write", task.get, _nothing)
        for finish in self.finalize_fns:
            finish()


@dataclass(frozen=True)
class _Call:
    """A function that knows of no progress, as the work of a task."""

    function: Callable[[], Any]

    def __call__(self, advance: Callable[[int], None]) -> None:
        self.function()
        advance(0)


def _nothing(*_: Any, **__: Any) -> None:
    """There is nothing to do."""
