"""Which names in a pickle the user trusts, and which cannot be trusted."""

from __future__ import annotations

import builtins
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

_MODULES = frozenset((
    "_ctypes", "_functools", "_imp", "_operator", "_pickle", "_posixsubprocess", "_pyio",
    "_pyrepl", "_socket", "builtins", "code", "codeop", "copyreg", "ctypes", "functools", "gc",
    "imp", "importlib", "inspect", "io", "marshal", "multiprocessing", "nt", "operator",
    "os", "pdb", "pickle", "posix", "pty", "pydoc", "runpy", "shutil", "site",
    "socket", "subprocess", "sys", "timeit", "types", "webbrowser",
))  # fmt: skip
"""Python's modules whose functions do what their arguments say, or reach all loaded code."""
_NAMES = (
    "_io.FileIO", "_io.open", "_io.open_code", "numpy.load", "torch._jit_internal", "torch.hub",
    "torch.jit", "torch.load", "torch.storage._load_from_bytes", "torch.utils.cpp_extension",
)  # fmt: skip
"""The same of other packages, with everything inside."""


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """A global without a rule. A pickle may only take a part of it by getattr."""

    module: str
    name: str


GETATTR = Name("builtins", "getattr")
"""Protocols 2 and 3 write a nested class or a class method as ``getattr(Outer, "Inner")``. So do
Python 3.11.0 to 3.11.3 for a member of an enum. It means the dotted name; no getattr runs."""


def is_unsafe(module: str, name: str) -> bool:
    """True where a pickle would decide what runs, so that trust has no meaning."""
    if module == "builtins":
        kind = vars(builtins).get(name)
        return not (isinstance(kind, type) and issubclass(kind, BaseException))
    if any(part.startswith("__") for part in name.split(".")[1:]):
        return True  # __globals__ and the like
    if module.partition(".")[0] in _MODULES:
        return True
    full = f"{module}.{name}."
    return any(full.startswith(f"{unsafe}.") for unsafe in _NAMES)


def trusted_globals(trusted: Sequence[Any] = ()) -> dict[str, Any]:
    """Qualified name to class or function: the ``trusted`` ones, and torch's safe globals."""
    import torch

    found: dict[str, Any] = {}
    for given in (*torch.serialization.get_safe_globals(), *trusted):
        if isinstance(given, tuple):
            value, name = given
            found[name] = value
            continue
        # A method written in C, such as torch.relu, is pickled by its class and its name. The
        # method may have no module.
        if isinstance(given, BuiltinFunctionType | MethodDescriptorType):
            reduced = given.__reduce__()
            if isinstance(reduced, tuple) and isinstance(reduced[1][0], type):
                owner, method = reduced[1]
                found[f"{owner.__module__}.{owner.__qualname__}.{method}"] = given
                continue
        found[f"{given.__module__}.{given.__qualname__}"] = given
    return found


def current_name(module: str, name: str) -> tuple[str, str]:
    """The name of a global in this Python.

    torch.save writes protocol 2, which has some names of Python 2. Python 3.13 pickles paths by a
    private module.
    """
    if module == "pathlib._local":
        return "pathlib", name
    return NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))


def refusal(module: str, name: str) -> str:
    """The error message for a global that is not trusted, or that cannot be."""
    full = f"{module}.{name}"
    if is_unsafe(module, name):
        return (
            f"the object holds {full}, which runs what the file asks for: it was not run, nothing "
            "was loaded, and it cannot be trusted (if this is your own object, save plain data "
            "instead)"
        )
    return (
        f"the object holds {full}, which is not trusted, so nothing of it was loaded\n"
        f"  hint: if you trust this checkpoint's author, pass trusted=({name},) to load, "
        f"or call torch.serialization.add_safe_globals([{full}])"
    )
