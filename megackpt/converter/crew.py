"""The worker processes of a conversion: tasks out, finished ones in, and what to say when one dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from megackpt.async_save import children
from megackpt.converter.cells import ConversionTask
from megackpt.converter.journal import TaskResult
from megackpt.converter.working import Assignment, Failed
from megackpt.errors import RankLost


class _Worker:
    """One process."""

    def __init__(self, assignment: Assignment) -> None:
        self.task: int | None = None
        self.pipe, theirs = Pipe()
        with theirs:
            self.process = children.start("megackpt.converter.working", theirs.fileno())
        self.send(assignment)

    def send(self, message: object) -> None:
        try:
            self.pipe.send(message)
        except OSError as error:
            raise self.lost() from error

    def recv(self) -> Any:
        try:
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self.lost() from error

    def lost(self) -> RankLost:
        self.process.kill()
        how = children.how_ended(self.process.wait())
        doing = "as it began" if self.task is None else f"at task {self.task}"
        story = f"the worker process {self.process.pid} {how} {doing}"
        return RankLost(
            f"{story}; nothing is committed",
            {} if self.task is None else {self.task: story},
        )

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()


def run_tasks(
    assignment: Assignment,
    workers: int,
    tasks: Iterator[ConversionTask],
    finished: Callable[[TaskResult], None],
    moved: Callable[[int], None],
) -> None:
    """Have all tasks done by so many processes. ``finished`` and ``moved`` are called in this thread.

    Raises the first error of a worker; RankLost where one died. When this returns or raises, all are gone.
    """
    crew: dict[Connection, _Worker] = {}
    try:
        for _ in range(workers):
            worker = _Worker(assignment)
            crew[worker.pipe] = worker
        busy = dict(crew)
        while busy:
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]
                message = worker.recv()
                if isinstance(message, Failed):
                    raise message.error
                if isinstance(message, TaskResult):
                    finished(message)
                elif message is not None:
                    moved(message)
                    continue
                task = next(tasks, None)
                if task is None:
                    del busy[worker.pipe]
                else:
                    worker.task = task.number
                    worker.send(task)
    finally:
        for worker in crew.values():
            worker.stop()
