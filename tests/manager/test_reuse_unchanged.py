"""A manager knows which parameters are frozen, and which step it has restored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megackpt import Strategy
from megackpt.manager import CheckpointManager
from megackpt.planning import cache

STRATEGY = Strategy(reuse_unchanged=True)


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    cache.forget()


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 64, device="cpu"), torch.nn.Linear(64, 8, device="cpu")
    made = torch.nn.Sequential(*layers)
    made[0].requires_grad_(False)
    return made


def train(net: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.add_(1)


def links(folder: Path) -> list[int]:
    return [path.stat().st_nlink for path in sorted(folder.rglob("*.distcp"))]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_frozen_parameters_are_linked(tmp_path: Path, asynchronous: bool) -> None:
    net = model()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    with CheckpointManager(
        tmp_path, STRATEGY, keep_last=2, naming="plain", asynchronous=asynchronous
    ) as manager:
        for step in range(4):
            train(net)
            manager.save(step, model=net, optimizer=optimizer)
            manager.finalize()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "2",
        "3",
    ]
    assert [path.name for path in (tmp_path / "3" / "unchanged").iterdir()] == [
        "__0_0.distcp"
    ]
    assert links(tmp_path / "3" / "unchanged") == [2]
    other = model()
    with CheckpointManager(tmp_path, naming="plain") as manager:
        manager.restore(model=other)
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_new_process_links_the_step_that_it_has_restored(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, STRATEGY, naming="plain") as manager:
        manager.save(0, model=model())
    cache.forget()  # as a new process
    net = model()
    with CheckpointManager(tmp_path, STRATEGY, naming="plain") as manager:
        manager.restore(model=net)
        train(net)
        manager.save(1, model=net)
    assert links(tmp_path / "1" / "unchanged") == [2]


def test_other_declarations_link_the_last_step(tmp_path: Path) -> None:
    """The first step of an optimizer adds tensors to the state."""
    net = model()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    with CheckpointManager(tmp_path, STRATEGY, naming="plain") as manager:
        manager.save(0, model=net, optimizer=optimizer)
        net(torch.ones(1, 64, device="cpu")).sum().backward()
        optimizer.step()
        manager.save(1, model=net, optimizer=optimizer)
    assert links(tmp_path / "1" / "unchanged") == [2]


def test_ls_and_show_count_shared_bytes(tmp_path: Path) -> None:
    net = model()
    with CheckpointManager(tmp_path, STRATEGY, naming="plain") as manager:
        for step in range(2):
            train(net)
            manager.save(step, model=net)
        (first, second) = manager.steps()
    file = tmp_path / "1" / "unchanged" / "__0_0.distcp"
    assert first.shared == second.shared == file.stat().st_size
    command = [sys.executable, "-m", "megackpt", "show", "--json"]
    shown = subprocess.run(
        [*command, str(tmp_path / "1")],
        capture_output=True,
        check=True,
        text=True,
    )
    assert json.loads(shown.stdout)["shared"] == file.stat().st_size
    (tmp_path / "0" / "unchanged" / "__0_0.distcp").unlink()
    with CheckpointManager(tmp_path, naming="plain") as manager:
        assert manager.steps()[-1].shared == 0
