"""Megatron's ``strategies``: formats and policies, each of which saves or loads when it is called."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from megackpt.megatron.installing import MODULES


def __getattr__(name: str) -> ModuleType:
    if f".strategies.{name}" in MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
