"""Processes beside this one: started by name, so that the caller's main module never runs again; how they ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

_CODE = "import sys; sys.path[:] = {path!r}; from {module} import main; main({fd}, {pid})"


def start(module: str, descriptor: int, *, apart: bool = False) -> subprocess.Popen[bytes]:
    """Run ``main(descriptor, our pid)`` of a module in a new interpreter, which inherits that descriptor alone.

    What it prints joins our standard error. ``apart``: in a process group of its own, which no terminal interrupts.
    (In a session of its own its priority would not count: Linux shares processors among sessions first.)
    """
    code = _CODE.format(path=sys.path, module=module, fd=descriptor, pid=os.getpid())
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=[descriptor],
        process_group=0 if apart else None,
    )


def how_ended(code: int) -> str:
    """``ended with status 1``, ``was killed by SIGKILL (out of memory, perhaps)``, by a Popen's return code."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"was killed by {name}" + " (out of memory, perhaps)" * (code == -signal.SIGKILL)
