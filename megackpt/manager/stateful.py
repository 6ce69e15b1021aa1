"""What ``save`` and ``restore`` of a manager take by name: objects with a state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Protocol, Self, TypeAlias, runtime_checkable

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Module
from torch.optim import Optimizer

from megackpt.adapters.dtensor import sharded
from megackpt.distributed import GroupLike
from megackpt.errors import MismatchError
from megackpt.state import ShardedStateDict

_MANAGER_OPTIONS = {
    "checkpoint_dir",
    "sharded_strategy",
    "async_sharded_save",
    "process_group",
    "timeout",
}
"""Options of ``megackpt.save`` and ``load`` that are the same for all steps of a manager."""
_DICT_OPTIONS = {
    "content_metadata": "save",
    "key_map": "restore",
    "sharded_state_dict": "save and restore",
}
"""Options whose value may be a dict, as an object may be; and whose options they are."""
_CLOSE = 0.85
"""How alike two names are where one is taken for the other, misspelled (of 1)."""
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

    At the end of the ``with`` block, the optimizers' states that ``declare`` created are removed,
    unless ``load`` has filled them.

    Args:
        objects: modules, optimizers of these modules, other objects with ``state_dict`` and
            ``load_state_dict`` (torch's Stateful protocol), and dicts of any values.
        process_group: of the ranks that save, as for the manager.
    """

    def __init__(
        self, objects: Mapping[str, Savable], process_group: GroupLike = None
    ) -> None:
        if names := sorted(_MANAGER_OPTIONS & objects.keys()):
            raise ValueError(
                f"{', '.join(names)} cannot be given for one step: the manager's own is used for "
                "all"
            )
        for name, value in objects.items():
            if not isinstance(value, (HasState, dict)):
                raise TypeError(
                    f"{name}={value!r} is neither an option nor an object with state_dict() and "
                    "load_state_dict(), nor a dict; extra={...} takes other values"
                )
            close = get_close_matches(name, _DICT_OPTIONS, 1, _CLOSE)
            if isinstance(value, dict) and close:
                raise TypeError(
                    f"{name}={{...}} would be an object with this name, and {close[0]} is an "
                    f"option of {_DICT_OPTIONS[close[0]]}: correct it, or choose a name that is "
                    "less like it"
                )
        self._objects = dict(objects)
        self._among = None
        if isinstance(process_group, dist.ProcessGroup):
            self._among = dist.get_process_group_ranks(process_group)
        self._new_optimizers: list[Optimizer] = []

    def declare(self, others: ShardedStateDict | None) -> ShardedStateDict:
        """The sharded state dict of all objects and of ``others``, which is declared already.

        torch creates the state of an optimizer that has not made a step.
        """
        if not self._objects:
            return others or {}
        states: dict[Any, Any] = {}
        for name, value in self._objects.items():
            if isinstance(value, Module):
                states[name] = get_model_state_dict(value, options=_NOT_STRICT)
            elif isinstance(value, Optimizer):
                states[name] = self._optimizer_state(name, value)
            elif isinstance(value, dict):
                states[name] = value
            else:
                states[name] = value.state_dict()
        declared = sharded(states, among=self._among)
        if others is None:
            return declared
        if twice := states.keys() & others.keys():
            raise ValueError(f"{sorted(twice)} are in the state dict already")
        return others | declared

    def load(self, state: Mapping[str, Any]) -> None:
        """Give the objects their loaded states. A dict is not changed.

        Raises MismatchError, before any is changed, if the checkpoint has nothing for an object.
        """
        for name, value in self._objects.items():
            if name not in state and not isinstance(value, dict):
                raise MismatchError(
                    f"the checkpoint holds no state of {name!r}; its state has "
                    f"{', '.join(map(repr, state))}. Restore without {name}="
                )
        for name, value in self._objects.items():
            if isinstance(value, dict):
                continue
            if isinstance(value, Module):
                set_model_state_dict(value, state[name], options=_NOT_STRICT)
            elif isinstance(value, Optimizer):
                module = self._module_of(name, value)
                set_optimizer_state_dict(module, value, state[name])
            else:
                value.load_state_dict(state[name])
        self._new_optimizers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for optimizer in self._new_optimizers:
            optimizer.state.clear()

    def _optimizer_state(self, name: str, optimizer: Optimizer) -> Any:
        is_new = not optimizer.state
        module = self._module_of(name, optimizer)
        if not is_new:
            return get_optimizer_state_dict(module, optimizer)
        self._new_optimizers.append(optimizer)
        with _without_gradients(optimizer):
            state: Any = get_optimizer_state_dict(module, optimizer)
            # torch makes a step with zero gradients and counts it.
            for values in state["state"].values():
                if "step" in values:
                    values["step"] = values["step"] * 0
        return state

    def _module_of(self, name: str, optimizer: Optimizer) -> Module:
        """The module that has the optimizer's parameters."""
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for module in self._objects.values():
            if isinstance(module, Module) and wanted <= set(
                map(id, module.parameters())
            ):
                return module
        raise ValueError(
            f"{name}: none of the modules given has all parameters of this optimizer. Give the "
            "module, too (model=...); for several modules, one torch.nn.ModuleDict of them"
        )


@contextmanager
def _without_gradients(optimizer: Optimizer) -> Iterator[None]:
    """torch creates no state while there are gradients, and removes those that it makes."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
