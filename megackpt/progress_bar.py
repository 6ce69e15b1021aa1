"""Progress of operations on stderr: bars on a terminal (drawn by rich), lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from megackpt import events
from megackpt.events import TOTAL, Event, Operation, Stage, format_size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream can show colours and moving text. A process may have no stderr (None)."""
    if stream is None or stream.closed:
        return False
    return stream.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def progress(force: bool = False) -> Iterator[None]:
    """Draw a bar on stderr for each save, load and verification that starts in the block.

    A bar shows the stage, the bytes that are done and to do, and the rate. In a distributed job
    only rank 0 draws, and shows its own share of the bytes; all ranks may call this. If stderr is
    not a terminal, nothing is drawn, or with ``force`` one line at the end of each operation.
    """
    stream: TextIO | None = sys.stderr
    if is_terminal(stream) or (force and stream is not None and not stream.closed):
        with show_bars(transient=False):
            yield
    else:
        yield


@contextmanager
def show_bars(transient: bool) -> Iterator[None]:
    """Draw bars on stderr for the operations that start in the block.

    Args:
        transient: remove the bars when the last running operation has ended.
    """
    bars = _Bars(transient)
    events.add_observer(bars)
    try:
        yield
    finally:
        bars.close()


class _Row:
    """One operation: its present stage, and the last one that had bytes to move."""

    def __init__(self, task: TaskID, stage: Stage) -> None:
        self.task = task
        self.stage = self.moving = stage

    def enter(self, stage: Stage) -> None:
        if self.stage.todo:
            self.moving = self.stage
        self.stage = stage


class _Bars(events.Observer):
    """Draws the running operations of rank 0. A rich display exists only while there are any."""

    shows_progress = True

    def __init__(self, transient: bool) -> None:
        self.transient = transient
        # Reentrant: a garbage collection under the lock may end a save that was dropped.
        self._lock = threading.RLock()
        self._display: Progress | None = None
        self._rows: dict[Operation, _Row] = {}
        self._running = 0
        self._closed = False

    def stage_started(self, stage: Stage) -> None:
        """Show the stage in the row of its operation; a new operation gets a row."""
        running = stage.operation
        if row := self._rows.get(running):
            row.enter(stage)
        if stage.name != TOTAL or running.rank != 0 or self._closed:
            return
        with self._lock:
            if self._display is None:
                self._display = _make_display(self)
                self._display.start()
            task = self._display.add_task(running.name, total=None)
            self._rows[running] = _Row(task, stage)
            self._running += 1

    def stage_ended(self, stage: Stage, event: Event) -> None:  # noqa: ARG002
        """Stop the display when the last operation has ended."""
        row = self._rows.get(stage.operation)
        if row is None or stage.name != TOTAL:
            return
        row.enter(stage)
        with self._lock:
            self._running -= 1
            display = self._display
            if self._running or display is None:
                return
            self._display = None
            display.stop()
            self._rows.clear()
            if self._closed:
                events.remove_observer(self)

    def close(self) -> None:
        """Draw no new operations. Running asynchronous saves are drawn to their end."""
        with self._lock:
            self._closed = True
            if not self._running:
                events.remove_observer(self)

    def update(self, display: Progress) -> None:
        """Copy the state of all operations into the display. Called just before it is drawn."""
        for row in list(self._rows.values()):
            stage, running = row.stage, row.stage.operation
            share = f" (rank 0 of {running.ranks})" if running.ranks > 1 else ""
            text = f"{running.name}{share}: {stage.ended or stage.name}"
            display.update(row.task, description=text)
            moving = stage if stage.todo else row.moving
            if moving.todo:
                total = max(moving.todo, moving.done)
                display.update(row.task, completed=moving.done, total=total)


def _make_display(bars: _Bars) -> Progress:
    # rich takes 50 ms to import.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            rate = task.finished_speed or task.speed
            return Text(f"{format_size(rate)}/s" if rate else "", "cyan")

    class Display(Progress):
        # The constructor draws once, before the display is complete.
        is_complete = False

        def get_renderables(self) -> Iterable[Any]:
            if self.is_complete:
                bars.update(self)
            return super().get_renderables()

    display = Display(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        Rate(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr, highlight=False, markup=False, emoji=False),
        transient=bars.transient,
    )
    display.is_complete = True
    return display
