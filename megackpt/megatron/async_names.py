"""Helpers of Megatron's asynchronous saves, by Megatron's names. megackpt's saves need none."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def _disable_gc() -> Iterator[None]:
    """Without garbage collection; also a decorator."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _set_process_qos(cpu_priority: int | None, io_priority: int | None = None) -> None:
    """Raise the nice value of this process to ``cpu_priority``, which is at most 19.

    ``io_priority`` has no effect: Linux derives the priority of disk accesses from the nice value.
    """
    if cpu_priority is not None and os.nice(0) < cpu_priority <= 19:
        os.nice(cpu_priority - os.nice(0))


def warmup_persistent_caller(*_: Any, **__: Any) -> None:
    """No effect: a queue starts its worker with the first save, in some hundredths of a second."""


_results_queue = None
"""No other process has a queue here; Megatron's training imports the name."""


def get_write_results_queue(mp_mode: str = "spawn") -> None:
    """No effect: results of writes stay in this process. Megatron's training calls it."""


def has_nvrx_async_support() -> bool:
    """True: ``get_async_strategy("nvrx")`` returns what asynchronous saves need.

    That is megackpt's, with or without the package nvidia-resiliency-ext.
    """
    return True


def make_nvrx_async_request(
    async_request_cls: Callable[..., Any],
    async_fn: Callable[..., Any] | None,
    async_fn_args: Any,
    finalize_fns: list[Callable[..., Any]],
    async_fn_kwargs: Mapping[str, Any] | None = None,
    preload_fn: Callable[..., Any] | None = None,
) -> Any:
    """A request of this class, which is ``AsyncRequest`` or has its arguments."""
    return async_request_cls(
        async_fn,
        async_fn_args,
        finalize_fns,
        async_fn_kwargs=async_fn_kwargs or {},
        preload_fn=preload_fn,
    )
