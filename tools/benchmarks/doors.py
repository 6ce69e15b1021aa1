"""P16: the doors, over megackpt.save and megackpt.load of the same state.

A door is another library's call, or an object of megackpt, that ends in the same engine. The state is DTensors in
nested dicts, as a training program has them. The declaration of the state counts on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save

import megackpt
import megackpt.dcp
from benchmarks.contestants import StockDcp
from benchmarks.states import Piece

ENGINE = "megackpt"


class Engine(StockDcp):
    """megackpt.save and megackpt.load, of a state that is not declared yet."""

    name = ENGINE

    def declare(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {"model": super().declare(pieces)}

    def save(self, declared: dict[str, Any], folder: Path) -> None:
        megackpt.save(megackpt.sharded(declared), folder)

    def load(self, declared: dict[str, Any], folder: Path, verify: bool) -> None:
        megackpt.load(megackpt.sharded(declared), folder, verify=verify)


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

    def declare(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        layers = torch.nn.ModuleList()
        for value in super().declare(pieces)["model"].values():
            layer = torch.nn.Module()
            layer.weight = torch.nn.Parameter(value, requires_grad=False)
            layers.append(layer)
        return {"model": torch.nn.ModuleDict({"layers": layers})}


DOORS = {
    kind.name: kind
    for kind in (Engine, Installed, InstalledAsync, Manager, ManagerOfModule, Stock)
}
