"""Asynchronous saves: requests, the queue that finalizes them, thread and process workers."""

from __future__ import annotations

from megackpt.async_save.queue import AsyncCallsQueue as AsyncCallsQueue
from megackpt.async_save.request import (
    AsyncRequest as AsyncRequest,
    Pending as Pending,
)
from megackpt.async_save.task import (
    Task as Task,
    ThreadWorker as ThreadWorker,
    Work as Work,
    Worker as Worker,
)
