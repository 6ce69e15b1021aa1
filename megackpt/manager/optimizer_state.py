"""The stored form of an optimizer's state, under the names of its parameters.

The form is torch's (``get_optimizer_state_dict``), and has the name of the optimizer's class.
A parameter without state has no entry in it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from megackpt import tree
from megackpt.errors import MismatchError, ShardingError, join_truncated
from megackpt.loader.comparison import KeyMap, stored_key
from megackpt.planning.manifest import TensorMeta
from megackpt.state import dtype_named
from megackpt.state.storable import is_distributed

_CLASS = "class"
"""Key of the name of the optimizer's class, which torch's form lacks."""
_APART = ("state", "param_groups", _CLASS)
_NAMED = 6
"""Parameters, or places of a state, that a message names."""


class NamedOptimizer:
    """An optimizer whose parameters have names.

    After ``compare``, ``match`` has the stored values of the groups, and all that differs between
    the stored parameters and groups and the present ones, ``removed`` the names of parameters that
    are gone, and ``settled`` the keys of tensors of present and gone parameters.

    Args:
        name: of the optimizer among the objects, the first part of all keys.
        module: the name of the module that has all parameters.
        names: of the parameters of this module, by id.
    """

    def __init__(
        self, name: str, optimizer: Optimizer, module: str, names: Mapping[int, str]
    ) -> None:
        self.name = name
        self.optimizer = optimizer
        self.module = module
        self.match = Match([], [], [])
        self.removed: list[str] = []
        self.settled: list[str] = []
        self._class = type(optimizer).__name__
        self._state: dict[str, Any] = {}
        self._rest: dict[str, Any] = {}
        self._groups: list[list[str]] = []
        self._params: dict[str, torch.Tensor] = {}
        for group in optimizer.param_groups:
            # torch allows the same parameter twice in a group.
            own = [names[id(param)] for param in group["params"]]
            self._groups.append(own)
            self._params.update(zip(own, group["params"], strict=True))

    def saved(self) -> dict[str, Any]:
        """What the optimizer holds. Raises ShardingError for what could not be given back."""
        state = self.optimizer.state_dict()
        if not {"state", "param_groups"} <= state.keys():
            raise ShardingError(
                f"{self.name}: the state_dict() of {self._class} lacks state and param_groups"
            )
        names: dict[Any, str] = {}
        groups = []
        for group, own in zip(state["param_groups"], self._groups, strict=True):
            names.update(zip(group["params"], own, strict=True))
            kept = {**group, "params": own}
            for key, value in group.items():
                if isinstance(value, torch.Tensor) and value.numel() == 1:
                    # A tensor without dimensions is in the common state, not under a key.
                    kept[key] = value.reshape(())
            groups.append(kept)
        problems = []
        for path, leaf in tree.walk({**state, "param_groups": groups}):
            name = names.get(path[1], "") if path[0] == "state" else ""
            if problem := _problem(path, leaf, self._params.get(name)):
                problems.append(f"{tree.show(path)} {name}: {problem}")
        if problems:
            raise ShardingError(
                f"{self.name}: a restore could not give back the state of {self._class}: "
                f"{join_truncated(problems, _NAMED)}"
            )
        by_name = {names[number]: values for number, values in state["state"].items()}
        return {**state, "state": by_name, "param_groups": groups, _CLASS: self._class}

    def compare(
        self,
        values: Mapping[str, Any],
        tensors: Mapping[str, TensorMeta],
        key_map: KeyMap | None,
    ) -> dict[str, torch.Tensor]:
        """Compare the optimizer with the state below its name, without a change to it.

        Args:
            values: all stored values except tensors, in torch's form.
            tensors: by key. Keys lack the name of the optimizer.
            key_map: the key map of the load. A parameter has the name of its key in the module.

        Returns:
            The tensors to fill, by key.

        Raises:
            MismatchError: another class of optimizer, other parameters, groups of different
                values that are one now, or state whose layout is not known.
        """
        groups = values.get("param_groups")
        if not isinstance(groups, list):
            raise MismatchError(
                f"{self.name}: the checkpoint has no list of parameter groups below this name"
            )
        kind = values.get(_CLASS)
        if kind is None and groups:
            # torch's form has no class. Within one class, only few names come and go.
            kept = groups[0].keys()
            unknown = kept - self.optimizer.param_groups[0].keys()
            if len(unknown) > 1 < len(self.optimizer.defaults.keys() - kept):
                kind = f"a class with {', '.join(sorted(unknown))}"
        if kind not in (None, self._class):
            raise MismatchError(
                f"{self.name}: the state of another optimizer is stored, {kind}, and this one "
                f"is {self._class}. Build that one, or restore without {self.name}="
            )
        prefix = f"{self.module}."
        stored = {
            name: stored_key(key_map, prefix + name).removeprefix(prefix)
            for name in self._params
        }
        known = {name for group in groups for name in group["params"]}
        added = [name for name, before in stored.items() if before not in known]
        self.removed = sorted(known.difference(stored.values()), key=str)
        if known and all(type(name) is int for name in known):
            raise MismatchError(
                f"{self.name}: it was saved as {self.name}.state_dict(), whose parameters have "
                f"numbers. Load that: found = restore({self.name}={{}}), and "
                f"{self.name}.load_state_dict(found.state[{self.name!r}])"
            )
        if known and added and len(added) == len(stored):
            raise MismatchError(
                f"{self.name}: the parameters {_listed(added)} were not in the optimizer that was "
                f"saved, which had {_listed(self.removed)}. A key_map renames parameters"
            )
        own = [
            {**group, "params": [stored[name] for name in names]}
            for group, names in zip(
                self.optimizer.param_groups, self._groups, strict=True
            )
        ]
        self.match = match_groups(self.name, own, groups)
        for how, names in ("added", added), ("removed", self.removed):
            if names:
                text = f"parameters were {how}: {_listed(names)}"
                self.match.changes.append(text)
        state = values.get("state", {})
        self.settled = []
        self._state = {
            n: state[before] for n, before in stored.items() if before in state
        }
        self._rest = {key: value for key, value in values.items() if key not in _APART}
        found: dict[str, dict[str, TensorMeta]] = {}
        for key, meta in tensors.items():
            name, place = split_key(key, known)
            found.setdefault(name, {})[place] = meta
            if name:
                self.settled.append(key)
        return self._targets({name: found.get(s, {}) for name, s in stored.items()})

    def load(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Give the optimizer its state, with these ``tensors`` of ``compare``, and return it."""
        optimizer = self.optimizer
        state = self._state
        for key, tensor in tensors.items():
            name, place = split_key(key, self._params)
            put(state.setdefault(name, {}), place, tensor)
        before = [dict(group) for group in optimizer.param_groups]
        groups = [
            {**held, **values, "params": names}
            for held, values, names in zip(
                before, self.match.values, self._groups, strict=True
            )
        ]
        loaded = {**self._rest, "state": state, "param_groups": groups}
        if not is_loaded_in_place(optimizer):
            numbers = {name: number for number, name in enumerate(self._params)}
            numbered = [
                {**group, "params": [numbers[name] for name in group["params"]]}
                for group in groups
            ]
            by_number = {numbers[name]: values for name, values in state.items()}
            optimizer.load_state_dict(
                loaded | {"state": by_number, "param_groups": numbered}
            )
        else:
            # In place, since an optimizer that wraps this one may share both. torch's method would
            # convert the state to the dtypes of the parameters.
            optimizer.state.clear()
            for name, values in state.items():
                optimizer.state[self._params[name]] = values
        for group, held, values in zip(
            optimizer.param_groups, before, self.match.values, strict=True
        ):
            for key, value in values.items():
                # A tensor stays the same one, as a compiled step may have captured it.
                own = held.get(key)
                if isinstance(own, torch.Tensor):
                    with torch.no_grad():
                        value = own.copy_(torch.as_tensor(value, device=own.device))
                group[key] = value
        return loaded

    def _targets(
        self, found: Mapping[str, dict[str, TensorMeta]]
    ) -> dict[str, torch.Tensor]:
        """For each stored tensor the optimizer's tensor, or a new tensor of the same layout."""
        full: dict[str, str] = {}
        for name, places in found.items():
            for place, meta in places.items():
                if meta.shape == tuple(self._params[name].shape):
                    full[place] = meta.dtype
        wanted: dict[str, torch.Tensor] = {}
        for group, names, values in zip(
            self.optimizer.param_groups, self._groups, self.match.values, strict=True
        ):
            flags = {**group, **values}
            is_captured = bool(flags.get("capturable") or flags.get("fused"))
            for name in names:
                param, places = self._params[name], found[name]
                has_state = places or name in self._state
                is_empty = is_distributed(param) and not local_tensor(param).numel()
                if is_empty and has_state and full.keys().isdisjoint(places):
                    # A local checkpoint omits tensors without an element on this rank.
                    shape = tuple(param.shape)
                    places = places | {p: TensorMeta(shape, d) for p, d in full.items()}
                for place, meta in places.items():
                    held: Any = self.optimizer.state.get(param)
                    for part in place.split("."):
                        held = held.get(part) if isinstance(held, dict) else None
                    if getattr(held, "shape", None) != meta.shape:
                        held = self._new(name, place, meta, is_captured)
                    wanted[f"state.{name}.{place}"] = held
        return wanted

    def _new(
        self, name: str, place: str, meta: TensorMeta, is_captured: bool
    ) -> torch.Tensor:
        param = self._params[name]
        dtype = dtype_named(meta.dtype)
        is_number = not meta.shape and (param.dim() or place == "step")
        if meta.shape == tuple(param.shape) and not is_number:
            return torch.empty_like(param, dtype=dtype, requires_grad=False)
        if is_distributed(param) and not is_number:
            raise MismatchError(
                f"{self.name}: {place} of {name!r} has the shape {meta.shape}, and its layout for "
                f"the sharded parameter of {tuple(param.shape)} is not known. Make a step of the "
                "optimizer, which creates this tensor, and restore after it"
            )
        device = param.device
        if place == "step" and not is_captured:
            device = torch.device("cpu")
        return torch.empty(meta.shape, dtype=dtype, device=device)


def is_loaded_in_place(value: Any) -> bool:
    """Whether an optimizer keeps no more than torch's state and groups."""
    own = getattr(type(value), "load_state_dict", None)
    hooks = (f"_optimizer_load_state_dict_{kind}_hooks" for kind in ("pre", "post"))
    return own is Optimizer.load_state_dict and not any(
        getattr(value, name, None) for name in hooks
    )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor on this rank; any other tensor itself."""
    local: torch.Tensor = getattr(tensor, "to_local", lambda: tensor)()
    return local


def put(branch: dict[str, Any], place: str, value: Any) -> None:
    """Put a value into nested dicts, at a place such as "exp_avg" or "factors.0"."""
    *above, last = place.split(".")
    for key in above:
        branch = branch.setdefault(key, {})
    branch[last] = value


def split_key(key: str, names: Collection[str]) -> tuple[str, str]:
    """The parameter's name in "state.NAME.PLACE", and the place; or "" and the key."""
    key = key.removeprefix("state.")
    name = key
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name, key[len(name) + 1 :]


def stored_values(common: Any, objects: Mapping[str, Any]) -> dict[str, Any]:
    """All that is stored of an optimizer but tensors, in torch's form.

    torch DCP stores values as objects. ``objects``: by key, without the name of the optimizer.
    """
    values: dict[str, Any] = {"state": {}}
    if isinstance(common, dict):
        values |= common
    groups: dict[str, Any] = {}
    for key, value in objects.items():
        kind, _, place = key.partition(".")
        if kind == "param_groups":
            put(groups, place, value)
    if groups and all("params" in group for group in groups.values()):
        values["param_groups"] = [groups[number] for number in sorted(groups, key=int)]
        known = {name for group in groups.values() for name in group["params"]}
        for key, value in objects.items():
            name, place = split_key(key, known)
            if name:
                put(values["state"].setdefault(name, {}), place, value)
    return values


def _problem(path: tree.Path, leaf: Any, param: torch.Tensor | None) -> str:
    """Why a value could not be given back, or ""."""
    is_tensor = isinstance(leaf, torch.Tensor)
    kind, *place = path
    if kind == "state" and param is None:
        return "this is no parameter"
    if kind == "state":
        named = [type(key) is str and "." not in key for key in place[1:]]
        if is_tensor and not (named and all(named)):
            return "a tensor in a list, or without a name"
        if is_tensor and leaf.dim() and _is_cut(param) and not is_distributed(leaf):
            return (
                "a plain tensor of a sharded parameter, which may differ between ranks"
            )
    elif kind != "param_groups" and (is_tensor or int in map(type, place)):
        return "a tensor, or a value by number, beside the state of the parameters"
    elif is_tensor and leaf.dim():
        return "a tensor of several elements in a group"
    return ""


def _is_cut(param: Any) -> bool:
    """Whether ranks have different parts of a parameter."""
    if not hasattr(param, "placements"):
        return False
    cuts = zip(param.placements, param.device_mesh.shape, strict=True)
    return any(size > 1 and not cut.is_replicate() for cut, size in cuts)


def _listed(names: Iterable[Any]) -> str:
    return join_truncated(list(map(repr, names)), _NAMED, ", ")


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
