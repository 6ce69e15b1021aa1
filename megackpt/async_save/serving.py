"""The writer process: it takes one task after the other, tells how far each is, and what became of it.

Between it and its parent pass packets of one size over a socket; whatever is longer lies in memory that both map, and
that goes along as a descriptor. Both ends are ours and nobody else can reach the socket, so pickles may travel.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import pickle
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn

import numpy as np

from megackpt.distributed.failures import Attempt, Failure
from megackpt.errors import CheckpointingException, StorageError
from megackpt.staging.buffers import Buffer
from megackpt.storage import kernel

TASK, CANCEL, ARENA, FORGET = (
    b"T",
    b"C",
    b"A",
    b"F",
)  # to the writer; the first and the third come with memory
MOVED, ENDED = (
    b"M",
    b"E",
)  # from it, with how many bytes are done; the second comes with the outcome

_PACKET = struct.Struct("=cQQ")  # the word, its number, how long the memory is
_PAUSE = 0.05  # seconds between two words on how far it is
_arenas: dict[
    int, Buffer
] = {}  # kept from task to task: the faults of a new mapping would cost CPU again
_DEAF_TO = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def send(
    channel: socket.socket,
    word: bytes,
    number: int,
    memory: Buffer | None = None,
    *,
    wait: bool = False,
) -> None:
    """OSError where the other end is gone; without ``wait``, BlockingIOError where it does not listen."""
    flags = socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT)
    if memory is None:
        channel.send(_PACKET.pack(word, number, 0), flags)
    elif memory.fd is None:
        raise CheckpointingException(
            "this system has no memory that processes share (memfd_create), so a writer process cannot be used: "
            "write in threads (AsyncCallsQueue(persistent=False))"
        )
    else:
        socket.send_fds(
            channel, [_PACKET.pack(word, number, memory.size)], [memory.fd], flags
        )


def receive(channel: socket.socket) -> tuple[bytes, int, Buffer | None]:
    """Wait for a word, its number, and its memory. EOFError or ConnectionError where the other end is gone."""
    packet, descriptors, _, _ = socket.recv_fds(
        channel, _PACKET.size, 1, socket.MSG_CMSG_CLOEXEC
    )
    if not packet:
        raise EOFError
    word, number, size = _PACKET.unpack(packet)
    if size and not descriptors:
        raise StorageError(
            "a descriptor was lost on its way between processes: too many open files?"
        )
    return word, number, Buffer(size, descriptors[0]) if size else None


def shared(data: bytes | memoryview) -> Buffer:
    arena = Buffer.allocate(len(data))
    arena.memory[:] = np.frombuffer(data, np.uint8)
    return arena


def arena(number: int) -> Buffer:
    """In the writer: the memory that the parent sent under this number."""
    return _arenas[number]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__":
            raise CheckpointingException(
                f"{name} belongs to the script that was started, which a writer process does not run again: move it "
                "to a module that can be imported, or write in threads (AsyncCallsQueue(persistent=False))"
            )
        return super().find_class(module, name)


class _Service:
    """One thread does tasks, another one listens: to hear of a cancelled task, and of the parent's end, meanwhile."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._tasks: SimpleQueue[tuple[int, Buffer]] = SimpleQueue()
        self._cancelled = 0  # tasks up to this number
        self._lock = threading.Lock()
        self._number = 0  # of the task that goes on
        self._done = 0
        self._told = 0.0

    def listen(self) -> NoReturn:
        status = 1
        try:
            while True:
                self._hear(*receive(self._channel))
        except (EOFError, ConnectionError):
            status = 0
        except BaseException:  # noqa: BLE001 - told, and the end
            traceback.print_exc()
        finally:
            os._exit(status)

    def _hear(self, word: bytes, number: int, memory: Buffer | None) -> None:
        if word == TASK and memory is not None:
            self._tasks.put((number, memory))
        elif word == ARENA and memory is not None:
            _arenas[number] = memory
        elif word == CANCEL:
            self._cancelled = max(self._cancelled, number)
        elif word == FORGET:
            _arenas.pop(number, None)

    def work(self) -> NoReturn:
        while True:
            number, task = self._tasks.get()
            with self._lock:
                self._number, self._done = number, 0
            outcome = self._perform(task, partial(self._advance, number))
            with self._lock:
                self._number = 0
            send(self._channel, ENDED, self._done, outcome, wait=True)
            del task, outcome
            gc.collect()  # memory is given back now, not some time

    def _perform(self, task: Buffer, advance: Callable[[int], None]) -> Buffer:
        """The pickle of an Attempt, or of the Failure of whatever was raised."""
        try:
            work = _Unpickler(io.BytesIO(task.memory.data)).load()
            return shared(pickle.dumps(Attempt(work(advance)), pickle.HIGHEST_PROTOCOL))
        except BaseException as error:  # noqa: BLE001 - the parent hears of it
            return shared(pickle.dumps(Failure.of(0, error), pickle.HIGHEST_PROTOCOL))

    def _advance(self, number: int, count: int) -> None:
        with self._lock:
            if (
                number <= self._cancelled or number != self._number
            ):  # a thread may outlive its task
                raise CheckpointingException("given up")
            self._done += count
            now = time.monotonic()
            if now - self._told >= _PAUSE:
                self._told = now
                with suppress(BlockingIOError):  # the next word says it
                    send(self._channel, MOVED, self._done)


def main(descriptor: int, parent: int) -> None:
    """What the new process runs. It ends with its parent, whatever that dies of, and not by signals meant for that."""
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    kernel.give_way()
    kernel.die_with_parent()
    if os.getppid() != parent:
        return
    os.set_inheritable(descriptor, False)
    service = _Service(socket.socket(fileno=descriptor))
    threading.Thread(target=service.listen, name="megackpt-listen", daemon=True).start()
    service.work()
