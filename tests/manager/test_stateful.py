"""Objects given to a manager by name: their states are saved, and restored into them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import megackpt
from megackpt.errors import MismatchError, ShardingError, StorageError
from megackpt.manager import CheckpointManager
from tests.conftest import Ranks
from tests.manager.runs import state


class Training:
    """A model, its optimizer and a scheduler; each step has a loss."""

    def __init__(self, kind: str = "plain", **options: Any) -> None:
        torch.manual_seed(3)
        self.model: torch.nn.Module = torch.nn.Sequential(
            torch.nn.Linear(6, 10), torch.nn.BatchNorm1d(10), torch.nn.Linear(10, 2)
        )
        if kind == "fsdp2":
            fully_shard(
                self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),))
            )
        elif kind == "ddp":
            self.model = DistributedDataParallel(self.model)
        make = options.pop("optimizer", torch.optim.AdamW)
        self.optimizer = make(self.model.parameters(), lr=0.05, **options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def objects(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }

    def step(self) -> float:
        data = torch.arange(24.0).reshape(4, 6) / 24
        loss = (self.model(data) - 1).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()


SGD = {"optimizer": torch.optim.SGD, "momentum": 0.9, "dampening": 0.5}


@pytest.mark.parametrize("options", [{}, SGD, {"optimizer": torch.optim.Rprop}])
def test_a_training_continues_with_the_same_losses(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    whole = Training(**options)
    undisturbed = [whole.step() for _ in range(5)]
    with CheckpointManager(tmp_path, asynchronous=True) as manager:
        first = Training(**options)
        assert manager.restore(**first.objects(), extra={}) is None
        assert not first.optimizer.state  # as before the call
        assert [first.step() for _ in range(3)] == undisturbed[:3]
        manager.save(3, **first.objects(), extra={"epoch": 7, "seen": torch.ones(2)})
        first.step()
        second = Training(**options)
        manager.finalize()
        found = manager.restore(**second.objects(), extra={"seen": torch.zeros(2)})
    assert found is not None
    assert found.step == 3
    assert found.state["extra"]["epoch"] == 7
    assert found.state["extra"]["seen"].tolist() == [1, 1]
    assert [second.step() for _ in range(2)] == undisturbed[3:]


def test_an_optimizer_before_its_first_step(tmp_path: Path) -> None:
    whole = Training()
    manager = CheckpointManager(tmp_path)
    manager.save(0, **whole.objects())
    assert not whole.optimizer.state
    undisturbed = [whole.step() for _ in range(3)]
    second = Training()
    second.step()
    assert manager.restore(**second.objects()) is not None
    assert [second.step() for _ in range(3)] == pytest.approx(undisturbed, abs=1e-6)


def test_objects_beside_a_declared_state(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, state(4), extra={"epoch": 2}, content_metadata={"by": "a test"})
    found = manager.restore(state(-1), extra={}, strict="raise_unexpected")
    assert found is not None
    assert found.state["w"].eq(4).all()
    assert found.state["extra"] == {"epoch": 2}
    with pytest.raises(ValueError, match=r"\['value'\] are in the state dict already"):
        manager.save(2, state(4), value={})


def test_what_is_refused(tmp_path: Path) -> None:
    run, manager = Training(), CheckpointManager(tmp_path)
    with pytest.raises(TypeError, match="overwite=False is neither an option nor"):
        manager.save(1, model=run.model, overwite=False)
    for name, option in (
        ("content_metdata", "content_metadata"),
        ("keymap", "key_map"),
        ("shared_state_dict", "sharded_state_dict"),
        ("key_map", "key_map"),
    ):
        values: dict[str, Any] = {name: {"a": 1}}
        text = f"{option} is an option of save or restore:"
        with pytest.raises(TypeError, match=text):
            manager.save(1, model=run.model, **values)
    with pytest.raises(TypeError, match="content_metadata is an option of save or"):
        manager.restore(model=run.model, content_metadata={})
    with pytest.raises(
        TypeError, match=r"timeout=3 .*: give it once, to CheckpointMan"
    ):
        manager.save(1, model=run.model, timeout=3)
    with pytest.raises(ValueError, match="nothing to save"):
        manager.save(1)
    with pytest.raises(
        ValueError, match="optimizer: none of the modules given has all"
    ):
        manager.save(1, optimizer=run.optimizer)
    assert manager.steps() == ()
    manager.save(1, model=run.model)
    with pytest.raises(MismatchError, match=r"holds no state of 'scheduler'.* 'model'"):
        manager.restore(model=run.model, scheduler=run.scheduler)


def unsaved() -> dict[str, Any]:
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return {
        "Linear": net,
        "SGD": optimizer,
        "StepLR": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "DataLoader": DataLoader([1, 2]),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("kind", unsaved())
def test_an_object_in_a_dict_is_refused_with_the_cure(
    tmp_path: Path, kind: str
) -> None:
    value = unsaved()[kind]
    manager = CheckpointManager(tmp_path / "run")
    text = rf"\['it'\] is a {kind}.*save\(step, model=net\).*state_dict\(\)"
    with pytest.raises(ShardingError, match=text):
        manager.save(1, extra={"it": value})
    with pytest.raises(ShardingError, match=text):
        megackpt.save({"it": value}, tmp_path / "c")
    with pytest.raises(ShardingError, match=text):
        megackpt.save({"it": (1, value)}, tmp_path / "c")
    for replicated in ("nothing", "tensors", "all"):
        declared = megackpt.sharded({"it": value}, replicated=replicated)  # type: ignore[arg-type]
        with pytest.raises(ShardingError, match=text):
            megackpt.save(declared, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    assert not manager.steps()
    manager.save(1, extra={"a": 1})
    with pytest.raises(ShardingError, match=text):
        manager.restore(extra={"it": value})


def test_names_of_dicts_that_are_like_no_option(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    names = "metadata", "measures", "steps", "content", "maps"
    given = {name: {"a": 1} for name in names}
    manager.save(1, **given)
    found = manager.restore(**{name: {} for name in given})
    assert found is not None
    assert found.state == given
    with pytest.raises(TypeError, match="and metrics is an option of save"):
        manager.restore(metrics={})


def test_what_fails_leaves_no_invented_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, manager = Training(**SGD), CheckpointManager(tmp_path)
    manager.save(1, model=run.model)
    with pytest.raises(MismatchError):
        manager.restore(model=run.model, optimizer=run.optimizer)
    assert not run.optimizer.state

    def fail(blocking: bool) -> None:
        raise StorageError("the save before")

    manager._in_flight.add(2)
    monkeypatch.setattr(manager._queue, "maybe_finalize_async_calls", fail)
    with pytest.raises(StorageError, match="the save before"):
        manager.save(2, model=run.model, optimizer=run.optimizer)
    assert not run.optimizer.state


def test_a_new_optimizer_whose_parameters_have_gradients(tmp_path: Path) -> None:
    first, manager = Training(), CheckpointManager(tmp_path)
    first.step()
    manager.save(1, **first.objects())
    second = Training()
    second.model(torch.ones(4, 6)).sum().backward()
    gradients = [p.grad for p in second.model.parameters()]
    assert manager.restore(**second.objects()) is not None
    assert all(
        p.grad is gradient
        for p, gradient in zip(second.model.parameters(), gradients, strict=True)
    )
    assert second.step() == first.step()
    assert second.step() == first.step()


def test_a_missing_object_is_found_before_others_change(tmp_path: Path) -> None:
    run, manager = Training(), CheckpointManager(tmp_path)
    run.step()
    manager.save(1, scheduler=run.scheduler)
    run.step()
    with pytest.raises(MismatchError, match="no state of 'other'"):
        manager.restore(
            scheduler=run.scheduler,
            other=torch.optim.lr_scheduler.StepLR(run.optimizer, 2),
        )
    assert run.scheduler.last_epoch == 2


def test_a_module_without_a_state(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    objects = {"model": torch.nn.Linear(2, 2), "loss": torch.nn.MSELoss()}
    manager.save(1, **objects)
    found = manager.restore(**objects)
    assert found is not None
    assert found.state["loss"] == {}


def train(kind: str, root: str, steps: int) -> None:
    torch.set_num_threads(1)
    training = Training(kind)
    with CheckpointManager(root, asynchronous=True) as manager:
        found = manager.restore(**training.objects())
        first = found.step if found else 0
        for step in range(first + 1, first + steps + 1):
            loss = training.step()
            if dist.get_rank() == 0:
                print(step, loss)
            manager.save(step, **training.objects())


def losses(finished: list[Any]) -> list[tuple[int, float]]:
    rows = map(str.split, finished[0].stdout.splitlines())
    return [(int(step), float(loss)) for step, loss in rows]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_of_another_number_continue(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    whole = Training()
    undisturbed = [
        (step, pytest.approx(whole.step(), rel=1e-5)) for step in (1, 2, 3, 4, 5)
    ]
    assert losses(ranks(train, 2, kind, tmp_path, 2)) == undisturbed[:2]
    other = "ddp" if kind == "fsdp2" else "fsdp2"
    assert losses(ranks(train, 3, kind, tmp_path, 1)) == undisturbed[2:3]
    assert losses(ranks(train, 1, other, tmp_path, 2)) == undisturbed[3:]
