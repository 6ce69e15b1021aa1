"""Inert replacements for objects of classes whose code must not, or cannot, run.

The names of this module and its classes are part of blobs on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from reprlib import recursive_repr
from typing import Any


@dataclass(frozen=True, slots=True, repr=False)
class StandInClass:
    """A class by its name alone. A call makes a StandIn, without an import."""

    qualified_name: str

    def __repr__(self) -> str:
        return f"<stand-in for {self.qualified_name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return StandInClass, (self.qualified_name,)


@dataclass(slots=True, repr=False)
class StandIn:
    """An object of a class that did not run: the arguments and the state that the pickle has.

    For an enum member, ``args`` is its value, which is also the attribute ``value``. For a
    dataclass, ``state`` is a dict of the fields, which are also attributes.

    Args:
        qualified_name: module and name of the class.
        args: the arguments of the class.
        state: the state that the pickle sets.
        new: the pickle makes the object without a call of the class.
    """

    qualified_name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    new: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.qualified_name) is not str or type(self.args) is not tuple:
            raise TypeError(
                "a stand-in has a text as its name, and a tuple of arguments"
            )

    def __getattr__(self, name: str) -> Any:
        """A field. One with the name of an attribute of this class is only in ``state``."""
        # copy and pickle look up special names on objects without any attributes yet.
        if not name.startswith("__"):
            args, state = map(self.__getattribute__, ("args", "state"))
            fields = _fields(args, state)
            if name in fields:
                return fields[name]
        raise AttributeError(
            f"the stand-in for {self.qualified_name} has no attribute {name!r}"
        )

    def __dir__(self) -> list[str]:
        fields = _fields(self.args, self.state)
        return [*object.__dir__(self), *(name for name in fields if type(name) is str)]

    @recursive_repr()
    def __repr__(self) -> str:
        parts = [f"<stand-in for {self.qualified_name}"]
        if self.args:
            parts.append(f"args={self.args!r}")
        if self.state is not None:
            parts.append(f"state={self.state!r}")
        return " ".join(parts) + ">"

    def __hash__(self) -> int:
        return hash(self.qualified_name)

    def __reduce__(self) -> tuple[Any, ...]:
        return StandIn, (self.qualified_name, self.args, self.state, self.new)


def _fields(args: tuple[Any, ...], state: Any) -> Mapping[Any, Any]:
    """The fields that have a name."""
    # The state of a class with slots: (dict or None, dict of the slots).
    if type(state) is tuple and len(state) == 2:
        return {**_fields(args, state[0]), **_fields((), state[1])}
    if type(state) is dict:
        return state
    if state is None and len(args) == 1:
        return {"value": args[0]}
    return {}
