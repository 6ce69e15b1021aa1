"""Which rule a name in a pickle stands for: those of the allow-list, and what a user vouches for."""

from __future__ import annotations

import builtins
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Mapping, Sequence
from enum import EnumType
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

from megackpt.errors import UntrustedClass
from megackpt.serialization.rules import Find, Rule

_MODULES = frozenset((
    "_ctypes", "_functools", "_imp", "_operator", "_pickle", "_posixsubprocess", "_pyio",
    "_pyrepl", "_socket", "builtins", "code", "codeop", "copyreg", "ctypes", "functools", "gc",
    "imp", "importlib", "inspect", "io", "marshal", "multiprocessing", "nt", "operator",
    "os", "pdb", "pickle", "posix", "pty", "pydoc", "runpy", "shutil", "site",
    "socket", "subprocess", "sys", "timeit", "types", "webbrowser",
))  # fmt: skip
"""Modules of Python's own whose functions and classes do what their arguments say, or reach whatever is loaded."""
_NAMES = frozenset((
    "_io.FileIO",
    "_io.open",
    "_io.open_code",
    "numpy.load",
    "torch._jit_internal",
    "torch.hub",
    "torch.jit",
    "torch.load",
    "torch.storage._load_from_bytes",
    "torch.utils.cpp_extension",
))  # fmt: skip
"""The same of others, with all that is within."""


def never(module: str, name: str) -> bool:
    """Is this nothing that a user can vouch for? Then a pickle decides what it does."""
    if module == "builtins":
        kind = vars(builtins).get(name)
        return not (isinstance(kind, type) and issubclass(kind, BaseException))
    if any(part.startswith("__") for part in name.split(".")[1:]):
        return True  # __globals__ and the like of something
    full = f"{module}.{name}"
    return module.partition(".")[0] in _MODULES or any(
        f"{full}.".startswith(f"{one}.") for one in _NAMES
    )


def vouched_for(trusted: Sequence[Any] = ()) -> dict[str, Any]:
    """Qualified name -> class or function, of those given here and to ``torch.serialization.add_safe_globals``."""
    import torch

    vouched: dict[str, Any] = {}
    for given in (*torch.serialization.get_safe_globals(), *trusted):
        value, name = (
            given if isinstance(given, tuple) else (given, _name_in_a_pickle(given))
        )
        vouched[name] = value
    return vouched


def _name_in_a_pickle(given: Any) -> str:
    """Its module and its name there. Of a method of C's (torch.relu is one) these are its class's, and its own."""
    if isinstance(given, BuiltinFunctionType | MethodDescriptorType):
        reduced = given.__reduce__()
        if isinstance(reduced, tuple) and isinstance(reduced[1][0], type):
            owner, name = reduced[1]
            return f"{owner.__module__}.{owner.__qualname__}.{name}"
    return f"{given.__module__}.{given.__qualname__}"


def renamed(module: str, name: str) -> tuple[str, str]:
    """torch.save writes protocol 2, in which some things bear the names that they had in Python 2.

    Python 3.13 pickles paths by the private module that has them there.
    """
    module = "pathlib" if module == "pathlib._local" else module
    return NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))


def finder(trusted: Sequence[Any] = (), stand_ins: bool = False) -> Find:
    """Which globals stand for what; see ``megackpt.serialization.load``."""
    from megackpt.serialization.allowed import is_inert, known, stand_in, trusted_rule

    vouched = vouched_for(trusted)

    def find(module: str, name: str) -> Rule:
        module, name = renamed(module, name)
        full = f"{module}.{name}"
        if full in vouched and not never(module, name):
            return trusted_rule(vouched[full])
        rule = known().get(full, _member(full, vouched))
        if rule is None and (stand_ins or is_inert(module)):
            rule = stand_in(module, name)
        if rule is None:
            raise UntrustedClass(refusal(module, name))
        return rule

    return find


def _member(full: str, vouched: Mapping[str, Any]) -> Rule | None:
    """The rule of a member of an enum that is vouched for or known."""
    from megackpt.serialization.allowed import known

    owner, _, name = full.rpartition(".")
    rule = known().get(owner)
    kind: Any = vouched.get(owner, rule and rule.value)
    return (
        Rule(kind.__members__[name])
        if isinstance(kind, EnumType) and name in kind.__members__
        else None
    )


def refusal(module: str, name: str) -> str:
    """What is told of a name that is not trusted, or of one that nobody can trust."""
    full = f"{module}.{name}"
    if never(module, name):
        return (
            f"the object holds {full}, which does whatever the file asks for: it was not run, nothing was loaded, and "
            "it cannot be trusted (where this is your own object, save what it stands for instead of it)"
        )
    return (
        f"the object holds {full}, which is not trusted, so nothing of it was loaded\n"
        f"  hint: if you trust this checkpoint's author, pass trusted=({name},) to load, "
        f"or call torch.serialization.add_safe_globals([{full}])"
    )
