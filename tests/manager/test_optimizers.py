"""What an optimizer is given back is what it had: every optimizer, on one rank and on several."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import megackpt
from megackpt import LocalTier
from megackpt.errors import MismatchError, ShardingError
from megackpt.manager import CheckpointManager
from tests.conftest import Ranks
from tests.manager.optimizers import KINDS, Net, held, optimizer_of, steps, whole

NAMES = "abcd"
GROUPS = [{"params": ["a", "b"], "lr": 0.1}, {"params": ["c", "d"], "lr": 0.05}]
SHARDED = sorted(KINDS.keys() - {"Adafactor", "Rprop", "SparseAdam", "Muon"})
"""torch's own Adafactor, Rprop and SparseAdam make no step with DTensors."""


def restored(
    root: Path | str, kind: str, net: Any, *args: Any, **options: Any
) -> tuple[Any, Any]:
    optimizer = optimizer_of(kind, net, GROUPS)
    with CheckpointManager(root) as manager:
        assert manager.restore(model=net, optimizer=optimizer, **options) is not None
    return net, optimizer


@pytest.mark.parametrize("active", ["", "ab", "abcd"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_ten_steps_are_the_same(
    tmp_path: Path, kind: str, active: str, caplog: pytest.LogCaptureFixture
) -> None:
    """``active`` parameters have had gradients: none, as before the first step; some; all."""
    net = Net(NAMES)
    optimizer = optimizer_of(kind, net, GROUPS)
    steps(net, optimizer, active, range(1, 4) if active else ())
    before = held(net, optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(3, model=net, optimizer=optimizer)
        assert held(net, optimizer) == before
        stored = megackpt.load_plain_tensors(manager.path(3))
    state_of = {key.split(".")[2] for key in stored if key.startswith("optimizer.")}
    if kind != "Adagrad":  # its state is made with it
        assert state_of <= set(active)
    new, other = restored(tmp_path, kind, Net(NAMES))
    assert held(new, other) == before
    assert not caplog.records
    for of, its in ((net, optimizer), (new, other)):
        steps(of, its, NAMES, range(4, 14))
    assert held(new, other) == held(net, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_has_state_gets_the_stored_one(
    tmp_path: Path, kind: str
) -> None:
    net = Net(NAMES)
    optimizer = optimizer_of(kind, net, GROUPS)
    steps(net, optimizer, "ab", range(1, 4))
    with CheckpointManager(tmp_path) as manager:
        manager.save(3, model=net, optimizer=optimizer)
        new = Net(NAMES)
        other = optimizer_of(kind, new, GROUPS)
        steps(new, other, "bc", range(7, 9))
        manager.restore(model=new, optimizer=other)
    assert held(new, other) == held(net, optimizer)


def test_frozen_and_shared_parameters(tmp_path: Path) -> None:
    net = Net(NAMES)
    net.register_parameter("also", net.a)
    net.b.requires_grad_(False)
    optimizer = optimizer_of("AdamW", net, GROUPS)
    steps(net, optimizer, "acd", range(1, 3))
    with CheckpointManager(tmp_path) as manager:
        manager.save(3, model=net, optimizer=optimizer)
    other = Net(NAMES)
    other.register_parameter("also", other.a)
    other.c.requires_grad_(False)
    new, its = restored(tmp_path, "AdamW", other)
    assert held(new, its) == held(net, optimizer)
    assert new.also is new.a


@pytest.mark.parametrize("made", [0, 2])
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with dup")
def test_a_parameter_that_is_twice_in_a_group(tmp_path: Path, made: int) -> None:
    groups = [{"params": ["a", "b", "a"], "lr": 0.1}, {"params": ["c"], "lr": 0.2}]
    pairs = []
    for _ in range(2):
        net = Net(NAMES)
        pairs.append((net, optimizer_of("momentum", net, groups)))
    (net, optimizer), (new, other) = pairs
    steps(net, optimizer, "abc", range(made))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=net, optimizer=optimizer)
        manager.restore(model=new, optimizer=other)
    for pair in pairs:
        steps(*pair, "abc", range(made, 5))
    assert held(new, other) == held(net, optimizer)


def test_hooks_of_an_optimizer_are_called(tmp_path: Path) -> None:
    """torch's hooks may add to the state that is saved, and take it back."""
    net = Net(NAMES)
    optimizer = optimizer_of("AdamW", net, GROUPS)
    steps(net, optimizer, NAMES, range(3))
    optimizer.register_state_dict_post_hook(
        lambda _, state: {**state, "mine": {"n": 3}}
    )
    new = Net(NAMES)
    other = optimizer_of("AdamW", new, GROUPS)
    called: list[Any] = []
    other.register_load_state_dict_pre_hook(
        lambda _, state: called.append(state["mine"])
    )
    other.register_load_state_dict_post_hook(lambda _: called.append("after"))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=net, optimizer=optimizer)
        manager.restore(model=new, optimizer=other)
    assert called == [{"n": 3}, "after"]
    assert held(new, other) == held(net, optimizer)


def test_lbfgs_is_refused_by_name_when_it_has_state(tmp_path: Path) -> None:
    net = Net(NAMES)
    optimizer = torch.optim.LBFGS(net.parameters())
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=net, optimizer=optimizer)
        manager.restore(model=net, optimizer=optimizer)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum((p - 1).square().sum() for p in net.parameters())
            loss.backward()
            return loss

        optimizer.step(closure)
        with pytest.raises(ShardingError, match=r"optimizer: .*LBFGS.*old_dirs"):
            manager.save(2, model=net, optimizer=optimizer)


def test_state_of_no_parameter_is_refused_by_name(tmp_path: Path) -> None:
    net = Net(NAMES)
    optimizer = optimizer_of("AdamW", net, GROUPS)
    optimizer.state["all"] = {"norm": 1.0}
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(
            ShardingError, match=r"optimizer: .*\['all'\]\['norm'\].*no parameter"
        ),
    ):
        manager.save(1, model=net, optimizer=optimizer)


def test_a_state_dict_of_another_form_is_refused_by_name(tmp_path: Path) -> None:
    class Odd(torch.optim.AdamW):
        def state_dict(self) -> dict[str, Any]:
            return {"all": super().state_dict()}

    net = Net(NAMES)
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(
            ShardingError, match=r"optimizer: .* of Odd lacks state and param_groups"
        ),
    ):
        manager.save(1, model=net, optimizer=Odd(net.parameters()))


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor(tmp_path: Path) -> None:
    net = Net(NAMES)
    for lr in (torch.tensor(0.5), torch.tensor([0.5])):
        optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        objects = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
        with CheckpointManager(tmp_path) as manager:
            steps(net, optimizer, NAMES, range(2))
            scheduler.step()
            manager.save(1, **objects)
            steps(net, optimizer, NAMES, range(2))
            scheduler.step()
            assert lr.item() == 0.125
            manager.restore(**objects)
            assert optimizer.param_groups[0]["lr"] is lr
            assert lr.item() == 0.25
            number = torch.optim.AdamW(net.parameters(), lr=1.0)
            manager.restore(model=net, optimizer=number)
            assert float(number.param_groups[0]["lr"]) == 0.25


def test_half_precision_keeps_the_dtype_of_each_value(tmp_path: Path) -> None:
    net = Net(NAMES).bfloat16()
    optimizer = optimizer_of("ASGD", net, GROUPS)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=net, optimizer=optimizer)
    new, other = restored(tmp_path, "ASGD", Net(NAMES).bfloat16())
    assert held(new, other) == held(net, optimizer)


def test_the_hooks_of_a_load_are_called(tmp_path: Path) -> None:
    net = Net(NAMES)
    optimizer = optimizer_of("AdamW", net, GROUPS)
    steps(net, optimizer, NAMES, range(2))
    before = held(net, optimizer)
    called: list[Any] = []
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=net, optimizer=optimizer)
        new_net = Net(NAMES)
        new = optimizer_of("AdamW", new_net, GROUPS)
        new.register_load_state_dict_pre_hook(lambda _, state: called.append(state))
        new.register_load_state_dict_post_hook(called.append)
        manager.restore(model=new_net, optimizer=new)
    assert called[0]["param_groups"][0]["lr"] == 0.1
    assert called[1:] == [new]
    assert held(new_net, new) == before


@pytest.mark.parametrize("kind", ["Adam", "momentum", "SparseAdam"])
def test_a_step_that_torch_dcp_has_written(tmp_path: Path, kind: str) -> None:
    import torch.distributed.checkpoint as dcp

    net = Net(NAMES)
    optimizer = optimizer_of(kind, net, GROUPS)
    steps(net, optimizer, NAMES, range(2))
    state = {
        "model": net.state_dict(),
        "optimizer": get_optimizer_state_dict(net, optimizer),
    }
    dcp.save(state, checkpoint_id=tmp_path / "iter_0000003", no_dist=True)
    new = Net(NAMES)
    other = optimizer_of(kind, new, [{**g, "lr": 9.0} for g in GROUPS])
    with CheckpointManager(tmp_path) as manager:
        manager.restore(model=new, optimizer=other)
    assert held(new, other) == held(net, optimizer)


def test_a_step_without_the_name_of_the_class(tmp_path: Path) -> None:
    """As the releases before have written it."""
    net = Net(NAMES)
    optimizer = optimizer_of("Adam", net, GROUPS)
    steps(net, optimizer, NAMES, range(2))
    state = get_optimizer_state_dict(net, optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(
            1, megackpt.sharded({"model": net.state_dict(), "optimizer": state})
        )
        new, other = restored(tmp_path, "Adam", Net(NAMES))
        assert held(new, other) == held(net, optimizer)
        sgd = optimizer_of("momentum", net, GROUPS)
        with pytest.raises(MismatchError, match=r"another optimizer.*amsgrad.*is SGD"):
            manager.restore(model=net, optimizer=sgd)


class Failing:
    """Raises when it is loaded, after a change of its own."""

    def __init__(self) -> None:
        self.value, self.tensor, self.fails = 1, torch.ones(3), False

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if self.fails:
            self.fails = False
            raise KeyError("no such value")
        self.tensor.copy_(state["tensor"])


def test_an_object_that_fails_to_load_has_its_former_state(tmp_path: Path) -> None:
    one = Failing()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, one=one)
        one.value = 7
        tensor = one.tensor.mul_(5)
        one.fails = True
        with pytest.raises(KeyError, match="no such value"):
            manager.restore(one=one)
    assert one.value == 7
    assert one.tensor is tensor
    assert tensor.eq(5).all()


def test_a_read_error_names_undefined_tensors(tmp_path: Path) -> None:
    net = Net(NAMES)
    optimizer = optimizer_of("AdamW", net, GROUPS)
    with CheckpointManager(tmp_path) as manager:
        for number in (1, 2):
            steps(net, optimizer, NAMES, [number])
            manager.save(number, model=net, optimizer=optimizer)
            if number == 1:
                older = held(net, optimizer)
        for path in Path(manager.path(2)).glob("*.distcp"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2 :: 97] = b"?" * len(data[len(data) // 2 :: 97])
            path.write_bytes(data)
        with pytest.raises(megackpt.errors.CorruptCheckpoint) as caught:
            manager.restore(model=net, optimizer=optimizer, step=2)
        assert "undefined now" in caught.value.__notes__[0]
        assert "'model.a'" in caught.value.__notes__[0]
        found = manager.restore(model=net, optimizer=optimizer)
    assert found is not None
    assert found.step == 1
    assert held(net, optimizer) == older


def layouts(world: int) -> dict[str, Any]:
    """For each layout what makes a net; all have the same values."""
    line = init_device_mesh("cpu", (world,))
    made: dict[str, Any] = {
        "plain": lambda: Net(NAMES),
        "ddp": lambda: DistributedDataParallel(Net(NAMES)),
        "fsdp2": lambda: Net(NAMES, line, [Shard(0)]),
        "tp": lambda: Net(NAMES, line, [Shard(1)]),
    }
    if world == 4:
        square = init_device_mesh("cpu", (2, 2))
        made["hsdp"] = lambda: Net(NAMES, square, [Replicate(), Shard(0)])
        made["tp and fsdp2"] = lambda: Net(NAMES, square, [Shard(0), Shard(1)])
    return made


def save_on_ranks(root: str) -> None:
    torch.set_num_threads(1)
    for layout, make in layouts(dist.get_world_size()).items():
        for kind in SHARDED:
            net = make()
            inner = getattr(net, "module", net)
            optimizer = optimizer_of(kind, inner, GROUPS)
            steps(inner, optimizer, "abd", range(1, 3))
            with CheckpointManager(f"{root}/{layout}/{kind}") as manager:
                manager.save(2, model=net, optimizer=optimizer)


def restore_on_ranks(root: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("megackpt").setLevel(logging.ERROR)
    folders = sorted(path.name for path in Path(root).iterdir())
    for number, kind in enumerate(SHARDED):
        single = Net(NAMES)
        expected = optimizer_of(kind, single, GROUPS)
        steps(single, expected, "abd", range(1, 3))
        before = held(single, expected)
        steps(single, expected, NAMES, range(3, 13))
        after = held(single, expected)
        for turn, (layout, make) in enumerate(layouts(dist.get_world_size()).items()):
            saved = folders[(number + turn) % len(folders)]
            net = make()
            inner = getattr(net, "module", net)
            optimizer = optimizer_of(kind, inner, GROUPS)
            with CheckpointManager(f"{root}/{saved}/{kind}") as manager:
                assert manager.restore(model=net, optimizer=optimizer) is not None
            assert held(inner, optimizer) == before, (kind, saved, layout)
            steps(inner, optimizer, NAMES, range(3, 13))
            assert held(inner, optimizer) == after, (kind, layout)
    net = Net(NAMES, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    optimizer = optimizer_of("AdamW", net, GROUPS)
    optimizer.state[net.a]["rows"] = torch.full((2,), float(dist.get_rank()))
    with (
        CheckpointManager(f"{root}-refused") as manager,
        pytest.raises(ShardingError, match="plain tensor of a sharded parameter"),
    ):
        manager.save(1, model=net, optimizer=optimizer)
    sgd = optimizer_of("momentum", net, GROUPS)
    values = whole(dict(net.named_parameters()))
    with (
        CheckpointManager(f"{root}/fsdp2/AdamW") as manager,
        pytest.raises(MismatchError, match="another optimizer"),
    ):
        manager.restore(model=net, optimizer=sgd)
    assert whole(dict(net.named_parameters())) == values


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_restore_what_other_layouts_have_saved(
    ranks: Ranks, tmp_path: Path, world: int
) -> None:
    ranks(save_on_ranks, world, tmp_path / "run", timeout=300)
    ranks(restore_on_ranks, 6 - world, tmp_path / "run", timeout=300)


def test_adafactor_beside_a_sharded_parameter_is_refused(
    ranks: Ranks, tmp_path: Path
) -> None:
    net = Net(NAMES)
    optimizer = optimizer_of("Adafactor", net, GROUPS)
    steps(net, optimizer, NAMES, range(2))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=net, optimizer=optimizer)
    ranks(refuse_adafactor, 2, tmp_path)


def refuse_adafactor(root: str) -> None:
    net = Net(NAMES, init_device_mesh("cpu", (2,)), [Shard(0)])
    optimizer = optimizer_of("Adafactor", net, GROUPS)
    values = whole(dict(net.named_parameters()))
    with (
        CheckpointManager(root) as manager,
        pytest.raises(MismatchError, match="optimizer: row_var of 'a' has the shape"),
    ):
        manager.restore(model=net, optimizer=optimizer)
    assert whole(dict(net.named_parameters())) == values


def train_with_local_steps(root: str, world: int) -> None:
    """With 5 ranks one of them has no element of a parameter, nor of the state."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for kind in ("AdamW", "momentum", "WithNotes", "NAdam"):
        tier = LocalTier(f"{root}/local", every=1)
        for saved in (True, False):
            net = Net(NAMES, mesh, [Shard(0)])
            optimizer = optimizer_of(kind, net, GROUPS)
            with CheckpointManager(f"{root}/{kind}", local=tier) as manager:
                if saved and dist.get_world_size() == world:
                    steps(net, optimizer, "abc", range(1, 3))
                    assert manager.should_save(1)
                    manager.save(1, model=net, optimizer=optimizer)
                    continue
                found = manager.restore(model=net, optimizer=optimizer)
                assert found is not None
                assert found.source == "local"
            single = Net(NAMES)
            expected = optimizer_of(kind, single, GROUPS)
            steps(single, expected, "abc", range(1, 3))
            assert held(net, optimizer) == held(single, expected), kind
            for of, its in ((net, optimizer), (single, expected)):
                steps(of, its, NAMES, range(4, 7))
            assert held(net, optimizer) == held(single, expected), kind


@pytest.mark.slow
def test_local_steps_have_the_optimizer_too(ranks: Ranks, tmp_path: Path) -> None:
    ranks(train_with_local_steps, 5, tmp_path, 5, timeout=200)
    ranks(train_with_local_steps, 2, tmp_path, 5, timeout=200)
