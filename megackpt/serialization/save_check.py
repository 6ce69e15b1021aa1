"""The check at save: the unpickler of a load reads each blob that is about to be written.

Opaque objects take the place of all classes that need trust, so no code of a class runs. In all
other respects the check is a load. So a save refuses the values that no load accepts, whatever it
trusts.
"""

from __future__ import annotations

from typing import Any

from megackpt import limits
from megackpt.errors import UntrustedClass
from megackpt.serialization.allowlist import (
    known_rules,
    stands_in,
    storages,
)
from megackpt.serialization.archive import Archive
from megackpt.serialization.pickle_limits import check_shape
from megackpt.serialization.trust import (
    current_name,
    is_unsafe,
    refusal,
    trusted_globals,
)
from megackpt.serialization.unpickler import Rule, Unpickler

_MARGIN = 8
"""Levels that a format may put around an object."""


class Opaque:
    """An object of a class whose code does not run."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self) -> None: ...

    def extend(self, _: Any) -> None: ...

    def __setitem__(self, _: Any, __: Any) -> None: ...


class _CheckingUnpickler(Unpickler):
    """Known functions may fail on opaque arguments: they would not on the real ones."""

    def _call(self, function: Any, args: Any, kwargs: Any, new: bool) -> Any:
        try:
            return super()._call(function, args, kwargs, new)
        except (TypeError, ValueError, AttributeError, RuntimeError):
            parts = list(args)
            for arg in args:
                if isinstance(arg, tuple | list):
                    parts += arg
            for part in parts:
                kind = part if isinstance(part, type) else type(part)
                if issubclass(kind, Opaque):
                    value = Opaque()
                    self._made[id(value)] = value, _opaque_rule(Opaque)
                    return value
            raise


def _opaque_rule(kind: type) -> Rule:
    return Rule(kind, kind, lambda *_: None, trusted=True)


def check_loadable(blob: bytes) -> list[str]:
    """The error texts of the classes that a load of this blob must trust.

    Raises CorruptCheckpoint where a load fails whatever is trusted. Tensors are not read.
    """
    archive = Archive.of(blob)
    vouched, wanted = trusted_globals(), dict[str, None]()

    def find(module: str, name: str) -> Rule:
        module, name = current_name(module, name)
        full = f"{module}.{name}"
        unsafe = is_unsafe(module, name)
        if unsafe or full not in vouched:
            rule = known_rules().get(full)
            if rule is not None:
                return rule
        if unsafe:
            raise UntrustedClass(refusal(module, name))
        if full not in vouched and not stands_in(module):
            wanted[refusal(module, name)] = None
        return _opaque_rule(type(name, (Opaque,), {}))

    storage = storages(archive, read=False)
    unpickler = _CheckingUnpickler(archive.content("data.pkl"), find, storage)
    try:
        check_shape(unpickler.load(), limits.PICKLE_DEPTH - _MARGIN)
    finally:
        unpickler.discard()
    return list(wanted)
