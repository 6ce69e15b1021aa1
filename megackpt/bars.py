"""Progress bars on a terminal, drawn by rich: of what the command line does, and of saves and loads when asked."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from megackpt import events

if TYPE_CHECKING:
    from rich.progress import Progress as Bars, TaskID


def is_terminal(stream: TextIO | None) -> bool:
    """False, too, of a standard stream that a process does not have (None), or has closed."""
    if stream is None or stream.closed:
        return False
    return stream.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def progress(force: bool = False) -> Iterator[None]:
    """Draw a bar on stderr for each save, load and verification that this process begins in the ``with`` block.

    It tells the stage, the bytes that are done and those to do, and their rate. In a distributed job rank 0 alone
    draws, and its own share of the bytes; the other ranks may call this too. Where stderr is no terminal nothing is
    drawn; with ``force``, a line at the end, if there is a stderr.
    """
    there: TextIO | None = sys.stderr  # None in a process that was started without one
    if is_terminal(there) or (force and there is not None and not there.closed):
        with events.viewing(_Drawing()):
            yield
    else:
        yield


class _Drawing:
    """Bars that live as long as an operation of rank 0 does, with a line for each."""

    def __init__(self) -> None:
        # Of the same thread again where a garbage collection within ends a save that was dropped.
        self._lock = (
            threading.RLock()
        )  # of begin and end; ``follow`` is called under a lock of rich's
        self._bars: Bars | None = None
        self._lines: dict[events.Operation, _Line] = {}
        self._going = 0

    def began(self, stage: events.Stage) -> None:
        running = stage.operation
        if running.rank != 0:
            return
        if line := self._lines.get(running):
            line.at(stage)
        if stage.name != events.TOTAL:
            return
        with self._lock:
            if self._bars is None:
                self._bars = bars(sys.stderr, self.follow, transient=False)
                self._bars.start()
            self._lines[running] = _Line(
                self._bars.add_task(running.name, total=None), stage
            )
            self._going += 1

    def ended(self, stage: events.Stage) -> None:
        if stage.operation not in self._lines or stage.name != events.TOTAL:
            return
        self._lines[stage.operation].at(stage)
        with self._lock:
            self._going -= 1
            if self._bars is not None and not self._going:
                drawn, self._bars = self._bars, None
                drawn.stop()
                self._lines.clear()

    def follow(self, drawn: Bars) -> None:
        """How far is everything now? Asked before the bars are drawn."""
        for line in list(self._lines.values()):
            running, stage = line.stage.operation, line.stage
            moving = stage if stage.todo else line.moving
            share = f" (rank 0 of {running.ranks})" if running.ranks > 1 else ""
            drawn.update(
                line.task,
                description=f"{running.name}{share}: {stage.ended or stage.name}",
            )
            if moving.todo:
                drawn.update(
                    line.task,
                    completed=moving.done,
                    total=max(moving.todo, moving.done),
                )


class _Line:
    """What one line shows: the present stage, and the bytes of the last one that had any to move."""

    def __init__(self, task: TaskID, stage: events.Stage) -> None:
        self.task = task
        self.stage = self.moving = stage

    def at(self, stage: events.Stage) -> None:
        if self.stage.todo:
            self.moving = self.stage
        self.stage = stage


def bars(
    stream: TextIO, follow: Callable[[Bars], None] | None = None, transient: bool = True
) -> Bars:
    """rich's bars with bytes and their rate. ``follow`` is called with them each time they are about to be drawn."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress as Bars,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        """Bytes a second, in the units of the bytes beside it."""

        def render(self, task: Task) -> Text:
            rate = task.finished_speed or task.speed
            return Text(f"{events.size(rate)}/s" if rate else "", "cyan")

    class Following(Bars):
        complete = False

        def get_renderables(self) -> Iterable[Any]:
            if self.complete and follow is not None:
                follow(self)
            return super().get_renderables()

    drawn = Following(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        Rate(),
        TimeRemainingColumn(),
        console=Console(file=stream, highlight=False, markup=False, emoji=False),
        transient=transient,
    )
    drawn.complete = True  # rich draws once while it is made
    return drawn
