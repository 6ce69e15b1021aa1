"""Models of DTensors, trained, saved, and loaded at other parallelism."""

from __future__ import annotations

import math
import random
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import megackpt
from megackpt import (
    ShardedTensor,
    Strategy,
)
from megackpt.adapters.dtensor import sharded
from megackpt.adapters.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megackpt.state import apply_factories
from megackpt.testing import ThreadedGroup
from tests.torch_names import (
    HAS_ORDERS_OF_CUTS,
    cut_in_order,
)

DOCS = Path(__file__).resolve().parents[2] / "docs"


# --- four ranks, two, and one
SHAPES = ((7,), (13,), (2, 9), (5, 6), (9, 3, 4), (3,), (0, 4), ())


def cases(seed: int) -> dict[str, DTensor]:
    """The same values at placements that differ with the seed: on meshes of all ranks, and of a part with copies."""
    ranks = dist.get_world_size()
    chance = random.Random(seed)
    cube = init_device_mesh("cpu", (2, 1, ranks // 2), mesh_dim_names=("a", "b", "c"))
    square = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("x", "y"))
    meshes = [init_device_mesh("cpu", (ranks,)), square, square["x"], square["y"], cube]
    made = {}
    for shape, mesh, turn in product(SHAPES, meshes, range(3)):
        whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
        axes = range(len(shape))
        placements: list[Placement] = [
            Replicate()
            if not shape or chance.random() < 0.2
            else Shard(chance.choice(axes))
            for _ in range(mesh.ndim)
        ]
        for dim, placement in enumerate(placements):
            after = zip(mesh.shape[dim + 1 :], placements[dim + 1 :], strict=True)
            factor = math.prod(size for size, other in after if other == placement)
            if (
                isinstance(placement, Shard) and chance.random() < 0.7
            ):  # from right to left, as FSDP2 over TP
                alone = all(
                    getattr(other, "dim", None) != placement.dim
                    for other in placements[:dim]
                )
                several = chance.choice((1, 2, 3)) if alone and factor == 1 else factor
                placements[dim] = _StridedShard(placement.dim, split_factor=several)
        made[f"{len(made)}.{turn}"] = distribute_tensor(
            whole, mesh, placements, src_data_rank=None
        )
    return made


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(10),
            nn.Linear(10, 18),
            nn.Linear(18, 10),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Net(nn.Module):
    """Sizes that four ranks do not divide, a buffer, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 10)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(10, 30, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.numel()
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def net(kind: str) -> Net:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = Net()
    if kind == "plain":
        return model
    ranks = dist.get_world_size()
    shape = {"fsdp": (ranks,), "hsdp": (2, ranks // 2), "tp": (ranks // 2, 2)}[kind]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    if kind == "tp":
        for layer in model.layers:
            parallelize_module(
                layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"] if kind == "tp" else mesh)
    fully_shard(model, mesh=mesh["dp"] if kind == "tp" else mesh)
    return model


class Training:
    """A model and its optimizer."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = net(kind)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.01 * seed, foreach=False
        )

    def step(self) -> torch.Tensor:
        tokens = torch.randint(
            0, 30, (2, 5), generator=torch.Generator().manual_seed(5)
        )
        out = self.model(tokens)
        out.square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return out.detach()

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def restore(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=model,
            optim_state_dict=optimizer,
        )

    def whole(self) -> dict[str, Any]:
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict

        flat, _ = flatten_state_dict(self.state())
        full = {
            k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in flat.items()
        }
        return {
            k: v.detach().clone() if isinstance(v, torch.Tensor) else v
            for k, v in full.items()
        }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        same = (
            torch.equal(found[key], value)
            if isinstance(value, torch.Tensor)
            else found[key] == value
        )
        assert same, key


def resumed(
    kind: str,
    folder: str,
    saved: str,
    replicated: str = "tensors",
    written: str | None = None,
) -> None:
    """What was saved at another parallelism is here, in the model and the optimizer, and training goes on alike."""
    expected = torch.load(f"{folder}/{saved}.pt")
    training = Training(kind, seed=9)
    state = training.state()
    loaded = megackpt.load(
        sharded(state, replicated=replicated), f"{folder}/{written or saved}"
    )
    assert loaded["model"].keys() == state["model"].keys()
    assert all(
        loaded["model"][k] is v
        for k, v in state["model"].items()
        if isinstance(v, DTensor)
    )
    training.restore(loaded)
    assert_same(training.whole(), expected["state"])
    for out in expected["outs"]:
        torch.testing.assert_close(training.step(), out)


CUT = {
    "embed.weight": 0,
    "head.weight": 0,
    "up.weight": 0,
    "up.bias": 0,
    "down.weight": 1,
}


def by_parameter(whole: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of torch's own names under Megatron's: state of the optimizer by kind, then by parameter."""
    named = {}
    for key, value in whole.items():
        part, _, name = key.partition(".")
        if part == "optimizer" and isinstance(value, torch.Tensor):
            parameter, _, kind = name.removeprefix("state.").rpartition(".")
            named[f"optimizer.state.{kind}.{parameter}"] = value
        elif part == "model" and name != "head.weight":
            named[name] = value
    return named


def dcp_name(key: str) -> str:
    """The other way round."""
    if not key.startswith("optimizer.state."):
        return f"model.{key}"
    kind, _, parameter = key.removeprefix("optimizer.state.").partition(".")
    return f"optimizer.state.{parameter}.{kind}"


def in_megatron(rank: int, whole: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    """What this rank of TP2 x PP2 holds of these tensors, declared as Megatron's modules do it."""
    tp_rank, pp_rank = rank % 2, rank // 2
    state = {}
    for key, value in whole.items():
        stage = 1 if "layers.1." in key else 0
        cut = [
            (axis, tp_rank, 2)
            for end, axis in CUT.items()
            if key.endswith(end) and value.dim() > 0
        ]
        if stage == pp_rank:
            part = value.chunk(2, cut[0][0])[tp_rank] if cut else value
            replica = (0, 0 if cut else tp_rank, 0)
            state[key] = ShardedTensor.from_rank_offsets(
                key, part.clone(), *cut, replica_id=replica
            )
    return state


def mapped(training: Training) -> dict[str, Any]:
    """A model and its optimizer, the state under the parameters' keys, as Megatron's helpers have it."""
    state = training.model.state_dict(keep_vars=True)
    del state["head.weight"]  # the same parameter as embed.weight
    model = sharded(state)
    parameters = get_param_id_to_sharded_param_map(model, training.model.parameters())
    return {
        "model": model,
        "optimizer": optim_state_to_sharding_state(
            training.optimizer.state_dict(), parameters
        ),
    }


def on_four(folder: str) -> None:
    for seed in range(2):
        megackpt.save(sharded(cases(seed)), f"{folder}/cases{seed}")
    several = sharded(cases(0))
    apply_factories(several)
    assert {0, 1, 2, 3} <= {
        sum(part.data.numel() > 0 for part in parts) for parts in several.values()
    }
    other = cases(2)
    for tensor in other.values():
        tensor.to_local().fill_(-1)
    megackpt.load(sharded(other), f"{folder}/cases0")
    for key, tensor in cases(2).items():
        assert torch.equal(other[key].to_local(), tensor.to_local()), (
            key,
            tensor.placements,
        )
        # torch 2.13 puts together wrongly what it has cut in strides twice.
        if (
            sum(isinstance(placement, _StridedShard) for placement in tensor.placements)
            < 2
        ):
            whole = torch.arange(float(tensor.numel())).reshape(tensor.shape)
            assert torch.equal(other[key].full_tensor(), whole), (
                key,
                tensor.placements,
            )

    for kind, replicated in (("fsdp", "tensors"), ("tp", "tensors"), ("hsdp", "all")):
        training = Training(kind, seed=1)
        for _ in range(2):
            training.step()
        megackpt.save(
            sharded(training.state(), replicated=replicated), f"{folder}/{kind}"
        )
        if kind == "fsdp":
            dcp.save(training.state(), checkpoint_id=f"{folder}/stock")
        if kind == "tp":
            both = mapped(training)
            megackpt.save(both, f"{folder}/mapped")
            if dist.get_rank() == 0:
                groups = both["optimizer"]["param_groups"].build()
                torch.save(groups, f"{folder}/groups.pt")
        expected = training.whole()
        outs = [training.step() for _ in range(2)]
        if dist.get_rank() == 0:
            torch.save({"state": expected, "outs": outs}, f"{folder}/{kind}.pt")
    dist.barrier()
    resumed("fsdp", folder, "tp")
    in_stages(folder)
    in_parts(folder)

    # Stock DCP finds each of its keys where everything was stored, and the tensors in any case.
    for saved, asked in (("hsdp", ("model", "optimizer")), ("tp", ("model",))):
        training = Training("fsdp", seed=9)
        state = training.state()
        dcp.load(
            {name: state[name] for name in asked}, checkpoint_id=f"{folder}/{saved}"
        )
        training.restore(state)
        expected = torch.load(f"{folder}/{saved}.pt")["state"]
        found = {k: v for k, v in training.whole().items() if k.startswith(asked)}
        assert_same(found, {k: v for k, v in expected.items() if k.startswith(asked)})


def in_stages(folder: str) -> None:
    """Two stages of a pipeline, FSDP2 in each: a state is among the ranks of its stage."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    torch.manual_seed(stage)
    layer = Layer()
    layer.register_buffer("stage", torch.tensor(stage))
    fully_shard(layer, mesh=mesh["dp"])
    state = sharded(layer.state_dict(), f"layers.{stage}.", among=mesh["dp"])
    tied = distribute_tensor(
        torch.arange(9.0), mesh["dp"], [Shard(0)], src_data_rank=None
    )
    state |= sharded({"tied": tied}, among=mesh)
    with pytest.raises(
        megackpt.CoverageError, match=r"'layers\.1\..* has no main replica"
    ):
        megackpt.save(sharded(layer.state_dict(), f"layers.{stage}."), f"{folder}/none")
    megackpt.save(state, f"{folder}/stages")


def in_parts(folder: str) -> None:
    """On a mesh without rank 0, in an order of cuts of its own, over a group, and with values that differ."""
    rank = dist.get_rank()
    part = DeviceMesh("cpu", [2, 3])
    piece = (
        torch.arange(4.0).chunk(2)[max(rank - 2, 0)].clone()
        if rank > 1
        else torch.zeros(0)
    )
    tensor = DTensor.from_local(
        piece, part, [Shard(0)], run_check=False, shape=(4,), stride=(1,)
    )
    with pytest.raises(
        megackpt.CoverageError, match=r"(?s)'x' .* declared by .*sharded without among="
    ):
        megackpt.save(sharded({"x": tensor}), f"{folder}/none")
    megackpt.save(sharded({"x": tensor}, among=part), f"{folder}/part")

    square = init_device_mesh("cpu", (2, 2))
    a, b = square.get_coordinate() or (0, 0)
    local = torch.arange(8.0).chunk(2)[b].chunk(2)[a].clone()
    if HAS_ORDERS_OF_CUTS:
        turned = cut_in_order(local, square, (8,), (1, 0))
        assert torch.equal(turned.full_tensor(), torch.arange(8.0))
    else:
        turned = distribute_tensor(
            torch.arange(8.0), square, [Shard(0)] * 2, src_data_rank=None
        )
    megackpt.save(sharded({"x": turned}), f"{folder}/turned")

    group = dist.new_group([2, 3])
    if rank > 1:
        megackpt.save(
            sharded({"x": torch.ones(4)}, among=[2, 3]),
            f"{folder}/group",
            process_group=group,
        )
    buffers = {str(i): torch.full((9,), float(rank)) for i in range(8)}
    megackpt.save(sharded(buffers), f"{folder}/own", Strategy(balance=False))


def on_two(folder: str) -> None:
    resumed("fsdp", folder, "fsdp")
    resumed("fsdp", folder, "hsdp", "all")
    resumed("fsdp", folder, "fsdp", "all", written="stock")
    for saved in ("mapped", "megatron"):
        training = Training("fsdp", seed=9)
        training.step()
        loaded = megackpt.load(mapped(training), f"{folder}/{saved}")
        training.optimizer.load_state_dict(loaded["optimizer"])
        assert_same(training.whole(), torch.load(f"{folder}/tp.pt")["state"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "folder", "steps"),
    [
        ("from-fsdp2.md", "run/fsdp2", 3),
        ("from-fsdp2.md", "run/stages", 3),
        ("from-pytorch.md", "run/ddp", 6),
    ],
)
def test_a_guides_program_goes_on_with_fewer_ranks(
    page: str,
    folder: str,
    steps: int,
    ranks: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    imports = re.findall(r"^(?:import|from) .*$", blocks[0], re.MULTILINE)
    program = "\n".join(
        [*imports, next(block for block in blocks if f'"{folder}"' in block)]
    )
    script = tmp_path / "train.py"
    script.write_text(program, encoding="utf-8")
    told = []
    for place, sizes in (("two", (2, 1)), ("one", (1, 1))):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        for size in sizes:
            if size > 1:
                told.append(ranks(script, size)[0].stdout)
            else:
                exec(compile(program, script, "exec"), {})  # noqa: S102 - the code of our own page
                told.append(capfd.readouterr().out)
    several, alone = (
        [re.findall(r"step (\d+): (\S+)", out) for out in part]
        for part in (told[:2], told[2:])
    )
    assert [int(step) for run in several for step, _ in run] == list(
        range(1, 2 * steps + 1)
    )
    for run, expected in zip(several, alone, strict=True):
        assert [step for step, _ in run] == [step for step, _ in expected]
        assert [float(loss) for _, loss in run] == pytest.approx(
            [float(loss) for _, loss in expected], rel=1e-4
        )


@pytest.mark.slow
def test_models_go_from_one_parallelism_to_another(ranks: Any, tmp_path: Path) -> None:
    ranks(on_four, 4, tmp_path, timeout=240)

    for seed in range(2):
        for key, tensor in megackpt.load_plain_tensors(
            tmp_path / f"cases{seed}"
        ).items():
            assert torch.equal(tensor.flatten(), torch.arange(float(tensor.numel()))), (
                key
            )
    stages = megackpt.load_plain_tensors(tmp_path / "stages")
    assert stages.keys() >= {"layers.0.stage", "layers.1.stage"}
    assert stages["tied"].tolist() == list(range(9))

    parts = {
        name: megackpt.load_plain_tensors(tmp_path / name)
        for name in ("part", "turned", "group", "own")
    }
    assert [parts[name]["x"].tolist() for name in ("part", "turned", "group")] == [
        [0, 1, 2, 3],
        list(range(8)),
        [1] * 4,
    ]
    assert {float(x) for tensor in parts["own"].values() for x in tensor} == {0.0}

    whole = by_parameter(torch.load(tmp_path / "tp.pt")["state"])

    def megatron(group: Any) -> None:
        expected = in_megatron(group.rank, whole)
        groups = {"optimizer": {"param_groups": torch.load(tmp_path / "groups.pt")}}
        megackpt.save(expected | groups, tmp_path / "megatron", process_group=group)
        for saved, names in (("mapped", None), ("tp", dcp_name)):
            blank = {key: torch.full_like(value, -1) for key, value in whole.items()}
            state = in_megatron(group.rank, blank)
            loaded = megackpt.load(
                state, tmp_path / saved, key_map=names, process_group=group
            )
            for key, shard in expected.items():
                assert torch.equal(loaded[key], shard.data), key

    ThreadedGroup.run(4, megatron)
    ranks(on_two, 2, tmp_path, timeout=240)
    for kind in ("fsdp", "tp"):
        resumed("plain", str(tmp_path), kind)
