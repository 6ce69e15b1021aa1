"""Groups of parameters matched with stored ones, by the names of their parameters."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megackpt import tree
from megackpt.errors import MismatchError, join_truncated

Group = Mapping[str, Any]
"""Hyperparameters, and under "params" the names of the parameters."""

_LOCAL = {"params", "param_names"}
_OF_GROUPS = {
    "base_lrs",
    "_last_lr",
    "lr_lambdas",
    "min_lrs",
    "max_lrs",
    "base_momentums",
    "max_momentums",
}
"""Lists of torch's schedulers that have a value for each group."""


class Match(NamedTuple):
    """The result of ``match_groups``.

    ``sources`` has for each group the number of the stored group whose hyperparameters it takes,
    or None; ``values`` has these hyperparameters. ``changes`` describes how groups were regrouped.
    """

    sources: list[int | None]
    values: list[dict[str, Any]]
    changes: list[str]


def match_groups(name: str, own: Sequence[Group], stored: Sequence[Group]) -> Match:
    """Find for each group of the optimizer ``name`` the stored group of its parameters.

    A group without parameters takes the stored group without parameters that has the most equal
    values. Raises MismatchError for a group that was several groups of different hyperparameters.
    """
    holder = {param: i for i, group in enumerate(stored) for param in group["params"]}
    empty = [i for i, group in enumerate(stored) if not group["params"]]
    values = [{k: v for k, v in g.items() if k not in _LOCAL} for g in stored]
    match = Match([], [], [])
    parts = Counter[int]()
    problems: list[str] = []
    for group in own:
        found = sorted({holder[n] for n in group["params"] if n in holder})
        if empty and not group["params"]:
            found = [max(empty, key=lambda i: _count_alike(values[i], group))]
            empty.remove(found[0])
        parts.update(found)
        match.sources.append(found[0] if found else None)
        # Each part of a group that was split gets its separate copy of the values.
        match.values.append(copy.deepcopy(values[found[0]]) if found else {})
        if len(found) > 1:
            keys = dict.fromkeys(key for i in found for key in values[i])
            differing = [
                key
                for key in keys
                if not tree.are_alike([values[i].get(key, match) for i in found])
            ]
            text = "; ".join(_describe(i, stored[i], differing) for i in found)
            (problems if differing else match.changes).append(
                f"one group was several: {text}"
            )
    if problems:
        raise MismatchError(
            f"{name}: values of groups of parameters differ, and {join_truncated(problems)}. Build "
            "the optimizer with the saved groups, restore, and change the groups afterwards"
        )
    for i, count in parts.items():
        if count > 1:
            text = _describe(i, stored[i])
            match.changes.append(
                f"{count} groups were one, and have its values: {text}"
            )
    return match


def in_order(state: Any, own: Any, sources: Sequence[int | None]) -> Any:
    """The stored state of a scheduler, with its lists of groups in the order of ``sources``.

    ``own`` is the present state. It has the values of groups that were not stored.
    """
    result = dict(state)
    for key in _OF_GROUPS & state.keys() & own.keys():
        stored: dict[int | None, Any] = dict(enumerate(state[key]))
        pairs = zip(sources, own[key], strict=False)
        result[key] = [stored.get(source, value) for source, value in pairs]
    if "_schedulers" in state:
        pairs = zip(state["_schedulers"], own["_schedulers"], strict=True)
        result["_schedulers"] = [in_order(*pair, sources) for pair in pairs]
    return result


def _count_alike(group: Group, other: Group) -> int:
    return sum(tree.are_alike([group[k], other[k]]) for k in group.keys() & other)


def _describe(number: int, group: Group, keys: Sequence[str] = ()) -> str:
    shown = [f"{key}={group.get(key)!r}" for key in keys]
    names = join_truncated(list(map(repr, group["params"])), 3, ", ")
    return f"group {number} ({', '.join([names, *shown])})"
