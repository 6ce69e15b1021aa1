"""Tasks done by a process beside this one: started once, of low priority, fed through shared memory."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize

from megackpt.async_save import children, serving
from megackpt.async_save.task import Task
from megackpt.async_save.workers import GRACE, Worker
from megackpt.distributed import Attempt
from megackpt.distributed.failures import Failure
from megackpt.errors import CheckpointingException, StorageError
from megackpt.staging.buffers import Buffer

_SERVING = "megackpt.async_save.serving"
_FAREWELL = 2.0  # seconds that a process has for its end
_hiring = threading.Lock()  # held while a process is started, and while this one forks


class ProcessWorker(Worker):
    """Does tasks, one at a time, in a writer process. Their work, and what it returns, must be picklable.

    Arenas in the work are not pickled: the writer maps the same memory. The process is started by the first task,
    and anew by the first one after it has died. A work must not change from ``start`` until it has an outcome.
    ``grace``: seconds that a task which is given up has for coming to a stop, before the process is killed.
    """

    def __init__(self, grace: float = GRACE) -> None:
        self._grace = grace
        self._keeper: _Keeper | None = None
        self._dropped: finalize[[], ProcessWorker] | None = None
        _workers.add(self)

    def start(self, task: Task[Any]) -> None:
        try:
            with _hiring:
                if self._keeper is None:
                    self._keeper = _Keeper()
                    self._dropped = finalize(self, self._keeper.retire)
                    self._dropped.atexit = False  # it ends with this process anyway
                self._keeper.tasks.put(task)
        except RuntimeError as error:  # of the system, which has no thread left
            task.finish(Attempt(None, _unavailable(task, error)))

    def stop(
        self, task: Task[Any], reason: CheckpointingException | None = None
    ) -> None:
        error = task.cancel(reason)
        keeper = self._keeper
        if task.started and keeper is not None:  # else it never will be
            keeper.to_writer_of(task, _Child.cancel)
            if not task.wait(self._grace) and keeper.to_writer_of(task, _Child.kill):
                task.wait(self._grace)
        task.finish(Attempt(None, error))

    def close(self) -> None:
        """Give up what is under way, and end the process."""
        keeper = self._keeper
        if keeper is None:
            return
        keeper.closing = CheckpointingException("given up: the worker was closed")
        keeper.retire()
        current = keeper.current
        if current is not None:
            self.stop(current, keeper.closing)
        keeper.thread.join(self._grace)
        self._leave()

    def _leave(self) -> None:
        self._keeper = None
        if self._dropped is not None:
            self._dropped.detach()

    def forked(self) -> None:
        """In a process that was forked from the one that this belongs to: leave the writer alone."""
        if self._keeper is not None and self._keeper.child is not None:
            self._keeper.child.leave()
        self._leave()


class _Keeper:
    """The thread that hands the tasks over.

    It also starts the process: the system kills a process whose parent, the thread that started it, has ended.
    """

    def __init__(self) -> None:
        self.tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self.current: Task[Any] | None = None
        self.child: _Child | None = None
        self.closing: CheckpointingException | None = None
        self._turn = threading.Lock()  # held while a task is made the current one
        self.thread = threading.Thread(
            target=self._keep, name="megackpt-writer", daemon=True
        )
        self.thread.start()

    def retire(self) -> None:
        """End, and the process, after the tasks that were started."""
        self.tasks.put(None)

    def to_writer_of(self, task: Task[Any], do: Callable[[_Child], None]) -> bool:
        """Do this to the process while it is at this task. Is it?"""
        with self._turn:
            child = self.child
            if self.current is not task or child is None:
                return False
            do(child)
            return True

    def _turn_to(self, task: Task[Any] | None) -> None:
        with self._turn:
            self.current = task

    def _keep(self) -> None:
        while (task := self.tasks.get()) is not None:
            self._turn_to(task)
            if self.closing is not None:
                task.cancel(self.closing)
            if task.cancelled is not None:
                task.finish(Attempt(None, task.cancelled))
            elif task.begin():
                outcome = self._perform(task)
                failed = outcome.error is not None and task.cancelled is not None
                task.finish(Attempt(None, task.cancelled) if failed else outcome)
                del outcome
            self._turn_to(None)
            del task  # with its outcome, while there is nothing to do
        self._end()

    def _perform(self, task: Task[Any]) -> Attempt[Any]:
        error: Exception
        try:
            return self._living().perform(task)
        except CheckpointingException as failed:
            error = failed
        except (EOFError, ConnectionError) as gone:
            error = self._lost(task)
            error.__cause__ = gone
        except OSError as refused:  # what it has heard so far nobody knows
            self._end()
            error = _unavailable(task, refused)
            error.__cause__ = refused
        except Exception as failed:  # noqa: BLE001 - told to all ranks; nobody knows where the process is now
            self._end()
            error = failed
        return Attempt(None, error)

    def _living(self) -> _Child:
        if self.child is not None and (
            self.child.killed or self.child.process.poll() is not None
        ):
            self._end()
        if self.child is None:
            self.child = _Child()
        return self.child

    def _lost(self, task: Task[Any]) -> StorageError:
        pid, code = self._end()
        return StorageError(
            f"{task.name}: the writer process {pid} {children.how_ended(code)} before all was written; nothing was "
            "committed. The next save starts a new one. What it said last stands in this process's standard error; "
            "AsyncCallsQueue(persistent=False) writes in threads instead"
        )

    def _end(self) -> tuple[int, int]:
        child, self.child = self.child, None
        return (0, 0) if child is None else child.end()


class _Child:
    """A writer process, and which arenas it has mapped."""

    def __init__(self) -> None:
        with _hiring:
            self._channel, theirs = socket.socketpair(
                socket.AF_UNIX, socket.SOCK_SEQPACKET
            )
            with theirs:
                try:
                    self.process = children.start(_SERVING, theirs.fileno(), apart=True)
                except OSError as error:
                    self._channel.close()
                    raise StorageError(
                        f"cannot start a writer process: {error}; AsyncCallsQueue(persistent=False) writes in threads"
                    ) from error
        self.killed = False  # it may live a little longer
        self._number = 0  # of the task
        self._mapped: WeakSet[Buffer] = WeakSet()

    def perform(self, task: Task[Any]) -> Attempt[Any]:
        self._number += 1
        data, arenas = _pickled(task)
        work = serving.shared(data)
        if task.cancelled is not None:
            return Attempt(None, task.cancelled)
        for number, arena in arenas.items():
            if arena not in self._mapped:
                serving.send(self._channel, serving.ARENA, number, arena)
                self._mapped.add(arena)
                finalize(arena, self._forget, number).atexit = False
        serving.send(self._channel, serving.TASK, self._number, work)
        done = 0
        while True:
            word, total, memory = serving.receive(self._channel)
            with suppress(
                CheckpointingException
            ):  # a cancelled task is told again; the writer hears it, too
                task.advance(total - done)
            done = total
            if word == serving.ENDED and memory is not None:
                return self._outcome(pickle.loads(memory.memory.data))

    def _outcome(self, told: Attempt[Any] | Failure) -> Attempt[Any]:
        if isinstance(told, Attempt):
            return told
        error: Exception = RuntimeError(
            f"in the writer process {self.process.pid}: {told.text}"
        )
        if told.kind is not None:
            error = told.kind(told.text)
        error.__cause__ = _InTheWriter(told.story)
        return Attempt(None, error)

    def cancel(self) -> None:
        with suppress(OSError):  # who does not hear this is killed
            serving.send(self._channel, serving.CANCEL, self._number)

    def kill(self) -> None:
        self.killed = True
        self.process.kill()

    def _forget(self, number: int) -> None:
        with suppress(OSError):  # it is gone, and its memory with it
            serving.send(self._channel, serving.FORGET, number)

    def end(self) -> tuple[int, int]:
        """Its pid, and how it has ended: by itself, if it is about to, else by us."""
        self._channel.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_FAREWELL)
        self.process.kill()
        return self.process.pid, self.process.wait()

    def leave(self) -> None:
        """It belongs to another process."""
        self._channel.close()
        self.process.returncode = 0  # nothing to wait for


def _unavailable(task: Task[Any], why: Exception) -> StorageError:
    return StorageError(
        f"{task.name}: cannot be handed to a writer process: {why} (too many open files or threads, or too "
        "little memory?); nothing was committed. AsyncCallsQueue(persistent=False) writes in threads of this process"
    )


class _InTheWriter(Exception):
    """A traceback of the other process."""


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.arenas: dict[int, Buffer] = {}

    def reducer_override(
        self, value: object
    ) -> Any:  # asked far less often than persistent_id would be
        if not isinstance(value, Buffer):
            return NotImplemented
        number = _numbers.setdefault(value, next(_unused))
        self.arenas[number] = value
        return serving.arena, (number,)


def _pickled(task: Task[Any]) -> tuple[bytes, dict[int, Buffer]]:
    """The work, and the arenas that it names by numbers."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(task.work)
    except Exception as error:
        raise CheckpointingException(
            f"{task.name}: this work cannot be handed to a writer process ({error}): it must be picklable, so use "
            "functions that a module defines at its top, or AsyncCallsQueue(persistent=False), which writes in threads"
        ) from error
    # No copy. Python 3.12.1 crashes where a cycle (a traceback, say) holds what getbuffer gives.
    return buffer.getvalue(), pickler.arenas


_unused = itertools.count(1)
_numbers: WeakKeyDictionary[Buffer, int] = WeakKeyDictionary()
_workers: WeakSet[ProcessWorker] = WeakSet()


def _forked() -> None:
    _hiring.release()
    for worker in list(_workers):
        worker.forked()


os.register_at_fork(
    before=_hiring.acquire, after_in_parent=_hiring.release, after_in_child=_forked
)
