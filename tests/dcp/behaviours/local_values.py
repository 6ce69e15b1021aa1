"""In one process: what can be saved, and how it comes back."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from tests.dcp.behaviours.catalogue import behaviour
from tests.dcp.states import assert_same

DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "complex128",
]


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 1)
        self.table = nn.EmbeddingBag(5, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))) + self.table.weight.sum()


def trained(seed: int, lr: float = 0.1) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(2):
        model(torch.ones(3, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class Stateful:
    def __init__(self, value: Any) -> None:
        self.value = value
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.loads = state["value"], self.loads + 1


def numbers(dtype: str) -> torch.Tensor:
    return (torch.arange(24) % 2).reshape(4, 6).to(getattr(torch, dtype))


@behaviour(dtype=DTYPES)
def a_tensor_of_each_dtype(folder: Path, dtype: str) -> None:
    saved = {"w": numbers(dtype)}
    dcp.save(saved, checkpoint_id=folder / "c")
    found = {"w": torch.zeros_like(saved["w"])}
    dcp.load(found, checkpoint_id=folder / "c")
    assert_same(found, saved)


@behaviour(source=("float32", "bfloat16", "int32"), target=("float64", "float16"))
def a_load_casts_to_the_dtype_asked_for(folder: Path, source: str, target: str) -> None:
    dcp.save({"w": numbers(source)}, checkpoint_id=folder / "c")
    found = {"w": torch.full((4, 6), 7, dtype=getattr(torch, target))}
    dcp.load(found, checkpoint_id=folder / "c")
    assert_same(found, {"w": numbers(source).to(getattr(torch, target))})


@behaviour(quick=True)
def a_module_and_nothing_else(folder: Path) -> None:
    dcp.save(Net(1).state_dict(), checkpoint_id=folder / "c")
    found = Net(2).state_dict()
    assert not torch.equal(found["first.weight"], Net(1).state_dict()["first.weight"])
    dcp.load(found, checkpoint_id=folder / "c")
    assert_same(dict(found), dict(Net(1).state_dict()))


@behaviour(quick=True)
def a_load_fills_the_tensors_it_was_given(folder: Path) -> None:
    dcp.save({"a": {"w": torch.ones(3, 3)}}, checkpoint_id=folder / "c")
    inner = {"w": torch.zeros(3, 3)}
    tensor, found = inner["w"], {"a": inner}
    assert dcp.load(found, checkpoint_id=folder / "c") is None
    assert found["a"] is inner
    assert inner["w"] is tensor
    assert tensor.sum() == 9


@behaviour()
def a_load_fills_strided_memory(folder: Path) -> None:
    dcp.save({"w": torch.arange(12.0).reshape(3, 4)}, checkpoint_id=folder / "c")
    whole = torch.zeros(8, 6)
    dcp.load({"w": whole[1:7:2, 1:5]}, checkpoint_id=folder / "c")
    assert torch.equal(whole[1:7:2, 1:5], torch.arange(12.0).reshape(3, 4))
    assert whole.sum() == 66
    turned = torch.zeros(4, 3).t()
    dcp.load({"w": turned}, checkpoint_id=folder / "c")
    assert torch.equal(turned, torch.arange(12.0).reshape(3, 4))


@behaviour()
def a_view_is_saved_without_its_base(folder: Path) -> None:
    base = torch.arange(1_000_000.0)
    dcp.save(
        {"w": base[10:20], "t": base[:6].view(2, 3).t()}, checkpoint_id=folder / "c"
    )
    found = {"w": torch.zeros(10), "t": torch.zeros(3, 2)}
    dcp.load(found, checkpoint_id=folder / "c")
    assert_same(found, {"w": base[10:20], "t": base[:6].view(2, 3).t()})
    files = (folder / "c").iterdir()
    assert sum(path.stat().st_size for path in files) < 100_000


@behaviour()
def scalars_and_empty_tensors(folder: Path) -> None:
    saved = {"s": torch.tensor(3), "e": torch.empty(0, 4), "l": torch.tensor([5.0])}
    dcp.save(saved, checkpoint_id=folder / "c")
    found = {key: torch.zeros_like(value) for key, value in saved.items()}
    dcp.load(found, checkpoint_id=folder / "c")
    assert_same(found, saved)


@behaviour()
def tied_tensors(folder: Path) -> None:
    shared = torch.arange(6.0)
    dcp.save({"a": shared, "b": shared, "c": shared[2:]}, checkpoint_id=folder / "c")
    target = torch.zeros(6)
    found = {"a": target, "b": target, "c": torch.zeros(4)}
    dcp.load(found, checkpoint_id=folder / "c")
    assert_same(found, {"a": shared, "b": shared, "c": shared[2:]})


@behaviour()
def parameters_that_need_gradients(folder: Path) -> None:
    dcp.save({"p": nn.Parameter(torch.ones(3))}, checkpoint_id=folder / "c")
    found = {"p": nn.Parameter(torch.zeros(3))}
    dcp.load(found, checkpoint_id=folder / "c")
    assert found["p"].requires_grad
    assert found["p"].is_leaf
    assert found["p"].sum() == 3


@behaviour()
def conjugate_and_negative_views(folder: Path) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    saved = {"c": value.conj(), "n": value.conj().imag}
    dcp.save(saved, checkpoint_id=folder / "c")
    found = {"c": torch.zeros(2, dtype=torch.complex64), "n": torch.zeros(2)}
    dcp.load(found, checkpoint_id=folder / "c")
    assert torch.equal(found["c"], saved["c"])
    assert torch.equal(found["n"], saved["n"])


@behaviour(quick=True)
def lists_and_strings(folder: Path) -> None:
    dcp.save({"a": [1], "b": "text", "n": None}, checkpoint_id=folder / "c")
    found = {"a": [2], "b": "other", "n": 5}
    dcp.load(found, checkpoint_id=folder / "c")
    assert found == {"a": [1], "b": "text", "n": None}


@behaviour()
def objects_of_any_class(folder: Path) -> None:
    import datetime as dt
    import decimal

    saved = {"d": dt.date(2026, 11, 23), "x": decimal.Decimal("1.5"), "s": {1, 2}}
    dcp.save(saved, checkpoint_id=folder / "c")
    found: dict[str, Any] = dict.fromkeys(saved)
    dcp.load(found, checkpoint_id=folder / "c")
    assert found == saved


@behaviour()
def streams_of_bytes(folder: Path) -> None:
    dcp.save({"b": io.BytesIO(b"epoch 4")}, checkpoint_id=folder / "c")
    found = {"b": io.BytesIO(b"")}
    dcp.load(found, checkpoint_id=folder / "c")
    assert found["b"].getvalue() == b"epoch 4"


@behaviour()
def objects_of_some_megabytes(folder: Path) -> None:
    saved = {"text": "x" * 3_000_000, "list": list(range(200_000))}
    dcp.save(saved, checkpoint_id=folder / "c")
    found: dict[str, Any] = {"text": "", "list": []}
    dcp.load(found, checkpoint_id=folder / "c")
    assert found == saved


@behaviour()
def nested_lists_and_dicts(folder: Path) -> None:
    def state(number: int) -> dict[str, Any]:
        return {
            "plain": number,
            "list": [number, 2],
            "inner": {"a": number, "b": 3},
            "tensor": torch.tensor([number]),
            "deep": [[torch.tensor(number), "x"], [1, number], {"k": [number]}],
        }

    dcp.save(state(4), checkpoint_id=folder / "c")
    found = state(9)
    dcp.load(found, checkpoint_id=folder / "c")
    assert_same(found, state(4))


@behaviour()
def keys_with_dots_and_slashes(folder: Path) -> None:
    saved = {"a.b/c": torch.ones(2), "a": {"b": {"d": torch.zeros(3)}}, "ü ": 7}
    dcp.save(saved, checkpoint_id=folder / "c")
    found = {"a.b/c": torch.zeros(2), "a": {"b": {"d": torch.ones(3)}}, "ü ": 0}
    dcp.load(found, checkpoint_id=folder / "c")
    assert_same(found, saved)


@behaviour()
def a_thousand_tensors(folder: Path) -> None:
    saved = {f"layer.{i}": torch.full((3,), float(i)) for i in range(1000)}
    dcp.save(saved, checkpoint_id=folder / "c")
    found = {key: torch.zeros(3) for key in saved}
    dcp.load(found, checkpoint_id=folder / "c")
    assert_same(found, saved)


@behaviour(commits=True)
def an_empty_state(folder: Path) -> None:
    dcp.save({}, checkpoint_id=folder / "c")
    dcp.load({}, checkpoint_id=folder / "c")


@behaviour(quick=True)
def stateful_objects_load_themselves(folder: Path) -> None:
    dcp.save({"s": Stateful(torch.ones(4)), "n": 3}, checkpoint_id=folder / "c")
    stateful = Stateful(torch.zeros(4))
    found = {"s": stateful, "n": 0}
    dcp.load(found, checkpoint_id=folder / "c")
    assert found["s"] is stateful
    assert stateful.loads == 1
    assert found["n"] == 3
    assert torch.equal(stateful.value, torch.ones(4))


@behaviour()
def plain_values_are_set_and_stateful_ones_are_not(folder: Path) -> None:
    class Watched(dict[str, Any]):
        sets = 0

        def __setitem__(self, key: str, value: Any) -> None:
            self.sets += 1
            super().__setitem__(key, value)

    dcp.save({"a": Stateful(1)}, checkpoint_id=folder / "c")
    state = Watched(a=Stateful(2))
    dcp.load(state, checkpoint_id=folder / "c")
    assert state.sets == 0
    assert state["a"].value == 1
    dcp.save({"a": {"w": torch.ones(2), "n": [1]}}, checkpoint_id=folder / "c")
    state = Watched(a={"w": torch.zeros(2), "n": [2]})
    dcp.load(state, checkpoint_id=folder / "c")
    assert state.sets
    assert state["a"]["n"] == [1]


@behaviour()
def a_module_is_stateful(folder: Path) -> None:
    dcp.save({"model": Net(1)}, checkpoint_id=folder / "c")
    model = Net(2)
    dcp.load({"model": model}, checkpoint_id=folder / "c")
    assert_same(dict(model.state_dict()), dict(Net(1).state_dict()))


@behaviour(quick=True)
def model_and_optimizer_go_on(folder: Path) -> None:
    model, optimizer = trained(1)
    saved = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(saved, checkpoint_id=folder / "c")
    other, other_optimizer = trained(2, lr=0.7)
    into = {
        "model": get_model_state_dict(other),
        "optimizer": get_optimizer_state_dict(other, other_optimizer),
    }
    dcp.load(into, checkpoint_id=folder / "c")
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=into["model"],
        optim_state_dict=into["optimizer"],
    )
    assert other_optimizer.param_groups[0]["lr"] == 0.1
    for one, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        one(torch.ones(3, 5)).sum().backward()
        its_optimizer.step()
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


@behaviour()
def an_optimizer_without_state_yet(folder: Path) -> None:
    model = Net(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    _, state = get_state_dict(model, optimizer)
    dcp.save({"optimizer": state}, checkpoint_id=folder / "c")
    other = torch.optim.SGD(model.parameters(), lr=0.5)
    into = {"optimizer": get_optimizer_state_dict(model, other)}
    dcp.load(into, checkpoint_id=folder / "c")
    assert into["optimizer"]["param_groups"][0]["lr"] == 0.25


@behaviour()
def a_scheduler_and_random_states(folder: Path) -> None:
    _model, optimizer = trained(1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    state = {"scheduler": scheduler, "rng": torch.get_rng_state()}
    dcp.save(state, checkpoint_id=folder / "c")
    expected = torch.rand(3)
    other = torch.optim.lr_scheduler.StepLR(trained(2)[1], 2)
    found = {"scheduler": other, "rng": torch.zeros_like(torch.get_rng_state())}
    dcp.load(found, checkpoint_id=folder / "c")
    torch.set_rng_state(found["rng"])
    assert torch.equal(torch.rand(3), expected)
    assert other.last_epoch == 3
    assert other.get_last_lr() == scheduler.get_last_lr()
