"""Flat ranges of parameters as boxes, against an index model; and optimizers dealt out over data-parallel ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import megackpt
from megackpt.adapters.flat_ranges import make_flat_range_shards
from megackpt.adapters.modules import (
    ParallelLayout,
    make_sharded_tensors_for_checkpoint,
)
from megackpt.adapters.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megackpt.errors import CoverageError, ShardingError
from megackpt.state import ShardedTensor, ShardedTensorFactory, extract, is_main_replica
from megackpt.testing import ThreadedGroup


@st.composite
def placed(draw: st.DrawFn) -> ShardedTensor:
    """A piece somewhere in a larger tensor, perhaps with prepended axes; its values are its own flat numbers."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    before, behind = (
        draw(st.lists(st.integers(0, 3), min_size=len(shape), max_size=len(shape)))
        for _ in "ab"
    )
    prepended = draw(st.lists(st.integers(0, 2), max_size=2))
    data = torch.arange(float(math.prod(shape))).view(shape)
    whole = (
        *(n + 1 for n in prepended),
        *(sum(n) for n in zip(before, shape, behind, strict=True)),
    )
    at = (*prepended, *before)
    n = len(prepended)
    return ShardedTensor(
        "w",
        data,
        data.dtype,
        tuple(shape),
        whole,
        at,
        None,
        (1, 2, 3),
        prepend_axis_num=n,
    )


@settings(max_examples=150, deadline=None)
@given(placed(), st.data())
def test_any_range_is_few_boxes_of_its_own_elements(
    param: ShardedTensor, draw: st.DataObject
) -> None:
    size = math.prod(param.local_shape)
    start, stop = sorted(draw.draw(st.integers(0, size)) for _ in "ab")
    data = torch.arange(float(start), float(stop), dtype=torch.float64)
    shards = make_flat_range_shards(param, data, slice(start, stop), "m")
    assert len(shards) <= max(1, 2 * len(param.local_shape) - 1)
    own = param.data if param.data is not None else torch.empty(0)
    whole = torch.full(param.global_shape, -1.0, dtype=torch.float64)
    whole[param.global_slice()] = own.double()
    for shard in shards:
        shard.validate_metadata_integrity()
        assert (shard.key, shard.dtype, shard.axis_fragmentations) == (
            "m.w",
            torch.float64,
            None,
        )
        assert shard.replica_id == ((1, 2, 0) if size else (1, 2, 3))
        assert torch.equal(whole[shard.global_slice()], shard.data)
        assert size == 0 or shard.data.numel()
    told = [n for shard in shards for n in shard.data.flatten().tolist()]
    assert told == data.tolist()
    for shard in shards:
        shard.data.fill_(-2)
    assert (data == -2).all(), "the shards are views of the data"


def swiglu(key, x, layout, offsets):
    def build(key, x, replica_id, _):
        n, halves = len(offsets), x.chunk(2)
        return [
            ShardedTensor.from_rank_offsets(
                key,
                half,
                *offsets,
                (n, layout.tp_rank + part * layout.tp_size, 2 * layout.tp_size),
                replica_id=replica_id,
                prepend_axis_num=n,
            )
            for part, half in enumerate(halves)
        ]

    return ShardedTensorFactory(key, x, build, torch.cat, (0, 0, layout.dp_rank))


def interleaved(copied, transposed=False):
    """q, k and v of each head together in memory, apart in the checkpoint."""

    def build(key, x, replica_id, _):
        parts = (x.view(2, 3, 2, -1)[:, i] for i in range(3))
        parts = [part.reshape(4, -1) if copied else part for part in parts]
        parts = [part.mT if transposed else part for part in parts]
        return {
            name: ShardedTensor.from_rank_offsets(
                f"{key}.{name}", part, replica_id=replica_id
            )
            for name, part in zip("qkv", parts, strict=True)
        }

    return build


def nested(key, x, replica_id, _):
    rest = ShardedTensorFactory(
        f"{key}.rest", x[4:], interleaved(True), list, replica_id
    )
    return [
        ShardedTensor.from_rank_offsets(f"{key}.first", x[:4], replica_id=replica_id),
        rest,
    ]


BUILDS = {
    "swiglu": (8, swiglu("f", None, ParallelLayout(dp_rank=1), ()).build_fn),
    "views": (12, interleaved(False)),
    "copies": (12, interleaved(True)),
    "transposed": (12, interleaved(True, True)),
    "nested": (16, nested),
    "part": (
        8,
        lambda key, x, r, _: ShardedTensor.from_rank_offsets(
            key, x[2:6, 1:], replica_id=r
        ),
    ),
}


def assembled(shards):
    wholes: dict = {}
    for shard in shards:
        whole = wholes.setdefault(shard.key, torch.full(shard.global_shape, torch.nan))
        assert whole[shard.global_slice()].isnan().all(), "no element twice"
        whole[shard.global_slice()] = shard.data
    return wholes


@pytest.mark.parametrize("kind", BUILDS)
@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(0, 80), max_size=4), width=st.integers(2, 5))
def test_what_a_factory_cuts_is_cut_in_ranges_too(kind, cuts, width):
    rows, build = BUILDS[kind]
    x = torch.arange(float(rows * width)).view(rows, width)
    param = ShardedTensorFactory("f", x, build, list, (0, 0, 1))
    expected = assembled(extract({"x": replace(param, key="m.f")}).shards)
    bounds = [0, *sorted(min(cut, x.numel()) for cut in cuts), x.numel()]
    shards = []
    for start, stop in pairwise(bounds):
        shards += make_flat_range_shards(
            param, x.flatten()[start:stop], slice(start, stop), "m"
        )
    assert all(is_main_replica(shard.replica_id) for shard in shards)
    found = assembled(shards)
    assert found.keys() == expected.keys()
    assert all(
        torch.equal(found[key].nan_to_num(-1), expected[key].nan_to_num(-1))
        for key in expected
    )


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.double(),
        lambda x: x * 2,
        lambda x: torch.cat([x, torch.zeros_like(x)]),
    ],
)
def test_a_factory_that_computes_is_refused(compute):
    x = torch.ones(4, 3)
    param = ShardedTensorFactory(
        "f",
        x,
        lambda key, x, *_: ShardedTensor.from_rank_offsets(key, compute(x)),
        list,
    )
    with pytest.raises(
        ShardingError,
        match=r"'m\.f': its factory does not only take it apart.*cut and reshape only",
    ):
        make_flat_range_shards(param, torch.ones(12), slice(0, 12), "m")


def test_a_factory_that_cuts_everywhere_is_refused():
    x = torch.ones(100, 100)
    param = ShardedTensorFactory(
        "f", x, lambda key, x, *_: ShardedTensor.from_rank_offsets(key, x.mT), list
    )
    with pytest.raises(
        ShardingError,
        match=r"'m\.f': its factory makes 10000 stretches.*cut along the first axes",
    ):
        make_flat_range_shards(param, torch.ones(5), slice(5, 10), "m")


@pytest.mark.parametrize(
    "wrong", [slice(0, 7), slice(-1, 4), slice(4, 0), slice(None, 5), slice(0, 4)]
)
def test_ranges_that_are_none(wrong):
    param = ShardedTensor.from_rank_offsets("w", torch.ones(2, 3))
    with pytest.raises(
        ShardingError,
        match=r"'m\.w': data of shape \(5,\) is not elements.*shape \(2, 3\)",
    ):
        make_flat_range_shards(param, torch.ones(5), wrong, "m")


# ------------------------------------------------------------------------------------ whole jobs

LAYERS, HIDDEN, FFN, VOCAB = 2, 6, 8, 8


class Job:
    """A rank's parameters, in bfloat16, and an Adam of fp32 master weights over all of them, in two groups."""

    def __init__(self, rank, tp, pp, dp, *, upside_down=False):
        self.layout = layout = ParallelLayout.of(rank, tp=tp, pp=pp, dp=dp)
        self.span = range(
            LAYERS * layout.pp_rank // pp, LAYERS * (layout.pp_rank + 1) // pp
        )
        shapes = (
            {"embedding": (VOCAB // tp, HIDDEN)}
            if layout.pp_rank in (0, pp - 1)
            else {}
        )
        for layer in self.span:
            shapes |= {
                f"{layer}.glu": (2 * FFN // tp, HIDDEN),
                f"{layer}.out": (HIDDEN, FFN // tp),
            }
            shapes |= {
                f"{layer}.norm": (HIDDEN,),
                f"{layer}.gain": (),
                f"{layer}.none": (0, 3),
            }
        names = sorted(shapes, reverse=upside_down)
        self.params = {
            n: nn.Parameter(torch.zeros(shapes[n], dtype=torch.bfloat16)) for n in names
        }
        kinds = [("no_decay", 1e-3), ("decay", 1e-3)]
        self.groups = {
            kind: (lr, []) for kind, lr in (reversed(kinds) if upside_down else kinds)
        }
        for name in names:
            self.groups["no_decay" if name.endswith(("norm", "gain")) else "decay"][
                1
            ].append(name)
        self.ranges: dict[int, slice] = {}
        self.pieces = [(name, slice(0, p.numel())) for name, p in self.params.items()]
        self.deal_out()
        self.order = [
            (name, part)
            for _, names in self.groups.values()
            for name, part in self.pieces
            if name in names
        ]
        self.masters = [
            nn.Parameter(self.shard(name, part)) for name, part in self.order
        ]
        names = [name for name, _ in self.order]
        self.optimizer = torch.optim.Adam(
            {
                "params": [
                    m for m, n in zip(self.masters, names, strict=True) if n in group
                ],
                "lr": lr,
            }
            for lr, group in self.groups.values()
        )
        for master in self.masters:
            moments = {
                key: torch.zeros_like(master) for key in ("exp_avg", "exp_avg_sq")
            }
            self.optimizer.state[master] = {"step": torch.tensor(0.0), **moments}

    def deal_out(self):
        """Every rank has everything."""

    def shard(self, name, part):
        return torch.zeros(self.params[name].shape)

    def model(self):
        layout, state = self.layout, {}
        if "embedding" in self.params:
            copy = int(layout.pp_rank > 0)
            cut = (0, layout.tp_rank, layout.tp_size)
            state["embedding"] = ShardedTensor.from_rank_offsets(
                "embedding",
                self.params["embedding"],
                cut,
                replica_id=(copy, 0, layout.dp_rank),
            )
        for layer in self.span:
            own = {
                n.partition(".")[2]: p
                for n, p in self.params.items()
                if n.startswith(f"{layer}.")
            }
            offsets = ((0, layer, LAYERS),)
            glu = swiglu("layers.glu", own.pop("glu"), layout, offsets)
            plain = make_sharded_tensors_for_checkpoint(
                own, "layers.", {"out": 1}, offsets, tp_group=layout
            )
            state[f"layer{layer}"] = plain | {"glu": glu}
        return state

    def state(self):
        model, optimizer = self.model(), self.optimizer.state_dict()
        for number, master in enumerate(self.masters):
            optimizer["state"][number] = {
                **optimizer["state"][number],
                "fp32_param": master,
            }
        params = [self.params[name] for name, _ in self.order]
        names = get_param_id_to_sharded_param_map(model, params)
        return {
            "optimizer": optim_state_to_sharding_state(
                optimizer, names, flat_ranges=self.ranges
            )
        }

    def values(self):
        """(shard, what it has to hold) of all that is no number of a group."""
        for shard in extract(self.state()).shards:
            if ".param_group." in shard.key:
                continue
            if ".step." in shard.key:
                yield shard, torch.tensor(100.0 + sum(shard.global_offset))
                continue
            whole = torch.arange(float(math.prod(shard.global_shape))).view(
                shard.global_shape
            )
            yield shard, whole[shard.global_slice()] + sum(map(ord, shard.key))

    def fill(self):
        for shard, value in self.values():
            with torch.no_grad():
                shard.data.copy_(value)
        for state in self.state()["optimizer"]["state"].values():
            # What a factory declares are copies of the step.
            shard = extract({"step": state["step"]}).shards[0]
            state["step"].data.fill_(100.0 + sum(shard.global_offset))
        for group, decay in zip(self.optimizer.param_groups, self.groups, strict=True):
            group["lr"] = 0.25 if decay == "decay" else 0.5

    def load(self, directory, group):
        state = megackpt.load(self.state(), directory, process_group=group)["optimizer"]
        for number, master in enumerate(self.masters):
            loaded = state["state"][number].pop("fp32_param")
            assert number not in self.ranges or loaded.data_ptr() == master.data_ptr()
            with torch.no_grad():
                master.copy_(loaded)  # what a factory joins is a copy
        self.optimizer.load_state_dict(state)

    def check(self):
        for shard, value in self.values():
            assert torch.equal(shard.data.reshape(value.shape), value), shard
            assert ".step." in shard.key or shard.data.dtype == torch.float32
        rates = [group["lr"] for group in self.optimizer.param_groups]
        assert rates == [0.25 if decay == "decay" else 0.5 for decay in self.groups]


class Flat(Job):
    """The same in flat buckets: parameters with padding between them, buckets that end within a parameter, and of
    each bucket the data-parallel ranks have equal parts, the last with padding.
    """

    def deal_out(self):
        self.pieces, place, size = [], 0, 50 + 6 * self.layout.pp_rank
        part = -(-size // self.layout.dp_size)
        for name, p in self.params.items():
            for bucket in range(place // size, (place + p.numel()) // size + 1):
                low = size * bucket + part * self.layout.dp_rank
                high = min(low + part, size * (bucket + 1))
                begin, end = (min(max(n - place, 0), p.numel()) for n in (low, high))
                self.pieces.append((name, slice(begin, max(begin, end))))
            place += -(-p.numel() // 4) * 4
        self.pieces = [
            (n, part)
            for n, part in self.pieces
            if part.stop > part.start or not self.params[n].numel()
        ]
        for _, names in self.groups.values():
            mine = [part for n, part in self.pieces if n in names]
            self.ranges |= {len(self.ranges) + i: piece for i, piece in enumerate(mine)}

    def shard(self, name, part):
        return torch.zeros(part.stop - part.start)


def everywhere(world, act):
    """act(group, rank) on as many ranks as the world has."""
    ThreadedGroup.run(math.prod(world), lambda group: act(group, group.rank))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same optimizer state, saved by three kinds of jobs."""
    root = tmp_path_factory.mktemp("optimizers")
    for name, kind, world, form in (
        ("flat", Flat, (2, 2, 2), "torch_dist"),
        ("zarr", Flat, (1, 1, 3), "zarr"),
        ("whole", Job, (2, 2, 1), "torch_dist"),
    ):

        def save(group, rank, kind=kind, world=world, directory=root / name, form=form):
            job = kind(rank, *world)
            job.fill()
            megackpt.save(job.state(), directory, form, process_group=group)

        everywhere(world, save)
    return root


def test_dealt_out_or_not_the_keys_and_bytes_are_the_same(saved):
    flat, zarr, whole = (
        megackpt.load_plain_tensors(saved / name) for name in ("flat", "zarr", "whole")
    )
    assert flat.keys() == zarr.keys() == whole.keys()
    assert {
        "optimizer.state.exp_avg.layers.glu",
        "optimizer.state.step.layers.none",
    } < flat.keys()
    numbers = {key for key in flat if ".param_group." in key}
    assert all(
        torch.equal(flat[key], whole[key]) and torch.equal(zarr[key], whole[key])
        for key in flat
    )
    assert {int(flat[key].max()) for key in numbers} == {0, 1}


@pytest.mark.parametrize("source", ["flat", "zarr", "whole"])
@pytest.mark.parametrize(
    ("kind", "world"),
    [
        (Job, (1, 1, 1)),
        (Job, (4, 1, 1)),
        (Flat, (1, 2, 2)),
        (Flat, (1, 1, 4)),
        (Flat, (2, 1, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("upside_down", [False, True])
def test_loaded_at_another_parallelism_with_the_parameters_in_another_order(
    saved, source, kind, world, upside_down
):
    def load(group, rank):
        job = kind(rank, *world, upside_down=upside_down)
        job.load(saved / source, group)
        job.check()

    everywhere(world, load)


def test_a_copy_that_is_cut_otherwise_stays_a_copy():
    """Tied embeddings: the last stage's buckets are cut at other places; its ranges are no main replicas."""
    jobs = [Flat(rank, 2, 2, 2) for rank in range(8)]
    shards = [
        [s for s in extract(job.state()).shards if s.key.endswith("exp_avg.embedding")]
        for job in jobs
    ]
    mains = [sum(is_main_replica(s.replica_id) for s in own) for own in shards]
    assert all(mains[:4])
    assert any(map(len, shards[4:]))
    assert not any(mains[4:])
    first, last = (
        {(s.global_offset, s.local_shape) for own in part for s in own}
        for part in (shards[:4], shards[4:])
    )
    assert first != last


@pytest.mark.parametrize(
    "parts", [(slice(0, 0), slice(6, 6)), (slice(0, 2), slice(3, 6))]
)
def test_elements_that_no_rank_declares_raise(tmp_path, parts):
    def save(group):
        part = parts[group.rank]
        param = ShardedTensor.from_rank_offsets(
            "w", torch.zeros(2, 3), replica_id=(0, 0, group.rank)
        )
        state = {
            "state": {0: {"m": torch.zeros(part.stop - part.start)}},
            "param_groups": [],
        }
        optim_state_to_sharding_state(state, {0: param}, flat_ranges={0: part})
        megackpt.save(state, tmp_path, process_group=group)

    with pytest.raises(CoverageError, match=r"'optimizer\.state\.m\.w' is not covered"):
        ThreadedGroup.run(2, save)


def dealt_out(param, parts, directory=None):
    """Elements 0, 1, 2, ... of a parameter, in parts, saved; what is stored."""

    def save(group):
        part = parts[group.rank]
        values = torch.arange(float(part.start), float(part.stop))
        state = {
            "state": {0: {"m": values, "step": torch.tensor(3.0)}},
            "param_groups": [],
        }
        own = {0: replace(param, replica_id=(0, 0, group.rank))}
        megackpt.save(
            optim_state_to_sharding_state(state, own, flat_ranges={0: part}),
            directory,
            process_group=group,
        )

    ThreadedGroup.run(len(parts), save)
    return megackpt.load_plain_tensors(directory)


def test_a_range_of_which_nothing_is_stored(tmp_path):
    """The factory cuts off padding, and the last rank's range is all padding."""

    def build(key, x, r, _):
        return ShardedTensor.from_rank_offsets(key, x[:6], replica_id=r)

    param = ShardedTensorFactory("w", torch.zeros(8, 3), build, list)
    stored = dealt_out(param, [slice(0, 19), slice(19, 24)], tmp_path)
    assert torch.equal(stored["optimizer.state.m.w"], torch.arange(18.0).view(6, 3))


@pytest.mark.parametrize("holder", [0, 1])
def test_an_empty_range_of_a_parameter_without_dimensions(tmp_path, holder):
    parts = [slice(0, int(rank == holder)) for rank in range(2)]
    stored = dealt_out(
        ShardedTensor.from_rank_offsets("gain", torch.zeros(())), parts, tmp_path
    )
    assert {key: float(value) for key, value in stored.items()} == {
        "optimizer.state.m.gain": 0,
        "optimizer.state.step.gain": 3,
    }
    assert "state" not in megackpt.load_common_state_dict(tmp_path)
    with pytest.raises(
        CoverageError, match=r"'optimizer\.state\.step\.gain' is not covered"
    ):
        dealt_out(
            ShardedTensor.from_rank_offsets("gain", torch.zeros(())),
            [slice(0, 0)] * 2,
            tmp_path,
        )


@pytest.mark.parametrize("kind", ["views", "copies", "part"])
def test_a_range_on_the_meta_device_comes_back_in_its_order(tmp_path, kind):
    rows, build = BUILDS[kind]
    param = ShardedTensorFactory("w", torch.zeros(rows, 2), build, list)
    dealt_out(param, [slice(0, 2 * rows)], tmp_path)
    for part in (slice(0, 2 * rows), slice(3, 11)):
        values = {"m": torch.empty(part.stop - part.start, device="meta")}
        state = optim_state_to_sharding_state(
            {"state": {0: values}, "param_groups": []},
            {0: param},
            flat_ranges={0: part},
        )
        found = megackpt.load(state, tmp_path, validate_access_integrity=False)[
            "state"
        ][0]["m"]
        expected = torch.arange(2.0 * rows)
        if kind == "part":  # what is not stored is zero
            kept = torch.zeros(rows, 2, dtype=torch.bool)
            kept[2:6, 1:] = True
            expected *= kept.flatten()
        assert torch.equal(found, expected[part])


def test_stretches_are_counted_before_they_are_made():
    x = torch.empty(1, device="meta").expand(1 << 20, 1 << 20)
    build = lambda key, x, *_: ShardedTensor.from_rank_offsets(key, x.mT)  # noqa: E731
    with pytest.raises(ShardingError, match=f"its factory makes {1 << 40} stretches"):
        make_flat_range_shards(
            ShardedTensorFactory("f", x, build, list), torch.ones(5), slice(5, 10), "m"
        )
