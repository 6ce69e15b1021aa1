"""Values to blobs: torch.save, with enums and ``StandIn`` objects pickled for other readers."""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import types
from collections.abc import Callable
from enum import Enum, Flag
from typing import Any, ClassVar

from megackpt.serialization import standins
from megackpt.serialization.standins import StandIn

_ENUMS_BY_NAME = sys.version_info < (3, 11, 4)
"""Python pickles an enum member as a call of getattr, and combined flags as ``operator.or_``."""
_REDUCES_OF_PYTHON = frozenset((Enum.__reduce_ex__, Flag.__reduce_ex__))
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
"""Enums and dataclasses that Megatron-Core calls safe. Their construction runs no code."""


def dump(value: Any, check: Callable[[Any], None] | None = None) -> bytes:
    """The blob of a value, in the form of torch.save.

    StandIns for plain classes of Megatron-Core are written as objects of these classes. ``check``
    gets each object inside, except Python's plain values and containers, and may raise.

    Raises what pickle raises for values that cannot be pickled.
    """
    pickler: type = pickle.Pickler
    if check is not None or _ENUMS_BY_NAME:

        class CheckingPickler(pickle.Pickler):
            def reducer_override(self, value: Any) -> Any:
                if check is not None:
                    check(value)
                return _reduce_enum(value)

        pickler = CheckingPickler
    blob = _save(value, pickler)
    if standins.__name__.encode() in blob:
        blob = _save(value, _StandInPickler)
    return blob


def _save(value: Any, pickler: type) -> bytes:
    import torch  # here, because callers that only look at names and sizes need none

    buffer = io.BytesIO()
    module = types.SimpleNamespace(__name__="pickle", Pickler=pickler)
    torch.save(value, buffer, pickle_module=module)
    return buffer.getvalue()


def _reduce_enum(value: Any) -> Any:
    """The class and value of an enum member, which Python 3.11.4 and newer pickle.

    NotImplemented for all other values, and for enums that define how they are pickled.
    """
    by_python = (
        isinstance(value, Enum) and type(value).__reduce_ex__ in _REDUCES_OF_PYTHON
    )
    if by_python and type(value) not in copyreg.dispatch_table:
        return type(value), (value._value_,)
    return NotImplemented


class _StandInPickler(pickle._Pickler):
    """Writes a ``StandIn`` for a plain class of Megatron-Core as an object of that class.

    Other ``StandIn`` objects stay as they are: a class that was not trusted must not run where
    the copy is loaded. The base is Python's pickler, because the one in C cannot write a class by
    its name alone.
    """

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def reducer_override(self, value: Any) -> Any:
        return _reduce_enum(value)

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
