"""The tasks of a conversion, performed in this process or by worker processes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from megackpt.async_save.worker_process import WorkerProcess
from megackpt.backends.base import Backend
from megackpt.checkpoint import as_read_by, open_same
from megackpt.converter.cell_source import CellSource
from megackpt.converter.cells import ConversionTask
from megackpt.converter.journal import TaskResult
from megackpt.errors import RankLost, StorageError
from megackpt.storage import Storage, root_at


@dataclass(frozen=True, eq=False)
class WorkerContext:
    """What tasks need: the open source, the storage of the target, and the formats of both."""

    source: Storage
    reader: Backend
    target: Storage
    writer: Backend
    verify: bool
    casts: bool

    def __post_init__(self) -> None:
        if self.casts:  # now, because imports do not count as memory of the conversion
            importlib.import_module("torch")

    def perform(
        self, task: ConversionTask, advance: Callable[[int], None]
    ) -> TaskResult:
        """Read, convert and write the rows of one task, durably. ``advance`` takes the bytes done."""
        data = CellSource(self.source, self.reader, task, self.verify, advance)
        result = self.writer.write(self.target, task.plan, data)
        return TaskResult(task.number, result, data.overflows)


_contexts: list[WorkerContext] = []  # in a worker process: the one of its conversion


@dataclass(frozen=True)
class OpenContext:
    """The first work of a worker process: it opens the context of its tasks.

    ``source_id`` is the save_id of the source's manifest.
    """

    source: str
    source_id: str
    reader: Backend
    target: str
    writer: Backend
    verify: bool
    casts: bool

    def __call__(self, _: Callable[[int], None]) -> None:
        source = as_read_by(self.reader, open_same(self.source, self.source_id))
        target = root_at(self.target)
        _contexts.append(
            WorkerContext(
                source, self.reader, target, self.writer, self.verify, self.casts
            )
        )


@dataclass(frozen=True, eq=False)
class _PerformTask:
    """The further work of a worker process."""

    task: ConversionTask

    def __call__(self, advance: Callable[[int], None]) -> TaskResult:
        return _contexts[0].perform(self.task, advance)


def run_tasks(
    open_context: OpenContext,
    workers: int,
    tasks: Iterator[ConversionTask],
    finished: Callable[[TaskResult], None],
    advance: Callable[[int], None],
) -> None:
    """Have all tasks performed by worker processes. The callbacks are called on this thread.

    Raises the first error of a worker, and RankLost where one died. No process is left on return.
    """
    processes: dict[Connection, WorkerProcess] = {}
    numbers: dict[Connection, int] = {}  # of the tasks at work

    def send(
        connection: Connection, work: Callable[[Callable[[int], None]], object]
    ) -> None:
        try:
            processes[connection].send(work)
        except ConnectionError as error:
            raise _lost(processes[connection], numbers.get(connection)) from error

    try:
        for _ in range(workers):
            try:
                process = WorkerProcess()
            except OSError as error:
                raise StorageError(f"cannot start a worker process: {error}") from error
            processes[process.connection] = process
            send(process.connection, open_context)
        busy = set(processes)
        while busy:
            for connection in wait(list(busy)):
                process = processes[connection]  # type: ignore[index]
                try:
                    message = process.receive()
                except (EOFError, ConnectionError) as error:
                    raise _lost(process, numbers.get(process.connection)) from error
                if isinstance(message, int):
                    advance(message)
                    continue
                result = message.get()
                if result is not None:  # else the process has opened its context
                    finished(result)
                task = next(tasks, None)
                if task is None:
                    busy.remove(process.connection)
                else:
                    numbers[process.connection] = task.number
                    send(process.connection, _PerformTask(task))
    finally:
        for process in processes.values():
            process.kill()
        for process in processes.values():
            process.end()


def _lost(process: WorkerProcess, task: int | None) -> RankLost:
    text = f"the worker process {process.end()}"
    if task is None:
        return RankLost(f"{text} as it began; nothing is committed")
    text += f" at task {task}"
    return RankLost(f"{text}; nothing is committed", {task: text})
