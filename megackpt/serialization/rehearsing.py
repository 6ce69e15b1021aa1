"""Would a load give this back? Told of a blob when it is saved, by the machine that will read it, without any class.

What a load refuses whatever is trusted is refused here. In the place of what somebody would have to trust, also of
what is vouched for already, there is a thing that takes everything: no code of a class runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megackpt.errors import CorruptCheckpoint, UntrustedClass
from megackpt.serialization.allowed import is_inert, known
from megackpt.serialization.archive import Archive
from megackpt.serialization.bounds import DEPTH
from megackpt.serialization.finding import never, refusal, renamed, vouched_for
from megackpt.serialization.machine import Machine
from megackpt.serialization.rules import Rule
from megackpt.serialization.shape import check_shape

_MARGIN = 8
"""Levels that a format may put around an object."""


class Opaque:
    """An object of a class that is not looked at."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self) -> None: ...

    def extend(self, _: Any) -> None: ...

    def __setitem__(self, _: Any, __: Any) -> None: ...


class _Machine(Machine):
    """One that lets known functions fail on what is opaque: on the real thing they may not."""

    def _called(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return super()._called(call, args, kwargs)
        except (TypeError, ValueError, AttributeError, RuntimeError):
            if any(map(_is_opaque, args)):
                return Opaque()
            raise

    def _built(
        self, build: Callable[[Any, Any], None], instance: Any, state: Any
    ) -> None:
        if not isinstance(instance, Opaque):
            super()._built(build, instance, state)


def _is_opaque(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(isinstance(part, Opaque) for part in value)
    return isinstance(value, Opaque) or (
        isinstance(value, type) and issubclass(value, Opaque)
    )


def rehearse(blob: bytes) -> list[str]:
    """What a load of this blob, which was just written, will have to be told to trust: its refusals, in words.

    Raises CorruptCheckpoint where it would fail whatever is trusted. Tensors are not read.
    """
    archive = Archive.of(blob)
    vouched, wanted = vouched_for(), dict[str, None]()

    def find(module: str, name: str) -> Rule:
        module, name = renamed(module, name)
        full = f"{module}.{name}"
        barred = never(module, name)
        rule = None if full in vouched and not barred else known().get(full)
        if rule is not None:
            return rule
        if barred:
            raise UntrustedClass(refusal(module, name))
        if full not in vouched and not is_inert(module):
            wanted[refusal(module, name)] = None
        kind = type(name, (Opaque,), {})
        return Rule(kind, kind, lambda *_: None, trusted=True, keywords=True)

    def storage(persistent_id: Any) -> torch.TypedStorage:
        _, dtype, name, _, count = persistent_id
        if not isinstance(dtype, torch.dtype):
            raise CorruptCheckpoint("a tensor is of a kind that is not read back")
        octets = torch.empty(
            archive.members[f"data/{name}"].size, dtype=torch.uint8, device="meta"
        ).untyped_storage()
        if count * dtype.itemsize != octets.nbytes():
            raise CorruptCheckpoint(
                "a tensor's storage is of another size than it says"
            )
        return torch.TypedStorage(wrap_storage=octets, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]

    machine = _Machine(archive.content("data.pkl"), find, storage)
    try:
        check_shape(machine.load(), DEPTH - _MARGIN)
    finally:
        machine.discard()
    return list(wanted)
