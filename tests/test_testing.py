from __future__ import annotations

import threading
import time

import pytest
import torch

import megackpt
from megackpt.errors import RankFailure
from megackpt.testing import ThreadedGroup


def test_ranks_run_at_once_and_their_results_come_in_rank_order():
    together = threading.Barrier(8, timeout=10)

    def call(group):
        together.wait()
        return group.rank, group.size, group.is_coordinator

    assert ThreadedGroup.run(8, call) == [(rank, 8, rank == 0) for rank in range(8)]


def test_the_log_names_the_collectives_in_order():
    def call(group):
        group.all_agree(None)
        group.reduce_scatter("plan", lambda: 0, lambda all_: all_)
        group.reduce_broadcast("write", lambda: 0, len)
        return group.log

    expected = ["lowest", "gather", "scatter", "gather", "broadcast"]
    assert ThreadedGroup.run(3, call) == [expected] * 3


def test_values_are_not_shared_between_ranks():
    lists = ThreadedGroup.run(2, lambda group: group.broadcast("open", list))
    assert lists[0] is not lists[1]


def test_a_group_of_one():
    assert ThreadedGroup.run(
        1, lambda group: group.reduce_broadcast("x", lambda: 5, sum)
    ) == [5]


def test_ranks_at_different_collectives_stop_with_an_error():
    def call(group):
        if group.rank == 1:
            return group.broadcast("open", lambda: 0)
        return group.all_agree(1)

    start = time.monotonic()
    for error in ThreadedGroup.outcomes(3, call):
        assert isinstance(error, RankFailure)
        assert "different collectives" in str(error)
        assert "rank 1 is at broadcast of the stage 'open'" in str(error)
    assert time.monotonic() - start < 30  # and not the timeout


def test_different_stages_are_different_collectives():
    with pytest.raises(RankFailure, match="different collectives"):
        ThreadedGroup.run(
            2, lambda group: group.broadcast(f"stage {group.rank}", lambda: 0)
        )


def test_a_rank_that_raises_outside_a_collective_ends_the_wait_of_the_others():
    def call(group):
        if group.rank == 2:
            raise ValueError("outside")
        return group.all_agree(1)

    start = time.monotonic()
    got = ThreadedGroup.outcomes(3, call)
    assert time.monotonic() - start < 30  # and not the timeout
    assert isinstance(got[2], ValueError)
    for error in got[:2]:
        assert isinstance(error, RankFailure)
        assert "rank 2 raised ValueError: outside" in str(error)
    with pytest.raises(
        ValueError, match="outside"
    ):  # the root of the evil, not what followed from it
        ThreadedGroup.run(3, call)


def test_a_rank_that_finishes_early_ends_the_wait_of_the_others():
    got = ThreadedGroup.outcomes(2, lambda group: group.rank == 0 or group.all_agree(1))
    assert got[0] is True
    assert "rank 0 has finished" in str(got[1])


def test_an_interrupted_rank_ends_the_wait_of_the_others():
    def interrupt():
        raise KeyboardInterrupt

    def call(group):
        return group.reduce_broadcast(
            "write", interrupt if group.rank == 1 else int, len
        )

    got = ThreadedGroup.outcomes(3, call)
    assert isinstance(got[1], KeyboardInterrupt)
    assert "rank 1 left: KeyboardInterrupt" in str(got[0])


def test_a_late_rank_is_named_with_the_timeout():
    def call(group):
        if group.rank == 1:
            time.sleep(1.6)
        return group.all_agree(1)

    got = ThreadedGroup.outcomes(3, call, timeout=1.0)
    for error in got:
        assert isinstance(error, RankFailure)
        assert "1 s" in str(error)
        assert "rank 1 did not come" in str(error)


def test_a_rank_that_never_ends_is_named():
    stop = threading.Event()
    with pytest.raises(RankFailure, match="rank 0 is still running"):
        ThreadedGroup.run(
            2, lambda group: group.rank == 0 and stop.wait(10), timeout=0.1
        )
    stop.set()


def test_sharded_state_dicts_and_objects_of_ranks_that_are_threads(tmp_path):
    def run(group):
        model = torch.nn.Linear(3, 2)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.5)  # the generator is of all threads
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        expected = {name: t.clone() for name, t in model.state_dict().items()}
        state = megackpt.sharded({"model": model.state_dict(), "own": torch.ones(2)})
        megackpt.save(state, tmp_path / "state", process_group=group)
        manager = megackpt.CheckpointManager(tmp_path / "run", process_group=group)
        manager.save(1, model=model, optimizer=optimizer, extra={"epoch": 3})
        torch.nn.init.zeros_(model.weight)
        found = manager.restore(model=model, optimizer=optimizer, extra={})
        assert found.state["extra"] == {"epoch": 3}
        assert all(torch.equal(t, expected[n]) for n, t in model.state_dict().items())
        torch.nn.init.zeros_(model.weight)
        megackpt.load(state, tmp_path / "state", process_group=group)
        assert all(torch.equal(t, expected[n]) for n, t in model.state_dict().items())
        # A state of rank 1 alone, as of a pipeline's last stage.
        part = {}
        if group.rank == 1:
            part = megackpt.sharded({"head": torch.ones(2)}, among=[1])
        megackpt.save(part, tmp_path / "part", process_group=group)

    ThreadedGroup.run(3, run)
    assert megackpt.verify(tmp_path / "run/iter_0000001").ok
    assert megackpt.load_plain_tensors(tmp_path / "part")["head"].tolist() == [1, 1]


def test_hundreds_of_ranks():
    assert (
        ThreadedGroup.run(
            256, lambda group: group.reduce_broadcast("x", lambda: 1, sum)
        )
        == [256] * 256
    )
