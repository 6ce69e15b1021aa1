"""All optimizers of torch and three foreign ones, their parameters, and steps that are always the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

O = torch.optim  # noqa: E741


class WithNotes(Optimizer):
    """Keeps numbers, text, None and nested containers as state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(
            params, {"lr": lr, "scale": {"by": [1, 2.5]}, "weight_decay": 0}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"count": 0, "kind": "momentum", "last": None}
                    state |= {"seen": {"norms": [], 3: (1, "x")}}
                    state["factors"] = {"m": torch.zeros_like(param)}
                state["count"] += 1
                state["seen"]["norms"].append(float(state["count"]))
                state["factors"]["m"].mul_(0.5).add_(param.grad)
                param.sub_(state["factors"]["m"], alpha=group["lr"] / state["count"])


class StepOfGroup(Optimizer):
    """Counts its steps for each group, as apex does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    mean.lerp_(param.grad, 0.25)
                    param.sub_(mean, alpha=group["lr"] / group["step"])


class Wrapping(Optimizer):
    """Has another optimizer, to which it delegates state and groups, and counts its calls."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        self.inner = O.AdamW(params, lr=lr, **options)
        self.calls = 0
        for kind in ("step_pre", "step_post", "state_dict_pre", "state_dict_post"):
            setattr(self, f"_optimizer_{kind}_hooks", {})

    state = property(lambda self: self.inner.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.inner.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] *= 1 - 1 / (9 + self.calls)
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict: Any) -> None:
        given = dict(state_dict)
        self.calls = given.pop("calls")
        self.inner.load_state_dict(given)


class Delegating(Wrapping):
    """As above, without methods for the state."""

    state_dict = Optimizer.state_dict
    load_state_dict = Optimizer.load_state_dict

    def step(self, closure: Any = None) -> None:
        self.inner.step()


KINDS: dict[str, Callable[..., Optimizer]] = {
    name: getattr(O, name)
    for name in (
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
        "SparseAdam",
    )
}
KINDS["momentum"] = lambda params, **options: O.SGD(
    params, momentum=0.9, dampening=0.5, **options
)
if hasattr(O, "Muon"):
    KINDS["Muon"] = O.Muon
KINDS |= {
    kind.__name__: kind for kind in (WithNotes, StepOfGroup, Wrapping, Delegating)
}
"""LBFGS is not among them: it takes one group, and its state is refused."""


def has_decay(kind: str) -> bool:
    return kind not in ("Rprop", "SparseAdam", "Wrapping")


class Net(torch.nn.Module):
    """Matrices by name, with values that follow from their names."""

    def __init__(
        self, names: Iterable[str], mesh: Any = None, cuts: Any = None
    ) -> None:
        super().__init__()
        for name in names:
            value = values_of(name, 0)
            if mesh is not None:
                value = distribute_tensor(value, mesh, cuts)
            self.register_parameter(name, torch.nn.Parameter(value))


def values_of(name: str, step: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(crc32(f"{name} {step}".encode()))
    return torch.randn(4, 2, generator=seed)


def steps(
    net: torch.nn.Module,
    optimizer: Optimizer,
    active: Iterable[str],
    numbers: Iterable[int],
) -> None:
    """Make steps; only ``active`` parameters have gradients, which follow from name and number."""
    params = dict(net.named_parameters())
    for number in numbers:
        optimizer.zero_grad()
        for name in active:
            gradient = values_of(name, number)
            param = params[name]
            if isinstance(param, DTensor):
                gradient = distribute_tensor(
                    gradient, param.device_mesh, param.placements
                )
            elif isinstance(optimizer, O.SparseAdam):
                gradient = gradient.to_sparse()
            param.grad = gradient
        optimizer.step()
    optimizer.zero_grad()


def whole(value: Any) -> Any:
    """A value to compare: tensors are whole, and lists of numbers."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: whole(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(whole, value))
    return value


def held(net: torch.nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Values of parameters and of the optimizer, by name."""
    names = {param: name for name, param in net.named_parameters()}
    groups = [
        {**group, "params": [names[param] for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {names[param]: values for param, values in optimizer.state.items()}
    found = {"params": dict(net.named_parameters()), "state": state, "groups": groups}
    return copy.deepcopy(whole(found))


def optimizer_of(
    kind: str, net: torch.nn.Module, groups: Sequence[Mapping[str, Any]]
) -> Optimizer:
    """``groups``: hyperparameters, and "params": names."""
    params = dict(net.named_parameters())
    given = [
        {**group, "params": [params[n] for n in group["params"]]} for group in groups
    ]
    return KINDS[kind](given)
