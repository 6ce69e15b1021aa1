"""State dicts of ``dcp.save`` and ``dcp.load``, declared for ``megackpt.save`` and ``load``.

torch's planner makes and sends objects for each tensor. Small tensors then take several times as
long as in ``megackpt.save``. States that need no planner are declared in columns instead.
"""

from __future__ import annotations

from typing import Any

from megackpt import tree
from megackpt.adapters.dtensor import sharded
from megackpt.dcp.item_writer import is_plain
from megackpt.errors import ShardingError
from megackpt.saver.save_request import digest_number
from megackpt.state import ShardedObject, ShardedStateDict
from megackpt.state.tensor_subclasses import qualified, rule_named

_ATOMS = {bool, int, float, str, type(None)}


def declare_plain(
    state_dict: dict[str, Any], ranks: list[int] | None
) -> tuple[ShardedStateDict, int]:
    """Declarations under the keys of torch's planner, and a number of these keys.

    ``ranks`` of the world share the state. Raises ShardingError where torch's planner must decide:
    for values but plain tensors, tensors whose class has a rule, DTensors of these, and plain
    values of Python, and for equal keys.
    """
    keys = []
    state = sharded(state_dict, replicated="all", among=ranks)
    for leaf in tree.nested_values(state):
        value = getattr(leaf, "data", leaf)
        local = getattr(value, "_local_tensor", value)  # of a DTensor
        known = is_plain(local) and not local.is_meta
        known = known or rule_named(qualified(type(local))) is not None
        if isinstance(leaf, ShardedObject) and not leaf.global_shape:
            parts = value if type(value) in (list, tuple) else [value]
            known = {*map(type, parts)} <= _ATOMS
        if not known:
            raise ShardingError(f"{value!r:.100} is not a plain value")
        keys.append(leaf.key)
    if len({*keys}) < len(keys):
        raise ShardingError("values of the state dict have equal keys")
    return state, digest_number(repr(keys).encode())
