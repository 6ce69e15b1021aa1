"""What the integrations remove, load and keep; the foreign classes are the least that they need."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import megackpt
from megackpt.checkpoint.transaction import Transaction

OLD, NEW = "run/epoch=0-step=2.ckpt", "run/epoch=1-step=4.ckpt"


class Config:
    """Of torchtitan's manager."""

    __slots__ = ()


class Manager:
    """torchtitan's."""

    Config = Config

    def __init__(self, folder: str, keep_latest_k: int) -> None:
        self.folder = folder
        self.keep_latest_k = keep_latest_k

    def _should_purge(self) -> bool:
        return self.keep_latest_k > 0


class Strategy:
    """Lightning's."""

    is_global_zero = True

    def broadcast(self, value: Any) -> Any:
        return value

    def nothing(self, *_: Any) -> None: ...

    on_train_start = on_train_batch_start = on_train_end = teardown = nothing

    def remove_checkpoint(self, path: str) -> None:
        raise PermissionError(path)


Imported = Callable[..., Any]


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Imported:
    """Import one of our modules; the foreign one has these names."""
    monkeypatch.chdir(tmp_path)

    def load(name: str, foreign: str, **content: Any) -> Any:
        parts = foreign.split(".")
        for end in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:end]))
            monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(module).update(content)
        above = sys.modules[".".join(parts[:-1])]
        setattr(above, parts[-1], module)
        ours = f"megackpt.integrations.{name}"
        monkeypatch.delitem(sys.modules, ours, raising=False)
        found = import_module(ours)
        monkeypatch.setitem(sys.modules, ours, found)
        monkeypatch.delitem(sys.modules, ours)
        return found

    return load


@pytest.fixture
def titan(imported: Imported) -> Any:
    module = imported(
        "torchtitan",
        "torchtitan.components.checkpointer.dcp",
        CheckpointManager=Manager,
    )
    return module.CheckpointManager("run", 2)


@pytest.fixture
def strategy(imported: Imported) -> Any:
    names = ("DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")
    module = imported(
        "lightning", "lightning.pytorch.strategies", **dict.fromkeys(names, Strategy)
    )
    found = module.DDPStrategy()
    found.on_train_start()
    return found


def saved(*names: str) -> None:
    for name in names:
        megackpt.save(megackpt.sharded({"w": torch.ones(8)}), name)


def test_torchtitan_removes_its_own_steps_only(titan: Any) -> None:
    others = ["run/pretrained", "run/teacher", "run/iter_0000005", "run/step_7"]
    saved("archive", *others, "run/step-10", "run/step-20", "run/step-30")
    os.symlink("../archive", "run/step-5")
    titan._purge_stale_checkpoints()
    left = {f"run/{name}" for name in os.listdir("run")}
    assert left == {*others, "run/step-5", "run/step-20", "run/step-30"}
    assert megackpt.verify("archive").problems == ()


def test_torchtitan_counts_undamaged_steps_only(titan: Any) -> None:
    saved("run/step-10", "run/step-20", "run/step-30")
    os.truncate("run/step-30/__0_0.distcp", 10)
    titan._purge_stale_checkpoints()
    assert len(os.listdir("run")) == 3
    assert titan._find_load_step() == 20


def test_torchtitan_loads_its_own_steps_only(titan: Any) -> None:
    saved("run/iter_0000100", "run/step_50", "run/step-010")
    assert titan._find_load_step() == -1
    saved("run/step-10")
    assert titan._find_load_step() == 10
    assert titan._manager().latest().step == 100


def replaced(strategy: Any) -> None:
    """A checkpoint, which a save that is not complete yet replaces."""
    for path in (OLD, NEW):
        strategy.on_train_batch_start(None, 0)
        strategy._finalize(blocking=True)
        strategy.save_checkpoint({"state_dict": {"w": torch.ones(8)}}, path)
    strategy.remove_checkpoint(OLD)


def test_lightning_keeps_what_a_dropped_save_would_replace(strategy: Any) -> None:
    replaced(strategy)
    strategy.teardown()
    strategy.on_train_start()
    strategy.on_train_batch_start(None, 0)
    assert os.path.exists(OLD)


def test_lightning_keeps_what_a_failed_save_would_replace(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    replaced(strategy)
    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "_complete", full)
        with pytest.raises(megackpt.RankFailure):
            strategy.on_train_end()
    strategy.on_train_start()
    strategy.on_train_batch_start(None, 0)
    assert os.listdir("run") == [Path(OLD).name]


@pytest.mark.parametrize("refused", ["damaged", "of another library"])
def test_lightning_goes_on_when_a_removal_is_refused(
    strategy: Any, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    replaced(strategy)
    if refused == "damaged":
        for name in ("megackpt.index", ".metadata"):
            os.truncate(f"{OLD}/{name}", 20)
    else:
        Path(OLD, "megackpt.index").unlink()
    with caplog.at_level(logging.WARNING, "megackpt.lightning"):
        strategy.on_train_end()
        strategy.on_train_end()
    assert [OLD in line for line in caplog.messages] == [True]
    assert os.path.exists(OLD)


def test_lightning_completes_a_save_after_an_exception(strategy: Any) -> None:
    try:
        raise RuntimeError("of the training")
    except RuntimeError:
        strategy.save_checkpoint({"state_dict": {"w": torch.ones(8)}}, NEW)
        strategy.teardown()
    assert megackpt.verify(NEW).problems == ()


def test_lightning_removes_what_is_replaced(strategy: Any) -> None:
    replaced(strategy)
    strategy.on_train_end()
    assert os.listdir("run") == [Path(NEW).name]
