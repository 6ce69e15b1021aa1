"""Groups of an optimizer's parameters: on load matched by what they are, never by their number.

In a checkpoint they are a list in the common state, as Megatron-Core keeps them: hyperparameters, without parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

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


def declared_groups(
    groups: Sequence[Group], before: dict[int, int] | None, names: Mapping[int, str]
) -> ShardedTensorFactory:
    """The groups for a state dict, in whose place a load puts the stored ones in the order of these.

    ``before``: number of a parameter -> the number of its group when it was saved. A load empties it at its beginning
    and fills it, with what is stored only, before it asks for the groups. None where the groups are told apart without.
    ``names``: number of a parameter -> its key.
    A load raises MismatchError for groups that the checkpoint does not have, and where it cannot tell which is which.
    """

    def build(_key: str, data: Any, _replica_id: ReplicaId, _: slice | None) -> list[Group]:
        if before is not None:
            before.clear()
        return [{key: value for key, value in group.items() if key not in _LOCAL} for group in data]

    def merge(stored: list[Group]) -> list[Group]:
        return _Matching(groups, stored, before, names).groups()

    return ShardedTensorFactory("optimizer.param_groups", list(groups), build, merge)


class _Matching:
    """The stored group that each group of an optimizer was."""

    def __init__(
        self,
        groups: Sequence[Group],
        stored: Sequence[Group],
        before: Mapping[int, int] | None,
        names: Mapping[int, str],
    ) -> None:
        self.ours, self.stored, self.before, self.names = groups, stored, before, names
        self.keys = _identifying([*groups, *stored])

    def groups(self) -> list[Group]:
        found = [self.source(group) for group in self.ours]
        free = [i for i in range(len(self.stored)) if i not in found]
        unknown = [group for group, i in zip(self.ours, found, strict=True) if i is None]
        if free and len(free) + len(unknown) > 2:
            for group in unknown:
                if group["params"]:
                    raise self.mismatch(
                        group, free, "unknown (no number of a group is stored with its parameters)"
                    )
        found = [free.pop(0) if i is None and free else i for i in found]  # no parameter of these tells
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
            else {key: value for key, value in self.stored[i].items() if key not in _LOCAL}
            | {key: group[key] for key in _LOCAL if key in group}
            for group, i in zip(self.ours, found, strict=True)
        ]

    def source(self, group: Group) -> int | None:
        """The number of the stored group; None for one without any parameter that could tell."""
        if len(self.ours) == len(self.stored) == 1:
            return 0
        if self.before is not None:
            candidates = sorted({self.before[n] for n in group["params"] if n in self.before})
            candidates = [i for i in candidates if 0 <= i < len(self.stored)]
            if not candidates:
                return None
        else:
            kind = _kind(group, self.keys)
            candidates = [i for i, other in enumerate(self.stored) if _kind(other, self.keys) == kind]
        if len({repr(self.stored[i]) for i in candidates}) == 1:
            return candidates[0]
        raise self.mismatch(
            group, candidates or range(len(self.stored)), "several groups" if candidates else "not"
        )

    def mismatch(self, group: Group, candidates: Sequence[int], how: str) -> MismatchError:
        what = self.names_of(group) or _described(group)
        there = "; ".join(self.told(i) for i in candidates) or "none"
        return MismatchError(
            f"the group of parameters {what} is {how} in the checkpoint, which has: {there}. Build the optimizer with "
            "the groups that it was saved with, load, and change them afterwards; groups that have a 'name' are known "
            "by it"
        )

    def told(self, number: int) -> str:
        group = {"params": [n for n in self.names if (self.before or {}).get(n) == number]}
        keys = self.names_of(group)
        return f"{_described(self.stored[number])}{f' of {keys}' if keys else ''}"

    def names_of(self, group: Group) -> str:
        if any(key in group for key in IDENTIFYING):
            return _described(group)
        keys = [repr(self.names[n]) for n in group["params"] if n in self.names]
        return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def _identifying(groups: Sequence[Group]) -> list[str]:
    """The identifying hyperparameters that all groups have; Megatron's may have the prefix ``pre_``."""
    return [key for key in IDENTIFYING if all(key in group or f"pre_{key}" in group for group in groups)]


def _kind(group: Group, keys: Sequence[str]) -> list[Any]:
    return [group[key] if key in group else group[f"pre_{key}"] for key in keys]


def _described(group: Group) -> str:
    if "name" in group:
        return repr(group["name"])
    known = [key for key in group if key.removeprefix("pre_") in IDENTIFYING]
    shown = known or [key for key, value in group.items() if isinstance(value, (int, float))]
    return "(" + ", ".join(f"{key}={group[key]}" for key in shown[:6]) + ")"
