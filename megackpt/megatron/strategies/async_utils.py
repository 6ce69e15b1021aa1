"""Megatron's ``strategies.async_utils``: saves that go on while training does."""

from __future__ import annotations

from typing import Any

from megackpt.megatron.refused import refusing
from megackpt.runtime.async_calls import AsyncCallsQueue as AsyncCallsQueue, AsyncRequest as AsyncRequest

__getattr__ = refusing(__name__)


def warmup_persistent_caller(*_: Any, **__: Any) -> None:
    """A queue starts its worker with the first save, in some hundredths of a second."""
