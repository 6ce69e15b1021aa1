"""What tests of writer processes share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megackpt.async_save import Task
from megackpt.async_save.process_worker import ProcessWorker

PATIENCE = 60.0
SCRIPT = f"import sys; sys.path[:0] = [{str(Path(__file__).parents[2])!r}, {str(Path(__file__).parent)!r}]\n"
SCRIPT += """
from pathlib import Path
import chores
from megackpt.async_save import AsyncCallsQueue, AsyncRequest, Task
from megackpt.async_save.process_worker import ProcessWorker
from megackpt.async_save.request import Pending
from megackpt.distributed import group_over
"""


def ended(task: Task[Any]) -> Task[Any]:
    assert task.wait(PATIENCE)
    return task


def done(
    worker: ProcessWorker, work: Callable[[Any], Any], name: str = "iter_1"
) -> Any:
    """What becomes of it: the value, or the error."""
    task = Task(work, name)
    worker.start(task)
    outcome = ended(task).outcome
    assert outcome is not None
    return outcome.error or outcome.value


def until(seen: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (value := seen()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return value


def gone(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"
