"""Groups of an optimizer's parameters: on load matched by what they are, never by their number.

In a checkpoint they are a list in the common state, as Megatron-Core keeps them: hyperparameters, without parameters.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from megackpt import tree
from megackpt.errors import MismatchError
from megackpt.sharded import ReplicaId, ShardedTensorFactory

Group = dict[str, Any]

IDENTIFYING = ("name", "wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "default_config")
"""What says which group is which. The first is for people to give; of the others Megatron-Core makes its groups."""
_LOCAL = ("params", "param_names")  # what each rank keeps for itself

_logger = logging.getLogger(__name__)


def told_apart(groups: Sequence[Group]) -> bool:
    """Do their names or other identifying hyperparameters say which group is which?"""
    kinds = [_kind(group, _identifying(groups)) for group in groups]
    return all(kind not in kinds[:i] for i, kind in enumerate(kinds))


class GroupsFactory(ShardedTensorFactory):
    """The groups of one optimizer in a state dict; its data are the groups."""


def declared_groups(
    groups: Sequence[Group], before: dict[int, set[int]] | None, names: Mapping[int, str]
) -> GroupsFactory:
    """The groups for a state dict, in whose place a load puts the stored ones in the order of these.

    ``before``: number of a parameter -> the number of its group when it was saved (several, where several parameters
    were saved). A load empties it at its beginning and fills it, with what is stored only, before it asks for the
    groups. None where the groups are told apart without.
    ``names``: number of a parameter -> its key.
    A load raises MismatchError for groups that the checkpoint does not have, and where it cannot tell which is which.
    """

    def build(_key: str, data: Any, _replica_id: ReplicaId, _: slice | None) -> list[Group]:
        if before is not None:
            before.clear()
        return [_hyperparameters(group) for group in data]

    def merge(stored: list[Group]) -> list[Group]:
        return _Matching(groups, stored, before, names).groups()

    return GroupsFactory("optimizer.param_groups", list(groups), build, merge)


def stored_and_needed(
    factories: Sequence[tuple[tree.Path, ShardedTensorFactory]],
) -> tuple[dict[str, str], dict[str, str]]:
    """Hyperparameters as texts, by their places: those that rank 0 would store, and those of groups of which this rank
    has parameters. A save needs the latter of all ranks to be among the former of rank 0, or they would be lost."""
    stored, needed = dict[str, str](), dict[str, str]()
    for path, factory in factories:
        if isinstance(factory, GroupsFactory):
            count = {f"{tree.show(path)}, their number": str(len(factory.data))}
            stored |= count
            needed |= count
            for i, group in enumerate(factory.data):
                texts = {tree.show((*path, i, k)): _text(v) for k, v in _hyperparameters(group).items()}
                stored |= texts
                needed |= texts if group.get("params") else {}
    return stored, needed


class _Matching:
    """The stored group that each group of an optimizer was."""

    def __init__(
        self,
        groups: Sequence[Group],
        stored: Sequence[Group],
        before: Mapping[int, Collection[int]] | None,
        names: Mapping[int, str],
    ) -> None:
        self.ours, self.stored, self.before, self.names = groups, stored, before, names
        self.keys = _identifying(groups, stored)

    def groups(self) -> list[Group]:
        sources = [self.sources(group) for group in self.ours]
        known = {i for numbers in sources for i in numbers}
        free = [i for i in range(len(self.stored)) if i not in known]
        unknown = [group for group, numbers in zip(self.ours, sources, strict=True) if not numbers]
        if free and len(free) + len(unknown) > 2:
            for group in unknown:
                if group["params"]:
                    how = "is unknown (no number of a group is stored with its parameters) in the checkpoint"
                    raise self.mismatch(group, free, how)
            if unknown and not (len(unknown) <= len(free) and self.alike(free)):
                _logger.warning(
                    "of %d groups without a parameter on this rank nothing tells which they were: the stored ones that "
                    "are left are taken in their order. A save is refused where that was wrong; give groups names",
                    len(unknown),
                )
        found = [numbers[0] if numbers else free.pop(0) if free else None for numbers in sources]
        for i in free:
            _logger.warning("the checkpoint has a group of parameters that is gone: %s", self.told(i))
        for i in {i for i in found if i is not None and found.count(i) > 1}:
            _logger.warning(
                "several groups of parameters were one when they were saved, and all have its hyperparameters now; "
                "set what is to differ after the load: %s",
                self.told(i),
            )
        return [
            group
            if i is None
            else copy.deepcopy(_hyperparameters(self.stored[i])) | {k: group[k] for k in _LOCAL if k in group}
            for group, i in zip(self.ours, found, strict=True)
        ]

    def sources(self, group: Group) -> list[int]:
        """The numbers of the stored groups, all alike, that it was; none for one without any parameter that tells."""
        everything = range(len(self.stored))
        if len(self.ours) == len(self.stored) == 1:
            return [0]
        if self.before is None:
            kind = _kind(group, self.keys)
            found = [i for i in everything if _kind(self.stored[i], self.keys) == kind]
            how = "could be any of several groups in the checkpoint" if found else "is not in the checkpoint"
        else:
            said = {i for n in group["params"] for i in self.before.get(n, ())}
            found = [i for i in everything if i in said]
            how = "is several groups in the checkpoint"
        if (found or self.before is not None) and self.alike(found):
            return found
        raise self.mismatch(group, found or everything, how)

    def alike(self, numbers: Sequence[int]) -> bool:
        return not any(any(tree.diff(self.stored[numbers[0]], self.stored[i])) for i in numbers[1:])

    def mismatch(self, group: Group, candidates: Sequence[int], how: str) -> MismatchError:
        what = self.names_of(group) or _described(group)
        there = "; ".join(self.told(i) for i in candidates) or "none"
        new = [key for key in IDENTIFYING if key in group and not any(key in other for other in self.stored)]
        without = f" (without {new[0]!r}, which those have not)" if new else ""
        return MismatchError(
            f"the group of parameters {what} {how}, which has: {there}. Build the optimizer with the groups that it "
            f"was saved with{without}, load, and change them afterwards; groups that have a 'name' are known by it"
        )

    def told(self, number: int) -> str:
        group = {"params": [n for n in self.names if number in (self.before or {}).get(n, ())]}
        keys = self.names_of(group)
        return f"{_described(self.stored[number])}{f' of {keys}' if keys else ''}"

    def names_of(self, group: Group) -> str:
        if any(key in group for key in IDENTIFYING):
            return _described(group)
        keys = [repr(self.names[n]) for n in group["params"] if n in self.names]
        return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def _identifying(*lists: Sequence[Group]) -> list[str]:
    """The identifying hyperparameters that all groups have; names alone, where all are different.

    Megatron's may have the prefix ``pre_``.
    """
    every = [group for groups in lists for group in groups]
    keys = [key for key in IDENTIFYING if all(key in group or f"pre_{key}" in group for group in every)]
    named = "name" in keys and all(
        len({repr(g.get("name")) for g in groups}) == len(groups) for groups in lists
    )
    return ["name"] if named else keys


def _kind(group: Group, keys: Sequence[str]) -> list[Any]:
    return [group[key] if key in group else group[f"pre_{key}"] for key in keys]


def _described(group: Group) -> str:
    if "name" in group:
        return repr(group["name"])
    known = [key for key in group if key.removeprefix("pre_") in IDENTIFYING]
    shown = known or [key for key, value in group.items() if isinstance(value, (int, float))]
    return "(" + ", ".join(f"{key}={group[key]}" for key in shown[:6]) + ")"


def _hyperparameters(group: Group) -> Group:
    return {key: value for key, value in group.items() if key not in _LOCAL}


def _text(value: Any) -> str:
    """The same for equal values on any rank and device; of what is no plain value, its kind."""
    if isinstance(value, torch.Tensor):
        return _text(value.tolist())
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, (bool, int, float)):
        return repr(float(value))
    return repr(value) if value is None or isinstance(value, str) else type(value).__name__
