"""Later: what is done while training goes on. Requests, the queue that finalizes them in order, and their workers."""

from __future__ import annotations

from megackpt.runtime.async_calls.queue import AsyncCallsQueue
from megackpt.runtime.async_calls.request import AsyncRequest, Pending
from megackpt.runtime.async_calls.task import Task
from megackpt.runtime.async_calls.workers import ThreadWorker, Worker

__all__ = ["AsyncCallsQueue", "AsyncRequest", "Pending", "Task", "ThreadWorker", "Worker"]
