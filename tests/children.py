"""Work in a child process that may end itself at any point, as a kill would end it."""

from __future__ import annotations

import os
from collections.abc import Callable


def died(work: Callable[[], object]) -> bool:
    """Do this in a child. True if it ended itself with the code 9, False if it was done."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 9)
    return code == 9
