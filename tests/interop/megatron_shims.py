"""Lets Megatron-Core 0.16 and 0.12 run where there is no GPU: what they ask of CUDA is answered by the CPU."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

CPU = torch.device("cpu")
MAKERS = (
    "tensor",
    "empty",
    "zeros",
    "ones",
    "full",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
)


def dist_checkpointing() -> types.ModuleType:
    """Megatron-Core's own ``dist_checkpointing``, on the CPU. Only for a process of its own: torch is changed."""
    np.product = np.prod  # which numpy 2 has no more, and 0.12 asks for
    from megatron.core import (
        dist_checkpointing,
    )  # before the changes, which its use of torch.compile would notice

    _answer_for_cuda()
    return dist_checkpointing


def _answer_for_cuda() -> None:
    changed: dict[str, Callable[..., Any]] = {
        "current_device": lambda: CPU,
        "device_count": lambda: 1,
        "set_device": _nothing,
        "synchronize": _nothing,
    }
    for name, answer in changed.items():
        setattr(torch.cuda, name, answer)
    torch.Tensor.cuda = lambda self, *_, **__: self
    for name in MAKERS:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _nothing(*_: object, **__: object) -> None:
    return None


def _on_cpu(maker: Callable[..., Any]) -> Callable[..., Any]:
    """The same factory function, which takes every CUDA device for the CPU."""

    @functools.wraps(maker)
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = CPU
        return maker(*args, **kwargs)

    return made
