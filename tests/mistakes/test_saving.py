"""Mistakes in declarations and saves, as people make them, and what everybody must be told about each.

To read all messages as a stranger would: ``pytest -s tests/mistakes``.
"""

from __future__ import annotations

import threading

import torch

from megackpt import ShardedObject, ShardedTensor
from megackpt.errors import (
    CoverageError,
    ShardingError,
)
from tests.mistakes.gallery import mistake, piece, rows, test_gallery

__all__ = ["test_gallery"]

# --- which piece it is ---


@mistake(
    CoverageError,
    "'mlp.fc1.weight' is not covered: [0:8, 0:4] of (8, 4) has 2 main replicas",
    "declared: ranks 0, 1 [0:8, 0:4]",
    "is the tensor-parallel rank missing from rank_offsets?",
)
def the_tensor_parallel_rank_is_forgotten(r):
    r.save(
        {"fc1": piece("mlp.fc1.weight", torch.zeros(8, 4), replica_id=(r.pp, 0, r.dp))}
    )


@mistake(
    CoverageError,
    "[8:16, 0:4] of (16, 4) has no main replica; [0:8, 0:4] of (16, 4) has 2 main replicas",
    "declared: ranks 0, 1 [0:8, 0:4]",
    "is the tensor-parallel rank missing from rank_offsets",
)
def the_tensor_parallel_rank_is_forgotten_in_the_offset(r):
    half = torch.zeros(8, 4)
    r.save(
        {
            "fc1": ShardedTensor(
                "mlp.fc1.weight",
                half,
                half.dtype,
                (8, 4),
                (16, 4),
                (0, 0),
                (2, 1),
                (r.pp, 0, r.dp),
            )
        }
    )


@mistake(
    CoverageError,
    "'mlp.fc1.weight' is declared in 2 ways",
    "ranks 0-5, 7 (16, 8) float32; rank 6 (8, 16) float32",
    "is the number of fragments, the axis or prepend_axis_num wrong on rank 6",
)
def one_rank_cuts_the_wrong_axis(r):
    axis = 1 if r.rank == 6 else 0
    r.save(
        {
            "fc1": piece(
                "mlp.fc1.weight",
                torch.zeros(8, 8),
                (axis, r.tp, 2),
                replica_id=(r.pp, 0, r.dp),
            )
        }
    )


@mistake(
    CoverageError,
    "ranks 0-4, 6, 7 (16, 4) float32; rank 5 (32, 4) float32",
    "is the number of fragments, the axis or prepend_axis_num wrong on rank 5",
)
def one_rank_believes_in_another_tensor_parallel_size(r):
    size = 4 if r.rank == 5 else 2
    r.save(
        {
            "fc1": piece(
                "mlp.fc1.weight",
                torch.zeros(8, 4),
                (0, r.tp, size),
                replica_id=(r.pp, 0, r.dp),
            )
        }
    )


@mistake(
    CoverageError,
    "[16:24, 0:4] lies outside of (16, 4)",
    "rank 2 [16:24, 0:4]; rank 3 [24:32, 0:4]",
    "does rank_offsets hold the global rank instead of the rank within its group, or an index counted from 1?",
)
def the_global_rank_stands_for_the_tensor_parallel_rank(r):
    data = torch.zeros(8, 4)
    r.save(
        {
            "fc1": ShardedTensor(
                "mlp.fc1.weight",
                data,
                data.dtype,
                (8, 4),
                (16, 4),
                (8 * r.rank, 0),
                (2, 1),
            )
        }
    )


@mistake(
    CoverageError,
    "'embedding.weight'",
    "ranks 0-6 (56, 4) float32; rank 7 (8, 4) float32",
    "a vocabulary that is not padded",
    "axis_fragmentations=None",
)
def a_vocabulary_that_does_not_divide_is_cut_as_if_it_did(r):
    mine = len(torch.arange(50).chunk(8)[r.rank]) if r.rank < 8 else 0
    r.save(
        {"embedding": piece("embedding.weight", torch.zeros(mine, 4), (0, r.rank, 8))}
    )


@mistake(
    CoverageError,
    "ranks 0-3 (32, 4) float32; ranks 4-7 (40, 4) float32",
    "a vocabulary that is not padded",
)
def the_vocabulary_is_padded_differently_on_the_last_stage(r):
    padded = 40 if r.pp else 32
    rows = torch.zeros(padded // 2, 4)
    r.save(
        {
            "embedding": piece(
                "embedding.weight", rows, (0, r.tp, 2), replica_id=(r.pp, 0, r.dp)
            )
        }
    )


@mistake(
    CoverageError,
    "ranks 0-2, 4-7 (4, 12) float32; rank 3 (12, 4) float32",
    "is the number of fragments, the axis or prepend_axis_num wrong on rank 3",
)
def the_weight_is_transposed_on_one_rank(r):
    weight = torch.zeros(4, 12).T if r.rank == 3 else torch.zeros(4, 12)
    r.save({"proj": piece("proj.weight", weight, replica_id=r.rank)})


@mistake(
    CoverageError,
    "ranks 0-2, 4-7 (4,) bfloat16; rank 3 (4,) float32",
)
def one_rank_casts_to_another_dtype(r):
    dtype = torch.float32 if r.rank == 3 else torch.bfloat16
    r.save(
        {"norm": piece("norm.weight", torch.ones(4, dtype=dtype), replica_id=r.rank)}
    )


@mistake(
    CoverageError,
    "ranks 0, 1, 3-7 (2, 8, 4) float32; rank 2 (8, 4) float32",
    "is the number of fragments, the axis or prepend_axis_num wrong on rank 2",
)
def one_rank_forgets_to_prepend_the_layer(r):
    if r.rank == 2:
        return r.save(
            {
                "fc1": piece(
                    "layers.fc1.weight", torch.zeros(8, 4), replica_id=(0, r.tp, r.dp)
                )
            }
        )
    layer = torch.zeros(8, 4)
    return r.save(
        {
            "fc1": piece(
                "layers.fc1.weight",
                layer,
                (0, r.pp, 2),
                replica_id=(0, r.tp, r.dp),
                prepend_axis_num=1,
            )
        }
    )


@mistake(
    ShardingError,
    "ranks 0-3: 'layers.fc1.weight'",
    "((8, 4), 0 prepended, and (2, 8, 4)): prepend_axis_num=1 would fit",
)
def the_layer_is_prepended_but_not_counted(r):
    layer = torch.zeros(8, 4)
    whole, offset = (2, 8, 4), (r.pp, 0, 0)
    r.save(
        {
            "fc1": ShardedTensor(
                "layers.fc1.weight",
                layer,
                layer.dtype,
                (8, 4),
                whole,
                offset,
                (2, 1, 1),
            )
        }
    )


@mistake(
    CoverageError,
    "[1:2, 0:8] of (4, 8) has 2 main replicas",
    "declared: ranks 0, 4 [1:2, 0:8]",
    "two ranks declare the same box as main replica",
)
def both_stages_claim_the_layer_between_them(r):
    first = 2 * r.pp - r.pp  # stage 1 begins one layer too early
    r.save(layers(r, range(first, 2 + 2 * r.pp)))


@mistake(
    CoverageError,
    "[3:4, 0:8] of (4, 8) has no main replica",
    "no rank declares the region; is a rank or a pipeline stage missing",
)
def no_stage_claims_a_layer(r):
    r.save(layers(r, range(2 * r.pp, 2 + r.pp)))


def layers(r, numbers):
    at = {"replica_id": (0, r.tp, r.dp), "prepend_axis_num": 1}
    return {
        f"{n}": piece("layers.norm.weight", torch.ones(8), (0, n, 4), **at)
        for n in numbers
    }


@mistake(
    CoverageError,
    "[2:4, 0:8] of (4, 8) has no main replica; [0:2, 0:8] of (4, 8) has 2 main replicas",
    "ranks 0, 4 [0:1, 0:8]; ranks 0, 4 [1:2, 0:8]",
    "is the tensor-parallel rank missing from rank_offsets?",
)
def every_stage_numbers_its_layers_from_zero(r):
    r.save(layers(r, range(2)))


@mistake(
    CoverageError,
    "[8:12, 0:4] lies outside of (8, 4); [0:4, 0:4] of (8, 4) has no main replica",
    "rank 2 [8:12, 0:4]; rank 0 [4:8, 0:4]",
    "or an index counted from 1?",
)
def the_expert_index_is_off_by_one(r):
    local = torch.zeros(4, 4)
    offset = 4 * (r.dp + 1)
    r.save(
        {
            "e": ShardedTensor(
                "experts.weight",
                local,
                local.dtype,
                (4, 4),
                (8, 4),
                (offset, 0),
                (2, 1),
                (r.pp, r.tp, 0),
            )
        }
    )


@mistake(
    CoverageError,
    "[2:4, 0:4] of (4, 4) has no main replica",
    "[0:2, 0:4] of (4, 4) has 2 main replicas",
)
def the_expert_parallel_rank_is_forgotten(r):
    experts = [
        piece(
            "experts.weight",
            torch.zeros(4),
            (0, local, 4),
            replica_id=(r.pp, r.tp, 0),
            prepend_axis_num=1,
        )
        for local in range(2)  # of 4 experts, 2 on each ep rank
    ]
    r.save({"experts": experts})


# --- which copy it is ---


@mistake(
    CoverageError,
    "[0:16, 0:4] of (16, 4) has no main replica",
    "ranks 0, 2, 4, 6 [0:8, 0:4] (replica_id (0, 0, 1)",
    "exactly one rank must declare it with replica_id 0 (or all zeros)",
)
def no_replica_id_is_zero(r):
    r.save(
        {
            "fc1": piece(
                "mlp.fc1.weight",
                torch.zeros(8, 4),
                (0, r.tp, 2),
                replica_id=(0, r.pp, r.dp + 1),
            )
        }
    )


@mistake(
    CoverageError,
    "[0:8] of (8,) has no main replica",
    "ranks 0-7 [0:8] (replica_id 1, 2, 3, and 5 more)",
    "exactly one rank must declare it with replica_id 0",
)
def replicas_are_counted_from_one(r):
    r.save({"norm": piece("norm.weight", torch.zeros(8), replica_id=r.rank + 1)})


@mistake(
    CoverageError,
    "[0:16, 0:4] of (16, 4) has 2 main replicas",
    "ranks 0, 2 [0:8, 0:4]; ranks 1, 3 [8:16, 0:4]",
    "all but one need a non-zero replica_id",
)
def the_replica_id_is_forgotten_on_data_parallel_copies(r):
    r.save(
        {
            "fc1": piece(
                "mlp.fc1.weight",
                torch.zeros(8, 4),
                (0, r.tp, 2),
                replica_id=(r.pp, 0, 0),
            )
        }
    )


@mistake(
    CoverageError,
    "[0:8] of (8,) has 8 main replicas",
    "ranks 0-7 [0:8]",
    "8 ranks declare the same box as main replica; is the tensor-parallel rank missing",
)
def the_replica_id_is_forgotten_altogether(r):
    r.save({"norm": piece("norm.weight", torch.zeros(8))})


@mistake(
    CoverageError,
    "[0:8] of (8,) has 2 main replicas",
    "ranks 0, 1 [0:8]",
    "all but one need a non-zero replica_id",
)
def the_replica_id_of_a_norm_lacks_the_tensor_parallel_rank(r):
    r.save({"norm": piece("norm.weight", torch.zeros(8), replica_id=(r.pp, 0, r.dp))})


@mistake(
    CoverageError,
    "[0:32, 0:4] of (32, 4) has 2 main replicas",
    "ranks 0, 4 [0:16, 0:4]; ranks 1, 5 [16:32, 0:4]",
    "all but one need a non-zero replica_id",
)
def tied_embeddings_are_main_on_both_stages(r):
    rows = torch.zeros(16, 4)
    r.save(
        {
            "embedding": piece(
                "embedding.weight", rows, (0, r.tp, 2), replica_id=(0, 0, r.dp)
            )
        }
    )


@mistake(
    CoverageError,
    "rank 0 declared it more than once",
    "do two models share one prefix? Give each its own (add_prefix_for_sharding)",
)
def two_models_have_one_prefix(r):
    actor, critic = (
        piece("model.norm.weight", torch.zeros(8), replica_id=r.rank) for _ in range(2)
    )
    r.save({"actor": actor, "critic": critic})


@mistake(
    CoverageError,
    "ranks 0-7 (8,) float32; ranks 0-7 (12,) float32",
    "share one prefix? Give each its own (add_prefix_for_sharding)",
)
def two_models_of_different_size_have_one_prefix(r):
    actor, critic = (
        piece("model.norm.weight", torch.zeros(n), replica_id=r.rank) for n in (8, 12)
    )
    r.save({"actor": actor, "critic": critic})


# --- flat shards of an optimizer, and objects ---


@mistake(
    CoverageError,
    "[29:30] of (80,) has 2 main replicas",
    "rank 2 [20:30]; rank 3 [29:40]",
)
def ranges_of_the_optimizer_overlap(r):
    r.save(
        {
            "exp_avg": rows(
                "optimizer.exp_avg", 10 * r.rank - (r.rank == 3), 10 * r.rank + 10, 80
            )
        }
    )


@mistake(
    CoverageError,
    "[49:50] of (80,) has no main replica",
    "rank 4 [40:49]; rank 5 [50:60]",
)
def ranges_of_the_optimizer_leave_a_gap(r):
    r.save(
        {
            "exp_avg": rows(
                "optimizer.exp_avg", 10 * r.rank, 10 * r.rank + 10 - (r.rank == 4), 80
            )
        }
    )


@mistake(
    CoverageError,
    "[70:80] lies outside of (77,)",
    "rank 7 [70:80]",
)
def the_optimizer_is_declared_without_its_padding(r):
    r.save({"exp_avg": rows("optimizer.exp_avg", 10 * r.rank, 10 * r.rank + 10, 77)})


@mistake(
    CoverageError,
    "'rng_state' is not covered: [0:2] of objects (2,) has 2 main replicas",
    "ranks 0, 4 [0:1]; ranks 2, 6 [1:2]",
    "all but one need a non-zero replica_id",
)
def an_object_has_two_mains(r):
    r.save({"rng": ShardedObject("rng_state", [0], (2,), (r.dp,), (0, r.tp, 0))})


@mistake(
    CoverageError,
    "[0:2, 3:4] of objects (2, 4) has no main replica",
    "no rank declares the region; is a rank or a pipeline stage missing",
)
def an_object_is_missing(r):
    r.save(
        {
            "rng": ShardedObject(
                "rng_state", [0], (2, 4), (r.tp, r.dp + r.pp), (0, 0, r.pp and not r.dp)
            )
        }
    )


@mistake(
    CoverageError,
    "ranks 0, 2, 4, 6 objects (2,) object; ranks 1, 3, 5, 7 objects (4,) object",
)
def the_grid_of_an_object_differs(r):
    r.save(
        {"rng": ShardedObject("rng_state", [0], (4 if r.tp else 2,), (r.dp,), r.rank)}
    )


@mistake(
    CoverageError,
    "ranks 0-6 (1,) float32; rank 7 objects (1,) object",
)
def a_key_is_a_tensor_here_and_an_object_there(r):
    scale = ShardedObject("scale", 1.0, (1,), (0,), r.rank)
    r.save(
        {
            "scale": scale
            if r.rank == 7
            else piece("scale", torch.ones(1), replica_id=r.rank)
        }
    )


@mistake(
    ShardingError,
    "rank 0: the object 'dataloader/shard_0_8' cannot be pickled, at [0]['lock']",
    "LocalNonpersistentObject",
    "ranks 1-7: the same, but for the numbers",
)
def an_object_cannot_be_pickled(r):
    r.save(
        {
            "lock": ShardedObject(
                "dataloader", {"lock": threading.Lock()}, (8,), (r.rank,)
            )
        }
    )


@mistake(
    ShardingError,
    "ranks 0-7: the common state cannot be pickled, at ['args']['activation']",
    "LocalNonpersistentObject",
)
def the_common_state_cannot_be_pickled(r):
    r.save({"args": {"activation": lambda x: x}})
