"""Watching what processes take: the anonymous memory of ranks and of the processes that they start, at its peak."""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

EVERY = 0.002  # seconds
_KCMP = {"x86_64": 312, "aarch64": 272}.get(
    platform.machine()
)  # libc has no function for this system call
_KCMP_VM = 1


class Peaks:
    """The peak of each process above its first value, in bytes."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._idle = {pid: taken(pid) for pid in pids}
        self.extra = dict.fromkeys(pids, 0)

    def look(self) -> None:
        for pid, idle in self._idle.items():
            self.extra[pid] = max(self.extra[pid], taken(pid) - idle)


@contextmanager
def watched(pids: Sequence[int]) -> Iterator[Peaks]:
    """While the block runs these processes are looked at every other millisecond, from outside."""
    peaks, ended = Peaks(pids), threading.Event()

    def look() -> None:
        while not ended.wait(EVERY):
            peaks.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peaks
    finally:
        ended.set()
        thread.join()


def taken(pid: int) -> int:
    """The memory of a process without files, and the private memory of its descendants (they share the rest)."""
    return sum(_field(pid, "status", kind) for kind in ("RssAnon:", "RssShmem:")) + sum(
        _field(child, "smaps_rollup", "Private_Dirty:")
        for child in _descendants(pid)
        if not _same_memory(pid, child)
    )


def _same_memory(pid: int, child: int) -> bool:
    """Is it about to run another program, and until then in the memory of the process that starts it (vfork)?"""
    return (
        _KCMP is not None
        and ctypes.CDLL(None).syscall(_KCMP, pid, child, _KCMP_VM, 0, 0) == 0
    )


def _descendants(pid: int) -> Iterator[int]:
    try:
        found = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in _children(task)
        ]
    except (FileNotFoundError, ProcessLookupError):
        return  # it has ended meanwhile
    for child in found:
        yield child
        yield from _descendants(child)


def _children(task: Path) -> list[str]:
    return (task / "children").read_text().split()


def _field(pid: int, file: str, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it has ended meanwhile
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
