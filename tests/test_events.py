"""What operations tell of themselves: events, log records, and bars on terminals."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import megackpt
from megackpt import Event, ShardedTensor, events
from megackpt.backends.base import Source
from megackpt.backends.torch_dist import TorchDist
from megackpt.checkpoint import open_checkpoint
from megackpt.checkpoint.transaction import CountedSource
from megackpt.dcp import installation
from megackpt.errors import (
    CoverageError,
    MismatchError,
    NotACheckpoint,
    RankFailure,
    StorageError,
)
from megackpt.planning.manifest import SavePlan
from megackpt.staging.source import COPIED_AT_ONCE
from megackpt.testing import ThreadedGroup

FORMATS = ("torch_dist", "zarr", "safetensors")
ROWS, COLUMNS = 64, 1024


def state(rank: int, tp: int = 2, rows: int = ROWS) -> dict[str, Any]:
    cut, copy = rank % tp, rank // tp
    weight = torch.full((rows // tp, COLUMNS), float(cut))
    return {
        "weight": ShardedTensor.from_rank_offsets(
            "weight", weight, (0, cut, tp), replica_id=copy
        ),
        "iteration": 7,
    }


def save(
    directory: Path, ranks: int = 4, strategy: Any = "torch_dist", tp: int = 2
) -> list[Any]:
    return ThreadedGroup.outcomes(
        ranks,
        lambda group: megackpt.save(
            state(group.rank, tp), directory, strategy, process_group=group
        ),
    )


def told(work: Callable[[], object]) -> list[Event]:
    heard: list[Event] = []
    with megackpt.watching(heard.append):
        work()
    return heard


def of(heard: list[Event], stage: str) -> list[Event]:
    return sorted((e for e in heard if e.stage == stage), key=lambda e: e.rank)


def stages(heard: list[Event], rank: int) -> list[str]:
    return [e.stage for e in heard if e.rank == rank]


@pytest.mark.parametrize("name", FORMATS)
def test_every_stage_of_every_rank_has_an_event_with_its_bytes(
    tmp_path: Path, name: str
) -> None:
    saved = told(lambda: save(tmp_path / "a", strategy=name))
    assert stages(saved, 0) == ["declare", "begin", "plan", "write", "commit", "total"]
    assert all(
        stages(saved, rank) == ["declare", "write", "total"] for rank in (1, 2, 3)
    )
    written = [e.bytes for e in of(saved, "write")]
    assert sum(written) == megackpt.verify(tmp_path / "a").bytes > ROWS * COLUMNS * 4
    assert {e.bytes for e in of(saved, "total")} == {sum(written)}
    assert {e.id for e in saved if e.stage != "declare"} == {
        open_checkpoint(tmp_path / "a").manifest.save_id
    }

    def load(group: ThreadedGroup) -> None:
        megackpt.load(state(group.rank, 4), tmp_path / "a", process_group=group)

    loaded = told(lambda: ThreadedGroup.run(4, load))
    assert stages(loaded, 0) == ["open", "compare", "read", "total"]
    assert all(
        stages(loaded, rank) == ["compare", "read", "total"] for rank in (1, 2, 3)
    )
    landed = [e.bytes for e in of(loaded, "read")]
    blob = (
        landed[0] - ROWS * COLUMNS
    )  # each rank reads a quarter of 4-byte elements, and the common state
    assert blob > 0
    assert landed == [ROWS * COLUMNS + blob] * 4
    assert {e.bytes for e in of(loaded, "total")} == {sum(landed)}
    assert {e.id for e in loaded} == {open_checkpoint(tmp_path / "a").manifest.save_id}

    for e in (*saved, *loaded):
        assert (e.ranks, e.path, e.error) == (4, str(tmp_path / "a"), None)
        assert (
            0
            <= e.seconds
            <= max(total.seconds for total in of(saved + loaded, "total"))
        )


def test_a_reused_plan_is_seen_by_the_stage_that_is_missing(tmp_path: Path) -> None:
    def thrice(group: ThreadedGroup) -> None:
        for i in range(3):
            megackpt.save(state(group.rank), tmp_path / str(i), process_group=group)

    heard = told(lambda: ThreadedGroup.run(2, thrice))
    assert Counter(e.stage for e in heard) == Counter(
        {"declare": 6, "begin": 3, "plan": 1, "write": 6, "commit": 3, "total": 6}
    )
    assert len({e.id for e in of(heard, "total")}) == 3


class Full(TorchDist):
    """A disk that is full on one rank."""

    def write(self, root: Any, plan: SavePlan, data: Any) -> Any:
        if plan.rank == 1:
            raise StorageError("no space left on device\nand more to say")
        return super().write(root, plan, data)


def test_a_stage_that_fails_tells_why_and_where(tmp_path: Path) -> None:
    outcomes: list[Any] = []
    heard = told(lambda: outcomes.extend(save(tmp_path / "a", strategy=Full())))
    assert all(isinstance(outcome, StorageError) for outcome in outcomes)
    assert [e.error for e in of(heard, "write")] == [
        None,
        "StorageError: no space left on device",
        None,
        None,
    ]
    assert of(heard, "write")[1].bytes == 0
    assert of(heard, "commit") == []
    for e in of(heard, "total"):
        assert e.error is not None
        assert e.error.startswith("StorageError: ")
        assert "1" in e.error  # the rank
        assert e.bytes == 0


def test_a_failed_plan_has_an_event_of_the_coordinator(tmp_path: Path) -> None:
    outcomes: list[Any] = []
    heard = told(lambda: outcomes.extend(save(tmp_path / "a", ranks=2, tp=4)))
    assert all(isinstance(outcome, CoverageError) for outcome in outcomes)
    (plan,) = of(heard, "plan")
    assert plan.rank == 0
    assert plan.error is not None
    assert plan.error.startswith("CoverageError: 'weight'")
    assert [e.error is None for e in of(heard, "total")] == [False, False]


def test_a_load_that_does_not_fit_fails_where_it_is_compared(tmp_path: Path) -> None:
    save(tmp_path / "a")

    def load(group: ThreadedGroup) -> None:
        asked = state(group.rank, rows=ROWS * (1 + group.rank))
        megackpt.load(
            asked, tmp_path / "a", validate_access_integrity=False, process_group=group
        )

    outcomes: list[Any] = []
    heard = told(lambda: outcomes.extend(ThreadedGroup.outcomes(2, load)))
    assert all(isinstance(outcome, MismatchError | RankFailure) for outcome in outcomes)
    assert [e.error is None for e in of(heard, "compare")] == [True, False]
    assert of(heard, "read") == []
    assert [e.error is None for e in of(heard, "total")] == [False, False]


def test_a_verification_tells_what_it_has_compared_and_found(tmp_path: Path) -> None:
    save(tmp_path / "a")
    reports: list[Any] = []
    opened, read, total = told(lambda: reports.append(megackpt.verify(tmp_path / "a")))
    assert [e.stage for e in (opened, read, total)] == ["open", "read", "total"]
    assert read.bytes == total.bytes == reports[0].bytes
    assert {e.operation for e in (opened, read, total)} == {"verify"}
    assert total.id == open_checkpoint(tmp_path / "a").manifest.save_id

    victim = next((tmp_path / "a").glob("*.distcp"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    *_, total = told(lambda: megackpt.verify(tmp_path / "a"))
    assert total.error is not None
    assert total.error.startswith("1 problems: ")
    assert total.bytes == 0


def test_a_callback_that_fails_stops_no_save_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError(f"no connection to tell {event.stage}")

    heard: list[Event] = []
    with megackpt.watching(broken), megackpt.watching(heard.append):
        assert save(tmp_path / "a", ranks=2) == [None, None]
    assert megackpt.verify(tmp_path / "a").ok
    assert len(of(heard, "total")) == 2
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert record.name == "megackpt.events"
    assert record.exc_info is not None
    assert "no connection to tell declare" in str(record.exc_info[1])


def test_callbacks_come_and_go(tmp_path: Path) -> None:
    first: list[Event] = []
    second: list[Event] = []
    watch = megackpt.watching(first.append)
    try:
        with megackpt.watching(second.append):
            save(tmp_path / "a", ranks=1, tp=1)
        assert [e.stage for e in first] == [e.stage for e in second]
        save(tmp_path / "b", ranks=1, tp=1)
        assert len(first) == 2 * len(second)
    finally:
        watch.stop()
    watch.stop()
    save(tmp_path / "c", ranks=1, tp=1)
    assert len(first) == 2 * len(second)


def test_without_observers_no_event_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "megackpt.events")

    def never(**_fields: object) -> Event:
        raise AssertionError("an event was made")

    monkeypatch.setattr(events, "Event", never)
    assert save(tmp_path / "a", ranks=2) == [None, None]
    with (
        megackpt.watching(print),
        pytest.raises(AssertionError, match="an event was made"),
    ):
        megackpt.verify(tmp_path / "a")


class Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {name: getattr(record, name) for name in Event.__slots__}
        return json.dumps({"message": record.getMessage(), **fields})


def test_log_records_have_the_fields(tmp_path: Path) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Json())
    logger = logging.getLogger("megackpt.events")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        heard = told(lambda: save(tmp_path / "a", ranks=2))
        heard += told(lambda: save(tmp_path / "b", strategy=Full()))
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    messages = [record.pop("message") for record in records]
    assert sorted(map(str, records)) == sorted(
        str(asdict(e)) for e in heard
    )  # threads of ranks tell at once
    saved = next(e for e in heard if e.stage == "total")
    assert (
        f"save {tmp_path / 'a'} ({saved.id}): total, rank {saved.rank} of 2: 257.2 KiB in"
        in "".join(messages)
    )
    assert any("write, rank 1 of 4: failed after" in message for message in messages)


def test_an_operation_logs_one_line_at_level_info(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "megackpt")
    save(tmp_path / "a", ranks=2)
    save(tmp_path / "a", ranks=2)
    megackpt.verify(tmp_path / "a")
    save(tmp_path / "b", strategy=Full())  # fails, on all ranks
    lines = [(record.levelname, record.stage, record.rank) for record in caplog.records]
    assert lines == [("INFO", "total", 0)] * 4
    assert [record.operation for record in caplog.records] == [
        "save",
        "save",
        "verify",
        "save",
    ]


class Terminal:
    """A terminal in place of stderr; what was drawn on it is known when it is closed."""

    def __init__(self) -> None:
        self._ours, theirs = pty.openpty()
        self.stream = os.fdopen(theirs, "w", encoding="utf-8")
        self._parts: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._ours, 4096)
            except OSError:  # the other end is closed
                part = b""
            if not part:
                return
            self._parts.append(part)

    def drawn(self) -> str:
        self.stream.close()
        self._reader.join(10)
        os.close(self._ours)
        return b"".join(self._parts).decode()


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return terminal


@pytest.mark.parametrize("name", ["torch_dist", "zarr"])
def test_a_terminal_shows_the_operations_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    terminal = on_a_terminal(monkeypatch)
    heard: list[Event] = []
    with megackpt.progress(), megackpt.watching(heard.append):
        save(tmp_path / "a", ranks=2, strategy=name)
        ThreadedGroup.run(
            2, lambda g: megackpt.load(state(g.rank), tmp_path / "a", process_group=g)
        )
        megackpt.verify(tmp_path / "a")
    drawn = terminal.drawn()
    assert "\x1b[" in drawn  # it moves
    for operation in ("save (rank 0 of 2)", "load (rank 0 of 2)", "verify"):
        assert f"{operation}: done, " in drawn
    assert "257.2 KiB" in drawn  # verified
    assert "rank 1" not in drawn
    assert {e.error for e in heard} == {None}


def test_a_failure_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    with megackpt.progress(), pytest.raises(NotACheckpoint):
        megackpt.load(state(0, 1), tmp_path / "none")
    assert "load: failed" in terminal.drawn()


def test_nothing_is_drawn_where_no_terminal_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    with megackpt.progress():
        save(tmp_path / "a", ranks=1, tp=1)
    assert pipe.getvalue() == ""
    with megackpt.progress(force=True):
        save(tmp_path / "b", ranks=1, tp=1)
    assert "save: done" in pipe.getvalue()
    assert "\x1b" not in pipe.getvalue()


def test_a_line_that_cannot_be_printed_stops_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = io.StringIO()
    monkeypatch.setattr(sys, "stderr", gone)
    with megackpt.progress(force=True):
        gone.close()
        assert save(tmp_path / "a", ranks=1, tp=1) == [None]
    assert caplog.text.count("failed; its further errors are not reported") == 1
    assert megackpt.verify(tmp_path / "a").ok


def test_the_event_of_an_error_without_a_text() -> None:
    class Untold(Exception):
        def __str__(self) -> str:
            raise ValueError("it has no text")

    heard: list[Event] = []
    with (
        events.watching(heard.append),
        pytest.raises(Untold),
        events.operation("save", "a"),
    ):
        raise Untold
    assert [event.error for event in heard] == [
        "Untold: its text cannot be had: ValueError"
    ]


def test_a_conversion_and_a_save_through_torch_dcp_have_each_stage_once(
    tmp_path: Path,
) -> None:
    save(tmp_path / "a")
    converted = told(lambda: megackpt.convert(tmp_path / "a", tmp_path / "z", "zarr"))
    assert stages(converted, 0) == ["write", "total"]
    with installation.install():
        saved = told(
            lambda: dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "d")
        )
    assert stages(saved, 0).count("commit") == 1
    assert stages(saved, 0)[-1] == "total"


def test_large_tensors_are_counted_in_pieces() -> None:
    class OneBlock(Source):
        def blocks(self, _row: int) -> Any:
            yield memoryview(bytes(2 * COPIED_AT_ONCE + 5))

    counted: list[int] = []
    source = CountedSource(OneBlock(), counted.append)
    assert (
        [len(piece) for piece in source.blocks(0)]
        == counted
        == [COPIED_AT_ONCE, COPIED_AT_ONCE, 5]
    )
