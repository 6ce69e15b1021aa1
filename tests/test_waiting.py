"""A rank that waits long for others says in which stage, and for which of them; short waits are silent."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.testing import ThreadedGroup

SECONDS = "MEGACKPT_WAIT_WARNING_SECONDS"


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [
        r.getMessage() for r in tuple(caplog.records) if r.levelno == logging.WARNING
    ]
    return [text for text in found if "has waited" in text]


def until(true: Callable[[], object]) -> None:
    """Wait for what has to come, however slow the machine is."""
    deadline = time.monotonic() + 60
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert true()


def state(rank: int) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4), replica_id=rank)}


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECONDS, "0.3")


@pytest.mark.usefixtures("soon")
def test_all_that_wait_name_the_rank_that_has_not_come(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save(group: ThreadedGroup) -> None:
        if group.rank == 1:
            until(lambda: len(told(caplog)) == 2)
        megackpt.save(state(group.rank), tmp_path / "c", process_group=group)

    ThreadedGroup.run(3, save, timeout=120)
    for rank, text in zip((0, 2), sorted(told(caplog)), strict=False):
        assert text.startswith(
            f"rank {rank} has waited 0.3 s in the stage 'vote' of the save {tmp_path}/c for "
        )
        # Rank 0 looks at the directory before it votes, so rank 2 may have waited for it, too.
        assert (
            text.partition(" for ")[2].split(":")[0]
            in ("rank 1", "ranks 0, 1")[: 1 + (rank == 2)]
        )


@pytest.mark.usefixtures("soon")
def test_a_rank_that_reads_long_is_named_by_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    megackpt.save(state(0), tmp_path / "c")

    class Slow(dict[str, Any]):
        """Its keys are asked for within the load."""

        def items(self) -> Any:
            until(lambda: told(caplog))
            return super().items()

    def load(group: ThreadedGroup) -> None:
        asked = state(group.rank)
        megackpt.load(
            Slow(asked) if group.rank == 1 else asked,
            tmp_path / "c",
            process_group=group,
        )

    ThreadedGroup.run(2, load, timeout=120)
    assert told(caplog)[0].startswith("rank 0 has waited 0.3 s in the stage 'compare'")
    assert " for rank 1:" in told(caplog)[0]


@pytest.mark.usefixtures("soon")
def test_while_rank_0_is_at_work_the_others_wait_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def is_planning(event: megackpt.Event) -> None:
        if event.stage == "commit":
            until(lambda: len(told(caplog)) >= 2)

    with megackpt.watching(is_planning):
        ThreadedGroup.run(
            3,
            lambda group: megackpt.save(
                state(group.rank), tmp_path / "c", process_group=group
            ),
            120,
        )
    texts = told(caplog)
    assert {text.split(" has ")[0] for text in texts} == {"rank 1", "rank 2"}
    assert all(
        "in the stage 'write'" in text and " for rank 0:" in text for text in texts
    )


@pytest.mark.parametrize("seconds", ["", "0", "3600", "inf"])
def test_short_waits_are_silent_and_leave_no_thread(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    seconds: str,
) -> None:
    monkeypatch.setenv(SECONDS, seconds)
    for _ in range(3):
        ThreadedGroup.run(
            4,
            lambda group: megackpt.save(
                state(group.rank), tmp_path / "c", process_group=group
            ),
            120,
        )
    assert not told(caplog)
    until(
        lambda: (
            not [t for t in threading.enumerate() if t.name.startswith("megackpt-wait")]
        )
    )


def test_what_is_no_number_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a process; two threads may find it out at the same time, so there is one here."""
    monkeypatch.setenv(SECONDS, "soon")
    for _ in range(2):
        ThreadedGroup.run(
            1,
            lambda group: megackpt.save(
                state(group.rank), tmp_path / "c", process_group=group
            ),
        )
    assert caplog.text.count("'soon', which is not a number of seconds: using 30") <= 1
    assert megackpt.check_is_distributed_checkpoint(tmp_path / "c")


class Told(logging.Handler):
    """Puts the latest warning of each stage into a file that all ranks can look at."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.WARNING)
        self._folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "has waited" in text:
            stage = text.partition("stage '")[2].partition("'")[0]
            (self._folder / f"{stage} of {os.environ['RANK']}").write_text(text)


def come_late(folder: str) -> None:
    """Rank 1 comes late to a save and the second load, rank 0 to the first: once the others have said so."""
    rank, seen = int(os.environ["RANK"]), Path(folder)
    logging.getLogger("megackpt").addHandler(Told(seen))

    def until_told(stage: str, *others: int) -> None:
        until(lambda: all((seen / f"{stage} of {other}").exists() for other in others))

    if rank == 1:
        until_told("vote", 0, 2)
    megackpt.save(state(rank), seen / "c")
    if rank == 0:
        until_told("open", 1, 2)
    megackpt.load(state(rank), seen / "c")
    if rank == 1:
        until_told("compare", 0, 2)
    megackpt.load(state(rank), seen / "c")


@pytest.mark.slow
def test_processes_name_the_rank_that_has_not_come(ranks: Any, tmp_path: Path) -> None:
    ranks(come_late, 3, tmp_path, timeout=200, env={SECONDS: "0.5"})

    def named(stage: str, rank: int) -> str:
        text = (tmp_path / f"{stage} of {rank}").read_text()
        assert text.startswith(f"rank {rank} has waited 0.5 s in the stage {stage!r}")
        assert "(timeout=)" in text
        return text.partition(" for ")[2].partition(":")[0]

    # A rank that has only just come may be named beside the late one. Rank 0 tells the others whom it waits for.
    assert named("vote", 0) in ("rank 1", "rank 2", "ranks 1, 2")
    assert named("vote", 2) in ("rank 1", "rank 0")
    assert named("open", 1) == named("open", 2) == "rank 0"
    # Ranks 0 and 2 have done the step 'open' without it.
    assert named("compare", 0) == named("compare", 2) == "rank 1"
