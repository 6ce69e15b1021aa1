"""Where a run stands in its data: whole passes over any history of ranks, batches, crashes and resumes."""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader

import megackpt
from megackpt.errors import MismatchError, ShardingError
from megackpt.integrations.data_position import DataPosition
from megackpt.testing import ThreadedGroup


class Job(NamedTuple):
    """One start of a run: its ranks, its steps until its last save, and those that it lost when it died."""

    dp: int
    batch: int
    kept: int
    lost: int


small = st.integers(0, 4)
jobs = st.lists(
    st.builds(Job, st.integers(1, 4), st.integers(1, 4), small, small),
    min_size=1,
    max_size=5,
)
sizes, seeds = st.integers(1, 30), st.none() | st.integers(-3, 2**70)


def check(samples: int, seed: int | None, row: list[int]) -> None:
    """Is it one whole pass after another, and the beginning of the last; the same as of a run that never stopped?"""
    for start in range(0, len(row), samples):
        one = row[start : start + samples]
        assert len(set(one)) == len(one)
        assert set(one) == set(range(samples)) or start + samples > len(row)
    assert not row or row == first(DataPosition(samples, seed), len(row))


def first(position: DataPosition, batch_size: int) -> list[int]:
    return next(iter(position.batches(batch_size)))


@settings(max_examples=60)
@given(samples=sizes, seed=seeds, history=jobs)
def test_any_history_sees_one_pass_after_another(
    samples: int, seed: int | None, history: list[Job]
) -> None:
    row: list[int] = []  # what the model in the newest checkpoint was trained on
    state = DataPosition(samples, seed).state_dict()
    for job in history:
        position = DataPosition(samples, seed)
        position.load_state_dict(state)
        ranks = [
            iter(position.batches(job.batch, rank, job.dp)) for rank in range(job.dp)
        ]
        for step in range(job.kept + job.lost):
            together = [index for rank in ranks for index in next(rank)]
            assert len(together) == job.batch * job.dp
            if step < job.kept:
                row += together
                position.consumed_samples += len(together)
        state = position.state_dict()
    check(samples, seed, row)


@settings(max_examples=8)
@given(samples=sizes, seed=seeds, history=jobs)
def test_so_it_does_through_checkpoints_of_real_jobs(
    samples: int, seed: int | None, history: list[Job]
) -> None:
    row: list[int] = []

    def run(group: ThreadedGroup) -> list[list[int]]:
        position = DataPosition(samples, seed)
        if megackpt.check_is_distributed_checkpoint(folder):
            position.load_state_dict(
                megackpt.load({}, folder, process_group=group)["data"]
            )
        batches = iter(position.batches(job.batch, group.rank, group.size))
        seen = list(islice(batches, job.kept))
        position.consumed_samples += job.kept * job.batch * job.dp
        megackpt.save({"data": position.state_dict()}, folder, process_group=group)
        next(batches)  # trained on, and lost: the job dies before its next save
        return seen

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "ckpt"
        for job in history:
            ranks = ThreadedGroup.run(job.dp, run)
            row += [
                index
                for step in zip(*ranks, strict=True)
                for batch in step
                for index in batch
            ]
    check(samples, seed, row)


@settings(max_examples=50)
@given(samples=st.integers(1, 3000), seed=seeds, number=st.integers(0, 10**9))
def test_each_pass_is_a_permutation(
    samples: int, seed: int | None, number: int
) -> None:
    one = first(DataPosition(samples, seed, number * samples), samples)
    assert sorted(one) == list(range(samples))
    assert (one == sorted(one)) == (seed is None) or samples < 30


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    n = 1000
    orders = [
        tuple(first(DataPosition(n, seed, k * n), n))
        for seed in (0, 1, -1)
        for k in (0, 1, 2)
    ]
    assert len(set(orders)) == len(orders)
    for order in (
        orders
    ):  # a third of the length is what random places are apart; all in place would be 0
        assert 0.3 < sum(abs(i - place) for i, place in enumerate(order)) / n**2 < 0.37


def test_the_order_of_a_seed_never_changes() -> None:
    """A run that goes on with a newer megackpt would lose samples, and see others twice."""
    assert first(DataPosition(10), 20) == [
        *(7, 4, 3, 5, 6, 2, 9, 8, 1, 0),
        *(4, 7, 2, 9, 6, 0, 1, 5, 8, 3),
    ]
    assert first(DataPosition(1_000_003, 5, 10**12), 4) == [
        126148,
        789981,
        79239,
        342161,
    ]


@settings(max_examples=60)
@given(
    samples=sizes,
    seed=seeds,
    dp=st.integers(1, 3),
    batch=st.integers(1, 4),
    rounds=st.lists(st.tuples(small, small)),
)
def test_a_new_loader_continues_at_the_position_of_the_run(
    samples: int, seed: int | None, dp: int, batch: int, rounds: list[tuple[int, int]]
) -> None:
    position, row = DataPosition(samples, seed), []
    samplers = [position.batches(batch, rank, dp) for rank in range(dp)]
    for steps, ahead in rounds:
        drawn = [list(islice(sampler, steps + ahead)) for sampler in samplers]
        row += [
            index for step in range(steps) for rank in drawn for index in rank[step]
        ]
        position.consumed_samples += steps * batch * dp
    check(samples, seed, row)


@pytest.mark.parametrize("persistent", [False, True])
def test_one_loader_with_workers_serves_several_rounds(persistent: bool) -> None:
    position, seen = DataPosition(50), []
    ahead = {"num_workers": 2, "persistent_workers": persistent}
    loader = DataLoader(torch.arange(50), batch_sampler=position.batches(4), **ahead)
    for _ in range(3):  # evaluating in between
        for step, drawn in enumerate(loader):
            if step == 5:
                break
            seen += drawn.tolist()
            position.consumed_samples += len(drawn)
    check(50, 0, seen)


def test_loaders_that_draw_ahead_move_nothing() -> None:
    position, seen = DataPosition(50), []
    for steps, batch in ((3, 4), (2, 8), (3, 5)):
        ahead = {"num_workers": 1, "prefetch_factor": 4}
        loader = DataLoader(
            torch.arange(50), batch_sampler=position.batches(batch), **ahead
        )
        for _, drawn in zip(range(steps), loader, strict=False):
            seen += drawn.tolist()
            position.consumed_samples += len(drawn)
        state, position = position.state_dict(), DataPosition(50)
        position.load_state_dict(state)
    check(50, 0, seen)


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({"samples": 9, "seed": 0, "consumed_samples": 4}, r"\(samples\)"),
        ({"samples": 10, "seed": 1, "consumed_samples": 4}, r"\(seed\)"),
        ({"samples": 9, "seed": None, "consumed_samples": 4}, r"\(samples, seed\)"),
        ({"samples": 10, "seed": 0}, r"\(consumed_samples\)"),
        ({"samples": 10, "seed": 0, "consumed_samples": -1}, r"\(consumed_samples\)"),
        ({}, r"\(samples, seed\)"),
        (None, r"\(samples, seed\)"),
    ],
)
def test_a_position_in_another_row_is_refused(state: Any, what: str) -> None:
    position = DataPosition(10, 0, 3)
    with pytest.raises(
        MismatchError, match=rf"{what}: samples would be lost or repeated"
    ):
        position.load_state_dict(state)
    assert position == DataPosition(10, 0, 3)


@pytest.mark.parametrize(
    ("position", "batch", "rank", "ranks"),
    [
        (DataPosition(10), 1, 2, 2),
        (DataPosition(10), 1, -1, 2),
        (DataPosition(10), 0, 0, 1),
        (DataPosition(0), 1, 0, 1),
        (DataPosition(10, 0, -1), 1, 0, 1),
    ],
)
def test_ranks_and_batches_that_cannot_be(
    position: DataPosition, batch: int, rank: int, ranks: int
) -> None:
    with pytest.raises(ShardingError, match="cannot read batches"):
        position.batches(batch, rank, ranks)


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ((20 / 3, 0, 3), "batch_size"),
        ((2, 0.5, 2), "dp_rank"),
        ((2, 1, 2.5), "dp_size"),
    ],
)
def test_sizes_that_are_no_whole_numbers_are_refused(sizes: Any, what: str) -> None:
    with pytest.raises(
        ShardingError,
        match=rf"{what} of a data position is a whole number, not \d\.\d+",
    ):
        DataPosition(20).batches(*sizes)


def test_numbers_of_numpy_and_torch_are_kept_as_plain_ones(tmp_path: Path) -> None:
    position = DataPosition(np.int64(10), np.uint8(3))  # type: ignore[arg-type]
    position.consumed_samples += np.int64(4)  # type: ignore[assignment]
    position.consumed_samples += torch.tensor(3)  # type: ignore[assignment]
    assert {type(value) for value in position.state_dict().values()} == {int}
    assert first(position, 4) == first(DataPosition(10, 3, 7), 4)
    megackpt.save({"data": position.state_dict()}, tmp_path / "c")
    other = DataPosition(10, 3)
    other.load_state_dict(megackpt.load({}, tmp_path / "c")["data"])
    other.load_state_dict(
        position.state_dict() | {"consumed_samples": np.int64(7)}
    )  # as older ones were saved
    assert other == position
    with pytest.raises(
        ShardingError,
        match=r"consumed_samples of a data position is a whole number, not 1\.5",
    ):
        position.consumed_samples = 1.5  # type: ignore[assignment]
