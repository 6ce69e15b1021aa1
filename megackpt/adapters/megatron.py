"""Megatron-Core's own declarations as ours, leaf by leaf. Its classes are known by name; it is not imported.

Sources: ``dist_checkpointing/mapping.py`` of 0.12.3 and 0.16.1. Copies of Megatron under another root count as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

from megackpt import tree
from megackpt.adapters.flat_ranges import check_flat_range, declare_flat_range
from megackpt.errors import ShardingError
from megackpt.state import (
    LocalNonpersistentObject,
    ReplicaId,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

_logger = logging.getLogger(__name__)

_MODULE = ".dist_checkpointing.mapping"
_OURS: dict[str, Any] = {
    kind.__name__: kind for kind in (ShardedTensor, ShardedObject, ShardedTensorFactory)
}


def native(leaf: Any) -> Any:
    """One of Megatron's declarations as one of ours, of the same tensor or object; any other leaf as it is.

    What a factory builds becomes ours when it is built. A flattened tensor, as up to 0.15 optimizers declare, becomes
    a factory of the boxes that it fills.
    Raises ShardingError for a class that lacks fields which ours cannot do without, and for impossible ranges.
    """
    kind: Any = type(leaf)
    translate = _translation(kind)
    return leaf if translate is None else translate(leaf)


@lru_cache(maxsize=1024)
def _translation(kind: type) -> Callable[[Any], Any] | None:
    """What makes one of ours of an instance of this class; None where it is none of Megatron's."""
    base = next((b for b in kind.__mro__ if f".{b.__module__}".endswith(_MODULE)), None)
    if base is None:
        return None
    if base.__name__ == "LocalNonpersistentObject":
        return lambda leaf: LocalNonpersistentObject(leaf.unwrap())
    if base.__name__ not in _OURS:
        return None
    ours = _OURS[base.__name__]
    names = _fields(base, ours)
    values = attrgetter(*names)

    def translate(leaf: Any) -> Any:
        shard = ours(**dict(zip(names, values(leaf), strict=True)))
        if ours is ShardedTensorFactory:
            shard.build_fn = _asking(leaf)
        flat = ours is ShardedTensor and shard.flattened_range is not None
        return _unflattened(shard) if flat else shard

    return translate


def _asking(factory: Any) -> Callable[..., Any]:
    """The ``build_fn`` that asks the factory itself, whose class may have a ``build`` of its own, for ours."""

    def build(
        key: str, data: Any, replica_id: ReplicaId, flattened_range: slice | None
    ) -> Any:
        asked = copy(factory)
        vars(asked).update(
            key=key, data=data, replica_id=replica_id, flattened_range=flattened_range
        )
        return tree.dict_list_map_outplace(native, asked.build())

    return build


def _fields(theirs: type, ours: type) -> list[str]:
    """The fields that both classes have. Warns of those that are theirs alone; the caller keeps the answer."""
    named = f"{theirs.__module__}.{theirs.__name__}"
    there, here = getattr(theirs, "__dataclass_fields__", {}), fields(ours)
    lacking = [f.name for f in here if f.default is MISSING and f.name not in there]
    if lacking:
        raise ShardingError(
            f"{named} has no {', '.join(lacking)}: this version of Megatron-Core is unknown; declare the state with "
            f"megackpt.{ours.__name__}"
        )
    unknown = [name for name in there if name not in {f.name for f in here}]
    if unknown:
        _logger.warning(
            "%s has fields that megackpt does not know and does not look at: %s. What they ask for is not done.",
            named,
            ", ".join(unknown),
        )
    return [f.name for f in here if f.name in there]


def _unflattened(run: ShardedTensor) -> ShardedTensorFactory:
    """A run of elements of a local tensor, in C order: the boxes that they fill in it, views of the same data."""
    span, data = run.flattened_range or slice(0, 0), run.data
    check_flat_range(run, data, span)
    return declare_flat_range(replace(run, data=None, flattened_range=None), data, span)
