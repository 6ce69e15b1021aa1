"""P16: the doors, over megackpt.save and megackpt.load of the same state.

A door is another library's call, or an object of megackpt, that ends in the same engine. The state is DTensors in
nested dicts, as a training program has them. The declaration of the state counts on both sides. The doors of other
projects' trainers are in trainer_doors.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save

import megackpt
import megackpt.dcp
from benchmarks.contestants import Place, StockDcp
from benchmarks.states import Piece

ENGINE = "megackpt"


class Engine(StockDcp):
    """megackpt.save and megackpt.load, of a state that is not declared yet."""

    name = ENGINE
    alike = ENGINE
    """The contestant that calls megackpt as directly as the engine, with what the door needs besides."""

    def declare(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {"model": super().declare(pieces)}

    def save(self, declared: dict[str, Any], folder: Path) -> None:
        megackpt.save(megackpt.sharded(declared), folder)

    def load(self, declared: dict[str, Any], folder: Path, verify: bool) -> None:
        megackpt.load(megackpt.sharded(declared), folder, verify=verify)


class EngineAsync(Engine):
    """An asynchronous megackpt.save, until the checkpoint is complete."""

    name = "megackpt, asynchronous"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._queue = megackpt.AsyncCallsQueue()

    def save(self, declared: dict[str, Any], folder: Path) -> None:
        state = megackpt.sharded(declared)
        request = megackpt.save(state, folder, async_sharded_save=True)
        if request is not None:
            self._queue.schedule_async_request(request)
        self._queue.maybe_finalize_async_calls(blocking=True)


def module_of(state: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module whose parameters are these tensors: layers.0.0.weight, layers.0.1.weight.

    There are about as many layers as a layer has tensors. torch's load_state_dict compares each key with each child.
    """
    blocks: list[torch.nn.ModuleList] = []
    for number, value in enumerate(state.values()):
        if number % math.isqrt(len(state)) == 0:
            blocks.append(torch.nn.ModuleList())
        part = torch.nn.Module()
        part.weight = torch.nn.Parameter(value, requires_grad=False)
        blocks[-1].append(part)
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(blocks)})


class EngineOfModule(Engine):
    """megackpt.save and load of what torch's get_model_state_dict returns, and set_model_state_dict."""

    name = "megackpt, module"

    def declare(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {"model": module_of(super().declare(pieces)["model"])}

    def save(self, declared: dict[str, Any], folder: Path) -> None:
        super().save({"model": get_model_state_dict(declared["model"])}, folder)

    def load(self, declared: dict[str, Any], folder: Path, verify: bool) -> None:
        state = {"model": get_model_state_dict(declared["model"])}
        super().load(state, folder, verify)
        set_model_state_dict(declared["model"], state["model"])


class Stock(Engine):
    """torch DCP without megackpt, for comparison."""

    name = "stock dcp"
    save = StockDcp.save
    load = StockDcp.load


class Installed(Engine):
    """dcp.save and dcp.load after megackpt.dcp.install()."""

    name = "dcp.save, dcp.load"

    def save(self, declared: dict[str, Any], folder: Path) -> None:
        with megackpt.dcp.install():
            StockDcp.save(self, declared, folder)

    def load(self, declared: dict[str, Any], folder: Path, verify: bool) -> None:
        with megackpt.dcp.install():
            StockDcp.load(self, declared, folder, verify)


class InstalledAsync(Installed):
    """dcp.async_save after megackpt.dcp.install(), until the checkpoint is complete."""

    name = "dcp.async_save"
    alike = EngineAsync.name

    def save(self, declared: dict[str, Any], folder: Path) -> None:
        with megackpt.dcp.install():
            saving: Any = dcp_async_save(declared, checkpoint_id=folder)
            saving.result()


class Manager(Engine):
    """CheckpointManager with the state dict: finding the step counts."""

    name = "CheckpointManager"

    def save(self, declared: dict[str, Any], folder: Path) -> None:
        with megackpt.CheckpointManager(folder) as manager:
            manager.save(1, **declared)

    def load(self, declared: dict[str, Any], folder: Path, verify: bool) -> None:
        with megackpt.CheckpointManager(folder) as manager:
            if manager.restore(verify=verify, **declared) is None:
                raise megackpt.NotACheckpoint(f"{folder} holds no step")


class ManagerOfModule(Manager):
    """CheckpointManager with a module: torch's functions for states of modules count, too."""

    name = "CheckpointManager, module"
    alike = EngineOfModule.name

    def declare(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {"model": module_of(super().declare(pieces)["model"])}


DOORS: dict[str, type[Engine]] = {
    kind.name: kind
    for kind in (Installed, InstalledAsync, Manager, ManagerOfModule, Stock)
}
ENGINES: dict[str, type[Engine]] = {
    kind.name: kind for kind in (Engine, EngineAsync, EngineOfModule)
}
"""The contestants that the doors are compared with."""
