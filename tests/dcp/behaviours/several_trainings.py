"""On two and four ranks: models in training, whole and by keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.stateful import Stateful

from tests.dcp.behaviours.catalogue import behaviour
from tests.dcp.test_users import KINDS, Training, assert_same


class App(Stateful):
    """A model and its optimizer under the protocol that torch's tutorial shows."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def state_dict(self) -> dict[str, Any]:
        return self.training.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.training.restore(state)


@behaviour(ranks=4, source=KINDS)
def trained_one_way_and_resumed_another(folder: Path, source: str) -> None:
    saved = Training(source, seed=1)
    dcp.save({"app": App(saved)}, checkpoint_id=folder)
    expected = saved.whole()
    for target in KINDS:
        other = Training(target, seed=9)
        dcp.load({"app": App(other)}, checkpoint_id=folder)
        assert_same(other.whole(), expected)


@behaviour(ranks=2, kind=KINDS)
def trained_and_saved_in_the_background(folder: Path, kind: str) -> None:
    saved = Training(kind, seed=1)
    expected = saved.whole()
    expected = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in expected.items()
    }
    future: Any = dcp.async_save({"app": App(saved)}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in saved.model.parameters():
            parameter.zero_()
    future.result()
    dist.barrier()
    other = Training(kind, seed=9)
    dcp.load({"app": App(other)}, checkpoint_id=folder)
    assert_same(other.whole(), expected)


@behaviour(ranks=2)
def only_the_model(folder: Path) -> None:
    saved = Training("fsdp2", seed=1)
    dcp.save(saved.state(), checkpoint_id=folder)
    other = Training("fsdp2", seed=9)
    state = {"model": get_model_state_dict(other.model)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other.model, state["model"])
    for key, value in saved.model.state_dict().items():
        found = other.model.state_dict()[key]
        assert torch.equal(
            *(getattr(t, "full_tensor", lambda t=t: t)() for t in (found, value))
        )


@behaviour(ranks=2)
def by_keys_without_a_model(folder: Path) -> None:
    saved = Training("fsdp2", seed=1)
    dcp.save(saved.state(), checkpoint_id=folder)
    expected = saved.whole()
    model = _load_state_dict_from_keys("model", checkpoint_id=folder)["model"]
    for key, value in model.items():
        assert torch.equal(value, expected[f"model.{key}"])
    found = _load_state_dict_from_keys("optimizer.state", checkpoint_id=folder)
    assert list(found) == ["optimizer"]
    assert list(found["optimizer"]) == ["state"]


@behaviour(ranks=2)
def whole_state_dicts_on_the_host(folder: Path) -> None:
    saved = Training("fsdp2", seed=1)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(saved.model, saved.optimizer, options=options)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    other = Training("fsdp2", seed=9)
    into, into_optimizer = get_state_dict(other.model, other.optimizer)
    state = {"model": into, "optimizer": into_optimizer}
    expected = saved.whole()
    if dist.get_rank() == 0:
        assert {f"model.{key}" for key in model} <= set(expected)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        other.model,
        other.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    assert_same(other.whole(), expected)


@behaviour(ranks=2)
def flattened_optimizer_states(folder: Path) -> None:
    saved = Training("fsdp2", seed=1)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_state_dict(saved.model, saved.optimizer, options=options)
    dcp.save(dict(zip("mo", state, strict=True)), checkpoint_id=folder)
    other = Training("fsdp2", seed=9)
    into = get_state_dict(other.model, other.optimizer, options=options)
    found = dict(zip("mo", into, strict=True))
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(
        other.model,
        other.optimizer,
        model_state_dict=found["m"],
        optim_state_dict=found["o"],
        options=options,
    )
    assert_same(other.whole(), saved.whole())


@behaviour(ranks=2)
def a_checkpoint_of_shards_becomes_a_torch_file(folder: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    saved = Training("fsdp2", seed=1)
    dcp.save(saved.state(), checkpoint_id=folder)
    expected = saved.whole()
    if dist.get_rank() == 0:
        dcp_to_torch_save(folder, folder / "model.pt")
        found = torch.load(folder / "model.pt", weights_only=False)["model"]
        for key, value in found.items():
            assert torch.equal(value, expected[f"model.{key}"])
    dist.barrier()
