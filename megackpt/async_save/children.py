"""Processes beside this one: started by name, so that the caller's main module never runs again; how they ended."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys

_CODE = (
    "import sys; sys.path[:] = {path!r}; from {module} import main; main({fd}, {pid})"
)


def start(
    module: str, descriptor: int, *, apart: bool = False
) -> subprocess.Popen[bytes]:
    """Run ``main(descriptor, our pid)`` of a module in a new interpreter, which inherits that descriptor alone.

    What it prints joins our standard error. ``apart``: in a process group of its own, which no terminal interrupts.
    (In a session of its own its priority would not count: Linux shares processors among sessions first.)
    """
    # Python itself passes over what is no text there (a Path, say); a subclass may print itself otherwise.
    entries: list[object] = [*sys.path]
    path = [str.__str__(entry) for entry in entries if isinstance(entry, str)]
    # Of this process's own, 0 to 2 may be the descriptor's number where it has none of the standard streams.
    passed = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    try:
        return subprocess.Popen(
            [
                sys.executable,
                "-u",
                "-c",
                _CODE.format(path=path, module=module, fd=passed, pid=os.getpid()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=2 if _has_stderr() else subprocess.DEVNULL,
            stderr=None if _has_stderr() else subprocess.DEVNULL,
            pass_fds=[passed],
            process_group=0 if apart else None,
        )
    finally:
        os.close(passed)


def _has_stderr() -> bool:
    """Is descriptor 2 standard error? Where there was none at the start it may be any file by now."""
    if sys.__stderr__ is None:
        return False
    try:
        os.fstat(2)
    except OSError:
        return False
    return True


def how_ended(code: int) -> str:
    """``ended with status 1``, ``was killed by SIGKILL (out of memory, perhaps)``, by a Popen's return code."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"was killed by {name}" + " (out of memory, perhaps)" * (
        code == -signal.SIGKILL
    )
