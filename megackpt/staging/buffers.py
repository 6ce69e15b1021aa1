"""Host memory for copies of tensors: buffers that are reused from save to save, under a cap."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, Protocol
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from megackpt import limits
from megackpt.errors import StorageError
from megackpt.planning.box import Int64
from megackpt.planning.manifest import SavePlan

# Bytes. Sizes of buffers are multiples of this where the cap allows it.
_GRAIN = 64 << 10
_KEPT_FOR = 8  # leases after which a buffer that none of them used is freed
_POPULATE_WRITE = 23  # madvise of Linux 5.14; Python has no name for it
_POPULATED_AT_ONCE = 4 << 20  # bytes: madvise holds the interpreter's lock
_NO_MEMFD = (errno.ENOSYS, errno.EPERM, errno.EACCES)  # an old kernel, or a sandbox
_numbers = itertools.count(1)


class Event(Protocol):
    """The end of work on a device, such as a torch.cuda.Event."""

    def synchronize(self) -> object: ...


class Buffer:
    """Host memory that another process can map by its descriptor.

    ``fd`` is a memfd. It is None where the system has no memfd: the memory belongs to this process
    alone then. The memory is freed with the last reference to the buffer.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.size = size
        self.fd = fd  # owned by this object
        # Names the buffer in the worker process. It is never used again.
        self.number = next(_numbers)
        self.pinned = False  # registered with CUDA
        self.pending: list[Event] = []  # copies of devices into the buffer
        self.leased_at = 0
        self.is_guess = False  # made for the first lease, by the size of a load
        self.ready = threading.Lock()  # held by the thread that prepares the buffer
        if fd is not None:
            finalize(self, os.close, fd).atexit = False
        self._map = mmap.mmap(-1 if fd is None else fd, size)
        self.memory: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    @classmethod
    def allocate(cls, size: int) -> Buffer:
        try:
            fd = os.memfd_create("megackpt", os.MFD_CLOEXEC)
        except AttributeError:  # not Linux
            return cls(size)
        except OSError as error:
            # Other errors, such as too many open files, may be over at the next save.
            if error.errno not in _NO_MEMFD:
                raise
            return cls(size)
        try:
            os.ftruncate(fd, size)
        except BaseException:
            os.close(fd)
            raise
        return cls(size, fd)

    def populate(self) -> None:
        """Touch all pages at once, which costs far less than a page fault for each."""
        try:
            for start in range(0, self.size, _POPULATED_AT_ONCE):
                length = min(_POPULATED_AT_ONCE, self.size - start)
                self._map.madvise(_POPULATE_WRITE, start, length)
        except OSError:
            # An older kernel, or too little memory: the copy touches the pages.
            return

    def wait_for_devices(self) -> None:
        """Return when the copies of devices into this buffer are complete."""
        for event in tuple(self.pending):  # other threads may wait at the same time
            event.synchronize()
        self.pending.clear()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Buffer is sent to another process by its descriptor, not by pickle"
        )


@dataclass(eq=False)
class HostCopy:
    """The Source of a save plan's rows that were copied into a buffer.

    Row i is the ``lengths[i]`` bytes at ``starts[i]``. ``release`` gives the buffer back; calling
    it is optional and may be repeated. ``hold`` has later work of the devices' current streams wait
    for the copy. Pickling needs a pickler that replaces the buffer.
    """

    plan: SavePlan
    buffer: Buffer
    starts: Int64
    lengths: Int64
    release: Callable[[], object] = lambda: None
    hold: Callable[[], object] = lambda: None

    def blocks(self, row: int) -> Iterator[memoryview]:
        self.buffer.wait_for_devices()
        start = int(self.starts[row])
        yield self.buffer.memory[start : start + int(self.lengths[row])].data

    def views(
        self, rows: Sequence[int], sizes: Sequence[int]
    ) -> list[memoryview | None]:
        """The bytes of the rows of these sizes. They stay while this copy exists."""
        self.buffer.wait_for_devices()
        memory = self.buffer.memory.data
        views: list[memoryview | None] = []
        for row, size in zip(rows, sizes, strict=True):
            start = int(self.starts[row])
            view = None
            if self.lengths[row] == size:
                view = memory[start : start + size]
            views.append(view)
        return views

    def check(self) -> None:
        """No effect: the memory of a copy cannot change."""

    def __reduce__(self) -> tuple[Any, ...]:
        self.buffer.wait_for_devices()  # a worker process has no access to the events
        return HostCopy, (self.plan, self.buffer, self.starts, self.lengths)


class BufferPool:
    """The buffers of this process. Reuse matters: new pages cost more than the copy into them."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start empty, in a forked child: the memory and the state of the lock are its parent's."""
        self._lock = threading.Lock()
        self._free: list[Buffer] = []
        self._leased: set[Buffer] = set()
        self._returned: deque[Buffer] = deque()
        self.leases = 0
        # Bytes of the first lease, from a load; whether a queue waits for it; whether a thread
        # prepares it.
        self.expected = 0
        self.is_expecting = False
        self.is_guessing = False

    @property
    def has_guess(self) -> bool:
        """Whether a guess waits for the first lease, and a queue for the guess."""
        if self.leases or not self.is_expecting:
            return False
        return any(buffer.is_guess for buffer in self._free)

    def free_guess(self) -> None:
        """Free the guess, unless it is leased."""
        with self._lock:
            self._drop_guess()

    def _drop_guess(self) -> None:
        self._free = [buffer for buffer in self._free if not buffer.is_guess]

    def lease(self, size: int, cap: int) -> Buffer | None:
        """A buffer of at least ``size`` bytes; None where all leased ones would exceed ``cap``
        bytes.

        Raises StorageError where the system has no memory or no descriptor left.
        """
        with self._lock:
            self._collect_returned()
            available = cap - sum(buffer.size for buffer in self._leased)
            if size > available:
                return None
            # The smallest free buffer that is large enough, and not more than twice as large.
            most = min(max(2 * size, _GRAIN), available)
            fitting = [free for free in self._free if size <= free.size <= most]
            if fitting:
                buffer = min(fitting, key=lambda free: free.size)
                with buffer.ready:
                    self._free.remove(buffer)
            else:
                self._drop_guess()  # its size is wrong
                buffer = _allocate(size, available)
                buffer.populate()
            self.leases += 1
            buffer.is_guess = False
            buffer.leased_at = self.leases
            self._leased.add(buffer)
            self._free_unused(cap)
            return buffer

    def prepare(
        self,
        size: int,
        cap: int,
        pin: Callable[[Buffer], object],
        is_guess: bool = False,
    ) -> bool:
        """Make a buffer for a later lease of about ``size`` bytes, and ``pin`` it.

        A lease of the buffer waits for this. False where all buffers would exceed ``cap`` bytes.
        Raises StorageError like ``lease``.
        """
        with self._lock:
            self._collect_returned()
            held = sum(buffer.size for buffer in [*self._free, *self._leased])
        if held + size > cap:
            return False
        # More than asked for: the objects of a state, and the balance between ranks.
        buffer = _allocate(size + size // 16, cap - held)
        buffer.is_guess = is_guess
        with buffer.ready:
            with self._lock:
                buffer.leased_at = self.leases
                self._free.append(buffer)
                self._free_unused(cap)
            buffer.populate()
            pin(buffer)
        return True

    def give_back(self, buffer: Buffer) -> None:
        # The garbage collector may call this at any point, also while this thread holds the lock.
        # So it only notes the buffer for the next lease.
        self._returned.append(buffer)

    def _collect_returned(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            # In a forked process, unleased buffers belong to the parent.
            if buffer in self._leased:
                self._leased.remove(buffer)
                self._free.append(buffer)

    def _free_unused(self, cap: int) -> None:
        """Free what recent leases did not use, and the longest unused while all exceed the cap."""
        self._free.sort(key=lambda buffer: -buffer.leased_at)
        held = sum(buffer.size for buffer in [*self._free, *self._leased])
        while self._free:
            oldest = self._free[-1]
            if held <= cap and self.leases - oldest.leased_at < _KEPT_FOR:
                return
            held -= self._free.pop().size


def _allocate(size: int, available: int) -> Buffer:
    # Some slack, so that the buffer still fits when objects in the state grow a little.
    grain = max(_GRAIN, 1 << max(0, size.bit_length() - 5))
    rounded = min(max(1, -(-size // grain)) * grain, available)
    try:
        return Buffer.allocate(max(1, rounded))
    except OSError as error:
        raise StorageError(
            f"no memory to copy a save into: {size:,} bytes were refused: {error}"
        ) from error


POOL = BufferPool()
"""The pool of this process."""

os.register_at_fork(after_in_child=POOL.forget)


# The number of ranks on this host, as their launcher sets it; the innermost launcher first.
_LOCAL_RANKS = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "SLURM_NTASKS_PER_NODE",
)


@cache
def default_cap() -> int:
    """The bytes that copies of saves may take in this process without Strategy(staging_memory=...).

    This is half of the host memory that is available at the first call, divided by the ranks of
    this host (set by torchrun, Open MPI or Slurm; else 1), and at least 256 MiB.
    """
    ranks = 1
    for name in _LOCAL_RANKS:
        number = re.match(r"[1-9]\d*", os.environ.get(name, ""))
        if number:
            ranks = int(number[0])
            break
    return max(available_memory() // 2 // ranks, limits.STAGING_BYTES_MIN)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: the host's, within its control groups' limits."""
    try:
        meminfo = (root / "proc/meminfo").read_text()
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        found = [int(meminfo.partition("MemAvailable:")[2].split()[0]) << 10]
    except (OSError, IndexError, ValueError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in groups:
        _, controllers, path = line.split(":", 2)
        v1 = "memory" in controllers.split(",")
        if controllers and not v1:
            continue
        base = root / "sys/fs/cgroup"
        if v1:
            base /= "memory"
        group = base / path.lstrip("/")
        # A limit of any parent counts. A container may see its group as the root.
        while group.is_relative_to(base):
            found.append(_left_in_group(group, v1))
            group = group.parent
    return max(0, min(found))


def _left_in_group(group: Path, v1: bool) -> int:
    """Bytes below a control group's limit; its cached files do not count as used."""
    names = ("memory.max", "memory.current", "inactive_file")
    if v1:
        names = (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        )
    try:
        limit = int((group / names[0]).read_text())
        used = int((group / names[1]).read_text())
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == names[2]:
                used -= int(count)
        return limit - used
    except (OSError, ValueError):  # no such file, or "max": no limit
        return sys.maxsize
