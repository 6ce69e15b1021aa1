"""Mistakes in the calls of a manager with objects: each message names the argument, its value and the cure.

The names of other libraries' options are a table of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import CheckpointManager
from megackpt.errors import (
    MismatchError,
    NotACheckpoint,
    ShardingError,
    StorageError,
    UntrustedClass,
)
from megackpt.option_names import _NAMES_OF_PEERS


class Run:
    """A run whose step 1 has a model and its optimizer, step 2 a model, step 3 both as state dicts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.net = self.of_width(8)
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.net(torch.ones(2, 8)).sum().backward()
        self.optimizer.step()
        self.manager = CheckpointManager(root)
        self.save, self.restore = self.manager.save, self.manager.restore
        self.save(1, model=self.net, optimizer=self.optimizer, extra={"epoch": 1})
        self.save(2, model=self.net)
        states = self.net.state_dict(), self.optimizer.state_dict()
        self.save(3, model=states[0], optimizer=states[1])

    @staticmethod
    def of_width(width: int) -> torch.nn.Module:
        layers = torch.nn.Linear(8, width), torch.nn.Linear(width, 8)
        return torch.nn.Sequential(*layers)

    def sgd(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Config:
    """A class that no load trusts by itself."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("run"))


Call = Callable[[Any], Any]
MISTAKES: list[tuple[Call, type[Exception], tuple[str, ...]]] = [
    # --- the manager ---
    (
        lambda r: CheckpointManager(r.root, keep_best=2),
        ValueError,
        ("keep_best says", "keep_last=1, keep_best=2"),
    ),
    (lambda r: CheckpointManager(r.root, keep_last=0), ValueError, ("keep_last", "0")),
    (
        lambda r: CheckpointManager(r.root, keep_lats=3),
        TypeError,
        ("keep_lats=3", "did you mean keep_last=3?"),
    ),
    (
        lambda r: CheckpointManager(r.root, best_mode="lowest"),
        ValueError,
        ("best_mode is 'min' or 'max', not 'lowest'",),
    ),
    (lambda _: CheckpointManager(None), StorageError, ("a str or a Path, not None",)),
    (
        lambda r: CheckpointManager("hf://org/name").save(1, model=r.net),
        StorageError,
        ("'hf://org/name'", "s3://BUCKET", "huggingface_hub.snapshot_download(NAME)"),
    ),
    (
        lambda r: CheckpointManager("/proc/none").save(1, model=r.net),
        StorageError,
        ("cannot make the directory /proc/none", "Was the directory above removed"),
    ),
    (
        lambda r: CheckpointManager(f"{r.root}/iter_0000001").restore(model=r.net),
        megackpt.CorruptCheckpoint,
        ("iter_0000001 is a checkpoint itself: is the directory above it meant?",),
    ),
    # --- the step ---
    (lambda r: r.save("10", model=r.net), TypeError, ("step='10'", "step=int(...)")),
    (lambda r: r.save(1.0, model=r.net), TypeError, ("step=1.0", "step=int(...)")),
    (lambda r: r.save(True, model=r.net), TypeError, ("step=True", "step=int(...)")),
    (lambda r: r.save(r.net, 4), TypeError, ("step=Sequential(", "step=int(...)")),
    (lambda r: r.save(-1, model=r.net), ValueError, ("step=-1", "0 or more")),
    (lambda r: r.restore(model=r.net, step=True), TypeError, ("step=True",)),
    (
        lambda r: r.restore(model=r.net, step="10"),
        ValueError,
        ("step is an int, 'latest', 'best' or None, not '10'",),
    ),
    (
        lambda r: r.restore(model=r.net, step=7),
        NotACheckpoint,
        ("iter_0000007 does not exist",),
    ),
    # --- what is saved ---
    (lambda r: r.save(4), ValueError, ("nothing to save: give objects by name",)),
    (
        lambda r: r.save(4, r.net),
        ShardingError,
        ("not a Sequential", "save(step, model=net)", "sharded(net.state_dict())"),
    ),
    (lambda r: r.save(4, [r.net]), ShardingError, ("not a list", "under a key")),
    (
        lambda r: r.save(4, torch.ones(2)),
        ShardingError,
        ("not a Tensor", "Given: tensor([1., 1.])", "sharded(net.state_dict())"),
    ),
    (
        lambda r: megackpt.save(r.root / "x", r.net.state_dict()),
        ShardingError,
        ("arguments swapped? save(state, directory)", "Path("),
    ),
    (
        lambda r: megackpt.sharded(r.net),
        ShardingError,
        ("not a Sequential", "net.state_dict()"),
    ),
    (
        lambda r: r.save(4, {"model": r.net}),
        ShardingError,
        ("['model'] is a Sequential", "save(step, model=net)"),
    ),
    (
        lambda r: r.save(4, model=r.net, extra={"optimizer": r.optimizer}),
        ShardingError,
        ("['extra']['optimizer'] is a AdamW", "save(step, model=net)"),
    ),
    (
        lambda r: r.save(4, model=r.net, epoch=3),
        TypeError,
        ("epoch=3 is neither", "extra={'epoch': ...}"),
    ),
    (
        lambda r: r.save(4, model=r.net, overwite=False),
        TypeError,
        ("overwite=False is neither", "did you mean overwrite=False?"),
    ),
    (
        lambda r: r.save(4, strict=r.net),
        TypeError,
        ("strict=Sequential(", "strict is an option of save or restore", "my_strict="),
    ),
    (
        lambda r: r.restore(metric={}),
        TypeError,
        ("metric={}", "metric is an option of save or restore", "my_metric="),
    ),
    (
        lambda r: r.save(4, optimizer=r.optimizer),
        ValueError,
        ("optimizer: none of the modules", "model=..."),
    ),
    (
        lambda r: r.save(4, extra={"f": lambda: 0}),
        ShardingError,
        ("['extra']['f']", "LocalNonpersistentObject"),
    ),
    # --- what is restored ---
    (
        lambda r: r.restore(3),
        ShardingError,
        ("not a int", "restore(state, step=3)", "Given: 3"),
    ),
    (
        lambda r: r.restore(model=Run.of_width(9), step=2),
        MismatchError,
        ("loaded (8, 8) and expected (9, 8)", "'expected' the shape of your tensor"),
    ),
    (
        lambda r: r.restore(model=r.net, optimizer=r.sgd(), step=1),
        MismatchError,
        ("AdamW, and this one is SGD", "restore without optimizer="),
    ),
    (
        lambda r: r.restore(model=r.net, optimizer=r.optimizer, step=3),
        MismatchError,
        (
            "restore(optimizer={})",
            "optimizer.load_state_dict(found.state['optimizer'])",
        ),
    ),
    (
        lambda r: r.restore(net=r.net, step=2),
        MismatchError,
        ("no state of 'net'; its state has 'model'", "Restore without net="),
    ),
    (
        lambda r: r.restore(r.net.state_dict(), step=2),
        MismatchError,
        ("plain tensors", "restore(model=net)"),
    ),
    (
        lambda r: (r.save(5, extra={"c": Config()}), r.restore(extra={}, step=5)),
        UntrustedClass,
        ("Config", "pass trusted=(Config,)"),
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_message_names_the_argument_its_value_and_the_cure(
    run: Run, mistake: tuple[Call, type[Exception], tuple[str, ...]]
) -> None:
    call, error, told = mistake
    with pytest.raises(error) as caught:
        call(run)
    assert type(caught.value) is error
    assert [part for part in told if part not in str(caught.value)] == []


PEERS = [name for names in _NAMES_OF_PEERS.values() for name in names.split()]


def test_the_table_of_other_libraries_has_each_name_once() -> None:
    assert len(PEERS) == len(set(PEERS)) >= 20


@pytest.mark.parametrize("name", PEERS)
def test_an_option_of_another_library_is_answered_with_ours(
    run: Run, name: str
) -> None:
    given: dict[str, Any] = {name: 7}
    calls = [
        lambda: run.save(4, model=run.net, **given),
        lambda: run.restore(model=run.net, **given),
    ]
    if name not in signature(CheckpointManager).parameters:
        calls.append(lambda: CheckpointManager(run.root, **given))
    for call in calls:
        with pytest.raises(TypeError, match=rf"\b{name}=7.*: give ") as caught:
            call()
        assert "{}" not in str(caught.value)


def test_the_state_dict_of_an_optimizer_is_loaded_as_the_message_says(run: Run) -> None:
    other = torch.optim.AdamW(run.net.parameters())
    found = run.restore(optimizer={}, step=3)
    assert found is not None
    other.load_state_dict(found.state["optimizer"])
    for parameter in run.net.parameters():
        assert other.state[parameter]["exp_avg"].equal(
            run.optimizer.state[parameter]["exp_avg"]
        )


def test_dir_shows_the_public_names_only() -> None:
    for package in (megackpt, megackpt.dcp):
        assert dir(package) == sorted(package.__all__)
