"""An optimizer's parameter groups: matched on load by identity, not by position.

A checkpoint holds them as a list of hyperparameters in the common state, like Megatron-Core's
checkpoints. The lists of parameters are not stored: each rank keeps its list.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from megackpt import tree
from megackpt.errors import MismatchError, join_truncated
from megackpt.state import FactoryBuildFn, FactoryMergeFn, ShardedTensorFactory

Group = dict[str, Any]

IDENTIFYING = (
    "name",
    "wd_mult",
    "lr_mult",
    "is_expert_parallel",
    "is_decoupled_lr",
    "default_config",
)
"""Hyperparameters that identify a group: a name given by the user, and what Megatron groups by."""

_LOCAL = ("params", "param_names")  # local to each rank
_LONGEST_TEXT = 200
"""Characters. Longer texts of values are compared by a digest."""

_logger = logging.getLogger(__name__)


@dataclass
class GroupsFactory(ShardedTensorFactory):
    """The groups of one optimizer in a state dict. Its data are the groups.

    A load returns the stored groups, in the order of these. It raises MismatchError for groups
    that the checkpoint lacks, or that could be several.

    Attributes:
        keys: number of a parameter -> its key.
        numbers: number of a parameter -> numbers of its group in the checkpoint (several where the
            parameter was saved as several). The load fills it before it merges the groups. None if
            hyperparameters identify the groups.
    """

    build_fn: FactoryBuildFn = field(init=False, repr=False)
    merge_fn: FactoryMergeFn = field(init=False, repr=False)
    keys: Mapping[int, str] = field(default_factory=dict, repr=False)
    numbers: dict[int, set[int]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.build_fn = self._build
        self.merge_fn = self._merge
        groups = self.data or []  # None in a declaration without data
        keys = _identifying_keys(groups)
        if len({_text(_identity(group, keys)) for group in groups}) < len(groups):
            self.numbers = {}

    def keep(self, param: int, loaded: list[Any]) -> None:
        """Take the loaded numbers of a parameter's group."""
        if self.numbers is not None:
            self.numbers[param] = {int(number) for number in loaded}

    def _build(self, _key: str, data: Any, *_: Any) -> list[Group]:
        if self.numbers is not None:
            self.numbers.clear()
        return [_hyperparameters(group) for group in data]

    def _merge(self, stored: list[Group]) -> list[Group]:
        found = [self._find(group, stored) for group in self.data]
        taken = [number for numbers in found for number in numbers]
        free = [number for number in range(len(stored)) if number not in taken]
        unknown = found.count([])
        # A rank may have no parameter of a group, such as a pipeline stage. Such groups take the
        # free stored ones in order. One free and one unknown group are the same.
        same = len(free) == unknown == 1
        guessed = unknown > len(free) or not tree.are_alike([stored[n] for n in free])
        if free and unknown and guessed and not same:
            _logger.warning(
                "%d groups have no parameter on this rank, so their stored groups are taken in "
                "order; a save stores the values of ranks that have parameters of them",
                unknown,
            )
        for group, numbers in zip(self.data, found, strict=True):
            if group["params"] and not numbers and free and not same:
                raise self._mismatch(
                    group,
                    "is unknown (no number of a group is stored with its parameters) in the "
                    "checkpoint",
                    [stored[number] for number in free],
                )
        sources: list[int] = []
        result = []
        for group, numbers in zip(self.data, found, strict=True):
            if not numbers and free:
                numbers = [free.pop(0)]
            loaded = group
            if numbers:
                sources.append(numbers[0])
                loaded = copy.deepcopy(_hyperparameters(stored[numbers[0]]))
            local = {key: group[key] for key in _LOCAL if key in group}
            result.append(loaded | local)
        for number, group in enumerate(stored):
            if number in free:
                _logger.warning(
                    "the checkpoint has a group of parameters that is gone: %s",
                    _describe(group),
                )
            elif sources.count(number) > 1:
                _logger.warning(
                    "several groups of parameters were one when they were saved, and all have its "
                    "hyperparameters now; set those that differ after the load: %s",
                    _describe(group),
                )
        return result

    def _find(self, group: Group, stored: list[Group]) -> list[int]:
        """The stored groups, all equal, that became this one. None for a group without numbers."""
        if len(self.data) == len(stored) == 1:
            return [0]
        found = []
        if self.numbers is None:
            problem = "could be any of several groups in the checkpoint"
            keys = _identifying_keys(self.data, stored)
            identity = _identity(group, keys)
            for number, other in enumerate(stored):
                if _identity(other, keys) == identity:
                    found.append(number)
            if not found:
                raise self._mismatch(group, "is not in the checkpoint", stored)
        else:
            problem = "is several groups in the checkpoint"
            numbers = set[int]()
            for param in group["params"]:
                numbers |= self.numbers.get(param, set())
            found = sorted(numbers.intersection(range(len(stored))))
        candidates = [stored[number] for number in found]
        if not tree.are_alike(candidates):
            raise self._mismatch(group, problem, candidates)
        return found

    def _mismatch(
        self, group: Group, problem: str, candidates: Sequence[Group]
    ) -> MismatchError:
        keys = [repr(self.keys[n]) for n in group["params"] if n in self.keys]
        own = join_truncated(keys, 3, ", ")
        if not keys or _identity(group):
            own = _describe(group)
        there = "; ".join(map(_describe, candidates)) or "none"
        return MismatchError(
            f"the group of parameters {own} {problem}, which has: {there}. Build the optimizer "
            "with the groups that it was saved with, load, and change them afterwards; groups "
            "that have a 'name' are matched by it"
        )


def _identifying_keys(*lists: Sequence[Group]) -> list[str]:
    """The identifying hyperparameters that all groups have; only names, if all names differ."""
    identities = [_identity(group) for groups in lists for group in groups]
    keys = [key for key in IDENTIFYING if all(key in own for own in identities)]
    if "name" in keys:
        for groups in lists:
            if len({repr(group.get("name")) for group in groups}) < len(groups):
                return keys
        return ["name"]
    return keys


def _identity(group: Group, keys: Sequence[str] = IDENTIFYING) -> Group:
    """The identifying hyperparameters of a group. NeMo's have the prefix ``pre_``."""
    found = {}
    for key in keys:
        for name in (f"pre_{key}", key):
            if name in group:
                found[key] = group[name]
    return found


def _describe(group: Group) -> str:
    if "name" in group:
        return repr(group["name"])
    shown = []
    for key, value in (_identity(group) or group).items():
        if key in IDENTIFYING or isinstance(value, (int, float)):
            shown.append(f"{key}={value}")
    return f"({', '.join(shown[:6])})"


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
            if named:
                which = f"name={group['name']!r}"
            else:
                which = f"{i} of {len(groups)}"
            texts = {}
            for key, value in _hyperparameters(group).items():
                text = _text(value)
                if len(text) > _LONGEST_TEXT:
                    text = f"{text[:60]}... ({_digest(text.encode())})"
                texts[tree.show((key,))] = text
            needed = bool(group.get("params"))
            held[f"{tree.show(path)}[{which}]"] = HeldGroup((*path, i), needed, texts)
    return held


def _text(value: Any) -> str:
    """Text that is the same for equal values on any rank and device, and different otherwise.

    Values that cannot be pickled are compared by their type.
    """
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        try:
            plain = value.tolist()
        except Exception:  # noqa: BLE001 - tensors without plain elements raise anything
            plain = value
        if type(plain) is not type(value):
            return _text(plain)
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
        return value.type  # The index depends on the rank.
    if value is None or isinstance(value, str):
        return repr(value)
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=4)
    pickler.fast = True  # Without a memo, shared and equal objects look the same.
    try:
        pickler.dump(value)
    except Exception:  # noqa: BLE001 - the code of the value may raise anything
        return type(value).__name__
    return f"{type(value).__name__} {_digest(buffer.getvalue())}"


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()
