"""The modules below ``megackpt.megatron``, made from the table instead of files."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from megackpt.errors import CheckpointingException
from megackpt.megatron.table import MODULES, REFUSALS, SOURCES

PACKAGE = "megackpt.megatron"


class Refused(type):
    """The class of refused names. They import and work in ``isinstance``; to use one raises.

    Raises CheckpointingException when such a name is called or asked for a public attribute.
    """

    why: str

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise CheckpointingException(cls.why)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
        raise CheckpointingException(cls.why)


class TableModule(ModuleType):
    """A module of the table. An object is imported when its name is first used.

    So a program that only declares tensors does not import torch DCP.
    """

    def __init__(self, suffix: str) -> None:
        name = PACKAGE + suffix
        super().__init__(name, f"Megatron-Core's {suffix[1:]}: see {PACKAGE}.table.")
        self.__spec__ = ModuleSpec(name, None, is_package=suffix == ".strategies")
        self.__package__ = self.__spec__.parent
        if suffix == ".strategies":
            self.__path__: list[str] = []
        # For "import *": without refused names, as these are imported to be used.
        self.__all__ = [
            name
            for (module, name), source in SOURCES.items()
            if module == suffix[1:]
            and source not in REFUSALS
            and not name.startswith("_")
        ]

    def __getattr__(self, name: str) -> Any:
        module = self.__name__.removeprefix(f"{PACKAGE}.")
        source = SOURCES.get((module, name))
        if source is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if source in REFUSALS:
            why = f"{module}.{name} is not offered by megackpt: {REFUSALS[source]}"
            value: Any = Refused(name, (), {"__module__": self.__name__, "why": why})
        else:
            value = getattr(import_module(source), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})


def make_modules() -> None:
    """Put all modules of the table into ``sys.modules``, and into their packages as attributes."""
    for suffix in MODULES[1:]:
        module = TableModule(suffix)
        parent, _, name = module.__name__.rpartition(".")
        sys.modules[module.__name__] = module
        setattr(sys.modules[parent], name, module)
