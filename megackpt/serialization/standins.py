"""Inert stand-ins: what a pickle says about objects of classes whose code must not, or cannot, run."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from reprlib import recursive_repr
from typing import Any, ClassVar

from megackpt.serialization.enums import enum_by_value


class StandInClass:
    """A class that was only named. Calling it makes a StandIn; nothing is imported."""

    __slots__ = ("qualified_name",)

    def __init__(self, qualified_name: str) -> None:
        self.qualified_name = qualified_name

    def __repr__(self) -> str:
        return f"<stand-in for {self.qualified_name}>"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, StandInClass)
            and other.qualified_name == self.qualified_name
        )

    def __hash__(self) -> int:
        return hash(self.qualified_name)

    def __reduce__(self) -> tuple[Any, ...]:
        return StandInClass, (self.qualified_name,)


class StandIn:
    """An object of a class that was only named: the arguments it was made with and the state it was given.

    A member of an enum has its value as the one argument, and as ``value``; a dataclass has a dict of its fields
    as its state, and each of them as an attribute. ``new``: it was made without calling the class.
    """

    __slots__ = ("args", "new", "qualified_name", "state")

    def __init__(
        self,
        qualified_name: str,
        args: tuple[Any, ...] = (),
        state: Any = None,
        new: bool = False,
    ) -> None:
        self.qualified_name = qualified_name
        self.args = args
        self.state = state
        self.new = new

    def __getattr__(self, name: str) -> Any:
        """A field. Those that are named as one of this class's own attributes are in ``state`` alone."""
        fields = (
            {}
            if name.startswith("__")
            else _fields(*map(self.__getattribute__, ("args", "state")))
        )
        if name not in fields:
            raise AttributeError(
                f"the stand-in for {self.qualified_name} has no attribute {name!r}"
            )
        return fields[name]

    def __dir__(self) -> list[str]:
        return [
            *super().__dir__(),
            *(name for name in _fields(self.args, self.state) if type(name) is str),
        ]

    @recursive_repr()
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
        return StandIn, (self.qualified_name, self.args, self.state, self.new)


def _fields(args: tuple[Any, ...], state: Any) -> Mapping[Any, Any]:
    """What can be told apart by name."""
    if (
        type(state) is tuple and len(state) == 2
    ):  # of a class with slots: (dict or None, their dict)
        return {**_fields(args, state[0]), **_fields((), state[1])}
    if type(state) is dict:
        return state
    return {"value": args[0]} if state is None and len(args) == 1 else {}


class Pickler(pickle._Pickler):
    """Writes stand-ins for Megatron-Core's plain classes as what they stand for, so that Megatron reads them.

    Others stay stand-ins: what was inert because nobody vouched for it must not come alive in a checkpoint of ours.
    It is Python's pickler written in Python, for the one written in C cannot be told how to write a class.
    """

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def reducer_override(self, value: Any) -> Any:
        return enum_by_value(value)

    def save_stand_in(self: Any, value: StandIn) -> None:
        if value.qualified_name not in _PLAIN:
            self.save_reduce(*value.__reduce__(), obj=value)
            return
        module, _, name = value.qualified_name.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
        self.save(value.args)
        self.write(pickle.NEWOBJ if value.new else pickle.REDUCE)
        self.memoize(value)
        if value.state is not None:
            self.save(value.state)
            self.write(pickle.BUILD)

    dispatch[StandIn] = save_stand_in


_PLAIN = frozenset((
    "megatron.core.enums.ModelType",
    "megatron.core.optimizer.optimizer_config.AdamOptimizerConfig",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.optimizer.optimizer_config.SGDOptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.ModelType",
))  # fmt: skip
"""Enums and dataclasses that do nothing when they are made: those that Megatron-Core itself takes for safe."""
