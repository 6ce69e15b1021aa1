"""Values of dicts and objects that a manager is given by name come back without being asked for one by one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import megackpt
from megackpt import CheckpointManager, LocalTier, MismatchError, PerRank, ShardingError
from tests.conftest import Ranks


class Average:
    """A moving average of parameters. It is empty until its first update."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.decay = torch.tensor(0.5)
        self.updates = 0

    def update(self, named: dict[str, torch.Tensor]) -> None:
        self.shadow = {name: value.detach().clone() for name, value in named.items()}
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.updates = state["shadow"], state["updates"]


class WithDecay(Average):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"decay": self.decay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        assert state["decay"] is not None


EXTRA = {
    "epoch": 3,
    "rng": torch.arange(7, dtype=torch.uint8),
    "loss": torch.tensor(0.25, dtype=torch.bfloat16),
    "large": torch.ones(1 << 19),
    "none": torch.ones(0, 3),
    "by.layer": {"0.weight": torch.full((2, 3), 2.0), "1": {"weight": torch.ones(1)}},
    "numbers": {0: torch.ones(2), 1: {2: torch.zeros(1)}},
    "history": [torch.ones(1), 4, [torch.zeros(2), "text"], {"a": torch.ones(1)}],
    "only tensors": [torch.ones(3), torch.zeros(3)],
    "pair": (1, torch.ones(2)),
    "nothing": {},
}


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            is_same(one[key], other[key]) for key in one
        )
    if isinstance(one, list | tuple):
        same = all(map(is_same, one, other))
        return type(one) is type(other) and len(one) == len(other) and same
    return bool(one == other)


@pytest.mark.parametrize("format", ["torch_dist", "zarr"])
def test_a_dict_comes_back_as_it_was_saved(
    tmp_path: Path, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, format)
    extra = dict(EXTRA)
    if format == "zarr":
        del extra["loss"]  # a dtype that zarr lacks
    manager.save(1, model=torch.nn.Linear(2, 2), extra=extra)
    found = manager.restore(model=torch.nn.Linear(2, 2), extra={})
    assert found is not None
    assert set(found.state) == {"model", "extra"}
    assert is_same(found.state["extra"], extra)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_tensors_that_are_asked_for_are_filled_and_the_others_come_too(
    tmp_path: Path,
) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, extra=EXTRA)
    rng, number = torch.zeros(7, dtype=torch.uint8), torch.zeros(2)
    found = manager.restore(extra={"rng": rng, "numbers": {0: number}})
    assert found is not None
    assert is_same(found.state["extra"], EXTRA)
    assert rng.tolist() == list(range(7))
    assert number.tolist() == [1, 1]
    assert found.state["extra"]["rng"].data_ptr() == rng.data_ptr()


@pytest.mark.parametrize("saved", [torch.ones(2), PerRank(4), [PerRank(4), 5]])
@pytest.mark.parametrize("asked", [{}, {"r": None}, {"r": PerRank(0)}, {"other": 1}])
def test_values_that_are_alone_come_whatever_is_asked(
    tmp_path: Path, saved: Any, asked: dict[str, Any]
) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, extra={"r": saved})
    found = manager.restore(extra=asked)
    assert found is not None
    value = {PerRank: 4, list: [4, 5]}.get(type(saved), saved)
    assert is_same(found.state, {"extra": {"r": value}})


@pytest.mark.parametrize("kind", [Average, WithDecay])
def test_an_object_that_is_empty_in_a_new_process(
    tmp_path: Path, kind: type[Average]
) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    saved, loaded = kind(), kind()
    saved.update(dict(net.named_parameters()))
    manager = CheckpointManager(tmp_path)
    manager.save(1, model=net, average=saved)
    assert manager.restore(model=net, average=loaded) is not None
    assert loaded.updates == 1
    assert is_same(loaded.shadow, saved.shadow)


def test_what_is_not_asked_for_by_name_stays_away(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, extra=EXTRA, other={"weight": torch.ones(2), "n": 1})
    found = manager.restore(other={}, strict="raise_unexpected")
    assert found is not None
    assert is_same(found.state["other"], {"weight": torch.ones(2), "n": 1})
    assert "rng" not in found.state["extra"]


def test_a_checkpoint_without_notes_on_places(tmp_path: Path) -> None:
    state = {"extra": {"epoch": 2, "rng": torch.ones(3)}, "more": {"a": torch.ones(1)}}
    megackpt.save(megackpt.sharded(state), tmp_path / "iter_0000001")
    found = CheckpointManager(tmp_path).restore(extra={}, more={})
    assert found is not None
    assert is_same(found.state, state)


def test_local_steps_have_them_too(tmp_path: Path) -> None:
    tier = LocalTier(str(tmp_path / "host"), every=1)
    saved, loaded = Average(), Average()
    saved.update({"0.weight": torch.ones(2, 2)})
    with CheckpointManager(tmp_path / "run", local=tier, save_interval=10) as manager:
        assert manager.should_save(1)
        manager.save(1, average=saved, extra=EXTRA | {"own": PerRank(5)})
        found = manager.restore(average=loaded, extra={})
    assert found is not None
    assert found.source == "local"
    assert is_same(found.state["extra"], EXTRA | {"own": 5})
    assert is_same(loaded.shadow, saved.shadow)


class Sampler:
    """Each rank has a state of its own, and a tensor that is the same on all."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed, self.order = seed, torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"own": PerRank({"seed": self.seed}), "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed = state["own"] and state["own"]["seed"]


def shadows(root: str, steps: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    with CheckpointManager(root) as manager:
        loaded, sampler = Average(), Sampler()
        own = torch.full((2,), float(rank))
        found = manager.restore(average=loaded, sampler=sampler, extra={})
        if found is not None:
            assert sampler.seed == (None if rank >= steps else rank)
            assert sampler.order.tolist() == [0, 0, 0]
            assert torch.equal(loaded.shadow["0.weight"], torch.arange(10.0))
            assert not isinstance(loaded.shadow["0.weight"], DTensor)
            assert found.state["extra"]["small"].tolist() == [1, 1]
            expected = None if rank >= steps else rank
            assert found.state["extra"]["rng"] == expected
            if expected is not None:
                assert found.state["extra"]["seed"].tolist() == [rank, rank]
        average = Average()
        average.update(
            {"0.weight": distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])}
        )
        extra = {"small": torch.ones(2), "rng": PerRank(rank), "seed": PerRank(own)}
        manager.save(ranks, average=average, sampler=Sampler(rank), extra=extra)
        filled = average.shadow["0.weight"].to_local().zero_()
        again = manager.restore(average=average, extra={"rng": PerRank(None)})
        assert again is not None
        assert again.state["extra"]["rng"] == rank
        assert filled.tolist() == torch.arange(10.0).chunk(ranks)[rank].tolist()


def test_shards_come_back_whole_and_values_of_ranks_to_their_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(shadows, 2, tmp_path, 0)
    ranks(shadows, 3, tmp_path, 2)
    ranks(shadows, 1, tmp_path, 3)


def differing(root: str) -> None:
    rank = dist.get_rank()
    manager = CheckpointManager(root)
    for step in (1, 2):
        manager.save(step, extra={"seed": torch.tensor([rank]), "same": torch.ones(2)})
        manager.save(3, extra={"seed": PerRank(torch.tensor([rank]))})


def test_small_tensors_that_differ_between_ranks_are_named(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks(differing, 2, tmp_path)
    assert "extra.seed" not in first.stderr
    assert "Rank 1 common state dict differs" in second.stderr
    assert "of ['extra.seed'] and 0 more" in second.stderr
    assert "PerRank" in second.stderr
    assert "extra.same" not in second.stderr


def test_a_value_of_each_rank_without_a_manager(tmp_path: Path) -> None:
    state = {"rng": PerRank({"seed": 3}), "w": torch.ones(2)}
    megackpt.save(megackpt.sharded(state), tmp_path / "c")
    loaded = megackpt.load(megackpt.sharded(state), tmp_path / "c")
    assert loaded["rng"] == {"seed": 3}
    with pytest.raises(ShardingError, match=r"at \['rng'\].*megackpt.sharded"):
        megackpt.save(state, tmp_path / "d")
    manager = CheckpointManager(tmp_path)
    with pytest.raises(ShardingError, match=r"\['a'\]\[0\].*in dicts and lists"):
        manager.save(1, extra={"a": (PerRank(1),)})


def test_a_state_dict_that_declares_nothing_is_an_error(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2)
    manager = CheckpointManager(tmp_path / "objects")
    manager.save(1, model=net)
    cure = r"plain tensors and declares none.*restore\(model=net\)"
    with pytest.raises(MismatchError, match=cure):
        manager.restore(net.state_dict())
    with pytest.raises(MismatchError, match=cure):
        manager.restore(net.state_dict(), strict="log_all")
    manager = CheckpointManager(tmp_path / "declared")
    manager.save(1, megackpt.sharded(net.state_dict()))
    with pytest.raises(MismatchError, match=cure):
        manager.restore(net.state_dict())
    assert manager.restore(megackpt.sharded(net.state_dict())) is not None
    manager = CheckpointManager(tmp_path / "common")
    manager.save(1, net.state_dict())
    found = manager.restore(net.state_dict())
    assert found is not None
    assert torch.equal(found.state["weight"], net.weight)
