"""Puts our modules in the place of ``megatron.core.dist_checkpointing``, and takes them out."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

from megackpt.megatron.module_table import PACKAGE
from megackpt.megatron.table import MODULES

THEIRS = "megatron.core.dist_checkpointing"

KEPT = (".gpt_checkpoint_interop",)
"""Megatron's modules that stay: they rewrite declarations, which megackpt makes then (0.19)."""

TESTED = ("0.16.1",)
"""Releases of megatron-core that the tests install this in."""


class Installed(AbstractContextManager["Installed"]):
    """The result of ``install``: a context, at whose end the modules of that call are removed."""

    def __init__(self, first: bool) -> None:
        self._first = first

    def __exit__(self, *_: object) -> None:
        if self._first:
            uninstall()


def install() -> Installed:
    """Replace ``megatron.core.dist_checkpointing`` and its modules by ``megackpt.megatron``.

    Call it before Megatron is imported: then its models build megackpt's objects from the start.
    If Megatron has been imported, its modules are replaced, and so are the names that modules of
    ``megatron`` have imported from them. Not replaced are names that other modules have imported
    (``from megatron.core.dist_checkpointing import save`` in a script that calls this later),
    classes derived from Megatron's, default values of arguments, and existing objects.

    Undone by ``uninstall()``, or as a context: ``with megackpt.megatron.install(): ...``
    Warns (UserWarning) if the tests do not cover the release of Megatron-Core. If this call
    raises, because warnings are errors or a module does not import, all modules are unchanged.
    """
    if _hook in sys.meta_path:
        return Installed(first=False)
    sys.meta_path.insert(0, _hook)
    _hook.replaced = _take_out()
    try:
        if _hook.replaced:
            names = [n for n in _hook.replaced if _suffix(n) in (*MODULES, *KEPT)]
            _replace(_hook.replaced, {name: import_module(name) for name in names})
            _warn_of_release()
    except BaseException:
        uninstall()
        raise
    return Installed(first=True)


def uninstall() -> None:
    """Restore Megatron-Core's modules, also in modules of ``megatron`` imported in between."""
    if _hook not in sys.meta_path:
        return
    sys.meta_path.remove(_hook)
    ours = _take_out()
    sys.modules.update(_hook.replaced)
    _hook.replaced = {}
    if "megatron.core" in sys.modules:
        theirs = {}
        for name in ours:
            # A release may lack the module, or the module may not import: then no object has to be
            # restored.
            with suppress(Exception):
                theirs[name] = import_module(name)
        _replace(ours, theirs)


def _suffix(name: str) -> str | None:
    """What follows ``THEIRS`` in the name of a module in that package; None for other modules."""
    inside = name == THEIRS or name.startswith(f"{THEIRS}.")
    return name.removeprefix(THEIRS) if inside else None


def _take_out() -> dict[str, ModuleType]:
    """Remove the modules with Megatron's names from ``sys.modules``, and return them."""
    names = [name for name in list(sys.modules) if _suffix(name) is not None]
    return {name: sys.modules.pop(name) for name in names}


def _replace(old: Mapping[str, ModuleType], new: Mapping[str, ModuleType]) -> None:
    """In all modules of Megatron, replace objects of ``old`` by their namesakes in ``new``.

    Objects are found by identity: a module may have imported an object under another name.
    """
    replacements: dict[int, Any] = {}
    for name, module in new.items():
        replacements[id(old[name])] = module
        for key, value in list(vars(old[name]).items()):
            own = str(getattr(value, "__module__", "")).startswith(
                ("megackpt.", THEIRS)
            )
            if own and isinstance(value, type | FunctionType) and hasattr(module, key):
                replacements[id(value)] = getattr(module, key)
    for name, module in list(sys.modules.items()):
        inside = name.partition(".")[0] == "megatron" and _suffix(name) is None
        if inside and isinstance(module, ModuleType):
            for key, value in list(vars(module).items()):
                if id(value) in replacements:
                    setattr(module, key, replacements[id(value)])


class _Hook(MetaPathFinder, Loader):
    """Finds our modules under Megatron's names."""

    def __init__(self) -> None:
        self.replaced: dict[str, ModuleType] = {}

    def find_spec(
        self,
        fullname: str,
        path: Any,
        target: Any = None,
    ) -> ModuleSpec | None:
        suffix = _suffix(fullname)
        if suffix is None:
            return None
        if suffix in KEPT:
            folders = [
                os.path.join(folder, "dist_checkpointing")
                for folder in import_module("megatron.core").__path__
            ]
            return PathFinder.find_spec(fullname, folders)
        if suffix not in MODULES:
            # No later finder may take over: it would find megackpt's files, and import them a
            # second time.
            raise ModuleNotFoundError(
                f"{fullname} has no counterpart in {PACKAGE}, which is installed in the place "
                f"of {THEIRS}",
                name=fullname,
            )
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name == THEIRS and not self.replaced:
            _warn_of_release()
        module = import_module(spec.name.replace(THEIRS, PACKAGE, 1))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the original spec of the module, which has been executed."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


_hook = _Hook()


def _warn_of_release() -> None:
    try:
        version = import_module("megatron.core.package_info").__version__
    except (ImportError, AttributeError):
        version = "an unknown release"
    if version not in TESTED:
        warnings.warn(
            f"megackpt.megatron is tested with megatron-core {', '.join(TESTED)}, and is installed "
            f"in the place of {version}: try a save and a load before you rely on it",
            stacklevel=2,
        )
