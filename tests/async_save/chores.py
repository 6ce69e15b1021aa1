"""Works for the tests of writer processes, which import them by name. Files in ``folder`` tell how far they are."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megackpt.errors import CorruptCheckpoint, UntrustedClass
from megackpt.staging.buffers import Buffer

Advance = Callable[[int], None]


def pid(advance: Advance) -> int:
    return os.getpid()


@dataclass(frozen=True)
class Double:
    """Doubles what is in the arena."""

    arena: Buffer

    def __call__(self, advance: Advance) -> int:
        for start in range(0, self.arena.size, 1000):
            piece = self.arena.memory[start : start + 1000]
            piece *= 2
            advance(len(piece))
        return os.getpid()


@dataclass(frozen=True)
class Wait:
    """Moves 1000 bytes, then waits for the file "go"; while it waits it is ``deaf`` or not to being cancelled."""

    folder: Path
    deaf: bool = False

    def __call__(self, advance: Advance) -> int:
        advance(1000)
        written = self.folder / "begun.tmp"
        written.write_text(str(os.getpid()))
        written.rename(self.folder / "begun")  # it may be killed at any point
        while not (self.folder / "go").exists():
            time.sleep(0.005)
            if not self.deaf:
                advance(0)
        advance(1)
        return os.getpid()


@dataclass(frozen=True)
class Note:
    """Adds a line to the file "notes"."""

    folder: Path
    line: str

    def __call__(self, advance: Advance) -> int:
        with (self.folder / "notes").open("a") as file:
            print(self.line, file=file)
        return os.getpid()


def surroundings(advance: Advance) -> dict[str, Any]:
    """What the process looks like from inside."""
    number = {"x86_64": 252, "aarch64": 31}.get(os.uname().machine)  # ioprio_get
    call = ctypes.CDLL(None).syscall
    call.argtypes = [ctypes.c_long] * 3
    return {
        "torch": "torch" in sys.modules,
        "policy": os.sched_getscheduler(0),
        "ioprio": call(number, 1, 0) if number else None,
        "session": os.getsid(0),
        "group": os.getpgrp(),
        "descriptors": descriptors(os.getpid()),
        "written": int(
            Path("/proc/self/io").read_text().partition("wchar: ")[2].split()[0]
        ),
        "stdin": os.readlink("/proc/self/fd/0"),
    }


def descriptors(process: int) -> list[str]:
    """What a process has open, but for the look itself."""
    folder = Path(f"/proc/{process}/fd")
    found = []
    for link in folder.iterdir():
        try:
            found.append(os.readlink(link))
        except FileNotFoundError:
            continue
    return [name for name in found if name != f"/proc/{process}/fd"]


def damaged(advance: Advance) -> None:
    raise CorruptCheckpoint("fc1.weight is damaged")


def untrusted(advance: Advance) -> None:
    raise UntrustedClass("nobody trusts this")


def wrong(advance: Advance) -> None:
    print("the last words")
    raise KeyError("no such key")


def leave(advance: Advance) -> None:
    sys.exit("leaving")


def lock(advance: Advance) -> Any:
    return threading.Lock()


def exits(advance: Advance) -> None:
    os._exit(3)


def crash(advance: Advance) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def stopped(advance: Advance) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def large(advance: Advance) -> bytes:
    return bytes(3 << 20)


def mapped(advance: Advance) -> int:
    """Bytes of shared memory that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if "memfd:megackpt" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)
