"""Puts these modules in the place of ``megatron.core.dist_checkpointing``, and takes them out again."""

from __future__ import annotations

import ast
import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType, TracebackType
from typing import Any

from megackpt.megatron.refused import Refused

OURS, THEIRS = "megackpt.megatron", "megatron.core.dist_checkpointing"

MODULES = (
    "",
    ".core",
    ".dict_utils",
    ".exchange_utils",
    ".mapping",
    ".optimizer",
    ".serialization",
    ".state_dict_utils",
    ".strategies",
    ".strategies.async_utils",
    ".strategies.base",
    ".strategies.cached_metadata_filesystem_reader",
    ".strategies.checkpointable",
    ".strategies.common",
    ".strategies.filesystem_async",
    ".strategies.fully_parallel",
    ".strategies.resharding",
    ".strategies.state_dict_saver",
    ".strategies.tensorstore",
    ".strategies.torch",
    ".strategies.two_stage",
    ".strategies.zarr",
    ".tensor_aware_state_dict",
    ".utils",
    ".validation",
)
"""All of them, by what follows the package's name."""

CHECKED = ("0.16.1",)
"""Releases of megatron-core that the tests install this in."""


class Installed:
    """What ``install`` returns: to leave it as a context is to take out what that call put in."""

    def __init__(self, first: bool) -> None:
        self._first = first

    def __enter__(self) -> Installed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._first:
            uninstall()


def install() -> Installed:
    """From now on ``megatron.core.dist_checkpointing`` and all modules below it are those of ``megackpt.megatron``.

    Best called before Megatron is imported: then its models build megackpt's objects from the beginning. Where it is
    imported already, modules, and names that modules of ``megatron`` have taken from them, are exchanged. Not reached
    are names that other modules have taken (``from megatron.core.dist_checkpointing import save`` in a script that
    calls this later), classes derived from Megatron's, default values of arguments, and objects that exist.

    Warns of a release of Megatron-Core that this was not checked with, and names what it has that is not here.
    Undone by ``uninstall()``, or as a context: ``with megackpt.megatron.install(): ...``
    """
    if _finder in sys.meta_path:
        return Installed(first=False)
    sys.meta_path.insert(0, _finder)
    theirs = {name: sys.modules.pop(name) for name in list(sys.modules) if _suffix(name) is not None}
    _finder.set_aside = theirs
    if theirs:
        ours = {name: import_module(name) for name in theirs if _suffix(name) in MODULES}
        _exchange(theirs, ours)
    return Installed(first=True)


def uninstall() -> None:
    """Megatron-Core's own modules again, also in modules of ``megatron`` that were imported in between."""
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if _suffix(name) is not None}
    sys.modules.update(_finder.set_aside)
    if "megatron.core" in sys.modules:
        _exchange(ours, {name: module for name in ours if (module := _theirs(name)) is not None})
    _finder.set_aside = {}


def _suffix(name: str) -> str | None:
    """What follows the package's name; None for a module that is not in it."""
    inside = name == THEIRS or name.startswith(f"{THEIRS}.")
    return name.removeprefix(THEIRS) if inside else None


def _theirs(name: str) -> ModuleType | None:
    """Megatron's own module; None where it has none, or lacks what that needs."""
    try:
        return import_module(name)
    except ImportError:
        return None


def _exchange(old: Mapping[str, ModuleType], new: Mapping[str, ModuleType]) -> None:
    """In all modules of Megatron: what is of ``old`` for what has the same name in ``new``."""
    instead: dict[int, tuple[Any, Any]] = {}
    for name, module in new.items():
        instead[id(old[name])] = old[name], module
        for key, value in list(vars(old[name]).items()):
            own = str(getattr(value, "__module__", "")).startswith(("megackpt.", THEIRS))
            if own and isinstance(value, type | FunctionType) and hasattr(module, key):
                instead[id(value)] = value, getattr(module, key)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "megatron" and _suffix(name) is None and isinstance(module, ModuleType):
            for key, value in list(vars(module).items()):
                if id(value) in instead:
                    setattr(module, key, instead[id(value)][1])


class _Finder(MetaPathFinder, Loader):
    """Finds our modules under Megatron's names. Python then makes them attributes of their parents, as any."""

    set_aside: dict[str, ModuleType]

    def __init__(self) -> None:
        self.set_aside = {}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        suffix = _suffix(fullname)
        if suffix is None:
            return None
        if suffix not in MODULES:
            raise ModuleNotFoundError(
                f"{fullname} has no counterpart in {OURS}, which is installed in the place of {THEIRS}",
                name=fullname,
            )
        return ModuleSpec(fullname, self, is_package=suffix in ("", ".strategies"))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name == THEIRS:
            _warn_of_release()
        module = import_module(f"{OURS}{_suffix(spec.name)}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed: give it back the spec that it had."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


_finder = _Finder()


def _warn_of_release() -> None:
    from_disk = sys.modules.get("megatron.core")
    if from_disk is None:
        return
    version = import_module("megatron.core.package_info").__version__
    if version in CHECKED:
        return
    folder = Path(next(iter(from_disk.__path__))) / "dist_checkpointing"
    found = unoffered(folder)
    told = "\n  ".join(found or ["(all names and arguments are here)"])
    warnings.warn(
        f"megackpt.megatron was checked with megatron-core {', '.join(CHECKED)}, not with {version}, in whose place it "
        f"is installed now. Of {folder} there are not here, and were not checked:\n  {told}",
        stacklevel=2,
    )


def unoffered(folder: Path) -> list[str]:
    """Modules, public names and arguments in the sources of a ``dist_checkpointing`` that are not here, nor refused."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        suffix = "".join(f".{part}" for part in parts if part != "__init__")
        if suffix not in MODULES:
            found.append(f"the module {THEIRS}{suffix}")
            continue
        module = import_module(f"{OURS}{suffix}")
        for name, arguments in _declared(ast.parse(file.read_text(encoding="utf-8"))):
            told = f"{suffix.removeprefix('.')}.{name}"
            if not hasattr(module, name):
                found.append(told)
            elif lacking := _lacking(getattr(module, name), arguments):
                found.append(f"{told}({', '.join(lacking)})")
    return found


def _declared(source: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Public functions and classes, and what they are called with, as far as it is written there."""
    for node in source.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        inner = node.body if isinstance(node, ast.ClassDef) else []
        makers = [n for n in inner if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        maker = node if isinstance(node, ast.FunctionDef) else next(iter(makers), None)
        named = [] if maker is None else [*maker.args.posonlyargs, *maker.args.args, *maker.args.kwonlyargs]
        yield node.name, [a.arg for a in named if a.arg != "self"]


def _lacking(ours: Any, arguments: list[str]) -> list[str]:
    """The arguments that ours does not take."""
    if not arguments or isinstance(ours, Refused):
        return []
    taken = inspect.signature(ours).parameters
    if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        return []
    return [name for name in arguments if name not in taken]
