"""Host memory for copies of a save: arenas reused from save to save under a cap, and the rows that lie in one."""

from __future__ import annotations

import errno
import math
import mmap
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, Protocol
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from megackpt.errors import StorageError
from megackpt.planning.box import Int64
from megackpt.planning.manifest import SavePlan

PATIENCE = 1800.0
"""Seconds without any progress after which nobody waits for memory any longer."""
IDLE_PATIENCE = 5.0
"""The same, while nobody writes any of the copies that take the room."""
LEAST_CAP = 256 << 20

_GRAIN = 64 << 10  # sizes of arenas are multiples of this
_REMEMBERED = 8  # leases that tell how much memory is needed
_POPULATE_WRITE = 23  # madvise of Linux 5.14; Python has no name for it
_POLL = 0.1  # seconds: also a word that was missed is heard
_POPULATED = 64 << 20  # at a time: it holds the interpreter's lock
# How many ranks this host has; the innermost of those that started them first.
_RANKS_HERE = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "SLURM_NTASKS_PER_NODE",
)
_FORBIDDEN = (errno.ENOSYS, errno.EPERM, errno.EACCES)  # an old kernel, or a sandbox


class Event(Protocol):
    """Something that a device will have done, as torch.cuda.Event."""

    def synchronize(self) -> object: ...


class Arena:
    """Host memory that other processes can map: ``fd`` is its memfd, ``memory`` its bytes.

    Where the system has no memfd, ``fd`` is None and the memory this process's own. The descriptor is closed and
    the memory unmapped when nobody refers to it any more.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.size = size
        self.fd = fd
        self.pinned = False  # is it registered with a device?
        self.pending: list[Event] = []  # ends of what devices still write into it
        self.idle = False  # does it hold a copy that no worker has been given?
        self._populated = False
        if fd is not None:
            finalize(self, os.close, fd).atexit = False
        self._mapped = mmap.mmap(-1 if fd is None else fd, size)
        self.memory: NDArray[np.uint8] = np.frombuffer(self._mapped, np.uint8)

    @classmethod
    def new(cls, size: int) -> Arena:
        try:
            fd = os.memfd_create("megackpt", os.MFD_CLOEXEC)
        except AttributeError:  # not Linux
            return cls(size)
        except OSError as error:
            if error.errno not in _FORBIDDEN:
                raise  # it would be another one's the next time
            return cls(size)
        return cls._extended(fd, size)

    @classmethod
    def attached(cls, fd: int, size: int) -> Arena:
        """The arena of another process, by its descriptor, which is this object's to close from now on."""
        return cls(size, fd)

    def grown(self, size: int) -> Arena:
        """A larger one of the same memory, as far as that goes; this one is to be forgotten."""
        self.ready()
        return (
            Arena.new(size)
            if self.fd is None
            else self._extended(os.dup(self.fd), size)
        )

    @classmethod
    def _extended(cls, fd: int, size: int) -> Arena:
        try:
            os.ftruncate(fd, size)
        except BaseException:
            os.close(fd)
            raise
        return cls(size, fd)

    def populate(self) -> None:
        """Touch all pages, once: much cheaper than each by itself when data first come."""
        if self._populated:
            return
        self._populated = True
        try:
            for start in range(0, self.size, _POPULATED):
                self._mapped.madvise(
                    _POPULATE_WRITE, start, min(_POPULATED, self.size - start)
                )
        except (
            OSError
        ):  # an older kernel, or too little memory: the others are touched as data come
            return

    def ready(self) -> None:
        """Wait for devices that write into it."""
        for event in tuple(self.pending):  # of several threads, too
            event.synchronize()
        self.pending.clear()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an Arena travels to another process as its descriptor (fd) and size, not by pickle"
        )


@dataclass(frozen=True, eq=False)
class Copy:
    """The Source of a save plan's rows that were copied into an arena.

    ``start`` and ``length`` tell for each row where its bytes lie. Whoever pickles it sees to the arena.
    """

    plan: SavePlan
    arena: Arena
    start: Int64
    length: Int64
    lease: Lease | None = field(default=None, repr=False)
    """Of the arena; it does not travel."""

    def close(self) -> None:
        """Nobody reads this any more."""
        if self.lease is not None:
            self.lease.release()

    def blocks(self, row: int) -> Iterator[memoryview]:
        self.arena.ready()
        start = int(self.start[row])
        yield self.arena.memory[start : start + int(self.length[row])].data

    def __reduce__(self) -> tuple[Any, ...]:
        self.arena.ready()  # the other process cannot ask
        return Copy, (self.plan, self.arena, self.start, self.length)


def begun(work: object) -> None:
    """A worker has been given this: it will be written, and the memory of the copy that it names given back."""
    source = getattr(work, "source", None)
    if isinstance(source, Copy):
        source.arena.idle = False


class Lease:
    """An arena for a while: until ``release``, or until nobody refers to this any more."""

    def __init__(self, arena: Arena, give_back: Callable[[Arena, int], None]) -> None:
        self.arena = arena
        self.release = finalize(
            self, give_back, arena, os.getpid()
        )  # the first call counts
        self.release.atexit = False


class Pool:
    """Arenas that are reused from save to save: the first touch of a page costs far more than a copy into it.

    Leases of one process never sum up to more than the cap that each asks for; who asks for more waits until
    others give back. What was not needed lately is let go.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child: the memory is the parent's, shared with it, and the lock may be held by nobody."""
        self._changed = threading.Condition(threading.Lock())
        self._free: list[Arena] = []
        self._leased: set[Arena] = set()
        self._lately: deque[int] = deque(
            maxlen=_REMEMBERED
        )  # sums of leases, as each was granted
        self._returned: deque[Arena] = deque()

    def lease(
        self,
        need: Callable[[], int],
        cap: int,
        patience: float = PATIENCE,
        idle_patience: float = math.inf,
    ) -> Lease:
        """Memory of ``need()`` bytes, waiting while others hold so much that it goes beyond the cap.

        ``need`` is asked again when ``changed`` is called. Those who can end the waiting are writers, and no
        writer waits for this pool. StorageError when nothing has changed for ``patience`` seconds, or for
        ``idle_patience`` where all that takes the room is idle.
        """
        seen, since = (-1, -1, False), time.monotonic()
        with self._changed:
            while (room := self._room(cap)) < (
                wanted := need()
            ) and wanted:  # nothing is always to be had
                idle = bool(self._leased) and all(arena.idle for arena in self._leased)
                if seen != (wanted, room, idle):
                    seen, since = (wanted, room, idle), time.monotonic()
                elif (waited := time.monotonic() - since) > min(
                    patience, idle_patience if idle else math.inf
                ):
                    raise _no_room(
                        wanted, room, cap, waited, idle and waited > idle_patience
                    )
                self._changed.wait(min(patience, _POLL))
            arena = self._taken(wanted, room)
            self._leased.add(arena)
            self._lately.append(self._in_use())
            self._let_go(cap)
        lease = Lease(arena, self._take_back)
        arena.populate()
        return lease

    def changed(self) -> None:
        """Somebody needs less than before."""
        with self._changed:
            self._changed.notify_all()

    def _room(self, cap: int) -> int:
        self._collect()
        return cap - self._in_use()

    def _in_use(self) -> int:
        return sum(arena.size for arena in self._leased)

    def _held(self) -> int:
        """Bytes of all arenas, leased or not."""
        return self._in_use() + sum(arena.size for arena in self._free)

    def _taken(self, wanted: int, room: int) -> Arena:
        """A free arena that suits, else the largest that is too small, made larger, else a new one."""
        size = max(_GRAIN, -(-wanted // _GRAIN) * _GRAIN)
        free = sorted(self._free, key=lambda arena: arena.size)
        most = max(size, min(2 * size, room))
        chosen = next((arena for arena in free if size <= arena.size <= most), None)
        chosen = chosen or next(
            (arena for arena in reversed(free) if arena.size < size), None
        )
        try:
            if chosen is None:
                return Arena.new(size)
            self._free.remove(chosen)
            return chosen if chosen.size >= size else chosen.grown(size)
        except OSError as error:
            raise StorageError(
                f"no memory to copy a save into: {size:,} bytes were refused: {error}"
            ) from error

    def _let_go(self, cap: float = math.inf) -> None:
        """Forget free arenas, the smallest first, where all are more than the cap, or than was needed lately."""
        self._free.sort(key=lambda arena: -arena.size)
        while self._free and self._held() > min(
            cap, 1.5 * max(self._lately, default=0)
        ):
            self._free.pop()

    def _take_back(self, arena: Arena, process: int) -> None:
        """Never waits: a garbage collection may call this anywhere, also where this thread has the lock."""
        if os.getpid() != process:
            return  # a forked child has a copy of the lease
        self._returned.append(arena)
        if self._changed.acquire(blocking=False):
            try:
                self._collect()
                self._changed.notify_all()
            finally:
                self._changed.release()

    def _collect(self) -> None:
        while self._returned:
            arena = self._returned.popleft()
            self._leased.remove(arena)
            arena.idle = False
            self._free.append(arena)
            self._let_go()


def _no_room(
    wanted: int, room: int, cap: int, waited: float, idle: bool
) -> StorageError:
    why = (
        "and nobody writes those: schedule each request (AsyncCallsQueue.schedule_async_request) before the next save, "
        "or drop it"
        if idle
        else f"with no change for {waited:.0f} s: is a writer stuck?"
    )
    return StorageError(
        f"no memory to copy a save into: it needs {wanted:,} bytes, and earlier saves that are not written yet hold "
        f"{cap - room:,} of the {cap:,} allowed, {why} (Strategy(staging_memory=...) is the bound)"
    )


POOL = Pool()
"""The one of this process."""

os.register_at_fork(after_in_child=POOL.forget)


@cache
def default_cap() -> int:
    """The bytes that copies of saves may take in this process where nobody says so.

    That is half of the host memory that was available when this was asked first, shared by the ranks of this host
    (as torchrun, Open MPI or Slurm tell; else this one alone), and 256 MiB at least.
    """
    told = (re.match(r"[1-9]\d*", os.environ.get(name, "")) for name in _RANKS_HERE)
    ranks = next((int(number[0]) for number in told if number), 1)
    return max(available_memory() // 2 // ranks, LEAST_CAP)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: what the host has, and the limits of its control groups leave."""
    try:
        fields = dict(
            line.split(":") for line in (root / "proc/meminfo").read_text().splitlines()
        )
        found = [int(fields["MemAvailable"].split()[0]) << 10]
        groups = [
            line.split(":", 2)
            for line in (root / "proc/self/cgroup").read_text().splitlines()
        ]
    except (OSError, KeyError, ValueError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for _, controllers, path in groups:
        v1 = "memory" in controllers.split(",")
        base = root / "sys/fs/cgroup" / ("memory" if v1 else "")
        if v1 or not controllers:
            group = base / path.lstrip(
                "/"
            )  # a container may see its own group as the root
            found += [
                _left(folder, v1)
                for folder in (group, *group.parents)
                if folder.is_relative_to(base)
            ]
    return max(0, min(found))


def _left(group: Path, v1: bool) -> int:
    """What a control group's limit leaves, its caches of files aside; v1 and v2 have other names for it."""
    limit, usage, cached = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
        if v1
        else ("memory.max", "memory.current", "inactive_file ")
    )
    try:
        stat = (group / "memory.stat").read_text().splitlines()
        used = int((group / usage).read_text()) - sum(
            int(s.split()[1]) for s in stat if s.startswith(cached)
        )
        return int((group / limit).read_text()) - used
    except (OSError, ValueError):  # not there, or "max": no limit
        return sys.maxsize
