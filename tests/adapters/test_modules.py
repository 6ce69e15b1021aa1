"""Modules declared: layouts against Megatron's rank order, default replica ids, prefixes, containers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megackpt import tree
from megackpt.adapters.modules import (
    ParallelLayout,
    add_prefix_for_sharding,
    apply_prefix_mapping,
    get_extra_state_offsets,
    make_sharded_object_for_checkpoint,
    make_sharded_tensor_for_checkpoint,
    make_sharded_tensors_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
    replace_prefix_for_sharding,
    sharded_state_dict_default,
)
from megackpt.errors import ShardingError
from megackpt.planning.coverage import check
from megackpt.planning.manifest import Declarations
from megackpt.state import ShardedObject, ShardedTensor, declare, extract


class FakeGroup:
    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class ColumnParallel(nn.Module):
    def __init__(self, layout: ParallelLayout) -> None:
        super().__init__()
        self.layout = layout
        self.weight = nn.Parameter(torch.zeros(8 // layout.tp_size, 6))
        self.bias = nn.Parameter(torch.zeros(8 // layout.tp_size))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = self.state_dict(keep_vars=True)
        axes = {"weight": 0, "bias": 0}
        return make_sharded_tensors_for_checkpoint(
            state, prefix, axes, sharded_offsets, tp_group=self.layout
        )


def test_layout_is_megatrons_rank_order():
    layouts = [
        ParallelLayout.of(r, tp=2, cp=2, dp=2, pp=2, ep=4, etp=1) for r in range(16)
    ]
    assert [layout.tp_rank for layout in layouts[:4]] == [0, 1, 0, 1]
    assert [layout.cp_rank for layout in layouts[:8]] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [layout.dp_rank for layout in layouts[:8]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [layout.pp_rank for layout in layouts[::8]] == [0, 1]
    assert [layout.dp_cp_rank for layout in layouts[:8]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [layout.ep_rank for layout in layouts[:8]] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [layout.edp_rank for layout in layouts[:8]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (layouts[0].dp_cp_size, layouts[0].edp_size, layouts[0].etp_size) == (
        4,
        2,
        1,
    )
    assert len({(x.tp_rank, x.cp_rank, x.dp_rank, x.pp_rank) for x in layouts}) == 16
    assert ParallelLayout.of(3, tp=2, dp=2, ep=2).etp_size == 2
    assert ParallelLayout() == ParallelLayout.of(0)


def test_expert_layers_have_a_layout_of_their_own():
    places = [
        ParallelLayout.of(r, tp=2, cp=2, dp=2, pp=2, ep=2, etp=1).experts
        for r in range(16)
    ]
    assert [(x.tp_rank, x.tp_size, x.ep_rank, x.ep_size) for x in places[:3]] == [
        (0, 1, 0, 2),
        (0, 1, 1, 2),
        (0, 1, 0, 2),
    ]
    assert [x.dp_cp_rank for x in places[:8]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (places[0].dp_cp_size, places[8].pp_rank, places[8].pp_size) == (4, 1, 2)
    assert places[5].experts == places[5]


def test_layouts_that_do_not_fit():
    with pytest.raises(
        ShardingError, match="rank 4 is not in a world of tp=2 x cp=1 x dp=2 x pp=1"
    ):
        ParallelLayout.of(4, tp=2, dp=2)
    with pytest.raises(ShardingError, match="etp=2 x ep=3"):
        ParallelLayout.of(0, tp=2, dp=2, ep=3)
    with pytest.raises(ShardingError):
        ParallelLayout.of(0, tp=0)


@pytest.mark.parametrize(
    "groups",
    [
        {"tp_group": FakeGroup(1, 2), "dp_cp_group": FakeGroup(3, 4)},
        {"tp_group": ParallelLayout.of(7, tp=2, dp=4)},
        {"dp_cp_group": ParallelLayout.of(7, tp=2, dp=4)},
        {"tp_group": FakeGroup(1, 2), "dp_cp_group": ParallelLayout.of(7, tp=2, dp=4)},
    ],
)
def test_tensors_are_placed_by_groups_or_layouts(groups):
    t = make_tp_sharded_tensor_for_checkpoint(
        torch.zeros(4, 6),
        "w",
        1,
        prepend_offsets=((0, 2, 5),),
        allow_shape_mismatch=True,
        **groups,
    )
    assert (t.global_shape, t.global_offset, t.axis_fragmentations) == (
        (5, 4, 12),
        (2, 0, 6),
        (5, 1, 2),
    )
    assert (t.replica_id, t.prepend_axis_num, t.allow_shape_mismatch) == (
        (0, 0, 3),
        1,
        True,
    )
    r = make_sharded_tensor_for_checkpoint(torch.zeros(4), "b", ((0, 2, 5),), **groups)
    assert (r.global_shape, r.replica_id) == ((5, 4), (0, 1, 3))
    o = make_sharded_object_for_checkpoint("x", "o", ((0, 2, 5), (1, 0, 2)), **groups)
    assert (o.global_shape, o.global_offset, o.replica_id) == (
        (5, 2),
        (2, 0),
        (0, 1, 3),
    )
    assert (
        make_sharded_tensor_for_checkpoint(torch.zeros(4), "b", replica_id=7).replica_id
        == 7
    )


def test_one_process_needs_no_groups():
    t = make_tp_sharded_tensor_for_checkpoint(torch.zeros(4, 6), "w")
    assert (t.global_shape, t.replica_id) == ((4, 6), (0, 0, 0))


def test_several_ranks_without_groups_are_an_error(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(
        ShardingError, match=r"'w': tp_group is needed.*ParallelLayout\.of"
    ):
        make_tp_sharded_tensor_for_checkpoint(torch.zeros(4), "w")
    with pytest.raises(ShardingError, match="dp_cp_group is needed"):
        make_sharded_tensor_for_checkpoint(
            torch.zeros(4), "w", tp_group=FakeGroup(0, 4)
        )


def test_extra_state_offsets():
    assert get_extra_state_offsets(()) == ((1,), (0,))
    assert get_extra_state_offsets(((1, 3, 4), (0, 1, 2))) == ((2, 4), (1, 3))
    with pytest.raises(ShardingError, match="without a gap"):
        get_extra_state_offsets(((1, 0, 2),))


def test_a_modules_entries():
    state = {
        "weight": torch.zeros(4, 6),
        "bias": torch.zeros(6),
        "_extra_state": {"fp8": 1},
        "n": torch.tensor(3),
    }
    layout = ParallelLayout.of(3, tp=2, dp=2)
    shards = make_sharded_tensors_for_checkpoint(
        state, "fc.", {"weight": 1}, ((0, 1, 4),), tp_group=layout
    )
    assert list(shards) == ["fc.weight", "fc.bias", "fc._extra_state", "fc.n"]
    assert all(key == shard.key for key, shard in shards.items())
    assert shards["fc.weight"].global_shape == (4, 4, 12)
    assert shards["fc.bias"].replica_id == (0, 1, 1)
    assert isinstance(shards["fc._extra_state"], ShardedObject)
    assert shards["fc.n"].global_shape == (4,)
    with pytest.raises(ShardingError, match=r"'fc.x'.*torch.Tensor"):
        make_sharded_tensors_for_checkpoint({"x": 5}, "fc.")


def test_plain_containers_ask_their_children():
    model = nn.Sequential(
        nn.LayerNorm(6),
        nn.Sequential(ColumnParallel(ParallelLayout.of(1, tp=2)), nn.Linear(8, 2)),
    )
    model.register_buffer("seen", torch.tensor(0))
    layout = ParallelLayout.of(1, tp=2)
    shards = sharded_state_dict_default(
        model, "m.", metadata={"dp_cp_group": layout}, tp_group=layout
    )
    assert set(shards) == {f"m.{name}" for name in model.state_dict()}
    assert shards["m.1.0.weight"].global_shape == (8, 6)
    assert shards["m.1.0.weight"].data is model[1][0].weight
    assert shards["m.1.1.weight"].replica_id == (0, 1, 0)
    assert shards["m.seen"].replica_id == (0, 1, 0)


def test_a_shared_child_keeps_both_names():
    shared = ColumnParallel(ParallelLayout())
    model = nn.ModuleDict({"a": shared, "b": shared})
    assert set(sharded_state_dict_default(model)) == set(model.state_dict())


def test_all_ranks_together_cover_the_model():
    parts = []
    for rank in range(8):
        layout = ParallelLayout.of(rank, tp=2, dp=2, pp=2)
        block = nn.Sequential(ColumnParallel(layout), nn.LayerNorm(8))
        offsets = ((0, layout.pp_rank, layout.pp_size),)
        shards = sharded_state_dict_default(
            block, "layers.", offsets, {"dp_cp_group": layout}, layout
        )
        parts.append(declare(extract(shards).shards, rank=rank))
    check(Declarations.merge(parts))


def prefixed() -> tuple[dict, ShardedTensor]:
    t = ShardedTensor.from_rank_offsets("a.w", torch.zeros(1))
    return {"x": t, "again": [t], "o": ShardedObject("a.o", 1, (1,), (0,)), "n": 5}, t


def keys_of(state: dict) -> list[str]:
    return [leaf.key for leaf in tree.nested_values(state) if hasattr(leaf, "key")]


def test_prefixes():
    state, _ = prefixed()
    add_prefix_for_sharding(state, "model.")
    assert keys_of(state) == ["model.a.w", "model.a.w", "model.a.o"]
    replace_prefix_for_sharding(state, "model.a", "b")
    assert keys_of(state) == ["b.w", "b.w", "b.o"]
    state["o"].key = "other"
    with pytest.raises(ValueError, match=r"Expected other to begin with prefix b\."):
        replace_prefix_for_sharding(state, "b.", "c.")
    assert keys_of(state) == ["b.w", "b.w", "other"]
    apply_prefix_mapping(state, {"b": "first", "b.w": "second", "zzz": ""})
    assert keys_of(state) == ["first.w", "first.w", "other"]
