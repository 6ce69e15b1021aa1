"""Checkpoints at another parallelism: what is inferred of axes, and what the ranks of the other job would declare."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from megackpt.planning.box import Box
from megackpt.planning.coverage import uncovered
from megackpt.planning.manifest import (
    COMMON_KEY,
    OBJECT,
    Declaration,
    Declarations,
    Manifest,
    ShardId,
    TensorMeta,
)
from megackpt.planning.resharding import Axes, Parallelism, Resharded, reshard
from megackpt.planning.save_plan import plan_save

Cut = dict[int, int]
"""Axis -> number of pieces."""


def stored(tensors: dict[str, tuple[tuple[int, ...], Cut]]) -> Manifest:
    """The manifest of tensors of float32 that are cut into even pieces."""
    rows = []
    for key, (shape, cut) in tensors.items():
        counts = [cut.get(axis, 1) for axis in range(len(shape))]
        sizes = [n // count for n, count in zip(shape, counts, strict=True)]
        for place in np.ndindex(*counts):
            box = Box(tuple(p * s for p, s in zip(place, sizes, strict=True)), tuple(sizes))
            meta = TensorMeta(shape, "float32")
            rows.append(Declaration(ShardId(key, box), meta, 0, False, box.volume * 4, 0))
    return plan_save([Declarations.of(rows)])[1]


MEGATRON = {
    "embedding.word_embeddings.weight": ((64, 16), {0: 2}),
    "decoder.layers.self_attention.linear_qkv.weight": ((4, 48, 16), {0: 4, 1: 2}),
    "decoder.layers.self_attention.linear_proj.weight": ((4, 16, 16), {0: 4, 2: 2}),
    "decoder.layers.mlp.linear_fc1.weight": ((4, 64, 16), {0: 4, 1: 4}),
    "decoder.layers.input_layernorm.weight": ((4, 16), {0: 4}),
    "decoder.final_layernorm.weight": ((16,), {}),
    "output_layer.weight": ((64, 16), {0: 2}),
    "step": ((), {}),
}


def boxes_of(found: Resharded, rank: int, key: str) -> list[Box]:
    return [row.shard.box for row in found.parts[rank].rows() if row.shard.key == key]


def test_axes() -> None:
    axes = reshard(stored(MEGATRON), Parallelism()).axes
    assert axes["decoder.layers.self_attention.linear_qkv.weight"] == Axes(0, None, 1, 2)
    assert axes["decoder.layers.self_attention.linear_proj.weight"] == Axes(0, None, 2, 2)
    assert axes["decoder.layers.mlp.linear_fc1.weight"] == Axes(0, None, 1, 4)
    assert axes["decoder.layers.input_layernorm.weight"] == Axes(0, None, None, 1)
    assert axes["embedding.word_embeddings.weight"] == Axes(None, None, 0, 2)
    assert axes["step"] == Axes(None, None, None, 1)


def test_ranks_hold_what_such_a_job_holds() -> None:
    found = reshard(stored(MEGATRON), Parallelism(tensor=4, pipeline=2, data=2))
    rank = 1 * 8 + 1 * 4 + 2  # stage 1, data 1, tensor 2
    assert boxes_of(found, rank, "decoder.layers.self_attention.linear_qkv.weight") == [
        Box((layer, 24, 0), (1, 12, 16)) for layer in (2, 3)
    ]
    assert boxes_of(found, rank, "decoder.layers.mlp.linear_fc1.weight") == [
        Box((layer, at, 0), (1, 8, 16)) for layer in (2, 3) for at in (16, 48)
    ]
    assert boxes_of(found, rank, "decoder.layers.input_layernorm.weight") == [
        Box((layer, 0), (1, 16)) for layer in (2, 3)
    ]
    assert boxes_of(found, rank, "embedding.word_embeddings.weight") == []
    assert boxes_of(found, 2, "embedding.word_embeddings.weight") == [Box((32, 0), (16, 16))]
    assert boxes_of(found, rank, "output_layer.weight") == [Box((32, 0), (16, 16))]
    assert boxes_of(found, rank, "decoder.final_layernorm.weight") == [Box((0,), (16,))]
    assert boxes_of(found, 0, "decoder.final_layernorm.weight") == []
    assert boxes_of(found, rank, "step") == boxes_of(found, 0, "step") == [Box((), ())]


def test_layers_by_their_numbers_in_keys() -> None:
    tensors = {f"model.layers.{i}.w": ((8, 8), {0: 2}) for i in range(6)}
    found = reshard(stored(tensors), Parallelism(tensor=2, pipeline=3))
    for rank in range(6):
        held = {row.shard.key for row in found.parts[rank].rows()}
        assert held == {f"model.layers.{i}.w" for i in (rank // 2 * 2, rank // 2 * 2 + 1)}


@pytest.mark.parametrize(
    "tensors",
    [
        {"layers.mlp.experts.w": ((2, 4, 8, 8), {0: 2, 1: 4, 2: 2})},
        {f"layers.{i}.mlp.experts.w": ((4, 8, 8), {0: 4, 1: 2}) for i in range(2)},
        {f"layers.{i}.mlp.experts.{e}.w": ((8, 8), {0: 2}) for i in range(2) for e in range(4)},
    ],
)
def test_experts(tensors: dict[str, tuple[tuple[int, ...], Cut]]) -> None:
    found = reshard(stored(tensors), Parallelism(tensor=2, data=4, expert=2))
    assert not uncovered(Declarations.merge(found.parts))
    sizes = [int(part.nbytes.sum()) for part in found.parts]
    assert sizes == [2 * 4 * 64 * 4 // 2 // 2] * 8  # each holds half of the experts, each of these half
    assert [part.main.any() for part in found.parts] == [True] * 4 + [False] * 4


def test_fully_sharded() -> None:
    found = reshard(
        stored({"w": ((24, 4), {0: 4}), "b": ((24,), {0: 4})}), Parallelism(data=8, fully_sharded=True)
    )
    assert [len(part) for part in found.parts] == [2] * 8
    assert boxes_of(found, 3, "w") == [Box((9, 0), (3, 4))]
    assert not uncovered(Declarations.merge(found.parts))


def test_what_does_not_divide_is_told() -> None:
    found = reshard(stored({"w": ((10, 4), {0: 2}), "v": ((8, 4), {0: 2})}), Parallelism(tensor=4))
    assert found.uneven == ("w",)
    assert sorted(boxes_of(found, rank, "w")[0].shape[0] for rank in range(4)) == [2, 2, 3, 3]


def test_objects_keep_their_shards() -> None:
    rows = [
        Declaration(ShardId("rng", Box((i,), (1,))), TensorMeta((4,), OBJECT), 0, False, 0, 0)
        for i in range(4)
    ]
    rows.append(Declaration(ShardId(COMMON_KEY, Box((), ())), TensorMeta((), OBJECT), 0, False, 0, 0))
    found = reshard(plan_save([Declarations.of(rows)])[1], Parallelism(data=8))
    held = [[str(row.shard) for row in part.rows()] for part in found.parts]
    assert "the common state" in held[0]
    assert sorted(shard for shards in held for shard in shards) == sorted(str(row.shard) for row in rows)
    assert max(map(len, held)) <= 2


def test_no_parallelism_is_none() -> None:
    for wrong in ({"tensor": 0}, {"data": -1}, {"data": 4, "expert": 3}):
        with pytest.raises(ValueError, match="parallelism"):
            Parallelism(**wrong)


@settings(max_examples=60, deadline=None)
@given(
    job=st.builds(
        Parallelism,
        tensor=st.integers(1, 5),
        pipeline=st.integers(1, 4),
        data=st.integers(1, 3),
        fully_sharded=st.booleans(),
    ),
    data=st.data(),
)
def test_whatever_is_stored_is_declared_exactly_once(job: Parallelism, data: st.DataObject) -> None:
    """Any shapes, any cuts: the main replicas tile each tensor, and every rank's copies are of one of its shards."""
    tensors: dict[str, tuple[tuple[int, ...], Cut]] = {}
    for name in ("layers.w", "layers.3.v", "embed", "final.x", "plain", "layers.experts.e"):
        shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=3)))
        cut = {
            axis: data.draw(st.sampled_from([n for n in (1, 2, extent) if n and extent % n == 0]))
            for axis, extent in enumerate(shape)
            if extent
        }
        tensors[name] = (shape, cut)
    manifest = stored(tensors)
    found = reshard(manifest, job)
    assert len(found.parts) == job.ranks
    declared = Declarations.merge(found.parts)
    assert not uncovered(declared)
    assert {entry.key for entry in declared.tensors} == set(tensors)
    _, planned = plan_save(found.parts)
    assert planned.chunks.length.sum() == manifest.chunks.length.sum()
