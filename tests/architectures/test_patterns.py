"""The patterns of docs/patterns.md, saved at one parallelism and loaded at others, beside plain tensors cut by hand."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import megackpt
from megackpt import StrictHandling
from megackpt.adapters.flat_ranges import make_flat_range_shards
from megackpt.adapters.modules import ParallelLayout
from megackpt.adapters.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from megackpt.testing import ThreadedGroup
from tests.architectures.page import page

page.LAYERS = 4  # fewer than the page has, for time
LAYERS, EXPERTS, WIDTH, FFN, VOCABULARY = (
    page.LAYERS,
    page.EXPERTS,
    page.WIDTH,
    page.FFN,
    page.VOCABULARY,
)
MOMENT = 0.5  # how far an optimizer's state is from its parameter, in these tests


def plain(name: str, *shape: int) -> Tensor:
    """A whole tensor in which no two elements are equal."""
    return (
        (torch.arange(math.prod(shape)) + zlib.crc32(name.encode()) % 2**22)
        .float()
        .reshape(shape)
    )


class World(NamedTuple):
    """The parallelism of a job, and how many chunks of layers a stage has."""

    sizes: dict[str, int]
    chunks: int = 1

    def __str__(self) -> str:
        return (
            "".join(f"{name}{size}" for name, size in self.sizes.items())
            + f"vpp{self.chunks}"
        )

    def run(self, fn: Callable[[ThreadedGroup, ParallelLayout], Any]) -> list[Any]:
        ranks = math.prod(self.sizes.get(name, 1) for name in ("tp", "cp", "dp", "pp"))
        return ThreadedGroup.run(
            ranks, lambda group: fn(group, ParallelLayout.of(group.rank, **self.sizes))
        )


SAVED = World({"tp": 2, "dp": 2, "pp": 2, "ep": 2})
WORLDS = [
    World({"tp": 1}),
    World({"tp": 8}),
    World({"tp": 4, "dp": 2, "ep": 4, "etp": 2}, chunks=4),
    World({"tp": 2, "cp": 2, "pp": 2, "ep": 4, "etp": 1}, chunks=2),
    World({"pp": 4, "dp": 2, "ep": 2}),
]

Named = dict[str, Tensor]


class Architecture(NamedTuple):
    """A layer of the page, and what it is by hand: a rank's parameters of one layer, and what is stored of all."""

    layer: Callable[[ParallelLayout], nn.Module]
    mine: Callable[[int, ParallelLayout], Named]
    stored: Callable[[], Named]
    metadata: dict[str, bool] = {}  # noqa: RUF012 - never changed


def swiglu(number: int, place: ParallelLayout) -> Named:
    w, v, fc2 = (plain(name, LAYERS, *shape)[number] for name, shape in MLP.items())
    tp, mine = place.tp_size, place.tp_rank
    return {
        "fc1": torch.cat([w.chunk(tp)[mine], v.chunk(tp)[mine]]),
        "fc2": fc2.chunk(tp, 1)[mine],
    }


MLP = {"w": (FFN, WIDTH), "v": (FFN, WIDTH), "fc2": (WIDTH, FFN)}


def swiglu_stored() -> Named:
    w, v, fc2 = (plain(name, LAYERS, *shape) for name, shape in MLP.items())
    return {"layers.fc1": torch.cat([w, v], 1), "layers.fc2": fc2}


def swiglu_singleton() -> Named:
    w, v, fc2 = (plain(name, LAYERS, *shape) for name, shape in MLP.items())
    return {"layers.fc1_w": w, "layers.fc1_v": v, "layers.fc2": fc2}


def swiglu_by_name() -> Named:
    whole = swiglu_stored()
    return {
        key.replace("layers", f"layers.{number}"): x[number]
        for key, x in whole.items()
        for number in range(LAYERS)
    }


def fused_mlp(number: int, place: ParallelLayout) -> Named:
    mine = swiglu(number, place)
    return {"gate_up": mine["fc1"], "down": mine["fc2"]}


def fused_mlp_stored() -> Named:
    names = zip(MLP.items(), ("gate", "up", "down"), strict=True)
    return {
        f"layers.{here}": plain(name, LAYERS, *shape) for (name, shape), here in names
    }


ROWS = page.HEADS * page.HEAD, page.KV_HEADS * page.HEAD
ATTENTION = {
    "q": (ROWS[0], WIDTH),
    "k": (ROWS[1], WIDTH),
    "v": (ROWS[1], WIDTH),
    "out": (WIDTH, ROWS[0]),
}


def attention(number: int, place: ParallelLayout) -> Named:
    """Each rank has the heads of K and V that its heads of Q need, and no others."""
    q, k, v, out = (
        plain(f"a.{name}", LAYERS, *shape)[number] for name, shape in ATTENTION.items()
    )
    heads = range(page.HEADS)[
        place.tp_rank * page.HEADS // place.tp_size : (place.tp_rank + 1)
        * page.HEADS
        // place.tp_size
    ]
    groups = sorted({head // (page.HEADS // page.KV_HEADS) for head in heads})

    def rows(x: Tensor, numbers: Any) -> Tensor:
        return torch.cat([x[n * page.HEAD : (n + 1) * page.HEAD] for n in numbers])

    return {
        "q": rows(q, heads),
        "k": rows(k, groups),
        "v": rows(v, groups),
        "out": rows(out.T, heads).T,
    }


def attention_stored() -> Named:
    return {
        f"layers.{name}": plain(f"a.{name}", LAYERS, *shape)
        for name, shape in ATTENTION.items()
    }


def fused_attention(number: int, place: ParallelLayout) -> Named:
    mine = attention(number, place)
    return {"qkv": torch.cat([mine[name] for name in "qkv"]), "out": mine["out"]}


def grouped(number: int, place: ParallelLayout) -> Named:
    w, v, fc2 = (
        plain(f"e.{name}", LAYERS, EXPERTS, *shape)[number]
        for name, shape in MLP.items()
    )
    experts = range(EXPERTS)[
        place.ep_rank * EXPERTS // place.ep_size : (place.ep_rank + 1)
        * EXPERTS
        // place.ep_size
    ]
    tp, mine = place.etp_size, place.etp_rank
    return {
        "router": plain("router", LAYERS, EXPERTS, WIDTH)[number],
        "fc1": torch.stack(
            [torch.cat([w[e].chunk(tp)[mine], v[e].chunk(tp)[mine]]) for e in experts]
        ),
        "fc2": torch.stack([fc2[e].chunk(tp, 1)[mine] for e in experts]),
    }


def sequential(number: int, place: ParallelLayout) -> Named:
    mine = grouped(number, place)
    each = {
        f"experts.{i}.{name}": x
        for name in ("fc1", "fc2")
        for i, x in enumerate(mine[name])
    }
    return {"router": mine["router"], **each}


def experts_stored() -> Named:
    w, v, fc2 = (
        plain(f"e.{name}", LAYERS, EXPERTS, *shape) for name, shape in MLP.items()
    )
    router = plain("router", LAYERS, EXPERTS, WIDTH)
    return {
        "layers.router": router,
        "layers.experts.fc1": torch.cat([w, v], 2),
        "layers.experts.fc2": fc2,
    }


def inside(
    **children: Callable[[int, ParallelLayout], Named],
) -> Callable[[int, ParallelLayout], Named]:
    def mine(number: int, place: ParallelLayout) -> Named:
        parts = {name: child(number, place) for name, child in children.items()}
        return {
            f"{name}.{key}": x
            for name, part in parts.items()
            for key, x in part.items()
        }

    return mine


def mixture_stored() -> Named:
    parts = {"attention": attention_stored(), "mlp": experts_stored()}
    return {
        key.replace("layers", f"layers.{name}"): x
        for name, part in parts.items()
        for key, x in part.items()
    }


def separate_mixture(place: ParallelLayout) -> nn.Module:
    return nn.ModuleDict(
        {"attention": page.Attention(place), "mlp": page.SequentialExperts(place)}
    )


ARCHITECTURES = {
    "swiglu": Architecture(page.SwiGLU, swiglu, swiglu_stored),
    "swiglu-singleton": Architecture(
        page.SwiGLU, swiglu, swiglu_singleton, {"singleton_local_shards": True}
    ),
    "layers-by-name": Architecture(
        page.SwiGLU, swiglu, swiglu_by_name, {"non_homogeneous_layers": True}
    ),
    "fused-mlp": Architecture(page.FusedMLP, fused_mlp, fused_mlp_stored),
    "attention": Architecture(page.Attention, attention, attention_stored),
    "fused-attention": Architecture(
        page.FusedAttention, fused_attention, attention_stored
    ),
    "grouped": Architecture(page.GroupedExperts, grouped, experts_stored),
    "sequential": Architecture(page.SequentialExperts, sequential, experts_stored),
    "mixture": Architecture(
        page.mixture, inside(attention=fused_attention, mlp=grouped), mixture_stored
    ),
    "separate-mixture": Architecture(
        separate_mixture, inside(attention=attention, mlp=sequential), mixture_stored
    ),
}
TWINS = [
    ("attention", "fused-attention"),
    ("grouped", "sequential"),
    ("mixture", "separate-mixture"),
]
PAIRS = [(name, name) for name in ARCHITECTURES if "mixture" not in name]
PAIRS += TWINS + [(b, a) for a, b in TWINS]


class Rank:
    """One rank's stage, its state with that of an optimizer, and what both should be."""

    def __init__(
        self, name: str, place: ParallelLayout, chunks: int, metadata: dict[str, bool]
    ) -> None:
        architecture = ARCHITECTURES[name]
        self.stage = page.Stage(place, architecture.layer, chunks)
        self.right = {
            f"layers.{local}.{key}": x
            for local, number in enumerate(self.stage.numbers)
            for key, x in architecture.mine(number, place).items()
        }
        model = self.stage.sharded_state_dict(metadata=metadata)
        moments = {
            key: make_sharded_optimizer_tensor(
                shard, torch.zeros_like(shard.data), "optimizer.exp_avg"
            )
            for key, shard in model.items()
        }
        self.state = {"model": model, "moments": moments}

    def fill(self) -> None:
        with torch.no_grad():
            for key, x in self.right.items():
                self.state["model"][key].data.copy_(x)
                self.state["moments"][key].data.copy_(x + MOMENT)

    def check(self, loaded: dict[str, Any]) -> None:
        self.stage.load_state_dict(
            loaded["model"]
        )  # strict: all of its parameters, and nothing else
        parameters = dict(self.stage.named_parameters())
        assert parameters.keys() == loaded["moments"].keys() == self.right.keys()
        for key, x in self.right.items():
            assert torch.equal(parameters[key], x), key
            assert torch.equal(loaded["moments"][key], x + MOMENT), key


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of an architecture, written once."""
    made: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            metadata = ARCHITECTURES[name].metadata

            def on(group: ThreadedGroup, place: ParallelLayout) -> None:
                rank = Rank(name, place, SAVED.chunks, metadata)
                rank.fill()
                megackpt.save(
                    rank.state,
                    made[name],
                    process_group=group,
                    content_metadata=metadata,
                )

            SAVED.run(on)
        return made[name]

    return save


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_stored_are_the_whole_tensors(
    saved: Callable[[str], Path], name: str
) -> None:
    whole = ARCHITECTURES[name].stored()
    tensors = megackpt.load_plain_tensors(saved(name))
    assert tensors.keys() == whole.keys() | {
        f"optimizer.exp_avg.{key}" for key in whole
    }
    for key, x in whole.items():
        assert torch.equal(tensors[key], x), key
        assert torch.equal(tensors[f"optimizer.exp_avg.{key}"], x + MOMENT), key


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize(("there", "here"), PAIRS, ids=lambda name: name)
def test_every_rank_of_another_world_gets_what_is_its_own(
    saved: Callable[[str], Path], there: str, here: str, world: World
) -> None:
    checkpoint = saved(there)
    metadata = megackpt.load_content_metadata(
        checkpoint
    )  # which form it has, to be asked for alike
    assert metadata == ARCHITECTURES[there].metadata

    def on(group: ThreadedGroup, place: ParallelLayout) -> None:
        rank = Rank(here, place, world.chunks, metadata)
        rank.check(
            megackpt.load(
                rank.state,
                checkpoint,
                process_group=group,
                strict=StrictHandling.RAISE_ALL,
            )
        )

    world.run(on)


@pytest.mark.parametrize(
    ("pp", "chunks", "numbers"),
    [
        (1, 1, [[0, 1, 2, 3]]),
        (1, 2, [[0, 1, 2, 3]]),
        (2, 1, [[0, 1], [2, 3]]),
        (2, 2, [[0, 2], [1, 3]]),
        (4, 1, [[0], [1], [2], [3]]),
    ],
)
def test_layers_of_virtual_stages(
    pp: int, chunks: int, numbers: list[list[int]]
) -> None:
    places = [ParallelLayout.of(rank, pp=pp) for rank in range(pp)]
    assert [page.Stage(place, chunks=chunks).numbers for place in places] == numbers


def test_interleaved_layers_load_into_stages_that_are_not(tmp_path: Path) -> None:
    def save(group: ThreadedGroup, place: ParallelLayout) -> None:
        rank = Rank("swiglu", place, 2, {})
        rank.fill()
        megackpt.save(rank.state, tmp_path, process_group=group)

    def load(group: ThreadedGroup, place: ParallelLayout) -> None:
        rank = Rank("swiglu", place, 1, {})
        rank.check(megackpt.load(rank.state, tmp_path, process_group=group))

    World({"tp": 2, "cp": 2, "pp": 2}).run(save)
    World({"pp": 4, "dp": 2}).run(load)


@pytest.mark.parametrize("there_and_here", [TWINS[-1], TWINS[-1][::-1]], ids=str)
def test_adam_follows_its_parameters_into_the_other_form(
    tmp_path: Path, there_and_here: tuple[str, str]
) -> None:
    there, here = there_and_here

    def adam(rank: Rank, step: float) -> tuple[torch.optim.Adam, dict[str, Any]]:
        optimizer, parameters = (
            torch.optim.Adam(rank.stage.parameters()),
            dict(rank.stage.named_parameters()),
        )
        for key, p in parameters.items():
            x = rank.right[key] * step
            optimizer.state[p] = {
                "step": torch.tensor(step),
                "exp_avg": x,
                "exp_avg_sq": x + MOMENT,
            }
        numbers = get_param_id_to_sharded_param_map(
            rank.state["model"], rank.stage.parameters()
        )
        return optimizer, optim_state_to_sharding_state(optimizer.state_dict(), numbers)

    def save(group: ThreadedGroup, place: ParallelLayout) -> None:
        _, state = adam(Rank(there, place, 1, {}), 2.0)
        megackpt.save(state, tmp_path, process_group=group)

    def load(group: ThreadedGroup, place: ParallelLayout) -> None:
        rank = Rank(here, place, 2, {})
        optimizer, state = adam(rank, 0.0)
        optimizer.load_state_dict(megackpt.load(state, tmp_path, process_group=group))
        for key, p in rank.stage.named_parameters():
            state = optimizer.state[p]
            assert state["step"] == 2.0
            assert torch.equal(state["exp_avg"], rank.right[key] * 2), key
            assert torch.equal(state["exp_avg_sq"], rank.right[key] * 2 + MOMENT), key

    SAVED.run(save)
    World({"tp": 4, "pp": 2, "ep": 4, "etp": 1}).run(load)


@pytest.mark.parametrize("name", ["swiglu", "fused-attention", "grouped"])
def test_data_parallel_ranks_that_share_a_parameters_state_store_it_whole(
    tmp_path: Path, name: str
) -> None:
    def save(group: ThreadedGroup, place: ParallelLayout) -> None:
        rank, copies, state = (
            Rank(name, place, 1, {}),
            place.experts if name == "grouped" else place,
            {},
        )
        for key, x in rank.right.items():
            if "router" not in key:
                flat, parts = x.flatten(), copies.dp_cp_size
                cuts = [
                    len(flat) * (3 * n + 1) // (3 * parts + 1) if n else 0
                    for n in range(parts)
                ]
                start, stop = [*cuts, len(flat)][
                    copies.dp_cp_rank : copies.dp_cp_rank + 2
                ]
                mine, shard = flat[start:stop].clone(), rank.state["model"][key]
                state[key] = make_flat_range_shards(
                    shard, mine, slice(start, stop), "moment"
                )
        megackpt.save(state, tmp_path, process_group=group)

    World({"tp": 2, "dp": 4, "ep": 2}).run(save)
    tensors = megackpt.load_plain_tensors(tmp_path)
    whole = {
        key: x for key, x in ARCHITECTURES[name].stored().items() if "router" not in key
    }
    assert tensors.keys() == {f"moment.{key}" for key in whole}
    assert all(torch.equal(tensors[f"moment.{key}"], x) for key, x in whole.items())


EMBEDDING = plain("embedding", VOCABULARY, WIDTH)
HEIGHTS = {1: 56, 2: 64, 4: 64}  # with the padding, over so many ranks


@pytest.mark.parametrize("there", [(1, 4, 2), (2, 2, 2), (4, 1, 1)], ids=str)
@pytest.mark.parametrize("here", [(1, 1, 1), (1, 2, 1), (2, 4, 1), (4, 2, 1)], ids=str)
def test_tied_embeddings_of_any_height_are_equal_up_to_the_true_vocabulary(
    tmp_path: Path, there: tuple[int, int, int], here: tuple[int, int, int]
) -> None:
    before, now = (
        World(dict(zip(("tp", "pp", "dp"), sizes, strict=True)))
        for sizes in (there, here)
    )
    padded = torch.full((HEIGHTS[there[0]], WIDTH), -1.0)
    padded[:VOCABULARY] = EMBEDDING

    def save(group: ThreadedGroup, place: ParallelLayout) -> None:
        module = page.Embedding(place)
        for parameter in module.parameters():
            parameter.data.copy_(padded.chunk(place.tp_size)[place.tp_rank])
        megackpt.save(module.sharded_state_dict(), tmp_path, process_group=group)

    def load(
        group: ThreadedGroup, place: ParallelLayout
    ) -> tuple[int, int, Tensor | None]:
        module = page.Embedding(place)
        for parameter in module.parameters():
            parameter.data.fill_(7.0)
        module.load_state_dict(
            megackpt.load(module.sharded_state_dict(), tmp_path, process_group=group)
        )
        return place.pp_rank, place.tp_rank, getattr(module, "embedding", None)

    before.run(save)
    assert torch.equal(megackpt.load_plain_tensors(tmp_path)["embedding"], padded)
    right = torch.zeros(HEIGHTS[here[0]], WIDTH)
    rows = min(len(right), len(padded))
    right[:rows] = padded[:rows]
    held = [(pp, tp, weight) for pp, tp, weight in now.run(load) if weight is not None]
    assert sorted({pp for pp, _, _ in held}) == sorted(
        {0, here[1] - 1}
    )  # the first stage and the last
    for _, tp, weight in held:
        assert torch.equal(weight, right.chunk(here[0])[tp])
