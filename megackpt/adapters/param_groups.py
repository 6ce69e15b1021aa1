"""Groups of an optimizer's parameters: on load matched by what they are, never by their number.

In a checkpoint they are a list in the common state, as Megatron-Core keeps them: hyperparameters, without parameters.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from megackpt import tree
from megackpt.errors import MismatchError
from megackpt.state import ReplicaId, ShardedTensorFactory

Group = dict[str, Any]

IDENTIFYING = (
    "name",
    "wd_mult",
    "lr_mult",
    "is_expert_parallel",
    "is_decoupled_lr",
    "default_config",
)
"""What says which group is which. The first is for people to give; of the others Megatron-Core makes its groups."""
_LOCAL = ("params", "param_names")  # what each rank keeps for itself

_FEW = 16  # elements of a tensor that are told by their values

_logger = logging.getLogger(__name__)


def told_apart(groups: Sequence[Group]) -> bool:
    """Do their names or other identifying hyperparameters say which group is which?"""
    keys = _identifying(groups)
    return len({_text(_kind(group, keys)) for group in groups}) == len(groups)


class GroupsFactory(ShardedTensorFactory):
    """The groups of one optimizer in a state dict; its data are the groups."""


def declared_groups(
    groups: Sequence[Group],
    before: dict[int, set[int]] | None,
    names: Mapping[int, str],
) -> GroupsFactory:
    """The groups for a state dict, in whose place a load puts the stored ones in the order of these.

    ``before``: number of a parameter -> the number of its group when it was saved (several, where several parameters
    were saved). A load empties it at its beginning and fills it, with what is stored only, before it asks for the
    groups. None where the groups are told apart without.
    ``names``: number of a parameter -> its key.
    A load raises MismatchError for groups that the checkpoint does not have, and where it cannot tell which is which.
    """

    def build(
        _key: str, data: Any, _replica_id: ReplicaId, _: slice | None
    ) -> list[Group]:
        if before is not None:
            before.clear()
        return [_hyperparameters(group) for group in data]

    def merge(stored: list[Group]) -> list[Group]:
        return _Matching(groups, stored, before, names).groups()

    return GroupsFactory("optimizer.param_groups", list(groups), build, merge)


@dataclass(frozen=True)
class HeldGroup:
    """One group as one rank has it, for other ranks to compare."""

    path: tree.Path  # in this rank's common state
    needed: bool  # this rank has parameters of it
    texts: Mapping[str, str]  # its hyperparameters
    values: bytes = b""  # pickled, where they travel


def held_groups(
    factories: Sequence[tuple[tree.Path, ShardedTensorFactory]],
) -> dict[str, HeldGroup]:
    """This rank's groups, by what says which is which for all ranks: their names, or their place among so many."""
    held: dict[str, HeldGroup] = {}
    for path, factory in factories:
        if isinstance(factory, GroupsFactory):
            groups = factory.data
            named = _identifying(groups) == ["name"]
            for i, group in enumerate(groups):
                which = f"name={group['name']!r}" if named else f"{i} of {len(groups)}"
                texts = {
                    tree.show((key,)): _text(value)
                    for key, value in _hyperparameters(group).items()
                }
                held[f"{tree.show(path)}[{which}]"] = HeldGroup(
                    (*path, i), bool(group.get("params")), texts
                )
    return held


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
        unknown = [
            group
            for group, numbers in zip(self.ours, sources, strict=True)
            if not numbers
        ]
        if free and len(free) + len(unknown) > 2:
            for group in unknown:
                if group["params"]:
                    how = "is unknown (no number of a group is stored with its parameters) in the checkpoint"
                    raise self.mismatch(group, free, how)
            if unknown and not (len(unknown) <= len(free) and self.alike(free)):
                _logger.warning(
                    "of %d groups without a parameter on this rank nothing tells which they were: the stored ones that "
                    "are left are taken in their order; a save stores what ranks with parameters of them have",
                    len(unknown),
                )
        found = [
            numbers[0] if numbers else free.pop(0) if free else None
            for numbers in sources
        ]
        for i in free:
            _logger.warning(
                "the checkpoint has a group of parameters that is gone: %s",
                self.told(i),
            )
        for i in {i for i in found if i is not None and found.count(i) > 1}:
            _logger.warning(
                "several groups of parameters were one when they were saved, and all have its hyperparameters now; "
                "set what is to differ after the load: %s",
                self.told(i),
            )
        return [
            group
            if i is None
            else copy.deepcopy(_hyperparameters(self.stored[i]))
            | {k: group[k] for k in _LOCAL if k in group}
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
            how = (
                "could be any of several groups in the checkpoint"
                if found
                else "is not in the checkpoint"
            )
        else:
            said = {i for n in group["params"] for i in self.before.get(n, ())}
            found = [i for i in everything if i in said]
            how = "is several groups in the checkpoint"
        if (found or self.before is not None) and self.alike(found):
            return found
        raise self.mismatch(group, found or everything, how)

    def alike(self, numbers: Sequence[int]) -> bool:
        return not any(
            any(tree.diff(self.stored[numbers[0]], self.stored[i])) for i in numbers[1:]
        )

    def mismatch(
        self, group: Group, candidates: Sequence[int], how: str
    ) -> MismatchError:
        what = self.names_of(group) or _described(group)
        there = "; ".join(self.told(i) for i in candidates) or "none"
        new = [
            key
            for key in IDENTIFYING
            if key in group and not any(key in other for other in self.stored)
        ]
        without = f" (without {new[0]!r}, which those have not)" if new else ""
        return MismatchError(
            f"the group of parameters {what} {how}, which has: {there}. Build the optimizer with the groups that it "
            f"was saved with{without}, load, and change them afterwards; groups that have a 'name' are known by it"
        )

    def told(self, number: int) -> str:
        group = {
            "params": [
                n for n in self.names if number in (self.before or {}).get(n, ())
            ]
        }
        keys = self.names_of(group)
        return f"{_described(self.stored[number])}{f' of {keys}' if keys else ''}"

    def names_of(self, group: Group) -> str:
        if any(key in group for key in IDENTIFYING):
            return _described(group)
        keys = [repr(self.names[n]) for n in group["params"] if n in self.names]
        return ", ".join(keys[:3]) + (
            f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        )


def _identifying(*lists: Sequence[Group]) -> list[str]:
    """The identifying hyperparameters that all groups have; names alone, where all are different.

    Megatron's may have the prefix ``pre_``.
    """
    every = [group for groups in lists for group in groups]
    keys = [
        key
        for key in IDENTIFYING
        if all(key in group or f"pre_{key}" in group for group in every)
    ]
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
    shown = known or [
        key for key, value in group.items() if isinstance(value, (int, float))
    ]
    return "(" + ", ".join(f"{key}={group[key]}" for key in shown[:6]) + ")"


def _hyperparameters(group: Group) -> Group:
    return {key: value for key, value in group.items() if key not in _LOCAL}


def _text(value: Any) -> str:
    """The same for equal values on any rank and device, another for others; of what cannot be pickled, its kind."""
    plain = (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
    )
    if plain and not value.is_quantized and not value.is_nested:
        return _text_of_tensor(value.detach())
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return _text(value.item())
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{_text(k)}: {_text(v)}' for k, v in value.items()))}}}"
    if isinstance(value, (bool, int, float)):
        return repr(
            int(value)
            if isinstance(value, int) and abs(value) > 2**53
            else float(value)
        )
    if isinstance(value, torch.device):  # each rank has one of its own
        return value.type
    return (
        repr(value)
        if value is None or isinstance(value, str)
        else _text_of_object(value)
    )


def _text_of_tensor(value: torch.Tensor) -> str:
    if not value.is_meta and value.numel() <= _FEW:
        return _text(value.tolist())
    told = f"{value.dtype} {tuple(value.shape)}"
    if value.is_meta:
        return f"{told} on meta"
    flat = (
        value.cpu()
        .resolve_conj()
        .resolve_neg()
        .reshape(-1)
        .contiguous()
        .view(torch.uint8)
    )
    return f"{told} {blake2b(flat.numpy().data, digest_size=8).hexdigest()}"


def _text_of_object(value: Any) -> str:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=4)
    pickler.fast = True  # equal values look alike, be they one object or several
    try:
        pickler.dump(value)
    except Exception:  # noqa: BLE001 - the values' own code, which may raise anything
        return type(value).__name__
    return f"{type(value).__name__} {blake2b(buffer.getbuffer(), digest_size=8).hexdigest()}"
