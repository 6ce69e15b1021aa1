"""Prints the answer of a command: as JSON, as plain text, or decorated on a terminal (by rich).

An answer has data and blocks. The blocks are lines and tables; both text forms show the same ones.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from megackpt import events, limits
from megackpt.events import format_size
from megackpt.progress_bar import is_terminal, show_bars

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text


_COLUMN_GAP = "  "


class Cell(NamedTuple):
    """Text, and its style on a terminal (in rich's words: "bold", "red", "dim cyan")."""

    text: str
    style: str = ""


Line = Sequence[Cell | str]


@dataclass(frozen=True)
class Table:
    """Rows under headings. ``right`` has the numbers of the columns that are aligned right."""

    headings: Sequence[str]
    rows: Sequence[Line]
    right: Collection[int] = ()


Block = Line | Table


@dataclass(frozen=True)
class Answer:
    """The answer of a command.

    ``data`` is printed with ``--json``, ``blocks`` (made when they are needed) without it.
    """

    data: Mapping[str, Any]
    blocks: Iterable[Block]
    status: int = 0


def print_answer(answer: Answer, as_json: bool) -> None:
    """Print to stdout. A process may have no stdout."""
    if not _is_open(sys.stdout):
        return
    if as_json:
        print(json.dumps(to_json(answer.data), indent=2, allow_nan=False))
    elif is_terminal(sys.stdout):
        _print_decorated(answer.blocks)
    else:
        for line in plain_lines(answer.blocks):
            print(line)
    sys.stdout.flush()


def print_error(text: str) -> None:
    """Print a message to stderr. The exit status reports the error, too, so this may fail."""
    if not _is_open(sys.stderr):
        return
    first, *others = [escape(line) for line in text.split("\n")]
    with suppress(OSError):
        if is_terminal(sys.stderr):
            kind, colon, rest = first.partition(": ")
            styled = _rich_text([Cell(kind, "bold red"), colon + rest])
            _console(sys.stderr).print(styled, soft_wrap=True)
        else:
            print(first, file=sys.stderr)
        for line in others:
            print(line, file=sys.stderr)


@contextmanager
def show_progress() -> Iterator[None]:
    """Show the progress of the operations in the block on stderr: bars, or lines in a log."""
    if is_terminal(sys.stderr):
        with show_bars(transient=True):
            yield
        return
    lines = _ProgressLines()
    events.add_observer(lines)
    try:
        yield
    finally:
        events.remove_observer(lines)
        lines.stopped.set()


class _ProgressLines(events.Observer):
    """Prints a line every few seconds while an operation runs. Short operations print nothing."""

    shows_progress = True

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._stage: events.Stage | None = None

    def stage_started(self, stage: events.Stage) -> None:
        """Show this stage from now on."""
        if self._stage is None:
            threading.Thread(target=self._print_lines, daemon=True).start()
        self._stage = stage

    def _print_lines(self) -> None:
        while not self.stopped.wait(limits.PROGRESS_SECONDS):
            stage = self._stage
            if stage is None or not stage.todo or not _is_open(sys.stderr):
                continue
            percent = 100 * stage.done // stage.todo
            sizes = f"{format_size(stage.done)} of {format_size(stage.todo)}"
            # A log that cannot be written must not fail the operation.
            with suppress(OSError, ValueError):
                name = f"{stage.operation.name}: {stage.name}"
                print(f"{name}, {percent} %, {sizes}", file=sys.stderr, flush=True)


def _is_open(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed


def plain_lines(blocks: Iterable[Block]) -> Iterator[str]:
    """Undecorated text. No line is cut or wrapped."""
    follows_table = False
    for block in blocks:
        if not isinstance(block, Table):
            yield "".join(_texts(block))
        elif block.rows:
            if follows_table:
                yield ""
            yield from _aligned_rows(block)
        else:
            continue
        follows_table = isinstance(block, Table)


def _aligned_rows(table: Table) -> Iterator[str]:
    rows = [[heading.upper() for heading in table.headings]]
    rows += [_texts(row) for row in table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = []
        for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.rjust(width) if i in table.right else cell.ljust(width))
        yield _COLUMN_GAP.join(cells).rstrip()


def _texts(line: Line) -> list[str]:
    return [escape(cell if isinstance(cell, str) else cell.text) for cell in line]


def _print_decorated(blocks: Iterable[Block]) -> None:
    console = _console(sys.stdout)
    follows_table = False
    for block in blocks:
        if not isinstance(block, Table):
            if follows_table and block:
                console.print()
            console.print(_rich_text(block))
        elif block.rows:
            if follows_table:
                console.print()
            console.print(_rich_table(block))
        else:
            continue
        follows_table = isinstance(block, Table)


def _console(stream: TextIO) -> Console:
    # rich takes 50 ms to import.
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False, emoji=False)


def _rich_text(line: Line) -> Text:
    from rich.text import Text

    styles = ["" if isinstance(cell, str) else cell.style for cell in line]
    return Text.assemble(*zip(_texts(line), styles, strict=True))


def _rich_table(table: Table) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable

    drawn = RichTable(
        box=box.SIMPLE_HEAD,
        header_style="dim",
        border_style="dim",
        show_edge=False,
        pad_edge=False,
    )
    for i, heading in enumerate(table.headings):
        if i not in table.right:
            drawn.add_column(heading, overflow="fold")
            continue
        # On a narrow terminal text is wrapped, but numbers stay whole.
        width = max(len(heading), *(len(_texts([row[i]])[0]) for row in table.rows))
        drawn.add_column(heading, justify="right", min_width=width, no_wrap=True)
    for row in table.rows:
        drawn.add_row(*(_rich_text([cell]) for cell in row))
    return drawn


def to_json(value: Any) -> Any:
    """A value that JSON can hold.

    NaN and infinities become text, tensors their dtype and shape, other types their repr.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(key): to_json(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [to_json(item) for item in value]
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return {"dtype": _dtype_name(value), "shape": list(value.shape)}
    return one_line(value)


def one_line(value: Any) -> str:
    """A value in one line; large tensors and bytes by their size."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        text = f"{type(value).__name__.lower()} of {_dtype_name(value)}, "
        text += format_shape(value.shape)
        is_small = value.ndim == 0 or (value.ndim == 1 and value.shape[0] <= 8)
        return f"{text}: {value.tolist()}" if is_small else text
    if isinstance(value, bytes | bytearray | memoryview) and len(value) > 100:
        return f"{len(value)} bytes"
    return repr(value)


def _dtype_name(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def escape(text: str) -> str:
    """Escape line breaks and all characters that could control a terminal."""
    if text.isprintable():
        return text
    escaped = [
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text
    ]
    return "".join(escaped)


def counted(count: int, noun: str) -> str:
    """1 chunk, 2 chunks, 12,000 entries."""
    if count != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"
    return f"{count:,} {noun}"


def format_shape(shape: Sequence[int]) -> str:
    """2x3; "scalar" without dimensions."""
    return "x".join(map(str, shape)) or "scalar"


def format_age(moment: float) -> str:
    """The time since ``moment`` (seconds since 1970), in the largest unit that fits."""
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
