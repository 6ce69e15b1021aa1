"""A worker process: started by us, fed over a multiprocessing connection, with shared buffers.

The parent sends callables. The process runs them one by one, and sends back progress and outcomes.
Buffers pass as descriptors of memfds, and stay mapped while the parent uses them.

The process is a new interpreter that imports this module by name. A fork is unsafe once threads or
CUDA exist; multiprocessing's spawn runs the script of the user again if it has no guard, and is
refused in daemonic processes. Both ends of the connection are ours, so pickles may pass.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any
from weakref import WeakSet, finalize

from megackpt.distributed.failures import Attempt, Failure
from megackpt.errors import CheckpointingException
from megackpt.staging.buffers import Buffer
from megackpt.storage.kernel import libc_function

start_lock = threading.Lock()
"""Held while a worker process is started, and while this process forks.

A child forked in between would keep the worker's end of the connection open, and this process would
not notice the death of the worker.
"""

_EXIT_TIMEOUT = 2.0  # seconds; after that the process is killed
_PROGRESS_INTERVAL = 0.05  # seconds
# Signals for the trainer, such as an interrupt at the terminal. The worker ends with its parent.
_IGNORED_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_CODE = (
    "import sys; sys.path[:] = {path!r}; "
    "from megackpt.async_save.worker_process import main; main({fd}, {parent}, {low_priority})"
)
_mapped: dict[int, Buffer] = {}  # in the worker: the parent's buffers, by number


class WorkerProcess:
    """The parent's side of a worker process.

    ``low_priority``: the process uses only the processor and disk time that no other process needs.
    ``on_release`` is called with the number of a buffer that the parent has freed; pass it to
    ``unmap``. Raises OSError where the process cannot be started.

    The system kills the process when the thread that has started it ends.
    """

    def __init__(
        self,
        low_priority: bool = False,
        on_release: Callable[[int], None] = lambda _: None,
    ) -> None:
        with start_lock:
            self.connection, theirs = Pipe()
            try:
                with theirs:
                    self.process = _start(theirs.fileno(), low_priority)
            except BaseException:
                self.connection.close()
                raise
        self.killed = False  # it may take a moment to die
        self._on_release = on_release
        self._sent: WeakSet[Buffer] = WeakSet()

    def send(self, work: Callable[[Callable[[int], None]], Any]) -> None:
        """Have ``work`` called with a function that takes the number of bytes done since its last
        call.

        Raises CheckpointingException, before it sends, where the work cannot be pickled.
        Raises OSError where the process is dead or a descriptor cannot be sent.
        """
        file = io.BytesIO()
        pickler = _Pickler(file)
        try:
            pickler.dump(work)
        except Exception as error:
            raise CheckpointingException(
                f"this work cannot be sent to a writer process ({error}): it must be picklable, "
                "so use functions at the top level of a module, or "
                "AsyncCallsQueue(persistent=False), which writes in threads"
            ) from error
        for buffer in pickler.buffers:
            if buffer in self._sent:
                continue
            if buffer.fd is None:
                raise CheckpointingException(
                    "this system has no memory that processes can share (memfd_create), so a "
                    "writer process cannot be used: write in threads "
                    "(AsyncCallsQueue(persistent=False))"
                )
            self.connection.send(("map", buffer.number, buffer.size))
            send_handle(self.connection, buffer.fd, self.process.pid)
            self._sent.add(buffer)
            finalize(buffer, self._on_release, buffer.number).atexit = False
        self.connection.send(("run", file.getvalue()))

    def unmap(self, number: int) -> None:
        with suppress(OSError):  # the process is dead, and its memory is free
            self.connection.send(("unmap", number))

    def receive(self) -> int | Attempt[Any]:
        """Wait for the next message: bytes done since the last one, or the outcome of the work.

        Raises EOFError or ConnectionError where the process is dead.
        """
        message = self.connection.recv()
        if not isinstance(message, Failure):
            return message  # type: ignore[no-any-return]
        if message.kind is None:
            text = f"in the worker process {self.process.pid}: {message.text}"
            error: Exception = RuntimeError(text)
        else:
            error = message.kind(message.text)
        error.__cause__ = _RemoteTraceback(message.details)
        return Attempt(None, error)

    def kill(self) -> None:
        self.killed = True
        self.process.kill()

    def end(self) -> str:
        """Close the connection, which ends the process, and wait for it. Returns how it ended."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_TIMEOUT)
        self.process.kill()
        code = self.process.wait()
        how = f"ended with status {code}"
        if code < 0:
            how = f"was killed by signal {-code}"
            with suppress(ValueError):  # a real-time signal has no name
                how = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += " (out of memory, perhaps)"
        return f"{self.process.pid} {how}"

    def forget(self) -> None:
        """In a forked child: leave the process to the parent."""
        self.connection.close()
        self.process.returncode = 0  # so that Popen does not wait for it


def start_detached(module: str, argument: str) -> None:
    """Start ``module.main(argument)`` in a process that outlives this one.

    It has a session of its own, and no output. Raises OSError or CalledProcessError where it
    cannot be started.
    """
    # Its parent ends at once, so this process never has to ask for its status.
    code = "import os, sys; os.fork() and os._exit(0); "
    code += f"sys.path[:] = {_path()!r}; from {module} import main; main({argument!r})"
    null = subprocess.DEVNULL
    command = [sys.executable, "-c", code]
    with start_lock:
        subprocess.run(
            command,
            check=True,
            stdin=null,
            stdout=null,
            stderr=null,
            start_new_session=True,
        )


def _path() -> list[str]:
    # Python itself ignores entries of sys.path that are not strings.
    entries: list[object] = [*sys.path]
    return [str.__str__(entry) for entry in entries if isinstance(entry, str)]


def _start(descriptor: int, low_priority: bool) -> subprocess.Popen[bytes]:
    # The descriptor may be 0, 1 or 2 where this process has no standard streams.
    passed = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    code = _CODE.format(
        path=_path(), fd=passed, parent=os.getpid(), low_priority=low_priority
    )
    output = subprocess.DEVNULL
    # In a process that began without standard error, descriptor 2 may be any file by now.
    if sys.__stderr__ is not None:
        with suppress(OSError):
            os.fstat(2)
            output = 2
    try:
        return subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[passed],
            # No terminal interrupts a separate process group. A separate session would undo the low
            # priority: Linux shares the processors among sessions first.
            process_group=0,
        )
    finally:
        os.close(passed)


class _RemoteTraceback(Exception):
    """The text of a traceback in the worker process."""


class _Pickler(pickle.Pickler):
    """Replaces buffers by their numbers."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.buffers: list[Buffer] = []

    # Pickle calls it less often than persistent_id.
    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, Buffer):
            return NotImplemented
        self.buffers.append(value)
        return _mapped_buffer, (value.number,)


def _mapped_buffer(number: int) -> Buffer:
    return _mapped[number]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__":
            raise CheckpointingException(
                f"{name} is defined in the script itself, which a writer process does not run "
                "again: move it to a module that can be imported, or write in threads "
                "(AsyncCallsQueue(persistent=False))"
            )
        return super().find_class(module, name)


class _Progress:
    """The progress that one piece of work reports to the parent."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._ended = False
        self._count = 0
        self._sent_at = 0.0

    def advance(self, count: int) -> None:
        with self._lock:
            if self._ended:  # a thread may outlive the work that has started it
                raise CheckpointingException("this save is over")
            self._count += count
            if time.monotonic() - self._sent_at >= _PROGRESS_INTERVAL:
                self._connection.send(self._count)
                self._count = 0
                self._sent_at = time.monotonic()

    def end(self, outcome: bytes) -> None:
        with self._lock:
            self._ended = True
            self._connection.send(self._count)
            self._connection.send_bytes(outcome)


def main(descriptor: int, parent: int, low_priority: bool) -> None:
    """What the process runs until its parent closes the connection."""
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    if low_priority:
        give_way()
    die_with_parent()
    if os.getppid() != parent:  # it died before die_with_parent
        return
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    try:
        while True:
            kind, *arguments = connection.recv()
            if kind == "map":
                number, size = arguments
                # Kept from save to save: the page faults of a new mapping cost processor time.
                _mapped[number] = Buffer(size, recv_handle(connection))
            elif kind == "unmap":
                _mapped.pop(arguments[0], None)
            else:
                progress = _Progress(connection)
                progress.end(_run(arguments[0], progress.advance))
            del arguments
            # A cycle would keep the memory of the work until some later collection.
            gc.collect()
    except (EOFError, ConnectionError):
        os._exit(0)  # threads of a library must not delay the end


def _run(data: bytes, advance: Callable[[int], None]) -> bytes:
    """The pickled outcome: an Attempt, or the Failure of an exception."""
    try:
        work = _Unpickler(io.BytesIO(data)).load()
        return pickle.dumps(Attempt(work(advance)), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # noqa: BLE001 - raised in the parent
        return pickle.dumps(Failure.of(0, error), pickle.HIGHEST_PROTOCOL)


os.register_at_fork(
    before=start_lock.acquire,
    after_in_parent=start_lock.release,
    after_in_child=start_lock.release,
)


# Numbers of the system call; libc has no wrapper.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_LOWEST = 2 << 13 | 7  # best effort, the last of eight levels
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> bool:
    """Have the kernel kill this process when its parent dies. False if that is unsupported."""
    call = libc_function("prctl", ctypes.c_int, ctypes.c_ulong)
    return call is not None and call(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0


def give_way() -> bool:
    """Give this thread, and threads that it starts, the lowest priority for processor and disk.

    False if a part of that is unsupported.
    """
    call = libc_function("syscall", *[ctypes.c_long] * 4)
    number = _IOPRIO_SET.get(os.uname().machine)
    given = (
        call is not None
        and number is not None
        and call(number, 1, 0, _IOPRIO_LOWEST) == 0
    )
    try:
        # Stronger than nice: other threads that wake up run at once, without waiting for the
        # end of a time slice.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):  # not Linux, or a sandbox
        return False
    return given


def is_runnable(pid: int) -> bool:
    """Return whether a thread of a process is running, or waits for a processor."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()[0]
            if state == b"R":
                return True
    except OSError:  # not Linux, or it has ended
        return False
    return False
