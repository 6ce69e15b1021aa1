"""Objects for people to look at: whatever a blob holds, as nested dicts and lists. Nothing of it is trusted or run."""

from __future__ import annotations

import argparse
import io
import types
from collections import deque
from typing import Any

import numpy as np
import torch

from megackpt import serialization
from megackpt.serialization.standins import StandIn, StandInClass

_DEPTH = 100
_PARTS = 1 << 20
"""Leaves that are looked at."""
UNSEEN = "(not looked at: too deep, or too much)"
"""What stands for all that is beyond."""
_INDICES = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def look(data: bytes, where: str = "") -> Any:
    """What a blob holds. Classes that are not known become dicts of what the pickle says of them.

    Raises CorruptCheckpoint as ``serialization.load`` does; never UntrustedClass.
    """
    return _Opening().open(serialization.load(data, stand_ins=True, where=where), ())


class _Opening:
    """One walk through a value. Containers that hold themselves, and all too large ones, come to an end."""

    def __init__(self) -> None:
        self.parts = 0

    def open(self, value: Any, above: tuple[int, ...]) -> Any:
        self.parts += 1
        if id(value) in above:
            return "..."
        if len(above) > _DEPTH or self.parts > _PARTS:
            return UNSEEN
        inside = (*above, id(value))
        match value:
            case dict():
                return {
                    _told(key): self.open(item, inside) for key, item in value.items()
                }
            case np.ndarray() if value.dtype.hasobject:
                return [self.open(item, inside) for item in value.flat]
            case list() | tuple() | deque():
                return [self.open(item, inside) for item in value]
            case set() | frozenset():
                return sorted((self.open(item, inside) for item in value), key=repr)
            case argparse.Namespace() | types.SimpleNamespace():
                return self.open(vars(value), inside)
            case StandIn():
                return self._stand_in(value, inside)
            case StandInClass():
                return f"<class {value.qualified_name}>"
            case np.generic():
                return value.item()
            case io.BytesIO():
                return value.getvalue()
            case torch.Tensor() if value.layout in _INDICES:
                parts = {
                    name.strip("_"): getattr(value, name)()
                    for name in _INDICES[value.layout]
                }
                return {
                    "<class>": str(value.layout),
                    "shape": list(value.shape),
                    **parts,
                }
            case int() | range() | slice():
                return _told(value)
        return value

    def _stand_in(self, value: StandIn, inside: tuple[int, ...]) -> dict[str, Any]:
        opened = {"<class>": value.qualified_name}
        if value.args:
            opened["<arguments>"] = self.open(value.args, inside)
        state = self.open(value.state, inside)
        return opened | (
            state
            if isinstance(state, dict)
            else {}
            if state is None
            else {"<state>": state}
        )


def _told(value: Any) -> Any:
    """The value itself, if Python can write it: numbers of more than 4,300 digits it refuses."""
    try:
        repr(value)
    except ValueError:
        return (
            hex(value)
            if isinstance(value, int)
            else f"<{type(value).__name__} of numbers too long to tell>"
        )
    return value
