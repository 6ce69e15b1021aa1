"""Mistakes in objects, in single declarations and in calls of save."""

from __future__ import annotations

from pathlib import Path

import torch

import megackpt
from megackpt import ShardedObject, ShardedTensor, ShardedTensorFactory
from megackpt.errors import (
    BackendError,
    CoverageError,
    RankFailure,
    RankLost,
    ShardingError,
    StorageError,
)
from megackpt.testing import ThreadedGroup
from tests.mistakes.gallery import mistake, piece, test_gallery

__all__ = ["test_gallery"]

# --- a declaration that contradicts itself ---


@mistake(
    ShardingError,
    "ranks 0-7: 'fc1': Data shape should match `local_shape` attribute ((8, 4) and (8, 8))",
)
def the_local_shape_is_that_of_other_data(r):
    r.save(
        {
            "fc1": ShardedTensor(
                "fc1", torch.zeros(8, 4), torch.float32, (8, 8), (8, 8), (0, 0), (1, 1)
            )
        }
    )


@mistake(
    ShardingError,
    "rank 0: 'w': sizes and offsets must not be negative ((4,), (32,), (-4,)",
    "is a rank of -1 in them",
)
def an_offset_is_negative(r):
    data = torch.zeros(4)
    r.save(
        {
            "w": ShardedTensor(
                "w", data, data.dtype, (4,), (32,), (4 * (r.rank - 1),), (8,)
            )
        }
    )


@mistake(
    CoverageError,
    "[32:36] lies outside of (32,); [0:4] of (32,) has no main replica",
    "rank 7 [32:36]",
    "counted from 1?",
)
def an_offset_is_out_of_bounds(r):
    data = torch.zeros(4)
    r.save(
        {
            "w": ShardedTensor(
                "w", data, data.dtype, (4,), (32,), (4 * (r.rank + 1),), (8,)
            )
        }
    )


@mistake(
    ShardingError,
    "rank 7: Invalid rank offsets: ((0, 8, 8),) for key 'w'",
    "ranks count from 0",
    "in the build_fn of the factory 'w'",
)
def the_rank_reaches_the_number_of_fragments(r):
    r.save(
        {
            "w": ShardedTensorFactory(
                "w",
                torch.zeros(4),
                lambda k, d, *_: piece(k, d, (0, r.rank + 1, 8)),
                sum,
            )
        }
    )


@mistake(
    ShardingError,
    "ranks 0-7: ['weights']: a ShardedTensor ('w') in a tuple is lost",
    "make it one of these",
)
def a_shard_hides_in_a_tuple(r):
    r.save({"weights": (piece("w", torch.zeros(4), replica_id=r.rank), 1)})


@mistake(
    ShardingError,
    "'w': data on the meta device has no values to save; materialise it first",
)
def the_model_is_still_on_the_meta_device(r):
    r.save({"w": piece("w", torch.zeros(4, device="meta"), replica_id=r.rank)})


@mistake(
    ShardingError,
    "rank 0: 'w': data must be a torch.Tensor, not list; other values go into a ShardedObject",
    "ranks 1-7: the same",
)
def the_data_are_no_tensor(r):
    r.save(
        {"w": ShardedTensor("w", [1.0], torch.float32, (1,), (1,), (0,), (1,), r.rank)}
    )


@mistake(
    ShardingError,
    "a sharded state dict must be a dict, not a list: put it into one",
)
def the_state_is_a_list(r):
    r.save([piece("w", torch.zeros(4), replica_id=r.rank)])


@mistake(
    RankFailure,
    "8 of 8 ranks failed",
    "in the build_fn of the factory 'swiglu'",
    "called with (key, data, replica_id, flattened_range)",
)
def a_factory_builds_with_another_signature(r):
    r.save(
        {
            "w": ShardedTensorFactory(
                "swiglu", torch.zeros(4), lambda _key, _data: [], sum
            )
        }
    )


# --- the call ---


@mistake(
    ShardingError,
    "name different directories: rank 0: ",
    "iter_0000099; ranks 1-7: ",
)
def the_ranks_name_different_directories(r):
    r.save(r.model(), step=f"iter_{99 + (r.rank > 0):07}")


@mistake(
    ShardingError,
    "ask for different formats: ranks 0, 2, 4, 6: torch_dist 1; ranks 1, 3, 5, 7: zarr 2",
)
def the_ranks_choose_different_formats(r):
    r.save(r.model(), "zarr" if r.tp else "torch_dist")


@mistake(
    BackendError,
    "unknown format 'torch-dist': known are deepspeed, delta, orbax, safetensors, torch, ",
    "torch_checkpointing, torch_dist, zarr",
)
def the_format_is_misspelt(r):
    r.save(r.model(), "torch-dist")


@mistake(
    BackendError,
    "does not take the options {'files_per_ranks': 2}",
    "it takes files_per_rank, separation_hint, torch_metadata",
)
def an_option_of_the_format_is_misspelt(r):
    r.save(r.model(), megackpt.Strategy("torch_dist", options={"files_per_ranks": 2}))


@mistake(
    ShardingError,
    "name different directories: ranks 0-4, 6, 7: ",
    "; rank 5: ",
)
def only_one_rank_forgets_the_iteration_directory(r):
    r.save(r.model(), step="." if r.rank == 5 else "iter_0000100")


@mistake(
    StorageError,
    "'ftp://host/run' is not a URL of a bucket: it should be s3://BUCKET/FOLDER",
)
def the_url_is_not_that_of_a_bucket(r):
    megackpt.save(r.model(), "ftp://host/run", process_group=r.group)


@mistake(
    StorageError,
    "'s3:/bucket/run' was a URL, and a Path has made one slash of two: give it as a str",
)
def the_url_has_become_a_path(r):
    megackpt.save(r.model(), Path("s3://bucket/run"), process_group=r.group)


@mistake(
    StorageError,
    "shells expand the ~, Python does not: give os.path.expanduser('~/run')",
)
def the_directory_begins_with_a_tilde(r):
    megackpt.save(r.model(), Path("~/run"), process_group=r.group)


@mistake(ShardingError, "a sharded state dict must be a dict, not a ", "Path")
def the_arguments_are_swapped(r):
    megackpt.save(r.run / "iter_0000100", r.model(), process_group=r.group)


@mistake(
    ShardingError, "'fc1.weight' of 2 axes", "0 <= axis < 2 and 0 <= rank < fragments"
)
def the_axis_is_counted_from_the_end(r):
    r.save(
        {"fc1": piece("fc1.weight", torch.zeros(8, 4), (-1, 0, 2), replica_id=r.rank)}
    )


@mistake(
    ShardingError, "sizes and offsets must not exceed 2^62", "1180591620717411303424"
)
def the_global_shape_is_a_product_gone_wild(r):
    local = torch.zeros(4)
    r.save(
        {
            "m": ShardedTensor(
                "exp_avg", local, local.dtype, (4,), (2**70,), (0,), None, r.rank
            )
        }
    )


@mistake(ShardingError, "sizes must not exceed 2^62")
def the_grid_of_an_object_is_a_product_gone_wild(r):
    r.save({"rng": ShardedObject("rng_state", 7, (2**70,), (0,), r.rank)})


# --- what is no error, or not everybody's ---


def test_plain_tensors_that_differ_between_ranks_are_logged(tmp_path, caplog):
    """A state_dict() where a sharded_state_dict() belongs: only rank 0's values are saved."""

    def save(group):
        plain = {
            "model": {
                "fc1.weight": torch.full((4,), group.rank),
                "norm": torch.ones(4),
            },
            "iteration": 3,
        }
        megackpt.save(plain, tmp_path / "plain", process_group=group)

    ThreadedGroup.run(4, save)
    told = [
        record.getMessage()
        for record in caplog.records
        if "only rank 0's values" in record.getMessage()
    ]
    assert len(told) == 3
    assert told[0].startswith(
        "only rank 0's values of ['model']['fc1.weight'] and 0 more tensors are saved"
    )
    assert (
        "belong in a ShardedTensor (sharded_state_dict(), not state_dict())" in told[0]
    )


def test_the_error_of_a_rank_that_calls_alone_names_the_missing_ranks(tmp_path):
    def save(group):
        if group.rank == 0:  # as one does with torch.save
            megackpt.save({"n": 1}, tmp_path / "alone", process_group=group)

    first, *others = ThreadedGroup.outcomes(4, save)
    assert others == [None] * 3
    assert isinstance(first, RankLost)
    assert "rank 1 has finished" in str(first)
    assert not megackpt.check_is_distributed_checkpoint(tmp_path / "alone")


def test_a_message_stays_short_however_many_ranks_make_the_mistake(tmp_path):
    def save(group):
        wrong = ShardedTensor(
            "w",
            torch.zeros(4),
            torch.float32,
            (5,),
            (5 * 16,),
            (5 * group.rank,),
            (16,),
        )
        megackpt.save(
            {"w": wrong, "odd": "x" * group.rank},
            tmp_path / "wrong",
            process_group=group,
        )

    stories = {str(outcome) for outcome in ThreadedGroup.outcomes(16, save)}
    assert len(stories) == 1
    (story,) = stories
    assert "ranks 1-15: the same, but for the numbers" in story
    assert len(story) < 600
