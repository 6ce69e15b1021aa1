"""A worker for the queue that performs tasks in a worker process of low priority."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet, finalize

from megackpt import limits
from megackpt.async_save.task import Task, Worker
from megackpt.async_save.worker_process import WorkerProcess, is_runnable, start_lock
from megackpt.distributed import Attempt
from megackpt.errors import CheckpointingException, StorageError


class ProcessWorker(Worker):
    """Performs tasks one by one in one process.

    Work and results must be picklable. The first task starts the process, and the first one after
    its death starts another. Do not change the work between ``start`` and its outcome.
    """

    def __init__(self) -> None:
        self._dispatcher: _Dispatcher | None = None
        self._finalizer: finalize[[], ProcessWorker] | None = None
        _workers.add(self)

    def start(self, task: Task[Any]) -> None:
        try:
            with start_lock:
                if self._dispatcher is None:
                    self._dispatcher = _Dispatcher()
                    self._finalizer = finalize(self, self._dispatcher.end)
                    self._finalizer.atexit = False  # the process ends with this one
                self._dispatcher.items.put(task)
        except RuntimeError as error:  # the system has no thread left
            task.finish(Attempt(None, _unavailable(task, error)))

    def stop(
        self, task: Task[Any], reason: CheckpointingException | None = None
    ) -> None:
        """Give up a task. Its process is killed; the task's files do not become a checkpoint."""
        error = task.cancel(reason)
        dispatcher = self._dispatcher
        if task.started and dispatcher is not None and dispatcher.kill_process_of(task):
            task.stuck = not task.wait(limits.WORKER_STOP_SECONDS)
            if task.stuck:
                # The process does not die while it waits for a disk. The next task gets another.
                dispatcher.end()
                self._detach()
        task.finish(Attempt(None, error))

    def waits_for_processor(self) -> bool:
        dispatcher = self._dispatcher
        if dispatcher is None or dispatcher.process is None:
            return False
        return is_runnable(dispatcher.process.process.pid)

    def close(self) -> None:
        """Give up all tasks, and end the process."""
        dispatcher = self._dispatcher
        if dispatcher is None:
            return
        dispatcher.closing = CheckpointingException("given up: the worker was closed")
        dispatcher.end()
        current = dispatcher.current
        if current is not None:
            self.stop(current, dispatcher.closing)
        if self._dispatcher is not None:
            dispatcher.thread.join(limits.WORKER_STOP_SECONDS)
            self._detach()

    def forget(self) -> None:
        """In a forked child: leave the process to the parent."""
        if self._dispatcher is not None and self._dispatcher.process is not None:
            self._dispatcher.process.forget()
        self._detach()

    def _detach(self) -> None:
        self._dispatcher = None
        if self._finalizer is not None:
            self._finalizer.detach()


class _Dispatcher:
    """The thread that starts the process and sends it tasks.

    The system kills the process when this thread ends, so the thread lives as long as the worker.
    """

    def __init__(self) -> None:
        # Tasks; numbers of buffers that were freed; None at the end. Its put() may be called by the
        # garbage collector.
        self.items: SimpleQueue[Task[Any] | int | None] = SimpleQueue()
        self.process: WorkerProcess | None = None
        self.current: Task[Any] | None = None
        self.closing: CheckpointingException | None = None
        self._lock = threading.Lock()  # for current and process
        self.thread = threading.Thread(
            target=self._run, name="megackpt-writer", daemon=True
        )
        self.thread.start()

    def end(self) -> None:
        """End the thread and the process after the tasks that were started."""
        self.items.put(None)

    def kill_process_of(self, task: Task[Any]) -> bool:
        """Kill the process if it is at this task. Whether the task is the current one."""
        with self._lock:
            if self.current is not task:
                return False
            if self.process is not None:
                self.process.kill()
            return True

    def _run(self) -> None:
        while True:
            item = self.items.get()
            if item is None:
                break
            if isinstance(item, Task):
                with self._lock:
                    self.current = item
                if self.closing is not None:
                    item.cancel(self.closing)
                if item.cancelled is not None:
                    item.finish(Attempt(None, item.cancelled))
                elif item.claim():
                    item.finish(self._perform(item))
                with self._lock:
                    self.current = None
            elif self.process is not None:
                self.process.unmap(item)
            del item  # an idle thread must not keep the task and its memory
        self._end_process()

    def _perform(self, task: Task[Any]) -> Attempt[Any]:
        error: Exception
        try:
            process = self._living_process()
            # After the process can be killed: a task cancelled before that is not sent.
            if task.cancelled is not None:
                raise task.cancelled
            process.send(task.work)
            while True:
                message = process.receive()
                if isinstance(message, Attempt):
                    return message
                # A cancelled task raises: its process is being killed.
                with suppress(CheckpointingException):
                    task.advance(message)
        except CheckpointingException as failed:
            error = CheckpointingException(f"{task.name}: {failed}")
            error.__cause__ = failed
        except (EOFError, ConnectionError) as lost:
            error = StorageError(
                f"{task.name}: the writer process {self._end_process()} before all was written; "
                "nothing was committed. The next save starts a new one. See standard error for its "
                "last output; AsyncCallsQueue(persistent=False) writes in threads instead"
            )
            error.__cause__ = lost
        except OSError as failed:
            self._end_process()  # it may have received a part of a message
            error = _unavailable(task, failed)
            error.__cause__ = failed
        except Exception as failed:  # noqa: BLE001 - raised on all ranks
            self._end_process()
            error = failed
        if task.cancelled is not None:  # its process was killed for that
            error = task.cancelled
        return Attempt(None, error)

    def _living_process(self) -> WorkerProcess:
        process = self.process
        if process is not None:
            if not process.killed and process.process.poll() is None:
                return process
            self._end_process()
        process = WorkerProcess(low_priority=True, on_release=self.items.put)
        with self._lock:
            self.process = process
        return process

    def _end_process(self) -> str:
        with self._lock:
            process, self.process = self.process, None
        if process is None:
            return ""
        return process.end()


def _unavailable(task: Task[Any], error: Exception) -> StorageError:
    return StorageError(
        f"{task.name}: no writer process can be used: {error} (too many open files or threads, or "
        "too little memory?); nothing was committed. AsyncCallsQueue(persistent=False) writes in "
        "threads"
    )


_workers: WeakSet[ProcessWorker] = WeakSet()


def _forget_in_child() -> None:
    for worker in list(_workers):
        worker.forget()


os.register_at_fork(after_in_child=_forget_in_child)
