"""The objects and dicts that a manager is given by name: their states and their values.

A save may store values outside of the common state. The common state then notes their places. A
restore asks for all values below a name, and returns the values to these places.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _get_fqns,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from megackpt import limits, tree
from megackpt.adapters.dtensor import holders_of, sharded
from megackpt.distributed import Group, GroupLike, attempt
from megackpt.errors import MismatchError, ShardingError, join_truncated
from megackpt.loader.comparison import KeyMap, StateOfStored
from megackpt.loader.load_session import whole
from megackpt.manager.optimizer_state import (
    NamedOptimizer,
    in_order,
    is_loaded_in_place,
    local_tensor,
    stored_values,
)
from megackpt.option_names import meant_by
from megackpt.planning.manifest import COMMON_KEY, Manifest
from megackpt.staging.source import pieces
from megackpt.state import (
    PerRank,
    Placed,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    joined,
)
from megackpt.storage import digest

T = TypeVar("T")

logger = logging.getLogger("megackpt.manager")

_DICT_OPTIONS = ("content_metadata", "key_map", "metrics", "sharded_state_dict")
"""Options whose value may be a dict, as an object may be."""
_TENSORS = "tensors of the optimizer"
"""Key of an optimizer's tensors. The stored common state may name the parameters differently."""
_CLOSE = 0.85
"""Similarity (at most 1) from which a name counts as a misspelled option."""
# The load itself has checked the keys. A module may have none, such as a loss.
_NOT_STRICT = StateDictOptions(strict=False)


@runtime_checkable
class HasState(Protocol):
    """torch's Stateful protocol, whatever the methods return."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> object: ...


Savable: TypeAlias = HasState | dict[Any, Any]


class StatefulObjects:
    """Objects whose state is saved and restored, by name.

    Args:
        objects: modules, optimizers of these modules, other objects with ``state_dict`` and
            ``load_state_dict`` (torch's Stateful protocol), and dicts of any values.
        process_group: of the ranks that save, with the meaning it has for the manager.
        options: the options of the methods of the manager: an object may not have such a name.
    """

    def __init__(
        self,
        objects: Mapping[str, Savable],
        process_group: GroupLike,
        options: Collection[str],
    ) -> None:
        for name, value in objects.items():
            close = [name]
            if name not in options:
                close = get_close_matches(name, _DICT_OPTIONS, 1, _CLOSE) or close
            if name in options or (close != [name] and isinstance(value, dict)):
                raise TypeError(
                    f"{name}={value!r:.60} would be an object with this name, and {close[0]} is "
                    "an option of save or restore: correct it, or choose a name that is less like "
                    f"it, such as my_{name}="
                )
            advice = f": give it as extra={{{name!r}: ...}}"
            if not isinstance(value, (HasState, dict)):
                raise TypeError(
                    f"{name}={value!r:.60} is neither an option nor an object with state_dict() "
                    "and load_state_dict(), nor a dict"
                    f"{meant_by(name, value, options) or advice}"
                )
        self._objects = dict(objects)
        # Objects whose state torch's functions do not read and set.
        self.plain = {
            name: value
            for name, value in objects.items()
            if not isinstance(value, Module | Optimizer)
        }
        self._among = None
        if isinstance(process_group, dist.ProcessGroup):
            self._among = dist.get_process_group_ranks(process_group)
        self._former: dict[str, _Former] = {}
        self._optimizers = {
            name: NamedOptimizer(name, value, *self._names_of(name, value))
            for name, value in objects.items()
            if isinstance(value, Optimizer)
        }

    def declare(
        self, others: ShardedStateDict | None, load: bool = False
    ) -> ShardedStateDict:
        """The sharded state dict of all objects and of ``others``, which is declared already.

        With ``load``, the state dict omits the optimizers.
        """
        if not self._objects:
            return {} if others is None else others
        states: dict[Any, Any] = {}
        for name, value in self._objects.items():
            if isinstance(value, Module):
                states[name] = get_model_state_dict(value, options=_NOT_STRICT)
            elif name in self._optimizers:
                states[name] = {} if load else self._optimizers[name].saved()
            elif isinstance(value, dict):
                states[name] = value
            else:
                states[name] = value.state_dict()
        if load:
            # Another number of ranks may have saved these.
            states = tree.dict_list_map_outplace(
                lambda leaf: None if isinstance(leaf, PerRank) else leaf, states
            )
        declared = sharded(states, among=self._among)
        if others is not None:
            if twice := states.keys() & others.keys():
                raise ValueError(f"{sorted(twice)} are in the state dict already")
            declared = others | declared
        if not load:
            note_places(declared, self.plain)
        return declared

    def frozen_keys(self) -> set[str]:
        """The keys of the parameters that need no gradient."""
        keys = set()
        for name, value in self._objects.items():
            if isinstance(value, Module):
                for own, parameter in value.named_parameters(remove_duplicate=False):
                    if not parameter.requires_grad:
                        keys |= {f"{name}.{key}" for key in _get_fqns(value, own)}
        return keys

    def declare_to_load(
        self, others: ShardedStateDict | None, key_map: KeyMap | None
    ) -> ShardedStateDict:
        """The state to load, which is declared for each checkpoint that is tried.

        Optimizers are compared with the checkpoint. Dicts and other objects ask for all that is
        stored below their names.
        """
        if not self._objects:
            return self.declare(others)
        for name, value in self._objects.items():
            if not isinstance(value, (Module, dict)) and not is_loaded_in_place(value):
                self._former[name] = _Former(value)
        declared = self.declare(others, load=True)
        prefixes = tuple(f"{name}." for name in self._optimizers)
        late = StateOfStored(prefixes, partial(self._compare, declared, key_map))
        return cast("ShardedStateDict", late)  # load takes both

    def _compare(
        self,
        declared: ShardedStateDict,
        key_map: KeyMap | None,
        manifest: Manifest,
        values: Mapping[str, Any],
    ) -> tuple[ShardedStateDict, list[str]]:
        """Declare what to load of a checkpoint. Raises MismatchError before any object changes."""
        common = values.get(COMMON_KEY, {})
        names = {*common, *(entry.key.split(".")[0] for entry in manifest.tensors)}
        names -= {PLACES, COMMON_KEY}
        for name, value in self._objects.items():
            is_asked = name in self._optimizers or any(tree.walk(declared[name]))
            may_lack = key_map is not None or isinstance(value, dict)
            if is_asked and name not in names and not may_lack:
                raise MismatchError(
                    f"the checkpoint holds no state of {name!r}; its state has "
                    f"{', '.join(map(repr, sorted(names)))}. Restore without {name}="
                )
        state = dict(declared)
        rank, holders = holders_of(self._among)
        ask_for_all(state, self.plain, manifest, rank, len(holders))
        settled = []
        for name, optimizer in self._optimizers.items():
            prefix, module = f"{name}.", f"{optimizer.module}."
            tensors = _below(prefix, manifest.tensors)
            objects = _below(prefix, values.items())
            wanted = optimizer.compare(
                stored_values(common.get(name), objects),
                {key: meta for key, meta in tensors.items() if not meta.is_object},
                key_map,
            )
            state[name] = {_TENSORS: sharded(dict(wanted), prefix, among=self._among)}
            settled += [prefix + key for key in (*optimizer.settled, *objects)]
            settled += [module + param for param in optimizer.removed]
        return state, settled

    def load(self, state: dict[str, Any], group: Group) -> None:
        """Give the objects their loaded states; collective. A dict is not changed.

        An object whose ``load_state_dict`` fails gets its former state again. One WARNING names
        for each optimizer the parameters and groups that differ from the stored ones.
        """
        if not self._objects:
            return
        loaded = attempt(partial(self._load, state))
        if group.size == 1:
            loaded.get()  # the error of an object, not a RankFailure
        group.reduce_broadcast("objects", loaded.get, len)
        for name, optimizer in self._optimizers.items():
            changes = "; ".join(optimizer.match.changes)
            if changes and group.is_coordinator:
                logger.warning("%s was saved otherwise: %s", name, changes)

    def _load(self, state: dict[str, Any]) -> None:
        put_back(state, self.plain)
        for name, value in self._objects.items():
            try:
                if isinstance(value, Module):
                    # A partial load may have found no key.
                    own = state.get(name, {})
                    set_model_state_dict(value, own, options=_NOT_STRICT)
                elif name in self._optimizers:
                    tensors = state.get(name, {}).get(_TENSORS, {})
                    state[name] = self._optimizers[name].load(tensors)
                elif not isinstance(value, dict):
                    value.load_state_dict(self._reordered(value, state[name]))
            except Exception as error:
                if name in self._former:
                    self._former[name].give_back()
                    error.add_note(f"{name} has its former state, other objects do not")
                raise

    def _reordered(self, value: HasState, state: Any) -> Any:
        """The state of a scheduler, with its values of each group in the order of the groups."""
        if not isinstance(value, LRScheduler):
            return state
        for optimizer in self._optimizers.values():
            if optimizer.optimizer is value.optimizer:
                return in_order(state, value.state_dict(), optimizer.match.sources)
        return state

    def _names_of(self, name: str, optimizer: Optimizer) -> tuple[str, dict[int, str]]:
        """The module that has the optimizer's parameters, and their names by id, as torch's."""
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for key, module in self._objects.items():
            if not isinstance(module, Module):
                continue
            names = {id(p): n for n, p in module.named_parameters()}
            if wanted <= names.keys():
                kinds = {type(part).__name__ for part in module.modules()}
                if "FullyShardedDataParallel" in kinds:
                    raise ShardingError(
                        f"{key}: the flat parameters of FSDP1 have no names. Use fully_shard "
                        "(FSDP2), or torch's get_optimizer_state_dict and megackpt.sharded"
                    )
                return key, {p: min(_get_fqns(module, n)) for p, n in names.items()}
        raise ValueError(
            f"{name}: none of the modules given has all parameters of this optimizer. Give the "
            "module, too (model=...); for several modules, one torch.nn.ModuleDict of them"
        )


class _Former:
    """The state of an object before a load, which fills its tensors in place."""

    def __init__(self, value: HasState) -> None:
        self._object = value
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._state = tree.dict_list_map_outplace(self._keep, value.state_dict())

    def _keep(self, leaf: Any) -> Any:
        if isinstance(leaf, PerRank):
            leaf = leaf.value
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        held = local_tensor(leaf.detach())
        self._tensors.append((held, held.to("cpu", copy=True)))
        return leaf

    def give_back(self) -> None:
        for held, former in self._tensors:
            held.copy_(former)
        self._object.load_state_dict(self._state)


def _below(prefix: str, items: Iterable[tuple[str, T]]) -> dict[str, T]:
    """The items whose keys begin with a prefix, without the prefix."""
    return {k.removeprefix(prefix): v for k, v in items if k.startswith(prefix)}


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


def report_kept(group: Group, state: Mapping[Any, Any], kept: set[str]) -> None:
    """Log which keys a partial load has filled on this rank, and which are not stored."""
    logger.log(
        logging.INFO if group.is_coordinator else logging.DEBUG,
        "partial: %d tensors are filled; %d keys are not stored, and keep their values: %s",
        sum(isinstance(leaf, torch.Tensor) for leaf in tree.nested_values(state)),
        len(kept),
        join_truncated(sorted(kept), separator=", "),
    )


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
