"""Restores of a part: some objects, what is stored, and tensors that stored ones of another form make."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Linear, Module, Sequential

import megackpt
from megackpt import (
    CheckpointManager,
    LocalNonpersistentObject,
    LocalTier,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.errors import CoverageError, MismatchError
from megackpt.huggingface import Fuse, Part, Transpose
from megackpt.testing import ThreadedGroup

piece = ShardedTensor.from_rank_offsets


def model(*names: str, width: int = 4) -> Module:
    return Sequential(OrderedDict((name, Linear(width, width)) for name in names))


def trained(net: Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return optimizer


def weights(net: Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        tensor.equal(other[name]) for name, tensor in one.items()
    )


@pytest.fixture
def run(tmp_path: Path) -> tuple[CheckpointManager, Module]:
    net = model("a", "b")
    manager = CheckpointManager(tmp_path / "run")
    manager.save(1, model=net, optimizer=trained(net), extra={"epoch": 3})
    return manager, net


# --- only ---


@pytest.mark.parametrize("only", ["model", ("model", "extra"), {"model"}])
def test_only_the_named_objects_are_restored_and_nothing_is_warned_of(
    run: tuple[CheckpointManager, Module], caplog: pytest.LogCaptureFixture, only: Any
) -> None:
    manager, net = run
    other = model("a", "b")
    optimizer = trained(other)
    before = [state["exp_avg"].clone() for state in optimizer.state.values()]
    found = manager.restore(model=other, optimizer=optimizer, extra={}, only=only)
    assert found is not None
    assert same(weights(net), weights(other))
    after = [state["exp_avg"] for state in optimizer.state.values()]
    assert all(map(torch.equal, before, after))
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_name_that_is_not_given_is_refused(
    run: tuple[CheckpointManager, Module],
) -> None:
    manager, net = run
    with pytest.raises(ValueError, match=r"only='modle' names .* restore\(model=net"):
        manager.restore(model=net, only="modle")
    with pytest.raises(ValueError, match="only='model' names an object that is not"):
        manager.restore(only="model")


def test_only_asks_for_all_keys_of_the_object(
    run: tuple[CheckpointManager, Module],
) -> None:
    with pytest.raises(MismatchError, match=r"'model\.c\.weight'"):
        run[0].restore(model=model("a", "b", "c"), only="model")


# --- partial ---


def test_a_partial_restore_fills_what_is_stored_and_counts_both(
    run: tuple[CheckpointManager, Module], caplog: pytest.LogCaptureFixture
) -> None:
    manager, net = run
    other = model("a", "head")
    head = weights(other)
    with caplog.at_level(logging.INFO, "megackpt.manager"):
        found = manager.restore(model=other, partial=True)
    assert found is not None
    assert found.step == 1
    now = weights(other)
    assert now["a.weight"].equal(weights(net)["a.weight"])
    assert now["head.weight"].equal(head["head.weight"])
    text = (
        "partial: 2 tensors are filled; 2 keys are not stored, and keep their values: "
        "model.head.bias, model.head.weight"
    )
    records = [r for r in caplog.records if r.name == "megackpt.manager"]
    assert [(r.levelname, r.getMessage()) for r in records] == [
        ("INFO", text),
    ]
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_partial_restore_of_nothing_changes_nothing(
    run: tuple[CheckpointManager, Module],
) -> None:
    other = model("c")
    before = weights(other)
    found = run[0].restore(model=other, only="model", partial=True)
    assert found is not None
    assert same(before, weights(other))


def test_a_partial_restore_refuses_other_shapes_and_objects(
    run: tuple[CheckpointManager, Module],
) -> None:
    with pytest.raises(MismatchError, match=r"loaded \(4, 4\) and expected \(8, 8\)"):
        run[0].restore(model=model("a", width=8), partial=True)
    with pytest.raises(
        MismatchError, match=r"no state of 'ema'.* Restore without ema="
    ):
        run[0].restore(model=model("a"), ema=model("a"), partial=True)


def test_ranks_restore_parts_of_a_declared_state(tmp_path: Path) -> None:
    def work(group: ThreadedGroup) -> tuple[list[float], list[float]]:
        def state(*keys: str) -> dict[str, Any]:
            half = torch.full((2,), float(group.rank))
            return {k: piece(k, half.clone(), (0, group.rank, 2)) for k in keys}

        manager = CheckpointManager(tmp_path / "run", process_group=group)
        manager.save(1, state("a"))
        asked = state("a", "b")
        asked["a"].data.fill_(-1)
        found = manager.restore(asked, partial=True)
        assert found is not None
        assert found.state.keys() == {"a"}
        return asked["a"].data.tolist(), asked["b"].data.tolist()

    assert ThreadedGroup.run(2, work) == [
        ([0.0, 0.0], [0.0, 0.0]),
        ([1.0, 1.0], [1.0, 1.0]),
    ]


# --- transform ---


class Attention(Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            rows = 6 if name == "qkv" else 2
            setattr(self, name, torch.nn.Parameter(torch.randn(rows, 4)))


def test_a_transform_joins_and_cuts_stored_tensors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    apart, fused = Attention("q", "k", "v", "o"), Attention("qkv", "o")
    manager = CheckpointManager(tmp_path)
    manager.save(1, model=apart)
    names = tuple(f"model.{name}" for name in "qkv")
    found = manager.restore(model=fused, transform={"model.qkv": Fuse(names)})
    assert found is not None
    whole = torch.cat([getattr(apart, name) for name in "qkv"])
    assert fused.qkv.equal(whole)
    assert fused.o.equal(apart.o)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    manager.save(2, model=fused)
    again = Attention("q", "k", "v", "o")
    parts = {
        name: Part("model.qkv", number, (1, 1, 1)) for number, name in enumerate(names)
    }
    manager.restore(model=again, transform=parts)
    assert same(weights(apart), weights(again))


def test_a_transform_renames_by_pattern_transposes_and_casts(tmp_path: Path) -> None:
    stored = {f"old.{n}.kernel": torch.randn(2, 3) for n in range(3)}
    megackpt.save(megackpt.sharded({**stored, "other": torch.ones(2)}), tmp_path / "c")
    asked = {f"new.{n}.w": torch.zeros(3, 2, dtype=torch.float64) for n in range(3)}
    asked["other"] = torch.zeros(2)
    megackpt.load(
        megackpt.sharded(asked),
        tmp_path / "c",
        transform={"new.#.w": Transpose("old.#.kernel")},
    )
    for number in range(3):
        expected = stored[f"old.{number}.kernel"].T.to(torch.float64)
        assert asked[f"new.{number}.w"].equal(expected)
    assert asked["other"].eq(1).all()


def test_none_and_functions_in_a_transform(tmp_path: Path) -> None:
    """A tensor that keeps its values, one with new values, and one that two stored ones make."""
    net = model("a", "b")
    manager = CheckpointManager(tmp_path)
    manager.save(1, model=net)

    def zeros(shard: ShardedTensor) -> LocalNonpersistentObject:
        return LocalNonpersistentObject(shard.data.zero_())

    def mean(shard: ShardedTensor) -> ShardedTensorFactory:
        kind = shard.key.rpartition(".")[2]
        parts = [replace(shard, key=f"model.{n}.{kind}", data=None) for n in "ab"]

        def merge(values: list[torch.Tensor]) -> torch.Tensor:
            return shard.data.copy_((values[0] + values[1]) / 2)

        return ShardedTensorFactory(shard.key, shard.data, lambda *_: parts, merge)

    other = model("mean", "kept", "new")
    kept = weights(other)["kept.weight"]
    transform = {"model.mean.*": mean, "model.kept.*": None, "model.new.*": zeros}
    manager.restore(model=other, transform=transform)
    now, then = weights(other), weights(net)
    assert now["mean.weight"].equal((then["a.weight"] + then["b.weight"]) / 2)
    assert now["mean.bias"].equal((then["a.bias"] + then["b.bias"]) / 2)
    assert now["kept.weight"].equal(kept)
    assert now["new.weight"].eq(0).all()


def test_a_transform_of_shards_reads_the_regions_of_each_rank(tmp_path: Path) -> None:
    values = torch.arange(24.0).reshape(6, 4)

    def work(group: ThreadedGroup) -> torch.Tensor:
        parts = {
            name: piece(name, values[2 * n : 2 * n + 2].clone(), replica_id=group.rank)
            for n, name in enumerate("qkv")
        }
        manager = CheckpointManager(tmp_path / "run", process_group=group)
        manager.save(1, parts)
        local = torch.zeros(6, 2)
        state = {"qkv": piece("model.qkv", local, (1, group.rank, 2))}
        manager.restore(state, transform={"model.qkv": Fuse(("q", "k", "v"))})
        return local

    assert torch.cat(ThreadedGroup.run(2, work), 1).equal(values)


def test_errors_of_a_transform_are_raised_before_a_tensor_changes(
    run: tuple[CheckpointManager, Module],
) -> None:
    manager, _ = run
    other = model("a", "c")
    before = weights(other)
    for transform, error, text in (
        ({"model.c.*": "model.missing.*"}, MismatchError, "'model.missing.weight'"),
        ({"model.c.*": 3}, megackpt.ShardingError, "3 is neither a name nor a rule"),
        ({"*": None, "model.c.*": None}, MismatchError, "fits several rules"),
        (["model.c.*"], ValueError, r"transform is a mapping.* not \['model.c"),
        (
            {"model.c.*": "model.a.*"},
            CoverageError,
            "validate_access_integrity=False",
        ),
    ):
        with pytest.raises(error, match=text):
            manager.restore(model=other, only="model", transform=transform)
        assert same(before, weights(other))


def test_a_step_on_the_hosts_is_passed_over_by_a_transform(tmp_path: Path) -> None:
    net, other = model("a"), model("b")
    tier = LocalTier(tmp_path / "host", every=1)
    manager = CheckpointManager(tmp_path / "run", local=tier, save_interval=2)
    manager.save(2, model=net)
    later = model("a")
    manager.save(3, model=later)
    found = manager.restore(model=other, transform={"model.b.*": "model.a.*"})
    assert found is not None
    assert found.source == "storage"
    manager.close()
