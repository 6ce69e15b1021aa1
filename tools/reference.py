"""Makes the API reference from the docstrings: HTML, one page for each public module. A warning is an error.

python tools/reference.py [build/reference]
"""

from __future__ import annotations

import ast
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

PUBLIC = (
    "megackpt",
    "megackpt.adapters.dtensor",
    "megackpt.adapters.huggingface",
    "megackpt.adapters.modules",
    "megackpt.adapters.optimizer",
    "megackpt.adapters.position",
    "megackpt.backends.base",
    "megackpt.backends.ranges",
    "megackpt.backends.safetensors",
    "megackpt.checkpoint",
    "megackpt.converter",
    "megackpt.dcp",
    "megackpt.errors",
    "megackpt.manager",
    "megackpt.megatron",
    "megackpt.planning.box",
    "megackpt.planning.load_plan",
    "megackpt.planning.manifest",
    "megackpt.planning.save_plan",
    "megackpt.cli.report",
    "megackpt.storage",
    "megackpt.state",
    "megackpt.strategies",
    "megackpt.testing",
    "megackpt.tree",
    "megackpt.zarr_dtypes",
)


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/reference")
    for module in map(import_module, PUBLIC):
        if passed_on := names_passed_on(module):
            vars(module).setdefault("__all__", [*passed_on, *names_defined(module)])
        found = {
            name: getattr(module, name)
            for name in getattr(module, "__all__", dir(module))
        }
        vars(module).update(found)  # those, too, that are fetched on first use
    shown = [
        module
        for name, module in [*sys.modules.items()]
        if name.split(".")[0] == "megackpt"
    ]
    for made in {
        made
        for module in shown
        for made in vars(module).values()
        if isinstance(made, type)
    }:
        if issubclass(made, tuple) and "_fields" in vars(
            made
        ):  # its own module knows its annotations
            made.__new__.__annotations__ = typing.get_type_hints(made)
    pdoc.render.configure(
        docformat="google",
        show_source=False,
        footer_text=f"megackpt {megackpt.__version__}",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shadowed = ".*'function' object is not subscriptable"  # by a method called list
        warnings.filterwarnings("ignore", shadowed, UserWarning)
        pdoc.pdoc(*PUBLIC, output_directory=folder)
    bare = [f"{name}.{member}" for name in PUBLIC for member in undocumented(name)]
    if bare:
        print("no docstring:", *bare, sep="\n  ", file=sys.stderr)
        return 1
    pages = len(list(folder.rglob("*.html")))
    print(f"{folder}/index.html: {pages} pages")
    return 0


def names_passed_on(module: ModuleType) -> list[str]:
    """What a door has of its room: ``import name as name``."""
    imports = (
        node
        for node in ast.parse(getsource(module)).body
        if isinstance(node, ast.ImportFrom)
    )
    return [
        name.name for node in imports for name in node.names if name.name == name.asname
    ]


def names_defined(module: ModuleType) -> list[str]:
    return [
        name
        for name, made in vars(module).items()
        if getattr(made, "__module__", "") == module.__name__
        and not name.startswith("_")
    ]


def undocumented(name: str) -> list[str]:
    """Public classes and functions of a module without a docstring of their own."""
    module = pdoc.doc.Module(import_module(name))
    return [
        member.name
        for member in module.own_members
        if isinstance(member, (pdoc.doc.Class, pdoc.doc.Function))
        and not member.docstring
        if not member.name.startswith("_")
    ]


if __name__ == "__main__":
    sys.exit(main())
