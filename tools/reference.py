"""Writes the API reference from the docstrings: HTML, one page for each public module.

python tools/reference.py [build/reference]

A warning is an error, and so is a public class or function without a docstring.
"""

from __future__ import annotations

import ast
import contextlib
import sys
import typing
import warnings
from importlib import import_module
from inspect import getsource
from pathlib import Path
from types import ModuleType

import pdoc
import pdoc.render

import megackpt

API = (
    "megackpt",
    "megackpt.backends",
    "megackpt.dcp",
    "megackpt.megatron",
    "megackpt.testing",
)
"""The packages whose ``__all__`` is the public API, all of it with a stable meaning."""

EXTENSIONS = (
    "megackpt.adapters.dtensor",
    "megackpt.adapters.huggingface",
    "megackpt.adapters.modules",
    "megackpt.adapters.optimizer",
    "megackpt.adapters.position",
    "megackpt.backends.ranges",
    "megackpt.backends.safetensors",
    "megackpt.checkpoint",
    "megackpt.cli.report",
    "megackpt.converter",
    "megackpt.errors",
    "megackpt.manager",
    "megackpt.planning.box",
    "megackpt.planning.load_plan",
    "megackpt.planning.manifest",
    "megackpt.planning.save_plan",
    "megackpt.state",
    "megackpt.storage",
    "megackpt.strategies",
    "megackpt.tree",
    "megackpt.zarr_dtypes",
)
"""Modules for special purposes and for plug-ins, which the documentation uses."""


def main() -> int:
    """Write the pages; the exit status is 1 if a docstring is missing."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/reference")
    modules = [documented_module(name) for name in (*API, *EXTENSIONS)]
    resolve_tuple_annotations()
    pdoc.render.configure(
        docformat="google",
        show_source=False,
        footer_text=f"megackpt {megackpt.__version__}",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # A method called list hides the type in the annotations of its class.
        shadowed = ".*'function' object is not subscriptable"
        warnings.filterwarnings("ignore", shadowed, UserWarning)
        pdoc.pdoc(*API, *EXTENSIONS, output_directory=folder)
    missing = []
    for module in modules:
        for member in module.own_members:
            is_code = isinstance(member, (pdoc.doc.Class, pdoc.doc.Function))
            if is_code and not member.docstring and not member.name.startswith("_"):
                missing.append(f"{module.fullname}.{member.name}")
    if missing:
        print("no docstring:", *missing, sep="\n  ", file=sys.stderr)
        return 1
    print(f"{folder}/index.html: {len(list(folder.rglob('*.html')))} pages")
    return 0


def documented_module(name: str) -> pdoc.doc.Module:
    """A module as the reference shows it: the names of ``__all__``, or what it defines."""
    module = import_module(name)
    if imported := reexported_names(module):
        vars(module).setdefault("__all__", [*imported, *defined_names(module)])
    # Names that are imported on first use are not in the namespace yet.
    for member in getattr(module, "__all__", ()):
        vars(module)[member] = getattr(module, member)
    return pdoc.doc.Module(module)


def reexported_names(module: ModuleType) -> list[str]:
    """Names that a package takes from its modules: ``import name as name``."""
    names = []
    for node in ast.parse(getsource(module)).body:
        if isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names if alias.name == alias.asname]
    return names


def defined_names(module: ModuleType) -> list[str]:
    """Public names that a module defines itself."""
    names = []
    for name, value in vars(module).items():
        is_own = getattr(value, "__module__", "") == module.__name__
        if is_own and not name.startswith("_"):
            names.append(name)
    return names


def resolve_tuple_annotations() -> None:
    """Evaluate the annotations of named tuples, which only their own module can."""
    for name, module in [*sys.modules.items()]:
        if name.split(".")[0] != "megackpt":
            continue
        for value in [*vars(module).values()]:
            is_tuple = isinstance(value, type) and issubclass(value, tuple)
            if not is_tuple or "_fields" not in vars(value):
                continue
            # Internal ones may name types that are imported for type checkers only.
            with contextlib.suppress(NameError):
                value.__new__.__annotations__ = typing.get_type_hints(value)


if __name__ == "__main__":
    sys.exit(main())
