"""Names of a module that are imported when they are first used (PEP 562)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from megackpt.gc_pause import paused


def lazily(
    module: dict[str, Any], homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a module, given by its ``globals()``.

    ``homes``: the modules that hold the names.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in home_of:
            where = module["__name__"]
            raise AttributeError(f"module {where!r} has no attribute {name!r}")
        # The objects of new modules would start a scan of all objects of the process.
        with paused():
            value = getattr(import_module(home_of[name]), name)
        module[name] = value
        return value

    return get, lambda: sorted(module["__all__"])
