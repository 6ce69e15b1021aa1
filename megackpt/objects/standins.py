"""Inert stand-ins: what a pickle says about objects of classes whose code must not, or cannot, run."""

from __future__ import annotations

from typing import Any


class StandInClass:
    """A class that was only named. Calling it makes a StandIn; nothing is imported."""

    __slots__ = ("qualified_name",)

    def __init__(self, qualified_name: str) -> None:
        self.qualified_name = qualified_name

    def __repr__(self) -> str:
        return f"<stand-in for {self.qualified_name}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StandInClass) and other.qualified_name == self.qualified_name

    def __hash__(self) -> int:
        return hash(self.qualified_name)

    def __reduce__(self) -> tuple[Any, ...]:
        return StandInClass, (self.qualified_name,)


class StandIn:
    """An object of a class that was only named: the arguments it was made with and the state it was given.

    An enum's member has its value as the one argument; a dataclass has a dict of its fields as its state.
    """

    __slots__ = ("args", "qualified_name", "state")

    def __init__(self, qualified_name: str, args: tuple[Any, ...] = (), state: Any = None) -> None:
        self.qualified_name = qualified_name
        self.args = args
        self.state = state

    def __repr__(self) -> str:
        parts = [f"<stand-in for {self.qualified_name}"]
        if self.args:
            parts.append(f"args={self.args!r}")
        if self.state is not None:
            parts.append(f"state={self.state!r}")
        return " ".join(parts) + ">"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StandIn):
            return NotImplemented
        mine = self.qualified_name, self.args, self.state
        return mine == (other.qualified_name, other.args, other.state)

    def __hash__(self) -> int:
        return hash(self.qualified_name)

    def __reduce__(self) -> tuple[Any, ...]:
        return StandIn, (self.qualified_name, self.args, self.state)
