"""Puts these modules in the place of ``megatron.core.dist_checkpointing``, and takes them out again."""

from __future__ import annotations

import ast
import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
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

    Warns of a release of Megatron-Core that this was not checked with, and names what it has that is not here. Where
    this raises (warnings are errors, a module does not import) nothing is exchanged.
    Undone by ``uninstall()``, or as a context: ``with megackpt.megatron.install(): ...``
    """
    if _finder in sys.meta_path:
        return Installed(first=False)
    sys.meta_path.insert(0, _finder)
    theirs = {name: sys.modules.pop(name) for name in list(sys.modules) if _suffix(name) is not None}
    _finder.set_aside = theirs
    try:
        if theirs:
            ours = {name: import_module(name) for name in theirs if _suffix(name) in MODULES}
            _exchange(theirs, ours)
            _warn_of_release()
    except BaseException:
        uninstall()
        raise
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
    """Megatron's own module; None where it has none, or it does not import."""
    try:
        return import_module(name)
    except Exception:  # noqa: BLE001 - code of any release: with nothing to give, there is nothing to give back
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
        # A spec for what is not here, too: other finders would look into our folder, and make our modules twice.
        return ModuleSpec(fullname, self, is_package=suffix in ("", ".strategies"))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        suffix = _suffix(spec.name)
        if suffix not in MODULES:
            raise ModuleNotFoundError(
                f"{spec.name} has no counterpart in {OURS}, which is installed in the place of {THEIRS}",
                name=spec.name,
            )
        if not suffix and not self.set_aside:
            _warn_of_release()
        module = import_module(f"{OURS}{suffix}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed: give it back the spec that it had."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


_finder = _Finder()


def _warn_of_release() -> None:
    megatron = sys.modules.get("megatron.core")
    if megatron is None:
        return
    version = "an unknown release"
    try:
        version = import_module("megatron.core.package_info").__version__
        if version in CHECKED:
            return
        folder = Path(next(iter(megatron.__path__))) / "dist_checkpointing"
        if any(folder.rglob("*.py")):
            found = unoffered(folder) or ["(all names and arguments are here)"]
            told = f"of {folder} there are not here, and were not checked:\n  " + "\n  ".join(found)
        else:
            told = f"it could not be compared: its sources are not there, in {folder}"
    except Exception as error:  # noqa: BLE001 - a release of which nothing is known may lack, or hold, anything
        told = f"it could not be compared: {type(error).__name__}: {error}"
    warnings.warn(
        f"megackpt.megatron was checked with megatron-core {', '.join(CHECKED)}, not with {version}, in whose place it "
        f"is installed now; {told}",
        stacklevel=2,
    )


def unoffered(folder: Path) -> list[str]:
    """What the sources of a ``dist_checkpointing`` show (modules, names, methods, arguments) that is not here."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        suffix = "".join(f".{part}" for part in parts if part != "__init__")
        if suffix not in MODULES:
            found.append(f"the module {THEIRS}{suffix}")
            continue
        module = import_module(f"{OURS}{suffix}")
        found += _unoffered(
            ast.parse(file.read_text(encoding="utf-8")).body, module, suffix.removeprefix(".")
        )
    return found


def _unoffered(body: Sequence[ast.stmt], ours: Any, told: str) -> Iterator[str]:
    """Of public functions, classes and their methods, as far as it is written there what they are called with."""
    for node in _statements(body):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_") and not (isinstance(ours, type) and node.name == "__init__"):
            continue
        name = f"{told}.{node.name}"
        mine = getattr(ours, node.name, None)
        if mine is None:
            yield name
        elif isinstance(node, ast.ClassDef):
            if not isinstance(mine, Refused):
                yield from _unoffered(node.body, mine, name)
        elif lacking := _lacking(mine, [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]):
            yield f"{name}({', '.join(lacking)})"


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Also those that depend on what is there."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            handled = [one for handler in getattr(node, "handlers", ()) for one in handler.body]
            yield from _statements([*node.body, *node.orelse, *handled, *getattr(node, "finalbody", ())])


def _lacking(ours: Any, arguments: Sequence[ast.arg]) -> list[str]:
    """The arguments that ours does not take."""
    if isinstance(ours, Refused) or not callable(ours):
        return []
    taken = inspect.signature(ours).parameters
    if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        return []
    return [a.arg for a in arguments if a.arg not in taken and a.arg not in ("self", "cls")]
