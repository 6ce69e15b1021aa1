"""The values of the dicts and objects that a manager is given by name.

A save may store values outside of the common state. The common state then notes their places. A
restore asks for all values below a name, and returns the values to these places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from megackpt import limits, tree
from megackpt.errors import MismatchError
from megackpt.loader.load_session import whole
from megackpt.planning.manifest import Manifest
from megackpt.staging.source import pieces
from megackpt.state import (
    Placed,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    joined,
)
from megackpt.storage import digest

PLACES = "megackpt_places"
"""Key of the common state: for each object its dicts and lists, with keys in place of tensors."""
_VALUES = "megackpt_values"


def _key(leaf: Any) -> str | None:
    return leaf.key if isinstance(leaf, ShardedBase) else None


def note_places(declared: ShardedStateDict, names: Iterable[str]) -> None:
    """Note in ``declared`` where the tensors of these objects are."""
    places = {}
    for name in names:
        keys = tree.dict_list_map_outplace(_key, declared[name])
        if any(tree.nested_values(keys)):
            places[name] = keys
    if places:
        declared[PLACES] = places


def ask_for_all(
    declared: ShardedStateDict,
    objects: Mapping[str, Any],
    manifest: Manifest,
    rank: int,
    ranks: int,
) -> None:
    """Ask in ``declared`` for all that is stored below these objects.

    An object other than a dict that has tensors is asked for where it is empty. Tensors are whole.
    For an object of one axis, such as a ``PerRank``, each rank gets the cell of its number.

    Args:
        rank, ranks: this rank's number, and how many ranks ask.
    """
    prefixes: tuple[str, ...] = ()
    for name, value in objects.items():
        leaves = dict(tree.walk(declared[name], empties=True, above=(name,)))
        if isinstance(value, dict) or not any(map(_key, leaves.values())):
            leaves[name,] = None
        for path, leaf in leaves.items():
            if leaf is None or tree.is_branch(leaf):
                prefixes += ("".join(f"{step}." for step in path),)
    asked = set(map(_key, tree.nested_values(declared)))
    found: dict[str, ShardedTensor | ShardedObject] = {}
    for entry in manifest.tensors:
        key, meta = entry
        if key in asked or not f"{key}.".startswith(prefixes):
            continue
        if not meta.is_object:
            found[key] = whole(entry, rank)
        elif len(meta.shape) == 1:
            # All ranks together must ask for every cell.
            for cell in range(rank, *meta.shape, ranks):
                name = key if cell == rank else f"/{key}/{cell}"
                found[name] = ShardedObject(key, None, meta.shape, (cell,))
    declared[_VALUES] = found


def put_back(state: dict[Any, Any], names: Iterable[str]) -> None:
    """Put the loaded values of ``ask_for_all`` at their places."""
    values = state.pop(_VALUES, {})
    places = state.pop(PLACES, {})

    def place(key: str | None) -> Placed | None:
        return Placed(values[key], replaces=False) if key in values else None

    for name in names:
        above = f"{name}."
        # An earlier release has noted no places.
        keys = places.get(name) or {
            key.removeprefix(above): key for key in values if key.startswith(above)
        }
        if keys:
            placed = tree.dict_list_map_outplace(place, keys)
            state[name] = joined(state.get(name), placed, (name,))


def with_digests(
    declared: ShardedStateDict,
    names: Iterable[str],
    comparable: Callable[[Any], Any] | None,
    common: Any,
) -> Any:
    """The view of the common state that ranks compare, with digests of small tensors, by key."""
    view = common if comparable is None else comparable(common)
    if isinstance(view, dict):
        view.pop(PLACES, None)
        for leaf in tree.nested_values([declared[name] for name in names]):
            if (
                isinstance(leaf, ShardedTensor)
                and leaf.local_shape == leaf.global_shape
            ):
                data: Any = leaf.data
                if data.nbytes < limits.COMMON_STATE_WARNING_BYTES:
                    view[leaf.key] = digest(b"".join(pieces(data.detach())))
    return view


def refuse_undeclared(asked: ShardedStateDict | None, state: Mapping[Any, Any]) -> None:
    """MismatchError if ``asked`` has plain tensors and ``state`` has none of its keys."""
    asked = asked or {}
    leaves = tree.nested_values(asked)
    if asked.keys().isdisjoint(state) and any(
        isinstance(leaf, torch.Tensor) for leaf in leaves
    ):
        raise MismatchError(
            "nothing is loaded: the state dict has plain tensors and declares none. After "
            "save(step, model=net) call restore(model=net); after a save of a state dict, "
            "restore(megackpt.sharded(state_dict))"
        )
