"""``megackpt ls``: the steps of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from megackpt.checkpoint import open_checkpoint
from megackpt.cli.answers import (
    Answer,
    Block,
    Cell,
    Line,
    Table,
    age,
    counted,
    number,
    size,
)
from megackpt.errors import NotACheckpoint
from megackpt.manager import Run, Step, Tracker, list_run


def ls(directory: str) -> Answer:
    """Which steps a directory holds. Where it holds none and is none, raises what keeps it from being one."""
    run = list_run(directory)
    if not run.steps and run.itself is None:
        try:
            open_checkpoint(directory)
        except NotACheckpoint as error:
            raise NotACheckpoint(f"{error}; nor does it hold one") from error
    return Answer(lambda: _facts(run), lambda _pretty: _blocks(run))


def _facts(run: Run) -> dict[str, Any]:
    return {
        "location": run.location,
        "checkpoint": None if run.itself is None else asdict(run.itself),
        "steps": [asdict(step) for step in run.steps],
        "trackers": [asdict(tracker) for tracker in run.trackers],
        "latest": run.latest.name if run.latest else None,
    }


def _blocks(run: Run) -> Iterator[Block]:
    if run.itself is not None:
        itself = run.itself
        held = f"{counted(itself.files, 'file')}, {size(itself.bytes)}"
        what = f"{_format(itself)}, {held}, saved {age(itself.saved)} ago"
        yield Line.of(Cell(run.location, "bold"), f" is a checkpoint: {what}")
    if not run.steps:
        return
    count = sum(bool(step.complete) for step in run.steps)
    yield Line.of(
        Cell(run.location, "bold"),
        f": {counted(len(run.steps), 'checkpoint')}, {number(count)} complete",
    )
    headings = ("name", "step", "format", "files", "size", "age", "state")
    yield Table(headings, [_row(step, run) for step in run.steps], right=(1, 3, 4, 5))
    for step in run.steps:
        if step.reason:
            yield Line.of(Cell(step.name, "bold"), f": {step.reason}")
    yield from map(_tracker, run.trackers)


def _row(step: Step, run: Run) -> list[Cell]:
    latest = step is run.latest
    state = Cell("incomplete", "red")
    if step.complete:
        state = Cell(
            "complete, latest" if latest else "complete",
            "bold green" if latest else "green",
        )
    elif step.complete is None:
        state = Cell("not readable", "yellow")
    return [
        Cell(step.name, "bold" if latest else ""),
        Cell("-" if step.step is None else str(step.step)),
        Cell(_format(step), "cyan"),
        Cell(number(step.files)),
        Cell(size(step.bytes)),
        Cell(age(step.saved) if step.saved else "-"),
        state,
    ]


def _format(step: Step) -> str:
    return f"{step.format} {step.version}" if step.format else "-"


def _tracker(tracker: Tracker) -> Line:
    verdict = (
        Cell(tracker.problem, "red") if tracker.problem else Cell("so it is", "green")
    )
    return Line.of(
        Cell(tracker.name, "bold"),
        f" names {tracker.says or 'nothing'} as the latest: ",
        verdict,
    )
