"""Limits on pickles: work for copies and hashes, depth of values, how often parts repeat."""

from __future__ import annotations

import argparse
import types
from collections import deque
from collections.abc import Container, Iterable
from typing import Any

import numpy as np

from megackpt import limits
from megackpt.errors import CorruptCheckpoint, UntrustedClass
from megackpt.serialization.standins import StandIn
from megackpt.serialization.trust import Name, refusal

_SHARED = 256
"""How many times a larger value may share each of its parts, on average."""

_ITEM = 16
"""Units that an item of a container costs. A byte or character costs one."""
_FREE = 256
"""Characters, or bytes of an integer, without cost: names and numbers are shared often."""
_FREE_PARTS = 8
"""Parts of a key without cost."""
_COLLISIONS = 256
"""Keys with one hash in one container: a look-up compares with each of them."""
_SMALL = (1 << 61) - 1
"""Integers below this hash to themselves, so no two of them have one hash."""
_STRINGS = (str, bytes, bytearray)
_CONTAINERS = (tuple, list, dict, set, frozenset, range)
_SPREAD = frozenset((str, bytes, bool, float, type(None)))
"""Types of keys whose hashes a file cannot choose."""


class Budget:
    """The work that a pickle of ``nbytes`` may still ask for.

    A pickle that names each part once needs less than half of it. Parts that are shared, and
    copied or hashed at each use, use it up.
    """

    def __init__(self, nbytes: int) -> None:
        self._left = _ITEM * nbytes + (1 << 20)
        # Container identity -> (the container, hashes of its keys, how often they repeat). While
        # the reference to the container exists, no other container has its identity.
        self._hashed: dict[int, tuple[object, set[int], dict[int, int]]] = {}

    def spend(self, units: int) -> None:
        """Raises CorruptCheckpoint when the budget is used up."""
        self._left -= units
        if self._left < 0:
            raise CorruptCheckpoint(
                "a pickle has the same parts copied or hashed again and again"
            )

    def copy(self, values: Iterable[Any]) -> None:
        """Charge for values that a function may copy."""
        for value in values:
            self.spend(_weight(value))

    def hash(self, keys: Iterable[Any], target: object = None) -> None:
        """Charge for keys or members of ``target``, or of a new container of these alone.

        Raises CorruptCheckpoint for keys that exhaust the stack or time, and for many of one hash.
        """
        seen, repeated = set[int](), dict[int, int]()
        for key in keys:
            kind = type(key)
            if kind in _SPREAD or (kind is int and -_SMALL < key < _SMALL):
                continue
            if target is not None:
                kept = self._hashed.setdefault(id(target), (target, seen, repeated))
                _, seen, repeated = kept
            measured, _ = _measure((key,), limits.PICKLE_DEPTH, "the key of a dict")
            _, parts = measured.popitem()[1]
            self.spend(_ITEM * max(0, parts - _FREE_PARTS))
            value = hash(key)
            if value in seen:
                repeated[value] = repeated.get(value, 1) + 1
                if repeated[value] > _COLLISIONS:
                    raise CorruptCheckpoint(
                        f"more than {_COLLISIONS} keys of a dict or set have one hash"
                    )
            seen.add(value)


def _weight(value: Any) -> int:
    """The units that a copy of a value costs."""
    size = 0
    if isinstance(value, _STRINGS):
        size = len(value)
    elif isinstance(value, _CONTAINERS):
        return _ITEM * len(value)
    elif isinstance(value, int):
        size = value.bit_length() >> 3
    return size if size > _FREE else 0


def check_shape(value: Any, levels: int = limits.PICKLE_DEPTH) -> Container[int]:
    """Check that ordinary code can walk a value without exhausting stack, time or memory.

    Returns the identities of all containers in it.

    Raises:
        CorruptCheckpoint: it is nested too deep, or shares too many parts too often.
        UntrustedClass: it holds getattr, or a name that was only an argument of getattr.
    """
    measured, count = _measure(value, levels, "the object")
    _, leaves = measured.get(id(value), (0, 1))
    if leaves > max(limits.PICKLE_LEAVES, _SHARED * count):
        raise CorruptCheckpoint(
            f"the object has {leaves} parts, counted each time that they are met: "
            "too many are shared too often"
        )
    return measured


def _measure(
    value: Any, levels: int, what: str
) -> tuple[dict[int, tuple[int, int]], int]:
    """The identity of each container -> its depth, and its parts as often as a walk meets them.

    A long integer counts as several parts. The second result is the number of parts, each as often
    as containers hold it. Raises CorruptCheckpoint at the first container that is too deep: the
    number of parts may double at each level.
    """
    measured: dict[int, tuple[int, int]] = {}
    opened: set[int] = set()
    count = 0
    waiting: list[tuple[Any, bool]] = [(value, False)]
    while waiting:
        part, closing = waiting.pop()
        if id(part) in measured:
            continue
        inner = _parts(part)
        if inner is None:
            continue
        depth, leaves = 0, 1
        if not closing:
            if id(part) not in opened:  # else it contains itself, which pickle allows
                opened.add(id(part))
                waiting.append((part, True))
                waiting.extend((p, False) for p in inner)
        else:
            for below in inner:
                its_depth, its_leaves = measured.get(id(below), (0, 1))
                if type(below) is int:
                    its_leaves += _weight(below) // _ITEM
                depth = max(depth, its_depth)
                leaves += its_leaves
                count += 1
            opened.discard(id(part))
            measured[id(part)] = depth + 1, leaves
        if max(depth + 1, len(opened)) > levels:
            raise CorruptCheckpoint(f"{what} is nested more than {levels} levels deep")
    return measured, count


def _parts(value: Any) -> Iterable[Any] | None:
    """The parts of a container, or None for any other value."""
    if isinstance(value, dict):
        attributes = getattr(value, "__dict__", {})
        return [*dict.keys(value), *dict.values(value), *attributes.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return list(value.flat)
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return vars(value).values()
    if isinstance(value, StandIn):
        return (*value.args, value.state)
    if isinstance(value, range):  # its numbers may be long
        return (value.start, value.stop, value.step)
    if isinstance(value, Name):
        raise UntrustedClass(refusal(value.module, value.name))
    return None
