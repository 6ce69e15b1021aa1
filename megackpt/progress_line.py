"""Progress of operations on stderr: a line on a terminal, a bar in a notebook, lines in a log."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TextIO

from megackpt import events, limits
from megackpt.events import TOTAL, Event, Stage, format_size

_REDRAW_SECONDS = 0.1
_CLEAR_LINE = "\r\x1b[K"


def is_open(stream: TextIO | None) -> bool:
    """Whether a stream exists. A process may have no stderr (None)."""
    return stream is not None and not stream.closed


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream can show colours and moving text."""
    if stream is None or stream.closed:
        return False
    return stream.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def progress(force: bool = False) -> Iterator[None]:
    """Show on stderr each save, load and verification that runs in the block.

    A line shows the stage, and the bytes that are done and to do. In a distributed job only rank 0
    prints, and shows the bytes of rank 0; all ranks may call this. A notebook shows a bar of tqdm,
    if that is installed. If stderr is neither a terminal nor such a notebook, no line is printed,
    or with ``force`` one line at the end of each operation.
    """
    stream: TextIO | None = sys.stderr
    shows = is_terminal(stream) or _has_bars(stream)
    if not shows and not (force and is_open(stream)):
        yield
        return
    with show_progress(prints_end=True):
        yield


@contextmanager
def show_progress(prints_end: bool = False) -> Iterator[None]:
    """Show the operations in the block on stderr.

    Args:
        prints_end: print a line at the end of each operation. Without it, a log gets a line every
            few seconds if bytes were moved, and the terminal is clear when the last operation has
            ended.
    """
    if not is_open(sys.stderr):
        yield
        return
    lines = _Lines(sys.stderr, prints_end)
    events.add_observer(lines)
    try:
        yield
    finally:
        events.remove_observer(lines)
        lines.stopped.set()


def _has_bars(stream: object) -> bool:
    is_notebook = type(stream).__module__ == "ipykernel.iostream"
    return is_notebook and find_spec("tqdm") is not None


class _Lines(events.Observer):
    """Prints the newest stage of rank 0 from a thread."""

    shows_progress = True

    def __init__(self, stream: TextIO, prints_end: bool) -> None:
        self.stopped = threading.Event()
        self._stream = stream
        self._prints_end = prints_end
        self._has_bars = prints_end and _has_bars(stream)
        self._bar: Any = None
        # A bar is redrawn as a line on a terminal is.
        self._is_terminal = is_terminal(stream) or self._has_bars
        self._stage: Stage | None = None
        self._logged = ""
        # Reentrant: a garbage collection under the lock may end a save that was dropped.
        self._lock = threading.RLock()

    def stage_started(self, stage: Stage) -> None:
        """Show this stage from now on."""
        if stage.operation.rank != 0:
            return
        is_first = self._stage is None
        self._stage = stage
        if is_first and (self._is_terminal or not self._prints_end):
            threading.Thread(target=self._print_stages, daemon=True).start()

    def stage_ended(self, stage: Stage, event: Event) -> None:
        """Clear the line, or replace it by the result, when an operation has ended."""
        if stage.name != TOTAL or event.rank != 0:
            return
        if self._has_bars:
            with self._lock:
                self._show_bar(stage)
                self._bar = None
            return
        text = ""
        if self._prints_end:
            text = f"{_name(stage)}: {stage.ended}"
            if event.bytes:
                text += f", {format_size(event.bytes)}"
            text += f" in {event.seconds:.3f} s\n"
        if text or self._is_terminal:
            with self._lock:
                self._write(text)

    def _print_stages(self) -> None:
        seconds = limits.PROGRESS_SECONDS
        if self._is_terminal:
            seconds = _REDRAW_SECONDS
        # A log that cannot be written must not fail the operation.
        with suppress(OSError, ValueError):
            while not self.stopped.wait(seconds):
                with self._lock:
                    stage = self._stage
                    if stage is None or stage.ended:
                        continue
                    if self._has_bars:
                        self._show_bar(stage)
                        continue
                    text = f"{_name(stage)}: {stage.name}"
                    if stage.todo:
                        percent = 100 * stage.done // stage.todo
                        sizes = (
                            f"{format_size(stage.done)} of {format_size(stage.todo)}"
                        )
                        text += f", {percent} %, {sizes}"
                    if self._is_terminal:
                        self._write(text)
                    elif stage.todo and stage.done and text != self._logged:
                        self._logged = text
                        self._write(f"{text}\n")

    def _show_bar(self, stage: Stage) -> None:
        if self._bar is None:
            tqdm = import_module("tqdm.auto").tqdm
            self._bar = tqdm(unit="B", unit_scale=True, unit_divisor=1024)
        bar = self._bar
        text = f"{_name(stage)}: {stage.ended or stage.name}"
        bar.set_description_str(text, refresh=False)
        bar.reset(stage.todo or stage.done or None)
        # The reset takes the present as the start.
        bar.start_t -= time.perf_counter() - stage.started_at
        bar.n = stage.done
        bar.refresh()
        if stage.ended:
            bar.close()

    def _write(self, text: str) -> None:
        if self._is_terminal:
            text = _CLEAR_LINE + text
        self._stream.write(text)
        self._stream.flush()


def _name(stage: Stage) -> str:
    running = stage.operation
    if running.ranks == 1:
        return running.name
    return f"{running.name} (rank 0 of {running.ranks})"
