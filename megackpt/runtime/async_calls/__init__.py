"""Later: what is done while training goes on. Requests, the queue that finalizes them in order, and their workers."""

from __future__ import annotations

from megackpt.runtime.async_calls.queue import AsyncCallsQueue as AsyncCallsQueue
from megackpt.runtime.async_calls.request import (
    AsyncRequest as AsyncRequest,
    Pending as Pending,
)
from megackpt.runtime.async_calls.task import Task as Task
from megackpt.runtime.async_calls.workers import (
    ThreadWorker as ThreadWorker,
    Worker as Worker,
)
