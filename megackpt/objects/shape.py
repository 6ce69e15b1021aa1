"""The bounds on what comes out of a pickle: how deep it is nested, and how large it is when walked as a tree."""

from __future__ import annotations

import argparse
import types
from collections import deque
from collections.abc import Container, Iterable
from typing import Any

import numpy as np

from megackpt.errors import CorruptCheckpoint
from megackpt.objects.standins import StandIn

DEPTH = 500
"""Levels of containers: what Python's own pickle can still write."""
SIZE = 1 << 27
"""Leaves, counted as often as a walk meets them: parts that are shared many times over blow up."""


def check_shape(value: Any) -> Container[int]:
    """Raise CorruptCheckpoint for a value on which ordinary code would exhaust stack, time or memory.

    Returns the identities of all containers in it.
    """
    done: dict[int, tuple[int, int]] = {}  # identity -> depth, size
    open_: set[int] = set()
    waiting: list[tuple[Any, bool]] = [(value, False)]
    while waiting:
        part, closing = waiting.pop()
        inner = _parts(part)
        if inner is None or id(part) in done:
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
        if depth > DEPTH or size > SIZE:
            raise CorruptCheckpoint(
                f"the object is nested {depth} levels deep or has {size} parts: too much to be right"
            )
        open_.discard(id(part))
        done[id(part)] = depth, size
    return done


def _parts(value: Any) -> Iterable[Any] | None:
    """What a container holds, or None for what is no container."""
    if isinstance(value, dict):
        return [*dict.keys(value), *dict.values(value), *getattr(value, "__dict__", {}).values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return list(value.flat)
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return vars(value).values()
    if isinstance(value, StandIn):
        return (*value.args, value.state)
    return None
