"""All sequences of events on the control links of small jobs, without sockets and without waiting.

The jobs consist of the real ``Tree``, tables and diagnosis on a loop with a virtual clock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from megackpt import waiting
from megackpt.distributed import messages
from megackpt.distributed.connection_states import (
    AFTER_LOSS,
    TABLE,
    Condition,
    Event,
    State,
)
from megackpt.distributed.diagnosis import (
    CAUSE_SECONDS,
    Neighbour,
    Past,
    Waiting,
    ended,
    explained,
    missing,
)
from megackpt.distributed.messages import Reason, Verdict
from tests.distributed.virtual_job import BREAKS, HELD, TIMEOUT, Job

PAGE = Path(__file__).parents[2] / "docs/design/0032-control-plane.md"
Letter = tuple[str, int]


class Explorer:
    """Replays sequences of events. Jobs of one signature are followed once."""

    def __init__(self, size: int, late: int) -> None:
        self.size, self.late = size, late
        self.signatures = set[object]()

    def explore(self, length: int) -> None:
        """Check what any sequence of at most ``length`` events makes of a job."""
        front: list[tuple[Letter, ...]] = [()]
        for number in range(length + 1):
            following = [(each, self.replay(each)) for each in front]
            if number < length:
                front = [
                    (*each, letter) for each, letters in following for letter in letters
                ]

    def replay(self, sequence: tuple[Letter, ...]) -> list[Letter]:
        """Check the job after these events. Returns which may follow, if the job is a new one."""
        with pytest.MonkeyPatch.context() as patch:
            job = Job(self.size, self.late, patch)
            try:
                for event, child in sequence:
                    job.happens(event, child)
                signature = job.signature()
                if signature in self.signatures:
                    return []
                self.signatures.add(signature)
                following = [*job.may_happen()]
                check(job)
            except BaseException as error:
                error.add_note(f"after {sequence}")
                raise
            finally:
                job.close()
        return following


def check(job: Job) -> None:
    """This call ends, and so does the next one, which works if no process has ended."""
    job.wait_for_all(3 * TIMEOUT)
    check_names(job)
    job.go_on(HELD)
    job.begin(late=None)
    job.wait_for_all(3 * TIMEOUT)
    check_names(job)
    worked = {verdict is None for verdict in job.outcomes.values()}
    assert worked <= {not job.ended}


def check_names(job: Job) -> None:
    for verdict in job.outcomes.values():
        if verdict is None:
            continue
        late = {job.late} if Reason.SLOW in verdict.reasons else set()
        assert verdict.missing
        assert verdict.missing.keys() <= job.suspects | late


@pytest.mark.parametrize(
    ("size", "late", "fan_out", "length"),
    [
        (2, 1, 32, 3),
        (2, 0, 32, 3),
        (3, 2, 32, 2),
        (4, 3, 2, 1),
        pytest.param(2, 1, 32, 6, marks=pytest.mark.slow),
        pytest.param(2, 0, 32, 6, marks=pytest.mark.slow),
        pytest.param(3, 2, 32, 3, marks=pytest.mark.slow),
        pytest.param(4, 3, 2, 2, marks=pytest.mark.slow),
    ],
)
def test_no_sequence_names_a_wrong_rank_or_hangs_or_fails_the_next_call(
    size: int, late: int, fan_out: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "FAN_OUT", fan_out)  # 2: rank 3 is below rank 2
    monkeypatch.setattr(logging.getLogger("megackpt.distributed"), "disabled", True)
    monkeypatch.setenv(waiting.VARIABLE, "0")
    Explorer(size, late).explore(length)


@pytest.mark.parametrize("event", BREAKS)
@pytest.mark.parametrize(("size", "late"), [(2, 0), (2, 1), (3, 0), (3, 2)])
def test_a_first_step_survives_each_break_and_a_later_one_fails_on_all_ranks(
    size: int, late: int, event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("megackpt.distributed"), "disabled", True)
    for number in (1, 2):
        with monkeypatch.context() as patch:
            job = Job(size, late, patch)
            if number == 2:
                job.happens("go", 0)
            job.happens(event, size - 1)
            job.wait_for_all(3 * TIMEOUT)
            left = [*job.outcomes.values()]
            job.close()
        if number == 1 or event == "hold":
            assert left == [None] * size
        else:
            assert None not in left


def test_a_message_that_is_lost_with_its_connection_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(2, 0, monkeypatch)
    for event in ("go", "go", "hold", "go"):
        job.happens(event, 1)
    (message,) = [end.arrived for end in job.ends(1) if end.arrived]
    assert message
    job.happens("silent", 1)
    job.wait_for_all(3 * TIMEOUT)
    left = [*job.outcomes.values()]
    job.close()
    assert left == [None, None]


def test_a_rank_whose_connection_broke_is_not_named_after_it_has_worked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(3, 1, monkeypatch)
    job.happens("go", 0)
    job.happens("cut", 1)
    assert job.outcomes[0] == Verdict({1: Reason.ENDED}, name="save c")
    job.wait_for_all(TIMEOUT)
    for _ in range(3):
        job.happens("go", 0)
    assert not any(job.outcomes.values())
    job.happens("end", 2)
    job.happens("go", 0)
    job.wait_for_all(3 * TIMEOUT)
    named = [verdict and verdict.missing.keys() for verdict in job.outcomes.values()]
    job.close()
    assert named == [{2}, {2}]


Ends = tuple[Condition, Condition]
"""Of one link: the child's, and the parent's."""


def next_ends(ends: Ends) -> Iterator[tuple[Ends, set[object]]]:
    """All that may happen to a link next, with the rows of the table."""
    child, parent = ends
    rows: set[object] = set()

    def after(condition: Condition, event: Event) -> Condition:
        rows.add((condition.state, event))
        return condition.after(event, 0.0)[0]

    yield (after(child, Event.NEEDED), parent), rows
    rows = set()
    if child.state in (State.CONNECTING, State.RETURNING):
        yield (after(child, Event.REFUSED), parent), rows
        yield (after(child, Event.OPENED), after(parent, Event.OPENED)), rows
    # The other end closes this socket before it counts.
    yield (child, after(parent, Event.OPENED)), rows
    for event in (Event.GREETED, Event.ENDED, Event.SILENT, Event.DAMAGED):
        if child.state in (State.OPEN, State.READY):
            yield (after(child, event), parent), rows
        if parent.state in (State.OPEN, State.READY):
            yield (child, after(parent, event)), rows


def test_all_sequences_on_one_link_use_each_row_and_lead_to_a_connection() -> None:
    front: set[Ends] = {(Condition(), Condition())}
    found, used = set(front), set[object]()
    for _ in range(6):
        reached = set()
        for ends in front:
            for following, rows in next_ends(ends):
                reached.add(following)
                used |= rows
        front = reached
        found |= reached
    assert used == TABLE.keys()
    for child, parent in found:
        if child.state in (State.OPEN, State.READY):  # it notices the loss first
            child, _ = child.after(Event.ENDED, 0.0)
        child, _ = child.after(Event.NEEDED, 0.0)
        for event in (Event.OPENED, Event.GREETED):
            child, _ = child.after(event, 0.0)
            parent, _ = parent.after(event, 0.0)
        assert child.state is parent.state is State.READY


REASONS = {
    State.ABSENT: Reason.ABSENT,
    State.CONNECTING: Reason.ABSENT,
    State.RETURNING: Reason.ABSENT,
    State.OPEN: Reason.SLOW,
    State.READY: Reason.SLOW,
    State.CLOSED: Reason.ENDED,
}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_diagnosis_names_the_neighbours_that_are_awaited(size: int) -> None:
    for states in product(State, repeat=size - 1):
        neighbours = tuple(
            Neighbour(rank, Condition(state, 10.0), 19.0)
            for rank, state in enumerate(states, 1)
        )
        for first, now in product([True, False], [10.0, 14.9, 15.1, 20.0]):
            step = Waiting(0, first, 9.0, 1.0, now, neighbours)
            assert missing(step) == {
                rank: REASONS[state] for rank, state in enumerate(states, 1)
            }
            assert ended(step) == {
                rank: Reason.ENDED
                for rank, state in enumerate(states, 1)
                if state is State.CLOSED and (now > 15.0 or not first)
            }


def test_a_rank_that_answers_names_the_ranks_behind_it() -> None:
    ready = Condition(State.READY, 0.0)
    answer = {3: Reason.SILENT, 0: Reason.SLOW}
    behind = Neighbour(2, ready, 19.0, answer)
    silent = Neighbour(1, ready, 10.0)
    step = Waiting(0, False, 9.0, 1.0, 20.0, (silent, behind))
    assert missing(step) == {1: Reason.SILENT, 3: Reason.SILENT}
    assert missing(step, asking=1) == {3: Reason.SILENT}
    assert missing(step, asking=2) == {1: Reason.SILENT}


FAILS = [(1, Reason.ENDED), (2, Reason.ENDED), (2, Reason.SLOW), (3, Reason.BROKEN)]


def test_no_sequence_of_calls_blames_a_rank_that_has_worked_since() -> None:
    for sequence in product([*FAILS, "works", "later"], repeat=6):
        past, now, guilty = Past(0, Verdict({}), 0.0), 0.0, set[int]()
        for call, event in enumerate(sequence, 1):
            now += 1.0
            if event == "works":
                past, guilty = replace(past, worked=(call, now)), set()
            elif event == "later":
                now += CAUSE_SECONDS
            else:
                assert isinstance(event, tuple)
                rank, reason = event
                guilty.add(rank)
                verdict = explained(Verdict({rank: reason}), past, now)
                assert verdict.missing.keys() <= guilty
                past = Past(call, verdict, now, past.worked)


def test_the_page_prints_the_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for (state, event), (following, action) in TABLE.items():
        row = state.value, event.value, following.value, action.value
        assert f"| {' | '.join(row)} |" in page
    for (step, neighbour), recovery in AFTER_LOSS.items():
        assert f"| {step} | {neighbour} | {recovery.value} |" in page
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    states = tuple(f"| {state.value} |" for state in State)
    assert len([line for line in lines if line.startswith(states)]) == len(TABLE)
