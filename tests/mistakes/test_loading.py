"""Mistakes in what a load asks for, as people make them, and what everybody must be told about each.

What is asked for is told against a checkpoint of the model of conftest.py. ``pytest -s tests/mistakes`` prints all.
"""

from __future__ import annotations

import pytest
import torch

import megackpt
from megackpt import ShardedObject, ShardedTensor, ShardedTensorFactory
from megackpt.errors import (
    BackendError,
    CoverageError,
    MismatchError,
    NotACheckpoint,
    RankFailure,
    ShardingError,
    StorageError,
)
from tests.mistakes.gallery import mistake, piece, test_gallery

__all__ = ["test_gallery"]


# --- names ---


@mistake(
    MismatchError,
    "Unexpected keys",
    "'decoder.layers.1.norm.wieght' (did you mean 'decoder.layers.1.norm.weight'?)",
)
def a_key_is_misspelt(r):
    r.load(
        {"n": piece("decoder.layers.1.norm.wieght", torch.zeros(8), replica_id=r.rank)}
    )


@mistake(
    MismatchError,
    "'module.decoder.layers.1.norm.weight' (did you mean 'decoder.layers.1.norm.weight'?)",
)
def every_name_has_a_prefix_too_many(r):
    r.load(r.model(prefix="module."))


@mistake(
    MismatchError,
    "'model.decoder.layers.1.norm.weight' (did you mean 'decoder.layers.1.norm.weight'?)",
)
def the_prefix_of_another_wrapper_is_meant(r):
    state = r.model(prefix="module.")
    r.load(state, key_map=lambda key: key.replace("module.", "model."))


@mistake(
    MismatchError,
    "'encoder.block.0.q_proj.kernel'",
)
def all_keys_are_of_another_model(r):
    r.load(
        {"q": piece("encoder.block.0.q_proj.kernel", torch.zeros(8), replica_id=r.rank)}
    )


@mistake(
    MismatchError,
    "Unexpected keys: asked for, but not in the checkpoint",
    "'optimizer.state.exp_avg.decoder.layers.",
)
def the_optimizer_was_not_saved(r):
    state = r.model()
    for name, shard in [*state.items()]:
        if isinstance(shard, ShardedTensor) and "norm" in shard.key:
            copied = piece(
                f"optimizer.state.exp_avg.{shard.key}",
                torch.zeros(8),
                replica_id=shard.replica_id,
            )
            state[f"exp_avg.{name}"] = copied
    r.load(state)


@mistake(
    MismatchError,
    "Unexpected keys: asked for, but not in the checkpoint (8)",
    "'decoder.layers.4.norm.weight'",
)
def the_model_has_more_layers_of_their_own_keys(r):
    keys = [f"decoder.layers.{n}.norm.weight" for n in range(12)]
    r.load({key: piece(key, torch.zeros(8), replica_id=r.rank) for key in keys})


@mistake(
    MismatchError,
    "Missing keys: in the checkpoint, but asked for by no rank (6)",
    "'decoder.layers.mlp.fc1.weight'",
)
def half_of_the_model_is_not_asked_for_though_all_must_be(r):
    r.load(
        {key: value for key, value in r.model().items() if "norm" in key},
        strict="raise_all",
    )


@mistake(
    MismatchError,
    "rank 0: Unexpected keys",
    "'rng_state/shard_0_8' (stored as objects of the grid (2,))",
    "ranks 1-7: the same",
)
def the_grid_of_an_object_has_changed(r):
    r.load({"rng": ShardedObject("rng_state", None, (8,), (r.rank,))})


@mistake(
    MismatchError,
    "'rng_state' (stored as objects of the grid (2,))",
)
def an_object_is_asked_for_as_a_tensor(r):
    r.load({"rng": piece("rng_state", torch.zeros(2), replica_id=r.rank)})


@mistake(
    MismatchError,
    "(stored as a tensor (8,) float32, asked for as an object)",
)
def a_tensor_is_asked_for_as_an_object(r):
    r.load(
        {
            "norm": ShardedObject(
                "decoder.layers.1.norm.weight", None, (1,), (0,), r.rank
            )
        }
    )


# --- shapes ---


@mistake(
    MismatchError,
    "Global shape mismatch for loaded (32, 8) and expected (32, 16) tensor for key embedding.word_embeddings.weight",
)
def the_model_is_wider(r):
    r.load(r.model(hidden=16))


@mistake(
    MismatchError,
    "loaded (4, 32, 8) and expected (8, 32, 8)",
)
def the_model_is_deeper(r):
    r.load({k: v for k, v in r.model(layers=8).items() if "norm" not in k})


@mistake(
    MismatchError,
    "and expected (4, 8, 8) tensor for key decoder.layers.experts.weight",
)
def the_model_has_more_experts(r):
    r.load(r.model(experts=8))


@mistake(
    MismatchError,
    "loaded (32, 8) and expected (40, 8)",
    "if this is a vocabulary padded for another parallelism, allow_shape_mismatch=True",
)
def the_vocabulary_is_padded_for_another_parallelism(r):
    r.load(r.model(vocabulary=40))


@mistake(
    MismatchError,
    "loaded (4, 8, 32) and expected (4, 16, 16)",
)
def the_wrong_axis_is_cut(r):
    layer = (0, r.rank // 2, 4)
    fc2 = piece(
        "decoder.layers.mlp.fc2.weight",
        torch.zeros(8, 16),
        layer,
        (1, r.tp, 2),
        prepend_axis_num=1,
    )
    r.load({"fc2": fc2})


@mistake(
    MismatchError,
    "loaded (4, 32, 8) and expected (4, 8, 32)",
)
def the_weight_is_transposed(r):
    layer = (0, r.rank // 2, 4)
    fc1 = piece(
        "decoder.layers.mlp.fc1.weight",
        torch.zeros(8, 16),
        layer,
        (2, r.tp, 2),
        prepend_axis_num=1,
    )
    r.load({"fc1": fc1})


@mistake(
    MismatchError,
    "loaded (4, 32, 8) and expected (32, 8)",
)
def the_layer_is_not_prepended(r):
    r.load(
        {
            "fc1": piece(
                "decoder.layers.mlp.fc1.weight",
                torch.zeros(16, 8),
                (0, r.tp, 2),
                replica_id=r.rank // 2,
            )
        }
    )


@mistake(
    MismatchError,
    "loaded (32, 8) and expected (16, 8)",
)
def the_tensor_parallel_rank_is_forgotten(r):
    r.load(
        {
            "e": piece(
                "embedding.word_embeddings.weight",
                torch.zeros(16, 8),
                replica_id=r.rank,
            )
        }
    )


@mistake(
    MismatchError,
    "loaded (32, 8) and expected (128, 8)",
)
def the_world_size_stands_for_the_tensor_parallel_size(r):
    r.load(
        {
            "e": piece(
                "embedding.word_embeddings.weight", torch.zeros(16, 8), (0, r.rank, 8)
            )
        }
    )


@mistake(
    MismatchError,
    "dtype mismatch for loaded float32 and expected bfloat16 tensor for key decoder.layers.1.norm.weight",
    "dtype_policy='convert'",
)
def another_dtype_is_not_to_be_converted(r):
    norm = torch.zeros(8, dtype=torch.bfloat16)
    r.load(
        {"n": piece("decoder.layers.1.norm.weight", norm, replica_id=r.rank)},
        dtype_policy="error",
    )


# --- who asks for what ---


@mistake(
    CoverageError,
    "[4:32, 0:8] of (32, 8) has no main replica",
    "validate_access_integrity=False",
)
def only_a_part_is_asked_for(r):
    rows = torch.zeros(4, 8)
    data = ShardedTensor(
        "embedding.word_embeddings.weight",
        rows,
        rows.dtype,
        (4, 8),
        (32, 8),
        (0, 0),
        (8, 1),
        r.rank,
    )
    r.load({"e": data})


@mistake(
    CoverageError,
    "[0:8] of (8,) has 8 main replicas",
    "ranks 0-7 [0:8]",
    "validate_access_integrity=False",
)
def two_ranks_ask_for_the_same_part_as_main(r):
    r.load({"n": piece("decoder.layers.1.norm.weight", torch.zeros(8))})


@mistake(
    ShardingError,
    "cannot load into an expanded tensor (shape (8,), strides (0,))",
    "give data.contiguous(), or data=None",
)
def a_tensor_is_expanded(r):
    r.load(
        {
            "n": piece(
                "decoder.layers.1.norm.weight",
                torch.zeros(1).expand(8),
                replica_id=r.rank,
            )
        }
    )


@mistake(
    RankFailure,
    "not enough values to unpack (expected 2, got 1)",
    "in the merge_fn of the factory 'decoder.layers.1.norm.weight'",
    "called with what build_fn gave",
)
def a_merge_expects_what_its_build_does_not_give(r):
    def build(key, data, replica_id, _):
        return [piece(key, data, replica_id=replica_id)]

    def merge(loaded):
        w, v = loaded
        return torch.cat([w, v])

    name = "decoder.layers.1.norm.weight"
    r.load({"n": ShardedTensorFactory(name, torch.zeros(8), build, merge, r.rank)})


@mistake(
    ShardingError,
    "must be a dict, not a list",
)
def the_state_is_a_list_of_names(r):
    r.load(["embedding.word_embeddings.weight"])


@mistake(
    MismatchError,
    "Missing keys: in the checkpoint, but asked for by no rank (",
)
def the_state_holds_names_instead_of_shards(r):
    r.load({"embedding": "embedding.word_embeddings.weight"}, strict="raise_all")


# --- the call ---


@mistake(
    NotACheckpoint,
    "iter_0000100/metadata.json is not a distributed checkpoint, but one of its files",
)
def a_file_of_the_checkpoint_is_named(r):
    r.load(r.model(), step="iter_0000100/metadata.json")


@mistake(
    NotACheckpoint,
    "iter_0000100/.metadata is not a distributed checkpoint, but one of its files",
)
def the_table_of_contents_is_named(r):
    r.load(r.model(), step="iter_0000100/.metadata")


@mistake(
    MismatchError,
    "nothing but common state is stored: megackpt.load({}, directory) returns it",
)
def the_common_state_is_named(r):
    r.load(r.model(), step="iter_0000100/common.pt")


@mistake(StorageError, "a checkpoint's directory must be a str or a Path, not a dict")
def the_arguments_are_swapped(r):
    megackpt.load(r.run / "iter_0000100", r.model(), process_group=r.group)


@mistake(RankFailure, "trusted takes a tuple of classes, not <class 'complex'>")
def one_class_is_trusted_and_not_a_tuple_of_it(r):
    r.load(r.model(), trusted=complex)


@mistake(NotACheckpoint, "iter_0000200 does not exist")
def the_step_does_not_exist(r):
    r.load(r.model(), step="iter_0000200")


@mistake(NotACheckpoint, "iter_000100 does not exist")
def the_step_lacks_a_zero(r):
    r.load(r.model(), step="iter_000100")


@mistake(NotACheckpoint, "rum0/iter_0000100 does not exist")
def the_run_is_misspelt(r):
    r.load(r.model(), step="../rum0/iter_0000100")


@mistake(
    ShardingError,
    "ranks 6, 7: the ranks of one load name different directories",
    "iter_0000200, on rank 0 ",
)
def the_ranks_name_different_directories(r):
    r.load(r.model(), step="iter_0000100" if r.rank < 6 else "iter_0000200")


@mistake(
    BackendError,
    "it holds the format 'torch_dist', not 'zarr': leave sharded_strategy out",
)
def the_format_is_another_one(r):
    r.load(r.model(), sharded_strategy="zarr")


@mistake(
    BackendError,
    "unknown format 'torchdist': known are deepspeed, delta, orbax, safetensors, torch, ",
    "torch_checkpointing, torch_dist, zarr",
)
def the_format_is_misspelt(r):
    r.load(r.model(), sharded_strategy="torchdist")


@mistake(
    RankFailure,
    "dtype_policy is 'convert' or 'error', not 'ignore'",
)
def the_dtype_policy_is_no_policy(r):
    r.load(r.model(), dtype_policy="ignore")


@mistake(
    RankFailure,
    "Invalid strict flag: 'raise_al'; one of ",
    "'raise_all'",
)
def the_strictness_is_misspelt(r):
    r.load(r.model(), strict="raise_al")


@mistake(
    MismatchError,
    "'m.decoder.layers.1.norm.weight' (did you mean 'decoder.layers.1.norm.weight'?)",
)
def the_key_map_is_the_wrong_way_round(r):
    r.load(
        r.model(prefix="m."),
        key_map={"decoder.layers.1.norm.weight": "m.decoder.layers.1.norm.weight"},
    )


# --- what is no error ---


@pytest.mark.parametrize("asked", [torch.zeros(8), "decoder.layers.1.norm.weight"])
def test_a_load_warns_of_plain_tensors_and_texts_with_stored_names(
    asked, stranger, caplog
):
    """A state_dict() where a sharded_state_dict() belongs: nothing of it is loaded."""
    loaded = megackpt.load(
        {"decoder.layers.1.norm.weight": asked}, stranger.run / "iter_0000100"
    )
    assert set(loaded) == {"iteration"}
    told, unasked = [record.getMessage() for record in caplog.records]
    assert "stored, but asked for by no rank" in unasked
    assert told.startswith("'decoder.layers.1.norm.weight' and 0 more are not loaded")
    assert (
        "only a ShardedTensor is filled (megackpt.load(megackpt.sharded(state), directory), or "
        in told
    )
