"""What the integrations remove, load and keep; the foreign classes are the least that they need."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

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


class Ray:
    """Ray Train: what it was told, which it also knows after its workers were killed."""

    CheckpointConsistencyMode = CheckpointUploadMode = MagicMock()

    def __init__(self) -> None:
        self.reported: list[tuple[dict[str, Any], str | None]] = []
        self.info: object = None
        self.filesystem = SimpleNamespace(type_name="local")

    @staticmethod
    def Checkpoint(path: str) -> Any:  # noqa: N802
        return SimpleNamespace(path=path)

    def get_context(self) -> Any:
        path = os.path.abspath("run")
        storage = SimpleNamespace(
            experiment_fs_path=path, storage_filesystem=self.filesystem
        )
        return SimpleNamespace(get_storage=lambda: storage)

    def get_all_reported_checkpoints(self, _: Any) -> Any:
        paths = [name for _, name in self.reported if name is not None]
        found = [SimpleNamespace(path=os.path.abspath(f"run/{name}")) for name in paths]
        return [SimpleNamespace(checkpoint=checkpoint) for checkpoint in found]

    def report(self, metrics: Any, checkpoint: Any, **_: Any) -> None:
        name = None if checkpoint is None else os.path.basename(checkpoint.path)
        self.reported.append((metrics, name))

    def get_preemption_info(self) -> object:
        return self.info


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


@pytest.fixture
def ray() -> Ray:
    return Ray()


@pytest.fixture
def in_ray(imported: Imported, ray: Ray) -> Callable[..., Any]:
    """Makes our manager in a worker of Ray."""
    names = [name for name in dir(ray) if not name.startswith("_")]
    content = {name: getattr(ray, name) for name in names}
    module = imported("ray", "ray.train", **content)
    manager: Callable[..., Any] = module.CheckpointManager
    return manager


STATE = {"model": {"w": torch.ones(8)}}


def test_only_complete_checkpoints_are_reported_to_ray(in_ray: Any, ray: Ray) -> None:
    manager = in_ray()
    manager.save(1, **STATE, metrics={"loss": 0.5})
    assert ray.reported == []
    assert manager.finalize() == [1]
    assert ray.reported == [({"loss": 0.5}, "checkpoint-1")]
    manager.save(2, **STATE, asynchronous=False)
    assert ray.reported[1:] == [({}, "checkpoint-2")]
    manager.save(3, **STATE)
    manager.close()
    manager.close()
    assert ray.reported[2:] == [({}, "checkpoint-3")]


def test_failed_and_dropped_saves_are_not_reported_to_ray(
    in_ray: Any, ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    manager = in_ray(on_error="warn")
    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "_complete", full)
        manager.save(1, **STATE, asynchronous=False)
        manager.save(2, **STATE)
        assert manager.finalize() == []
    assert manager.failed_saves == 2
    manager.save(3, **STATE)
    manager.close(abort=True)
    assert ray.reported == []


def test_a_killed_workers_complete_checkpoint_is_reported_to_ray_once(
    in_ray: Any, ray: Ray
) -> None:
    manager = in_ray()
    manager.save(1, **STATE, asynchronous=False)
    saved("run/checkpoint-2")
    assert in_ray().restore(model={}).step == 2
    assert in_ray().restore(model={}).step == 2
    assert ray.reported[1:] == [({}, "checkpoint-2")]


def test_steps_with_foreign_names_are_not_reported_to_ray(
    in_ray: Any, ray: Ray
) -> None:
    saved("run/iter_0000007")
    assert in_ray().restore(model={}).step == 7
    assert ray.reported == []


def test_a_step_that_is_saved_again_is_reported_to_ray_once(
    in_ray: Any, ray: Ray
) -> None:
    in_ray().save(1, **STATE, asynchronous=False)
    in_ray().save(1, **STATE, asynchronous=False, metrics={"loss": 1})
    assert ray.reported == [({}, "checkpoint-1"), ({"loss": 1}, None)]


def test_ray_takes_a_node_away(in_ray: Any, ray: Ray) -> None:
    manager = in_ray(save_interval=10)
    assert not manager.should_save(1)
    ray.info = "in 30 seconds"
    assert manager.should_save(2)
    manager.save(2, **STATE)
    assert ray.reported == [({}, "checkpoint-2")]  # it was synchronous
    assert not manager.should_save(3)
    assert manager.should_save(10)


def test_ray_alone_removes_checkpoints(in_ray: Any) -> None:
    with pytest.raises(ValueError, match=r"keep_best, keep_last: .*num_to_keep"):
        in_ray(keep_last=2, keep_best=1)
    with pytest.raises(ValueError, match="local is not supported"):
        in_ray(local=object())


def test_a_run_of_ray_in_a_bucket_needs_its_url(in_ray: Any, ray: Ray) -> None:
    ray.filesystem.type_name = "s3"
    with pytest.raises(ValueError, match="give root"):
        in_ray()
