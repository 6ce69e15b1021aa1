"""The check at save: the unpickler of a load reads each blob that is about to be written.

Opaque objects take the place of all classes that need trust, so no code of a class runs. All
else is as in a load. So a save refuses what a load refuses whatever is trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megackpt import limits
from megackpt.errors import CorruptCheckpoint, UntrustedClass
from megackpt.serialization.allowlist import (
    is_megatron,
    known_rules,
    make_storage,
    parse_storage_id,
)
from megackpt.serialization.archive import Archive
from megackpt.serialization.limits import check_shape
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

    def _called(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return super()._called(call, args, kwargs)
        except (TypeError, ValueError, AttributeError, RuntimeError):
            for arg in args:
                parts = arg if isinstance(arg, tuple | list) else ()
                if any(map(_is_opaque, (arg, *parts))):
                    return Opaque()
            raise

    def _built(
        self, build: Callable[[Any, Any], None], instance: Any, state: Any
    ) -> None:
        if not isinstance(instance, Opaque):
            super()._built(build, instance, state)


def _is_opaque(value: Any) -> bool:
    return isinstance(value, Opaque) or (
        isinstance(value, type) and issubclass(value, Opaque)
    )


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
        rule = None if full in vouched and not unsafe else known_rules().get(full)
        if rule is not None:
            return rule
        if unsafe:
            raise UntrustedClass(refusal(module, name))
        if full not in vouched and not is_megatron(module):
            wanted[refusal(module, name)] = None
        kind = type(name, (Opaque,), {})
        return Rule(kind, kind, lambda *_: None, trusted=True)

    def storage(persistent_id: tuple[Any, ...]) -> torch.TypedStorage:
        dtype, name, count = parse_storage_id(persistent_id)
        if not isinstance(dtype, torch.dtype):
            raise CorruptCheckpoint("a tensor is of a kind that no load reads")
        size = archive.members[f"data/{name}"].size
        if count * dtype.itemsize != size:
            raise CorruptCheckpoint(f"a tensor's storage has {size} bytes, not {count}")
        return make_storage(torch.empty(size, dtype=torch.uint8, device="meta"), dtype)

    unpickler = _CheckingUnpickler(archive.content("data.pkl"), find, storage)
    try:
        check_shape(unpickler.load(), limits.PICKLE_DEPTH - _MARGIN)
    finally:
        unpickler.discard()
    return list(wanted)
