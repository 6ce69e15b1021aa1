"""The bounds on what comes out of a pickle: how deep it is nested, and how large it is when walked as a tree."""

from __future__ import annotations

import argparse
import types
from collections import deque
from collections.abc import Container, Iterable
from typing import Any

import numpy as np

from megackpt.errors import CorruptCheckpoint, UntrustedClass
from megackpt.serialization.bounds import DEPTH
from megackpt.serialization.finding import refusal
from megackpt.serialization.rules import Name
from megackpt.serialization.standins import StandIn

SIZE = 1 << 27
"""Leaves, counted as often as a walk meets them: parts that are shared many times over blow up."""
_SHARED = 256
"""Times that all parts of a larger value may be shared, in the mean."""


def check_shape(value: Any, levels: int = DEPTH) -> Container[int]:
    """Raise CorruptCheckpoint for a value on which ordinary code would exhaust stack, time or memory.

    Raises UntrustedClass for one that holds a name that was only given to getattr, or getattr itself.
    Returns the identities of all containers in it.
    """
    done: dict[int, tuple[int, int]] = {}  # identity -> depth, size
    open_: set[int] = set()
    parts = size = 0
    waiting: list[tuple[Any, bool]] = [(value, False)]
    while waiting:
        part, closing = waiting.pop()
        if (
            id(part) in done or (inner := _parts(part)) is None
        ):  # in this order: a look at the parts costs
            continue
        if not closing:
            if id(part) in open_:
                continue  # a cycle: pickle writes these, too
            open_.add(id(part))
            waiting.append((part, True))
            waiting.extend((p, False) for p in inner)
            continue
        sums = [done.get(id(p), (0, 1)) for p in inner]
        depth = 1 + max((d for d, _ in sums), default=0)
        size = 1 + sum(s for _, s in sums)
        if depth > levels:
            raise CorruptCheckpoint(
                f"the object is nested {depth} levels deep: at most {levels} can be read"
            )
        parts += len(sums)
        open_.discard(id(part))
        done[id(part)] = depth, size
    if size > max(SIZE, _SHARED * parts):
        raise CorruptCheckpoint(
            f"the object has {size} parts, counted as often as they are met: too many are shared too often"
        )
    return done


def _parts(value: Any) -> Iterable[Any] | None:
    """What a container holds, or None for what is no container."""
    if isinstance(value, dict):
        return [
            *dict.keys(value),
            *dict.values(value),
            *getattr(value, "__dict__", {}).values(),
        ]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return list(value.flat)
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return vars(value).values()
    if isinstance(value, StandIn):
        return (*value.args, value.state)
    if isinstance(value, Name):
        raise UntrustedClass(refusal(value.module, value.name))
    return None
