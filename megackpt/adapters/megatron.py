"""Megatron-Core's declarations, converted to megackpt's. Megatron is not imported.

Its classes are recognised by name, so copies of Megatron under another root work, too. Sources:
``dist_checkpointing/mapping.py`` of 0.12.3 and 0.16.1.
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


def from_megatron(leaf: Any) -> Any:
    """Convert one of Megatron's declarations to ours. Other leaves stay as they are.

    The shards of a factory are converted when it builds them. A flattened tensor, which optimizers
    declare up to 0.15, becomes a factory of the boxes that it fills.
    Raises ShardingError for a class that lacks fields which our class needs, and for impossible
    ranges.
    """
    kind: Any = type(leaf)
    convert = _converter(kind)
    if convert is None:
        return leaf
    return convert(leaf)


@lru_cache(maxsize=1024)
def _converter(kind: type) -> Callable[[Any], Any] | None:
    """Converts instances of this class. None for classes that are not Megatron's."""
    base = kind
    for base in kind.__mro__:
        if f".{base.__module__}".endswith(_MODULE):
            break
    else:
        return None
    if base.__name__ == "LocalNonpersistentObject":
        return lambda leaf: LocalNonpersistentObject(leaf.unwrap())
    ours = _OURS.get(base.__name__)
    if ours is None:
        return None
    there = getattr(base, "__dataclass_fields__", {})
    here = [field.name for field in fields(ours)]
    lacking = [
        f.name for f in fields(ours) if f.default is MISSING and f.name not in there
    ]
    if lacking:
        raise ShardingError(
            f"{base.__module__}.{base.__name__} has no {', '.join(lacking)}: this version of "
            f"Megatron-Core is unknown; declare the state with megackpt.{ours.__name__}"
        )
    # Once for each class: the caller keeps the converter.
    if unknown := [name for name in there if name not in here]:
        _logger.warning(
            "%s has fields that megackpt does not know, and ignores: %s",
            f"{base.__module__}.{base.__name__}",
            ", ".join(unknown),
        )
    names = [name for name in here if name in there]
    values = attrgetter(*names)

    def convert(leaf: Any) -> Any:
        shard = ours(**dict(zip(names, values(leaf), strict=True)))
        if isinstance(shard, ShardedTensorFactory):
            shard.build_fn = _build_fn(leaf)
        elif isinstance(shard, ShardedTensor) and shard.flattened_range is not None:
            # A range of the local tensor's elements, in C order.
            data = shard.data
            flat_range = shard.flattened_range
            check_flat_range(shard, data, flat_range)
            whole = replace(shard, data=None, flattened_range=None)
            return declare_flat_range(whole, data, flat_range)
        return shard

    return convert


def _build_fn(factory: Any) -> Callable[..., Any]:
    """A ``build_fn`` for our factory. It calls Megatron's ``build``, which a class may override."""

    def build(
        key: str,
        data: Any,
        replica_id: ReplicaId,
        flattened_range: slice | None,
    ) -> Any:
        theirs = copy(factory)
        vars(theirs).update(
            key=key, data=data, replica_id=replica_id, flattened_range=flattened_range
        )
        return tree.dict_list_map_outplace(from_megatron, theirs.build())

    return build
