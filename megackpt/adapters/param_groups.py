"""An optimizer's parameter groups: matched on load by identity, not by position.

A checkpoint holds them as a list of hyperparameters in the common state, as Megatron-Core's do.
The lists of parameters are not stored: each rank keeps its own.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from megackpt import tree
from megackpt.errors import MismatchError
from megackpt.state import ReplicaId, ShardedTensorFactory

Group = dict[str, Any]

GroupNumbers = dict[int, set[int]]
"""Number of a parameter -> the numbers that its group had when it was saved.

More than one where the parameter was saved as several.
"""

IDENTIFYING = (
    "name",
    "wd_mult",
    "lr_mult",
    "is_expert_parallel",
    "is_decoupled_lr",
    "default_config",
)
"""Hyperparameters that identify a group: a name given by the user, and what Megatron groups by."""

_LOCAL = ("params", "param_names")  # each rank's own
_SHORT_TENSOR = 16
"""Elements up to which a tensor is compared and shown by its values, not by a digest."""

_logger = logging.getLogger(__name__)


def are_identified(groups: Sequence[Group]) -> bool:
    """Whether names or other identifying hyperparameters are distinct."""
    keys = _identifying_keys(groups)
    return len({_text(_identity(group, keys)) for group in groups}) == len(groups)


class GroupsFactory(ShardedTensorFactory):
    """The groups of one optimizer in a state dict. Its data are the groups."""


def declare_groups(
    groups: Sequence[Group],
    numbers: GroupNumbers | None,
    keys: Mapping[int, str],
) -> GroupsFactory:
    """The groups for a state dict. A load returns the stored ones, in the order of these.

    ``numbers``: filled by the load before the groups are merged; emptied when it begins. None:
    the groups are identified by their hyperparameters. ``keys``: number of a parameter -> its key.
    A load raises MismatchError for groups that the checkpoint lacks, or that could be several.
    """
    matcher = _GroupMatcher(groups, numbers, keys)
    return GroupsFactory(
        "optimizer.param_groups", list(groups), matcher.build, matcher.merge
    )


class _GroupMatcher:
    """Finds the stored group of each group of an optimizer."""

    def __init__(
        self,
        groups: Sequence[Group],
        numbers: GroupNumbers | None,
        keys: Mapping[int, str],
    ) -> None:
        self._groups = groups
        self._numbers = numbers
        self._keys = keys

    def build(
        self,
        _key: str,
        data: Any,
        _replica_id: ReplicaId,
        _range: slice | None,
    ) -> list[Group]:
        if self._numbers is not None:
            self._numbers.clear()
        return [_hyperparameters(group) for group in data]

    def merge(self, stored: list[Group]) -> list[Group]:
        matches = [self._matches(group, stored) for group in self._groups]
        matched = {number for numbers in matches for number in numbers}
        free = [number for number in range(len(stored)) if number not in matched]
        unknown = [
            own for own, found in zip(self._groups, matches, strict=True) if not found
        ]
        self._check_unknown(unknown, free, stored)
        sources: list[int | None] = []
        result = []
        for group, found in zip(self._groups, matches, strict=True):
            source = found[0] if found else None
            if source is None and free:
                source = free.pop(0)
            sources.append(source)
            if source is None:
                result.append(group)
                continue
            local = {key: group[key] for key in _LOCAL if key in group}
            result.append(copy.deepcopy(_hyperparameters(stored[source])) | local)
        for number in free:
            _logger.warning(
                "the checkpoint has a group of parameters that is gone: %s",
                self._describe_stored(number, stored),
            )
        for number in range(len(stored)):
            if sources.count(number) > 1:
                _logger.warning(
                    "several groups of parameters were one when they were saved, and all have its "
                    "hyperparameters now; set those that differ after the load: %s",
                    self._describe_stored(number, stored),
                )
        return result

    def _matches(self, group: Group, stored: list[Group]) -> list[int]:
        """The stored groups, all alike, that became this one. None for a group without numbers."""
        if len(self._groups) == len(stored) == 1:
            return [0]
        if self._numbers is None:
            keys = _identifying_keys(self._groups, stored)
            identity = _identity(group, keys)
            found = [
                n for n, own in enumerate(stored) if _identity(own, keys) == identity
            ]
            if not found:
                everything = range(len(stored))
                raise self._mismatch(
                    group, "is not in the checkpoint", everything, stored
                )
            problem = "could be any of several groups in the checkpoint"
        else:
            loaded = set[int]().union(
                *(self._numbers.get(n, ()) for n in group["params"])
            )
            found = sorted(loaded.intersection(range(len(stored))))
            problem = "is several groups in the checkpoint"
        if not _are_alike(found, stored):
            raise self._mismatch(group, problem, found, stored)
        return found

    def _check_unknown(
        self,
        unknown: list[Group],
        free: list[int],
        stored: list[Group],
    ) -> None:
        """Groups without numbers take the free stored ones in order, if they have no parameters.

        A rank may have no parameter of a group, such as a pipeline stage. One free stored group
        and one unknown group are the same.
        """
        if not free or len(free) == len(unknown) == 1:
            return
        for group in unknown:
            if group["params"]:
                raise self._mismatch(
                    group,
                    "is unknown (no number of a group is stored with its parameters) in the "
                    "checkpoint",
                    free,
                    stored,
                )
        if unknown and not (len(unknown) <= len(free) and _are_alike(free, stored)):
            _logger.warning(
                "%d groups have no parameter on this rank, so their stored groups are taken in "
                "order; a save stores the values of ranks that have parameters of them",
                len(unknown),
            )

    def _mismatch(
        self,
        group: Group,
        problem: str,
        candidates: Sequence[int],
        stored: list[Group],
    ) -> MismatchError:
        there = [self._describe_stored(number, stored) for number in candidates]
        advice = ""
        for key in IDENTIFYING:
            if key in group and not any(key in other for other in stored):
                advice = f" (without {key!r}, which those have not)"
                break
        return MismatchError(
            f"the group of parameters {self._describe(group)} {problem}, which has: "
            f"{'; '.join(there) or 'none'}. Build the optimizer with the groups that it was saved "
            f"with{advice}, load, and change them afterwards; groups that have a 'name' are "
            "matched by it"
        )

    def _describe(self, group: Group) -> str:
        keys = self._keys_of(group["params"])
        if not keys or any(key in group for key in IDENTIFYING):
            return _describe(group)
        return keys

    def _describe_stored(self, number: int, stored: list[Group]) -> str:
        numbers = self._numbers or {}
        params = [param for param in self._keys if number in numbers.get(param, ())]
        keys = self._keys_of(params)
        return _describe(stored[number]) + (f" of {keys}" if keys else "")

    def _keys_of(self, params: Sequence[int]) -> str:
        keys = [repr(self._keys[number]) for number in params if number in self._keys]
        more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        return ", ".join(keys[:3]) + more


def _are_alike(numbers: Sequence[int], stored: Sequence[Group]) -> bool:
    groups = [stored[number] for number in numbers]
    return not any(any(tree.diff(groups[0], other)) for other in groups[1:])


def _identifying_keys(*lists: Sequence[Group]) -> list[str]:
    """The identifying hyperparameters that all groups have; only names, if all names differ.

    NeMo's have the prefix ``pre_``.
    """
    groups = [group for each in lists for group in each]
    keys = [
        key
        for key in IDENTIFYING
        if all(key in group or f"pre_{key}" in group for group in groups)
    ]
    if "name" in keys:
        for each in lists:
            if len({repr(group.get("name")) for group in each}) < len(each):
                return keys
        return ["name"]
    return keys


def _identity(group: Group, keys: Sequence[str]) -> list[Any]:
    return [group[key] if key in group else group[f"pre_{key}"] for key in keys]


def _describe(group: Group) -> str:
    if "name" in group:
        return repr(group["name"])
    shown = [key for key in group if key.removeprefix("pre_") in IDENTIFYING]
    if not shown:
        shown = [key for key, value in group.items() if isinstance(value, (int, float))]
    return "(" + ", ".join(f"{key}={group[key]}" for key in shown[:6]) + ")"


def _hyperparameters(group: Group) -> Group:
    return {key: value for key, value in group.items() if key not in _LOCAL}


# ---- Groups of several ranks, compared at a save


@dataclass(frozen=True)
class HeldGroup:
    """One rank's copy of a group, for comparison with other ranks."""

    path: tree.Path
    """In this rank's common state."""
    needed: bool
    """Whether this rank has parameters of it."""
    texts: Mapping[str, str]
    """Its hyperparameters."""
    values: bytes = b""
    """Pickled, where they are sent."""


def held_groups(
    factories: Sequence[tuple[tree.Path, ShardedTensorFactory]],
) -> dict[str, HeldGroup]:
    """This rank's groups, by names that are the same on all ranks: name, or number and count."""
    held: dict[str, HeldGroup] = {}
    for path, factory in factories:
        if not isinstance(factory, GroupsFactory):
            continue
        groups = factory.data
        named = _identifying_keys(groups) == ["name"]
        for i, group in enumerate(groups):
            which = f"name={group['name']!r}" if named else f"{i} of {len(groups)}"
            texts = {}
            for key, value in _hyperparameters(group).items():
                texts[tree.show((key,))] = _text(value)
            needed = bool(group.get("params"))
            held[f"{tree.show(path)}[{which}]"] = HeldGroup((*path, i), needed, texts)
    return held


def _text(value: Any) -> str:
    """Equal for equal values on any rank and device, and different for others.

    Values that cannot be pickled are compared by their type.
    """
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        dense = value.layout is torch.strided and not value.is_nested
        if dense and not value.is_quantized:
            return _text_of_tensor(value.detach())
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return _text(value.item())
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, dict):
        items = sorted(f"{_text(key)}: {_text(inner)}" for key, inner in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, int) and abs(value) > 2**53:  # no float has its value
        return repr(int(value))
    if isinstance(value, (bool, int, float)):
        return repr(float(value))
    if isinstance(value, torch.device):
        return value.type  # The index is each rank's own.
    if value is None or isinstance(value, str):
        return repr(value)
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=4)
    pickler.fast = True  # Without a memo, shared and equal objects look the same.
    try:
        pickler.dump(value)
    except Exception:  # noqa: BLE001 - the value's own code may raise anything
        return type(value).__name__
    return f"{type(value).__name__} {_digest(buffer.getbuffer())}"


def _text_of_tensor(value: torch.Tensor) -> str:
    kind = f"{value.dtype} {tuple(value.shape)}"
    if value.is_meta:
        return f"{kind} on meta"
    if value.numel() <= _SHORT_TENSOR:
        return _text(value.tolist())
    host = value.cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
    return f"{kind} {_digest(host.view(torch.uint8).numpy().data)}"


def _digest(data: memoryview) -> str:
    return blake2b(data, digest_size=8).hexdigest()
