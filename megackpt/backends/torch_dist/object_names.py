"""The names under which ``.metadata`` lists objects. ``key/shard_0.1_4.2`` is shard (0, 1) of one of shape (4, 2)."""

from __future__ import annotations

from collections.abc import Iterable

from megackpt.backends.object_files import Dims, parse_offset
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
_UNKNOWN = -1  # an extent that the name leaves out

Name = tuple[str, Dims, Dims]


def parse_name(name: str) -> Name:
    """Key, offset and global shape of an object. Old releases leave out the last extent: it is then -1."""
    if name == LISTED_COMMON:
        return COMMON_KEY, (), ()
    key, slash, last = name.rpartition("/")
    found = parse_offset(last)
    if not slash or found is None or key == COMMON_KEY:
        return name, (), ()
    offset, shape = found
    if not offset or len(offset) - len(shape) not in (0, 1):
        return name, (), ()
    return key, offset, (*shape, _UNKNOWN)[: len(offset)]


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
