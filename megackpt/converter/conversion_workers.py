"""The tasks of a conversion, performed in this process or by worker processes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait

from megackpt.async_save.worker_process import WorkerProcess
from megackpt.backends.base import Backend
from megackpt.checkpoint import Writing, as_read_by, open_same
from megackpt.converter.cell_source import CellSource
from megackpt.converter.cells import ConversionTask
from megackpt.converter.journal import TaskResult
from megackpt.errors import RankLost, StorageError

_CHECK_SECONDS = 1.0


@dataclass(eq=False)
class TaskRunner:
    """Performs the tasks of one conversion, in this process or in a worker process.

    ``source_id`` is the save_id of the source's manifest, ``save_id`` that of the target. ``open``
    has to be called first.
    """

    source: str
    source_id: str
    reader: Backend
    target: str
    save_id: str
    writer: Backend
    verify: bool
    casts: bool

    def open(self) -> None:
        """Open the source. Raises what ``open_same`` raises."""
        if self.casts:  # now, because imports do not count as memory of the conversion
            importlib.import_module("torch")
        stored = open_same(self.source, self.source_id)
        self._stored = as_read_by(self.reader, stored)

    def perform(
        self, task: ConversionTask, advance: Callable[[int], None]
    ) -> TaskResult:
        """Read, convert and write the rows of one task, durably.

        ``advance`` takes the bytes done.
        """
        data = CellSource(self._stored, self.reader, task, self.verify)
        writing = Writing(self.target, self.save_id, self.writer, task.plan, data)
        return TaskResult(task.number, writing(advance), data.overflows)


_runners: list[TaskRunner] = []  # in a worker process: the one of its conversion


def open_runner(runner: TaskRunner, _: Callable[[int], None]) -> None:
    """The first work of a worker process."""
    runner.open()
    _runners.append(runner)


def _perform(task: ConversionTask, advance: Callable[[int], None]) -> TaskResult:
    """The further work of a worker process."""
    return _runners[0].perform(task, advance)


def run_tasks(
    runner: TaskRunner,
    workers: int,
    tasks: Iterator[ConversionTask],
    finished: Callable[[TaskResult], None],
    advance: Callable[[int], None],
    check: Callable[[], None],
) -> None:
    """Have all tasks performed by worker processes. The callbacks are called on this thread.

    ``check`` is called at least once a second; it stops the work by raising. Raises the first error
    of a worker, and RankLost where one died. No process is left on return.
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
            send(process.connection, partial(open_runner, runner))
        busy = set(processes)
        while busy:
            check()
            for connection in wait(list(busy), _CHECK_SECONDS):
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
                    send(process.connection, partial(_perform, task))
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
