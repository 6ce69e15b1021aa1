"""What Linux knows of a process: its end with its parent, its priority, whether it waits."""

from __future__ import annotations

import ctypes
import os
import signal

from megackpt.storage.kernel import libc_function

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
