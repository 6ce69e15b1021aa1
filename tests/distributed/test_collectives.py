from __future__ import annotations

import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest

from megackpt.distributed import SingleGroup, Stream, group_over
from megackpt.distributed.failures import (
    Failure,
    departure,
    for_all_ranks,
)
from megackpt.errors import (
    CheckpointingException,
    CoverageError,
    RankFailure,
    RankLost,
    StorageError,
    name_ranks,
)
from megackpt.testing import ThreadedGroup
from tests.distributed.exchanges import (
    Shy,
    Stubborn,
    exchange,
    exchanged,
    raise_,
    raises_on,
    stream,
)


def outcomes(size, call):
    """What each rank of a threaded group raised or got."""
    return ThreadedGroup.outcomes(size, call, timeout=10)


# One process alone


def test_alone_everything_is_a_plain_call():
    group = SingleGroup()
    marker = object()  # nothing is copied or pickled
    assert group.reduce_scatter("plan", lambda: marker, lambda all_: all_) is marker
    assert (
        group.reduce_broadcast("write", lambda: marker, lambda all_: all_[0]) is marker
    )
    assert group.broadcast("open", lambda: marker) is marker
    assert group.all_agree(7)
    assert not group.all_agree(None)


def test_a_large_broadcast_is_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values arrive as they are, and the message is a small part of them."""
    travelled: list[int] = []
    broadcast = ThreadedGroup._broadcast

    def watch(group: ThreadedGroup, stage: str, packed: bytes | None) -> bytes:
        if packed is not None:
            travelled.append(len(packed))
        return bytes(broadcast(group, stage, packed))

    monkeypatch.setattr(ThreadedGroup, "_broadcast", watch)
    large, small = np.arange(1 << 18), np.arange(100)

    def run(group: ThreadedGroup) -> None:
        for value in (large, small):
            got = group.broadcast("open", lambda value=value: value)
            assert np.array_equal(got, value)
            got = group.reduce_broadcast(
                "read", lambda: 1, lambda _, value=value: value
            )
            assert np.array_equal(got, value)

    ThreadedGroup.run(3, run)
    assert max(travelled) < large.nbytes // 2
    assert min(travelled) > small.nbytes


def test_alone_our_errors_pass_unchanged_and_foreign_ones_are_wrapped():
    error = CoverageError("a hole")
    with pytest.raises(CoverageError) as caught:
        SingleGroup().broadcast("plan", lambda: raise_(error))
    assert caught.value is error
    with pytest.raises(
        RankFailure, match=r"Worker failure in the stage 'write': OSError: .*full"
    ) as caught:
        SingleGroup().reduce_broadcast(
            "write", lambda: raise_(OSError(28, "full")), len
        )
    assert isinstance(caught.value.__cause__, OSError)
    assert "raise_" in caught.value.failures[0]


@pytest.mark.parametrize("departure", [KeyboardInterrupt, SystemExit])
def test_alone_departures_pass(departure):
    with pytest.raises(departure):
        SingleGroup().reduce_scatter(
            "plan", lambda: raise_(departure()), lambda all_: all_
        )


# Several ranks: values


def test_values_reach_every_rank():
    def call(group):
        part = group.reduce_scatter(
            "plan", lambda: group.rank, lambda all_: [10 * x for x in all_]
        )
        total = group.reduce_broadcast("write", lambda: np.full(3, group.rank), sum)
        said = group.broadcast("open", lambda: {"from": group.rank})
        return part, total.tolist(), said

    assert ThreadedGroup.run(4, call) == [
        (10 * rank, [6, 6, 6], {"from": 0}) for rank in range(4)
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_streams_reach_their_ranks(size):
    assert ThreadedGroup.run(size, exchanged) == [True] * size
    assert exchanged(SingleGroup())


@pytest.mark.parametrize("end", ["out", "in"])
def test_an_error_of_a_stream_is_raised_on_all_ranks_without_a_wait(end):
    def broken(data):
        yield data[:9].data
        raise StorageError("gone")

    def call(group):
        data = np.zeros(100, np.uint8)
        way = {"out": data, "in": data.copy()}
        parts = {
            name: Stream(100, broken(d) if (group.rank, name) == (1, end) else [d.data])
            for name, d in way.items()
        }
        with pytest.raises(StorageError, match=r"^rank 1: gone$"):
            exchange(
                group,
                {(group.rank + 1) % 3: parts["out"]},
                {(group.rank - 1) % 3: parts["in"]},
            )
        assert exchanged(group)
        return group.reduce_broadcast("write", lambda: 1, sum)

    assert ThreadedGroup.run(3, call) == [3, 3, 3]


def test_a_stream_that_is_too_short_raises():
    def call(group):
        exchange(
            group,
            {0: Stream(9, [memoryview(b"1234")])},
            {0: stream(np.zeros(9, np.uint8))},
        )

    with pytest.raises(RankFailure, match="a stream of 9 bytes ends 5 too early"):
        call(SingleGroup())


def test_an_exchange_with_a_rank_that_does_not_come_ends():
    def call(group):
        if group.rank == 1:
            return
        data = np.zeros(9, np.uint8)
        exchange(group, {}, {1: stream(data)})

    first, _ = outcomes(2, call)
    assert isinstance(first, RankLost)
    assert "rank 0 waits in vain in the stage 'exchange': rank 1 has finished" in str(
        first
    )


@pytest.mark.parametrize(
    ("tokens", "agreed"),
    [
        ([5, 5, 5], True),
        ([0, 0, 0], True),
        ([2**63 - 1] * 3, True),
        ([5, 5, 6], False),
        ([5, None, 5], False),
        ([0, None, 0], False),
        ([None] * 3, False),
    ],
)
def test_vote(tokens, agreed):
    assert (
        ThreadedGroup.run(3, lambda group: group.all_agree(tokens[group.rank]))
        == [agreed] * 3
    )


# Several ranks: failures


@pytest.mark.parametrize("verb", ["reduce_scatter", "reduce_broadcast"])
def test_one_ranks_error_of_ours_is_raised_on_all_with_its_rank(verb):
    work = raises_on({2}, StorageError("no space left in 'x/__2_0.distcp'"))
    got = outcomes(
        4,
        lambda group: getattr(group, verb)(
            "write", lambda: work(group), lambda all_: all_
        ),
    )
    assert [type(error) for error in got] == [StorageError] * 4
    assert {str(error) for error in got} == {
        "rank 2: no space left in 'x/__2_0.distcp'"
    }
    assert isinstance(
        got[2].__cause__, StorageError
    )  # where it happened, the traceback is kept
    assert got[1].__cause__ is None


def test_the_same_text_of_several_ranks_is_printed_once():
    work = raises_on({0, 1, 2, 5}, StorageError("disk full"))
    got = outcomes(
        6, lambda group: group.reduce_broadcast("write", lambda: work(group), len)
    )
    assert {str(error) for error in got} == {"ranks 0-2, 5: disk full"}


def test_a_foreign_error_is_a_rank_failure_with_the_story():
    work = raises_on({1}, ZeroDivisionError("by zero"))
    got = outcomes(
        3, lambda group: group.reduce_broadcast("write", lambda: work(group), len)
    )
    for error in got:
        assert isinstance(error, RankFailure)
        assert "Worker failure in the stage 'write': 1 of 3 ranks failed" in str(error)
        assert "rank 1: ZeroDivisionError: by zero" in str(error)
        assert list(error.failures) == [1]
        assert "raise error" in error.failures[1]
    assert isinstance(got[1].__cause__, ZeroDivisionError)


def test_errors_of_different_classes_are_a_rank_failure_with_all_of_them():
    def work(group):
        raise {0: StorageError("full"), 1: CoverageError("hole"), 2: OSError("io")}[
            group.rank
        ]

    got = outcomes(
        3,
        lambda group: group.reduce_scatter(
            "plan", lambda: work(group), lambda all_: all_
        ),
    )
    for error in got:
        assert type(error) is RankFailure
        assert set(error.failures) == {0, 1, 2}
        assert all(
            text in str(error)
            for text in ("rank 0: full", "rank 1: hole", "rank 2: OSError: io")
        )
        assert "Worker failure" not in str(error)


@pytest.mark.parametrize("verb", ["reduce_scatter", "reduce_broadcast", "broadcast"])
def test_what_the_coordinator_decides_against_all_is_said_in_its_own_words(verb):
    def call(group):
        if verb == "broadcast":
            return group.broadcast(
                "open", lambda: raise_(CoverageError("'w' is not covered"))
            )
        return getattr(group, verb)(
            "plan", lambda: 0, lambda _: raise_(CoverageError("'w' is not covered"))
        )

    got = outcomes(3, call)
    assert [type(error) for error in got] == [CoverageError] * 3
    assert {str(error) for error in got} == {"'w' is not covered"}


def test_a_foreign_error_of_the_coordinator_is_a_rank_failure_of_rank_0():
    got = outcomes(
        3, lambda group: group.broadcast("open", lambda: raise_(KeyError("x")))
    )
    for error in got:
        assert isinstance(error, RankFailure)
        assert "the coordinator failed: KeyError: 'x'" in str(error)
        assert list(error.failures) == [0]
    assert isinstance(got[0].__cause__, KeyError)


def test_an_unpicklable_error_or_result_is_raised_as_text():
    def bad_error(group):
        return group.reduce_broadcast(
            "plan", lambda: raise_(Stubborn(threading.Lock())), len
        )

    def bad_result(group):
        return group.reduce_broadcast("plan", threading.Lock, len)

    def bad_decision(group):
        return group.reduce_scatter("plan", lambda: 0, lambda _: [0, threading.Lock()])

    assert "Stubborn: stubborn, with a lock" in str(outcomes(2, bad_error)[1])
    for call in (bad_result, bad_decision):
        for error in outcomes(2, call):
            assert isinstance(error, RankFailure)
            assert "pickle" in str(error)


@pytest.mark.parametrize(
    ("verb", "shy"),
    [
        ("reduce_scatter", 1),
        ("reduce_broadcast", 1),
        ("broadcast", 1),
    ],
)
def test_a_message_that_one_rank_cannot_unpack_is_its_failure_without_a_wait(verb, shy):
    def call(group):
        told = {
            "reduce_scatter": lambda: group.reduce_scatter(
                "plan", lambda: 0, lambda all_: [Shy(shy)] * len(all_)
            ),
            "reduce_broadcast": lambda: group.reduce_broadcast(
                "plan", lambda: 0, lambda _: Shy(shy)
            ),
            "broadcast": lambda: group.broadcast("plan", lambda: Shy(shy)),
        }
        told[verb]()
        group.reduce_broadcast("write", lambda: 0, len)

    got = outcomes(3, call)
    assert [type(error) for error in got] == [RankLost] * 3
    assert all(
        f"rank {shy} left: CheckpointingException: a message of rank 0 cannot be read: "
        in str(error)
        and "not on this rank" in str(error)
        for error in got
    )
    assert "__setstate__" in got[shy].failures[shy]


def test_why_a_rank_leaves_is_one_line_that_any_store_takes():
    error = SystemExit("no /data/caf\udce9" + "." * 1000 + "\nmore")
    assert departure(error).startswith("left: SystemExit: no /data/caf\\udce9...")
    assert len(departure(error)) < 400
    assert "more" not in departure(error)


def test_a_message_that_the_coordinator_cannot_unpack_raises_on_all_ranks():
    for error in outcomes(
        2, lambda group: group.reduce_broadcast("plan", lambda: Shy(0), len)
    ):
        assert isinstance(error, CheckpointingException)
        assert "a message of rank 1 cannot be read: " in str(error)
        assert "not on this rank" in str(error)


def test_a_local_exception_class_is_raised_as_text():
    class Local(CheckpointingException):
        pass

    for error in outcomes(
        2, lambda group: group.reduce_broadcast("x", lambda: raise_(Local("mine")), len)
    ):
        assert isinstance(error, RankFailure)
        assert "Local: mine" in str(error)


def test_a_failure_that_is_no_exception_is_shared_too():
    class TorchLike(BaseException):
        """As torch.distributed.checkpoint's CheckpointException is."""

    for error in outcomes(
        2, lambda group: group.broadcast("open", lambda: raise_(TorchLike("odd")))
    ):
        assert isinstance(error, RankFailure)
        assert "odd" in str(error)


def test_a_wrong_number_of_parts_is_an_error_on_all_ranks():
    got = outcomes(
        3, lambda group: group.reduce_scatter("plan", lambda: 0, lambda _: [1, 2])
    )
    assert all("2 values to scatter over 3 ranks" in str(error) for error in got)


def test_after_a_shared_failure_the_group_works_on():
    def call(group):
        with pytest.raises(StorageError):
            group.broadcast("open", lambda: raise_(StorageError("once")))
        return group.broadcast("open", lambda: "fine")

    assert ThreadedGroup.run(3, call) == ["fine"] * 3


def test_notes_of_an_error_are_in_the_text():
    error = StorageError("full")
    error.add_note("hint: delete something")
    assert "hint: delete something" in str(
        for_all_ranks("write", [Failure.of(1, error)], 2)
    )


def test_many_stories_are_cut_in_the_message_but_kept():
    failures = [Failure.of(rank, OSError(f"story {rank}")) for rank in range(20)]
    error = for_all_ranks("write", failures, 20)
    assert "and 12 more tracebacks" in str(error)
    assert len(error.failures) == 20
    assert pickle.loads(pickle.dumps(error)).failures == error.failures


def test_ranks_are_named_in_runs():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([4, 0, 1, 2, 7, 8]) == "ranks 0-2, 4, 7, 8"


# Which group


def test_without_torch_nothing_imports_it():
    code = (
        "import sys; from megackpt.distributed import group_over; "
        "assert group_over().size == 1; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_group_is_returned_as_it_is_and_one_process_has_always_the_same():
    group = SingleGroup()
    assert group_over(group) is group
    assert group_over() is group_over()


def test_a_process_group_that_is_none_is_refused():
    with pytest.raises(CheckpointingException, match="not initialised"):
        group_over("world")
