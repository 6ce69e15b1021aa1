"""The names under which ``.metadata`` lists objects. ``key/shard_0.1_4.2`` is shard (0, 1) of one of shape (4, 2)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    COMMON_KEY,
    OBJECT,
    TensorEntry,
    TensorMeta,
    unique_key,
)

LISTED_COMMON = unique_key(COMMON_KEY, (0,), (1,))
"""The item in which Megatron-Core from 0.19 on keeps the common state, as ``[dict]``. It writes no common.pt."""
_SHARD = re.compile(
    r"(?P<key>.*)/shard_(?P<offset>[0-9]{1,10}(?:\.[0-9]{1,10})*)_(?P<shape>[0-9]{1,10}(?:\.[0-9]{1,10})*)",
    re.DOTALL,
)
_UNKNOWN = -1  # an extent that the name leaves out

Name = tuple[str, tuple[int, ...], tuple[int, ...]]


def parse_name(name: str) -> Name:
    """Key, offset and global shape of an object. Old releases leave out the last extent: it is then -1."""
    if name == LISTED_COMMON:
        return COMMON_KEY, (), ()
    match = _SHARD.fullmatch(name)
    if match is None:
        return name, (), ()
    offset, shape = (
        tuple(map(int, match[part].split("."))) for part in ("offset", "shape")
    )
    known = (
        all(o < s < 1 << 31 for o, s in zip(offset, shape, strict=False))
        and max(offset) < 1 << 31
    )
    if (
        not known
        or len(offset) - len(shape) not in (0, 1)
        or match["key"] == COMMON_KEY
    ):
        return name, (), ()
    return match["key"], offset, (*shape, _UNKNOWN)[: len(offset)]


def objects_named(names: Iterable[str]) -> dict[str, tuple[TensorEntry, Box]]:
    """For each name the object, and which box of it this is. An unknown extent is what the names reach to."""
    parsed = {name: parse_name(name) for name in names}
    reach: dict[str, int] = {}
    for key, offset, shape in parsed.values():
        if _UNKNOWN in shape:
            reach[key] = max(reach.get(key, 0), offset[-1] + 1)
    found = {}
    for name, (key, offset, shape) in parsed.items():
        whole = (*shape[:-1], reach[key]) if _UNKNOWN in shape else shape
        found[name] = (
            TensorEntry(key, TensorMeta(whole, OBJECT)),
            Box(offset, (1,) * len(shape)),
        )
    return found
