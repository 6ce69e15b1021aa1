"""Values of blobs for people to look at, as nested dicts and lists, without trust in any class."""

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
UNSEEN = "(not looked at: too deep, or too much)"
"""Takes the place of parts beyond these limits."""
_INDICES = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def look(data: bytes, where: str = "") -> Any:
    """The value of a blob. Objects of unknown classes become dicts of what the pickle has.

    Raises CorruptCheckpoint as ``serialization.load`` does; never UntrustedClass.
    """
    return _Viewer().view(serialization.load(data, stand_ins=True, where=where), ())


class _Viewer:
    """One walk through a value. It ends in containers that contain themselves, too."""

    def __init__(self) -> None:
        self.parts = 0

    def view(self, value: Any, above: tuple[int, ...]) -> Any:
        """A copy of plain containers. ``above``: identities of the containers around it."""
        self.parts += 1
        if id(value) in above:
            return "..."
        if len(above) > _DEPTH or self.parts > _PARTS:
            return UNSEEN
        inside = (*above, id(value))
        match value:
            case dict():
                return {_number(k): self.view(v, inside) for k, v in value.items()}
            case np.ndarray() if value.dtype.hasobject:
                return [self.view(item, inside) for item in value.flat]
            case list() | tuple() | deque():
                return [self.view(item, inside) for item in value]
            case set() | frozenset():
                return sorted((self.view(item, inside) for item in value), key=repr)
            case argparse.Namespace() | types.SimpleNamespace():
                return self.view(vars(value), inside)
            case StandIn():
                return self.view_of_unknown(value, inside)
            case StandInClass():
                return f"<class {value.qualified_name}>"
            case np.generic():
                return value.item()
            case io.BytesIO():
                return value.getvalue()
            case torch.Tensor() if value.layout in _INDICES:
                opened = {"<class>": str(value.layout), "shape": list(value.shape)}
                for name in _INDICES[value.layout]:
                    opened[name.strip("_")] = getattr(value, name)()
                return opened
            case int() | range() | slice():
                return _number(value)
        return value

    def view_of_unknown(
        self, value: StandIn, inside: tuple[int, ...]
    ) -> dict[str, Any]:
        """What the pickle has of an object of an unknown class."""
        shown: dict[str, Any] = {"<class>": value.qualified_name}
        if value.args:
            shown["<arguments>"] = self.view(value.args, inside)
        state = self.view(value.state, inside)
        if isinstance(state, dict):
            shown |= state
        elif state is not None:
            shown["<state>"] = state
        return shown


def _number(value: Any) -> Any:
    """The value itself, if Python can print it: it refuses numbers of over 4,300 digits."""
    try:
        repr(value)
    except ValueError:
        if isinstance(value, int):
            return hex(value)
        return f"<{type(value).__name__} of numbers too long to print>"
    return value
