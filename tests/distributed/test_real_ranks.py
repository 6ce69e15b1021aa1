"""Collectives of processes: values, failures, subgroups, late and dead ranks, and the end of the store."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import numpy as np
import pytest

from megackpt.distributed import SingleGroup, Stream, group_over
from megackpt.errors import (
    CheckpointingException,
    CoverageError,
    RankFailure,
    RankLost,
    StorageError,
)
from tests.distributed.exchanges import (
    Shy,
    exchange,
    exchanged,
    raise_,
    raises_on,
    stream,
)

# Real processes


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


def default_group_works() -> bool:
    import torch
    import torch.distributed as dist

    ones = torch.ones(1)
    dist.all_reduce(ones)
    return int(ones) == dist.get_world_size()


def end_at_once():
    """A gloo thread that is still at work while the interpreter ends would abort some of the processes."""
    sys.exit(0)


def shy_in_the_middle(group):
    group.broadcast("open", lambda: Shy(2))
    group.reduce_broadcast("write", lambda: 1, len)


def real_values_and_failures():
    import torch.distributed as dist

    group = group_over(timeout=seconds(20))
    assert group.identity is group_over(timeout=seconds(20)).identity
    group = group_over(timeout=seconds(20))
    assert (group.rank, group.size) == (dist.get_rank(), 4)
    big = np.arange(300_000) + group.rank
    part = group.reduce_scatter(
        "plan", lambda: big, lambda all_: [all_[3 - r] for r in range(4)]
    )
    assert (part == np.arange(300_000) + 3 - group.rank).all()
    assert group.reduce_broadcast("write", lambda: group.rank, sum) == 6
    assert (group.broadcast("open", lambda: big) == np.arange(300_000)).all()
    assert group.all_agree(2**63 - 1)
    assert not group.all_agree(group.rank)
    assert not group.all_agree(None if group.rank == 3 else 0)
    assert not group.all_agree(None)

    work = raises_on({2}, StorageError("disk full"))
    with pytest.raises(StorageError, match=r"^rank 2: disk full$"):
        group.reduce_broadcast("write", lambda: work(group), len)
    work = raises_on({0, 1, 2, 3}, ValueError("same"))
    with pytest.raises(RankFailure, match=r"ranks 0-3: ValueError: same"):
        group.reduce_scatter("write", lambda: work(group), lambda all_: all_)
    with pytest.raises(CoverageError, match=r"^a hole$"):
        group.reduce_scatter(
            "plan", lambda: 0, lambda _: raise_(CoverageError("a hole"))
        )
    assert exchanged(group)
    much = np.full(10_000_000, group.rank, np.uint8)  # several windows
    came = np.zeros_like(much)
    exchange(
        group,
        {(group.rank + 1) % 4: stream(much)},
        {(group.rank - 1) % 4: stream(came, [7])},
    )
    assert (came == (group.rank - 1) % 4).all()
    bad = Stream(10_000_000, iter([much[:5].data]))
    with pytest.raises(
        RankFailure, match="rank 3: ValueError: a stream of 10000000 bytes ends"
    ):
        exchange(
            group,
            {(group.rank + 1) % 4: bad if group.rank == 3 else stream(much)},
            {(group.rank - 1) % 4: stream(came)},
        )
    assert default_group_works()
    assert group.broadcast("open", lambda: "still here") == "still here"
    assert group.all_agree(1)
    with pytest.raises(RankLost, match=r"rank 2 left: .* not on this rank"):
        group.lowest([isinstance(group.broadcast("open", lambda: Shy(2)), Shy)])
    group = group_over(timeout=seconds(20))
    assert group.all_agree(1)
    with pytest.raises(RankLost, match=r"rank 2 left: .* not on this rank") as lost:
        shy_in_the_middle(group)
    assert set(lost.value.failures) == {
        2
    }  # not those who wait for the coordinator, and have not noticed yet
    end_at_once()


def test_real_ranks(ranks):
    ranks(real_values_and_failures, 4)


def real_subgroup():
    import torch.distributed as dist

    rank = dist.get_rank()
    evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine, other = (evens, odds) if rank % 2 == 0 else (odds, evens)
    group = group_over(mine, timeout=seconds(20))
    assert (group.rank, group.size) == (rank // 2, 2)
    assert group.reduce_broadcast("plan", lambda: rank, list) == (
        [0, 2] if rank % 2 == 0 else [1, 3]
    )
    assert group_over(timeout=seconds(20)).size == 4
    with pytest.raises(CheckpointingException, match="a member of"):
        group_over(other)
    alone = [dist.new_group([each]) for each in range(4)][rank]
    assert isinstance(group_over(alone), SingleGroup)
    # And a default group that is destroyed and made again in the same job gets a group of its own.
    dist.destroy_process_group(evens if rank % 2 == 0 else odds)
    again = [dist.new_group(pair) for pair in ([0, 2], [1, 3])][rank % 2]
    assert (
        group_over(again, timeout=seconds(20)).reduce_broadcast("x", lambda: rank, len)
        == 2
    )
    end_at_once()


def test_subgroups(ranks):
    ranks(real_subgroup, 4)


def real_new_lives(folder):
    """In each life of the default group one rank alone has used it before the life ends."""
    import torch.distributed as dist

    rank = dist.get_rank()
    for life in range(3):
        if rank == life % 2:
            with pytest.raises(RankLost):
                group_over(timeout=seconds(0.5), name="its own").all_agree(1)
        dist.barrier()
        dist.destroy_process_group()
        where = f"file://{folder}/{life}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
        group = group_over(timeout=seconds(20), name=f"all's in life {life}")
        assert group.reduce_broadcast("x", lambda: rank, len) == 2
        dist.barrier()


def test_a_group_made_anew_works_where_ranks_had_used_the_former_one_unequally(
    ranks, tmp_path
):
    ranks(real_new_lives, 2, tmp_path)


def real_shortage(of):
    """At the first call a rank has no descriptor, or no thread, for its connections."""
    import resource
    import threading

    import torch.distributed as dist

    rank = dist.get_rank()
    group = group_over(timeout=seconds(2))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    patch = pytest.MonkeyPatch()
    if of == "descriptors" and rank == 0:
        lowest_free = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    if of == "threads" and rank == 1:
        start = threading.Thread.start

        def refuse(thread):
            if thread.name == "megackpt-store":
                raise RuntimeError("can't start new thread")
            start(thread)

        patch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RankLost):
        group.all_agree(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    patch.undo()
    time.sleep(4.5)  # after so long a store that does not answer is given up
    dist.barrier()
    assert group_over(timeout=seconds(20)).all_agree(1)


@pytest.mark.parametrize("of", ["descriptors", "threads"])
def test_a_rank_connects_after_it_had_no_descriptor_or_no_thread(ranks, of):
    ranks(real_shortage, 2, of)


def one_call(stage, groups):
    group = group_over(timeout=seconds(1))
    groups.append(group)
    if stage == "vote":
        group.all_agree(1)
    group.reduce_broadcast(stage, lambda: group.rank, len)


def real_late_rank(stage):
    """Rank 2 is late; then everybody, rank 2 as well, goes on with the next call."""
    import torch.distributed as dist

    rank = dist.get_rank()
    group = group_over(timeout=seconds(20))
    assert group.broadcast("open", lambda: "once")  # the connection stands
    if rank == 2:
        time.sleep(4)
    start = time.monotonic()
    groups = []
    with pytest.raises(RankFailure) as caught:
        one_call(stage, groups)
    print(time.monotonic() - start, caught.value)
    assert time.monotonic() - start < 10
    if rank != 2:
        with pytest.raises(RankFailure, match="rank 2 did not answer"):
            groups[0].broadcast("commit", lambda: "never")
    assert group.broadcast("commit", lambda: "another call") == "another call"
    assert default_group_works()
    group = group_over(timeout=seconds(20))
    assert group.reduce_broadcast("write", lambda: rank, sum) == 6
    assert group.all_agree(1)


@pytest.mark.parametrize(
    "stage", ["plan", pytest.param("vote", marks=pytest.mark.slow)]
)
def test_a_late_rank_is_an_error_with_the_timeout_and_the_next_call_works(ranks, stage):
    done = ranks(real_late_rank, 4, stage)
    for rank in (0, 1, 3):
        assert f"in the stage '{stage}' (timeout 1 s)" in done[rank].stdout
        assert "rank 2 did not answer" in done[rank].stdout
        assert "the next save or load connects afresh" in done[rank].stdout
    assert "rank 2 comes too late" in done[2].stdout


def real_dead_rank(dead, how):
    import torch.distributed as dist

    rank = dist.get_rank()

    def work():
        if rank == dead and how != "interrupt":
            print("gone", flush=True)
            os._exit(0)
        if rank == dead:
            raise KeyboardInterrupt
        return rank

    start = time.monotonic()
    try:
        group_over(
            timeout=seconds(20)
        )  # now the connection stands; start-up under load took its time
        group = group_over(timeout=seconds(2))
        group.all_agree(
            1
        )  # this one as well: or the rank may be gone before the others have found it
        if how == "exchange":
            data = np.zeros(10_000_000, np.uint8)
            gone = (work() for _ in range(1)) if rank == dead else [data.data]
            exchange(
                group,
                {(rank + 1) % 3: Stream(len(data), gone)},
                {(rank - 1) % 3: stream(data)},
            )
        group.reduce_scatter("write", work, lambda all_: all_)
    except (RankFailure, KeyboardInterrupt) as error:
        print(
            round(time.monotonic() - start, 1), type(error).__name__, error, flush=True
        )
    assert time.monotonic() - start < 40
    os._exit(0)  # the default group cannot be taken down in order any more


@pytest.mark.parametrize(("dead", "how"), [(0, "exit"), (2, "exit"), (1, "exchange")])
def test_all_other_ranks_name_a_dead_rank(ranks, dead, how):
    done = ranks(real_dead_rank, 3, dead, how)
    for rank, process in enumerate(done):
        if rank == dead:
            assert process.stdout == "gone\n"
        else:
            assert "RankLost" in process.stdout
            assert f"rank {dead} did not answer" in process.stdout


def test_all_other_ranks_name_an_interrupted_rank(ranks):
    done = ranks(real_dead_rank, 3, 1, "interrupt")
    assert "KeyboardInterrupt" in done[1].stdout
    for rank in (0, 2):
        assert "rank 1 left: KeyboardInterrupt" in done[rank].stdout


def store_dies_with_rank_0():
    import torch.distributed as dist

    dist.init_process_group("gloo")  # env://: rank 0 holds the store
    real_dead_rank(0, "exit")


def test_nothing_hangs_when_the_store_dies_as_well(ranks):
    done = ranks(store_dies_with_rank_0, 3, init=False)
    assert all("RankLost" in process.stdout for process in done[1:])
