"""Workers perform the tasks of the queue: their interface, and threads of this process."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

from megackpt import limits
from megackpt.async_save.task import Task
from megackpt.distributed import Attempt, attempt
from megackpt.errors import CheckpointingException


class Worker(ABC):
    """Performs tasks in the background."""

    @abstractmethod
    def start(self, task: Task[Any]) -> None:
        """Start or queue the task, without blocking. Errors become its outcome."""

    @abstractmethod
    def stop(
        self, task: Task[Any], reason: CheckpointingException | None = None
    ) -> None:
        """Give up a task. On return it has an outcome (this error), and the worker takes others."""

    def close(self) -> None:  # noqa: B027 - threads end with their tasks
        """Release what the worker holds; no task may follow."""


class ThreadWorker(Worker):
    """One thread a task. System calls and digests release the interpreter's lock."""

    def start(self, task: Task[Any]) -> None:
        if not task.started:
            # A daemon: without finalization there is no checkpoint, so an ending process need
            # not wait.
            name = f"megackpt-{task.name}"
            thread = threading.Thread(
                target=task.run, args=(True,), name=name, daemon=True
            )
            error = attempt(thread.start).error
            if error is not None:  # the system has no thread left
                task.finish(Attempt(None, error))

    def stop(
        self, task: Task[Any], reason: CheckpointingException | None = None
    ) -> None:
        error = task.cancel(reason)
        if not (task.started and task.wait(limits.WORKER_STOP_SECONDS)):
            task.stuck = task.started
            task.finish(Attempt(None, error))
