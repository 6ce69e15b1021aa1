"""Optimizer state through a change of parallelism: every tensor and step comes back bit-equal."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import megackpt
from megackpt.adapters.modules import (
    ParallelLayout,
    make_sharded_tensors_for_checkpoint,
)
from megackpt.adapters.optimizer import (
    KEEP_VARS_HINT,
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from megackpt.errors import MismatchError, ShardingError
from megackpt.planning.coverage import check
from megackpt.planning.manifest import Declarations
from megackpt.state import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    declare,
    extract,
    is_main_replica,
    restore,
)
from megackpt.testing import ThreadedGroup

LAYERS, HIDDEN, FFN = 4, 6, 8


def glu_factory(
    key: str, param: torch.Tensor, layout: ParallelLayout, layer: int
) -> ShardedTensorFactory:
    """Gate and value halves of one parameter, each cut by tensor parallelism, under one key."""

    def build(key, data, replica_id, flattened_range):
        return [
            ShardedTensor.from_rank_offsets(
                key,
                half,
                (0, layer, LAYERS),
                (1, layout.tp_rank + part * layout.tp_size, 2 * layout.tp_size),
                replica_id=replica_id,
                prepend_axis_num=1,
            )
            for part, half in enumerate(data.chunk(2))
        ]

    return ShardedTensorFactory(key, param, build, torch.cat, (0, 0, layout.dp_rank))


class Block(nn.Module):
    def __init__(self, layout: ParallelLayout, layer: int) -> None:
        super().__init__()
        self.layout, self.layer = layout, layer
        self.glu = nn.Parameter(torch.zeros(2 * FFN // layout.tp_size, HIDDEN))
        self.out = nn.Parameter(torch.zeros(HIDDEN, FFN // layout.tp_size))
        self.norm = nn.Parameter(torch.zeros(HIDDEN))

    def sharded(self) -> dict:
        state = {"out": self.out, "norm": self.norm}
        offsets = ((0, self.layer, LAYERS),)
        shards = make_sharded_tensors_for_checkpoint(
            state, "layers.", {"out": 1}, offsets, tp_group=self.layout
        )
        return shards | {
            "layers.glu": glu_factory("layers.glu", self.glu, self.layout, self.layer)
        }


class Job:
    """One rank of a training job: its layers, its optimizer."""

    def __init__(
        self, rank: int, tp: int, pp: int, dp: int = 1, make=torch.optim.AdamW
    ) -> None:
        self.layout = ParallelLayout.of(rank, tp=tp, pp=pp, dp=dp)
        mine = range(
            LAYERS * self.layout.pp_rank // pp, LAYERS * (self.layout.pp_rank + 1) // pp
        )
        self.blocks = [Block(self.layout, layer) for layer in mine]
        self.optimizer = make([p for block in self.blocks for p in block.parameters()])
        for block in self.blocks:
            for p in block.parameters():
                p.grad = torch.zeros_like(p)
        self.optimizer.step()

    def state(self) -> dict:
        model = {f"block{i}": block.sharded() for i, block in enumerate(self.blocks)}
        params = get_param_id_to_sharded_param_map(
            model, [p for b in self.blocks for p in b.parameters()]
        )
        return {
            "model": model,
            "optimizer": optim_state_to_sharding_state(
                self.optimizer.state_dict(), params
            ),
        }


def world(tp: int, pp: int, dp: int = 1, **kwargs) -> list[Job]:
    return [Job(rank, tp, pp, dp, **kwargs) for rank in range(tp * pp * dp)]


def fill(jobs: list[Job]) -> None:
    """Values that depend on the global place only: whatever is copied to the wrong place is seen."""
    for job in jobs:
        for shard in extract(job.state()).shards:
            if isinstance(shard, ShardedTensor):
                layer = shard.global_offset[0]
                if ".step." in shard.key:
                    shard.data.fill_(100 + layer)
                    continue
                grid = torch.arange(float(torch.Size(shard.global_shape).numel())).view(
                    shard.global_shape
                )
                seed = sum(map(ord, shard.key)) / 7
                with torch.no_grad():
                    shard.data.copy_(grid[shard.global_slice()] + seed)


def saved(jobs: list[Job]) -> tuple[dict, dict]:
    """What a checkpoint would hold: {key: global tensor} of the main replicas, and rank 0's common state."""
    stored: dict = {}
    parts = []
    common: dict = {}
    for rank, job in enumerate(jobs):
        extracted = extract(job.state())
        common = extracted.common if rank == 0 else common
        parts.append(declare(extracted.shards, rank=rank, saving=True))
        for shard in extracted.shards:
            if not is_main_replica(shard.replica_id):
                continue
            if isinstance(shard, ShardedObject):
                stored[shard.unique_key] = shard.data
            else:
                whole = stored.setdefault(
                    shard.key, torch.full(shard.global_shape, torch.nan)
                )
                whole[shard.global_slice()] = shard.data.detach()
    check(Declarations.merge(parts))
    return stored, copy.deepcopy(common)


def loaded(job: Job, stored: dict, common: dict) -> dict:
    extracted = extract(job.state())
    values = [
        stored[s.unique_key]
        if isinstance(s, ShardedObject)
        else stored[s.key][s.global_slice()].clone()
        for s in extracted.shards
    ]
    return restore(extracted, values, common)


@pytest.mark.parametrize(
    "target", [(1, 1, 1), (2, 1, 2), (1, 4, 1), (4, 2, 1)], ids=str
)
@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        torch.optim.Adagrad,
        lambda p: torch.optim.SGD(p, momentum=0.9),
    ],
)
def test_state_survives_another_parallelism(target, make):
    source = world(2, 2, 2, make=make)
    fill(source)
    stored, common = saved(source)
    assert not any(
        torch.isnan(t).any() for t in stored.values() if isinstance(t, torch.Tensor)
    )
    wanted, got = world(*target, make=make), world(*target, make=make)
    fill(wanted)
    for should, job in zip(wanted, got, strict=True):
        state = loaded(job, stored, common)
        job.optimizer.load_state_dict(state["optimizer"])
        expected, actual = should.optimizer.state_dict(), job.optimizer.state_dict()
        assert expected["param_groups"] == actual["param_groups"]
        assert expected["state"].keys() == actual["state"].keys()
        for number, values in expected["state"].items():
            assert values.keys() == actual["state"][number].keys()
            for name, value in values.items():
                assert torch.equal(
                    torch.as_tensor(value),
                    torch.as_tensor(actual["state"][number][name]),
                )


def test_keys_and_what_is_left_in_the_common_state():
    stored, common = saved(world(2, 1))
    names = {
        key.removeprefix("optimizer.state.")
        for key in stored
        if key.startswith("optimizer")
    }
    assert names == {
        f"{s}.layers.{p}"
        for s in ("exp_avg", "exp_avg_sq", "step")
        for p in ("glu", "out", "norm")
    }
    assert stored["optimizer.state.step.layers.out"].shape == (LAYERS,)
    assert list(common) == ["optimizer"]
    assert common["optimizer"]["param_groups"][0]["lr"] == 0.001
    assert "params" not in common["optimizer"]["param_groups"][0]


def test_plain_numbers_and_excluded_state():
    weight = nn.Parameter(torch.zeros(2, 3))
    param = ShardedTensor.from_rank_offsets(
        "w", weight, (0, 1, 2), (1, 1, 2), prepend_axis_num=1
    )
    before = {
        "state": {0: {"step": 7, "exp_avg": torch.ones(2, 3), "none": None}},
        "param_groups": [{"params": [0]}],
    }
    given_state = copy.copy(before)
    result = optim_state_to_sharding_state(
        given_state, {0: param}, exclude_keys=("none",)
    )
    assert result is given_state
    assert set(before["state"][0]) == {"step", "exp_avg", "none"}
    assert before["param_groups"] == [{"params": [0]}]
    step = result["state"][0]["step"]
    assert (step.unique_key, step.data) == ("optimizer.state.step.w/shard_1_2", 7)
    assert not is_main_replica(step.replica_id)
    assert result["state"][0]["exp_avg"].global_offset == param.global_offset
    assert set(result["state"][0]) == {"step", "exp_avg"}
    assert result["param_groups"].build() == [{}]


def test_a_step_of_an_irregular_param_has_one_main_replica():
    mains = 0
    for start, size in [(0, 0), (0, 3), (3, 5)]:
        data = torch.zeros(size)
        param = ShardedTensor("w", data, data.dtype, (size,), (8,), (start,), None)
        state = {"state": {0: {"step": torch.tensor(5.0)}}, "param_groups": []}
        shard = optim_state_to_sharding_state(state, {0: param})["state"][0]["step"]
        shard.validate_metadata_integrity()
        mains += is_main_replica(shard.replica_id)
    assert mains == 1


def test_state_of_another_shape_than_a_sharded_parameter_raises():
    data = torch.zeros(4, 3)
    rows = {"state": {0: {"row": torch.zeros(4)}}, "param_groups": []}
    whole = ShardedTensor.from_rank_offsets("w", data)
    shard = optim_state_to_sharding_state(copy.copy(rows), {0: whole})["state"][0][
        "row"
    ]
    assert (shard.global_shape, shard.key) == ((4,), "optimizer.state.row.w")
    cut = ShardedTensor.from_rank_offsets("w", data, (0, 0, 2))
    with pytest.raises(
        ShardingError,
        match=r"'optimizer.state.row.w': state of shape \(4,\).*exclude_keys",
    ):
        optim_state_to_sharding_state(copy.copy(rows), {0: cut})


def test_wrong_shapes_and_unknown_params(caplog):
    param = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 3))
    with pytest.raises(
        ShardingError, match=r"'p.w': state of shape \(4,\) does not match.*\(4, 3\)"
    ):
        make_sharded_optimizer_tensor(param, torch.zeros(4), "p")
    fp32 = make_sharded_optimizer_tensor(
        param, torch.zeros(4, 3, dtype=torch.float64), "p"
    )
    assert (fp32.key, fp32.dtype) == ("p.w", torch.float64)
    with pytest.raises(ValueError, match="Param id 0 does not match"):
        optim_state_to_sharding_state({"state": {0: {}}, "param_groups": []}, {})
    with caplog.at_level(logging.WARNING):
        assert (
            get_param_id_to_sharded_param_map(
                {"w": param}, [nn.Parameter(torch.zeros(1))]
            )
            == {}
        )
    assert KEEP_VARS_HINT in caplog.text


def test_params_are_matched_by_identity():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    assert get_optim_param_to_id_map([a, b, a]) == {id(a): 0, id(b): 1}
    shard = ShardedTensor.from_rank_offsets("b", b)
    assert get_param_id_to_sharded_param_map({"x": [shard], "n": 1}, iter([a, b])) == {
        1: shard
    }


def test_of_tied_parameters_the_smallest_replica_counts():
    p = nn.Parameter(torch.zeros(2))
    copies = [
        ShardedTensor.from_rank_offsets("w", p, replica_id=(n, 0, 0)) for n in (2, 0, 1)
    ]
    assert get_param_id_to_sharded_param_map({"m": copies}, [p])[0] is copies[1]
    assert get_param_id_to_sharded_param_map({"m": copies[::2]}, [p])[0] is copies[2]
    for rank in range(2):  # alike on all data-parallel ranks
        tied = [
            ShardedTensor.from_rank_offsets(key, p, replica_id=(n, 0, rank))
            for n, key in ((1, "b"), (0, "a"))
        ]
        assert get_param_id_to_sharded_param_map({"m": tied}, [p])[0].key == "a"


def test_megatrons_own_declarations_are_known():
    p = nn.Parameter(torch.zeros(2))
    theirs = type(
        "ShardedTensor",
        (ShardedTensor,),
        {"__module__": "megatron.core.dist_checkpointing.mapping"},
    )
    ours = ShardedTensor.from_rank_offsets("w", p)
    (found,) = get_param_id_to_sharded_param_map(
        {"w": theirs(**vars(ours))}, [p]
    ).values()
    assert (type(found), found.key) == (ShardedTensor, "w")


def experts(key, steps, value=torch.tensor):
    """Experts with parameters of their own, which have made so many steps; and their grouped form, which has made none,
    whole or of a range."""
    params = [nn.Parameter(torch.full((4, 2), float(i))) for i in range(3)]
    cut = [
        ShardedTensor.from_rank_offsets("w", p, (0, i, 3), prepend_axis_num=1)
        for i, p in enumerate(params)
    ]
    apart = {
        "state": {i: {key: value(n)} for i, n in enumerate(steps)},
        "param_groups": [],
    }

    def build(name, x, replica_id, _):
        return [
            ShardedTensor.from_rank_offsets(
                name, row, (0, i, 3), replica_id=replica_id, prepend_axis_num=1
            )
            for i, row in enumerate(x)
        ]

    def grouped(part=None, rank=0):
        state = {"state": {0: {key: value(0.0)}}, "param_groups": []}
        param = ShardedTensorFactory(
            "w", torch.zeros(3, 4, 2), build, torch.stack, (0, 0, rank)
        )
        return {
            "o": optim_state_to_sharding_state(
                state, {0: param}, flat_ranges=part and {0: part}
            )
        }

    return {"o": optim_state_to_sharding_state(apart, dict(enumerate(cut)))}, grouped


@pytest.mark.parametrize("form", ["torch_dist", "zarr", "safetensors"])
@pytest.mark.parametrize("value", [torch.tensor, float])
def test_of_steps_that_differ_the_largest_is_taken(tmp_path, caplog, form, value):
    apart, grouped = experts("step", (5.0, 9.0, 7.0), value)
    megackpt.save(apart, tmp_path, form)
    with caplog.at_level(logging.WARNING):
        assert megackpt.load(grouped(), tmp_path)["o"]["state"][0]["step"] == 9
        parts = [slice(0, 0), slice(0, 10), slice(10, 24)]

        def load(group):
            state = grouped(parts[group.rank], group.rank)
            return megackpt.load(state, tmp_path, process_group=group)["o"]["state"][0][
                "step"
            ]

        assert ThreadedGroup.run(3, load) == [9, 9, 9]
    assert (
        "'optimizer.state.step.w' has one value here and several in the checkpoint (5.0, 9.0, 7.0)"
        in caplog.text
    )


def test_different_values_of_one_parameter_raise(tmp_path):
    apart, grouped = experts("scale", (5.0, 9.0, 7.0))
    megackpt.save(apart, tmp_path)
    with pytest.raises(
        MismatchError,
        match=r"'optimizer\.state\.scale\.w' has one value here and 3 in the checkpoint",
    ):
        megackpt.load(grouped(), tmp_path)
    apart, grouped = experts("scale", (5.0, 5.0, 5.0))
    megackpt.save(apart, tmp_path)
    assert megackpt.load(grouped(), tmp_path)["o"]["state"][0]["scale"] == 5


@pytest.mark.parametrize("value", [torch.tensor, float])
def test_two_pieces_of_a_parameter_on_a_rank(tmp_path, value):
    """Its buckets end inside of it; saved and loaded so, or whole."""

    def state(cuts, steps):
        pieces = {i: slice(*cut) for i, cut in enumerate(cuts)}
        values = {
            i: {"step": value(steps), "m": torch.full((p.stop - p.start,), steps)}
            for i, p in pieces.items()
        }
        whole = dict.fromkeys(
            pieces, ShardedTensor.from_rank_offsets("w", torch.zeros(4, 3))
        )
        groups = {"state": values, "param_groups": []}
        return {"o": optim_state_to_sharding_state(groups, whole, flat_ranges=pieces)}

    forms = ([(0, 12)], [(0, 6), (6, 12)])
    for before in forms:
        megackpt.save(state(before, 5.0), tmp_path)
        for after in forms:
            found = megackpt.load(state(after, 0.0), tmp_path)["o"]["state"].values()
            assert [float(own["step"]) for own in found] == [5.0] * len(after)


@pytest.mark.parametrize(
    "value", [torch.zeros(1, 1), [torch.zeros(2)], {"L": [torch.zeros(1)]}]
)
def test_tensors_of_a_cut_parameter_are_not_taken_for_one_value(value):
    cut = ShardedTensor.from_rank_offsets("w", torch.zeros(1, 3), (0, 0, 2))
    with pytest.raises(
        ShardingError,
        match=r"'optimizer.state.row.w': .*nothing says how it is sharded",
    ):
        optim_state_to_sharding_state(
            {"state": {0: {"row": value}}, "param_groups": []}, {0: cut}
        )


def test_a_step_of_one_element_is_the_parameters():
    cut = ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, 0, 2))
    for ranges in ({}, {0: slice(0, 1)}, {0: slice(0, 2)}):
        state = {"state": {0: {"step": torch.ones(1)}}, "param_groups": []}
        step = optim_state_to_sharding_state(state, {0: cut}, flat_ranges=ranges)[
            "state"
        ][0]["step"]
        (shard,) = extract({"step": step}).shards
        assert (shard.global_shape, is_main_replica(shard.replica_id)) == ((1,), True)
