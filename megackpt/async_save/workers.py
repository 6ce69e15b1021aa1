"""Who does the tasks: a worker starts one at once and gives it up when told. Here: threads of this process."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

from megackpt import limits
from megackpt.async_save.task import Task
from megackpt.distributed import Attempt, attempt
from megackpt.errors import CheckpointingException


class Worker(ABC):
    """Does tasks while this process goes on."""

    @abstractmethod
    def start(self, task: Task[Any]) -> None:
        """Begin, or take note for later; returns at once. What goes wrong is the outcome of the task."""

    @abstractmethod
    def stop(
        self, task: Task[Any], reason: CheckpointingException | None = None
    ) -> None:
        """Give a task up. When this returns it has an outcome (this error), and the worker is ready for others."""

    def close(self) -> None:  # noqa: B027 - threads end with their tasks
        """There will be no more tasks."""


class ThreadWorker(Worker):
    """A thread for each task. They write through system calls and digests that let go of the interpreter."""

    def start(self, task: Task[Any]) -> None:
        if not task.started:
            # A daemon, for a process that ends has nothing to wait for: what was not finalized is no checkpoint.
            name = f"megackpt-{task.name}"
            thread = threading.Thread(
                target=task.run, args=(True,), name=name, daemon=True
            )
            if (
                error := attempt(thread.start).error
            ) is not None:  # the system has none left
                task.finish(Attempt(None, error))

    def stop(
        self, task: Task[Any], reason: CheckpointingException | None = None
    ) -> None:
        error = task.cancel(reason)
        if not (task.started and task.wait(limits.WORKER_STOP_SECONDS)):
            task.finish(Attempt(None, error))
