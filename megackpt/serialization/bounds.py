"""The bounds on the work that a pickle can ask for: what functions copy, and what dictionaries and sets hash."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megackpt.errors import CorruptCheckpoint
from megackpt.serialization.standins import StandIn

DEPTH = 500
"""Levels of containers: what Python's own pickle can still write."""
_ITEM = 16
"""Units that an item of a container costs. A byte or character costs one."""
_FREE = 256
"""Characters, or bytes of an integer, that cost nothing: names, paths and numbers are shared many times over."""
_FREE_PARTS = 8
"""Parts of a key that cost nothing."""
_COLLISIONS = 256
"""Keys of one hash in one container: a look-up compares with each of them."""
_SMALL = (1 << 61) - 1
"""Python's hash of an integer below this is the integer itself, so that no two are alike."""
_STRINGS = (str, bytes, bytearray)
_CONTAINERS = (tuple, list, dict, set, frozenset, range)
_SPREAD = frozenset((str, bytes, bool, float, type(None)))
"""Kinds of keys of which nobody can make many with one hash."""


class Budget:
    """The work that is left to a pickle of so many bytes.

    A pickle that names each of its parts once needs far less than it has. What is shared, and copied or hashed
    each time that it is named, uses it up.
    """

    def __init__(self, nbytes: int) -> None:
        self._left = _ITEM * nbytes + (1 << 20)
        self._hashed: dict[int, tuple[object, set[int], dict[int, int]]] = {}

    def spend(self, units: int) -> None:
        """Raises CorruptCheckpoint when nothing is left."""
        self._left -= units
        if self._left < 0:
            raise CorruptCheckpoint(
                "a pickle has the same parts copied or hashed again and again"
            )

    def copy(self, values: Iterable[Any]) -> None:
        """Each of these may be copied by the function that is about to get it."""
        self.spend(sum(map(_weight, values)))

    def hash(self, keys: Iterable[Any], target: object = None) -> None:
        """These are about to become keys or members: of ``target``, or of a container that is made of them alone.

        Raises CorruptCheckpoint for keys whose hashing could exhaust the stack or time, and for many of one hash.
        """
        chosen = [
            key for key in keys if type(key) not in _SPREAD and not _is_small(key)
        ]
        if not chosen:
            return
        kept = None if target is None else self._hashed.get(id(target))
        seen, again = (set[int](), dict[int, int]()) if kept is None else kept[1:]
        for key in chosen:
            self.spend(_ITEM * max(0, self._parts(key) - _FREE_PARTS))
            value = hash(key)
            if value in seen:
                again[value] = again.get(value, 1) + 1
                if again[value] > _COLLISIONS:
                    raise CorruptCheckpoint(
                        f"more than {_COLLISIONS} keys of a dict or set have one hash"
                    )
            seen.add(value)
        if target is not None:  # it is kept, so that nothing else gets its identity
            self._hashed[id(target)] = target, seen, again

    def _parts(self, key: Any) -> int:
        """How many parts a key has, as often as hashing meets them."""
        waiting, count = [(key, 1)], 0
        while waiting:
            part, depth = waiting.pop()
            inner: Iterable[Any] = ()
            if isinstance(part, tuple | frozenset | list):
                inner = part
            elif isinstance(part, dict):
                inner = [*dict.keys(part), *dict.values(part)]
            elif type(part) is StandIn:
                inner = (*part.args, part.state)
            elif type(part) is int:
                count += _weight(part) // _ITEM
            elif type(part) is range:
                inner = (part.start, part.stop, part.step)
            if depth > DEPTH:
                raise CorruptCheckpoint(
                    f"the key of a dict is nested more than {DEPTH} levels deep"
                )
            count += 1
            if (count + len(waiting)) * _ITEM > self._left:
                raise CorruptCheckpoint("the keys of a dict or set have too many parts")
            waiting.extend((part, depth + 1) for part in inner)
        return count


def _is_small(key: Any) -> bool:
    return type(key) is int and -_SMALL < key < _SMALL


def _weight(value: Any) -> int:
    if isinstance(value, _STRINGS):
        return len(value) if len(value) > _FREE else 0
    if isinstance(value, _CONTAINERS):
        return _ITEM * len(value)
    if isinstance(value, int):
        size = value.bit_length() >> 3
        return size if size > _FREE else 0
    return 0
