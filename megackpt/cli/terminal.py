"""Text out: tables, trees, colour and progress on a terminal (through rich), plain aligned lines anywhere else."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from megackpt import events
from megackpt.cli.answers import (
    BAR,
    GAP,
    Answer,
    Block,
    Cell,
    Cells,
    Line,
    Progress,
    Table,
    clean,
    jsonable,
)
from megackpt.progress_bar import is_terminal, show_bars

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_GAP = "  "


def tell(answer: Answer, as_json: bool) -> None:
    """Print an answer to stdout, where there is one."""
    if not _is_there(sys.stdout):
        return
    if as_json:
        print(json.dumps(jsonable(answer.facts()), indent=2, allow_nan=False))
    elif is_terminal(sys.stdout):
        _decorate(answer.blocks(True))
    else:
        for line in plain(answer.blocks(False)):
            print(line)
    sys.stdout.flush()


def complain(text: str) -> None:
    """One message to stderr, where there is one: the exit status tells, too."""
    if _is_there(sys.stderr):
        with suppress(OSError):
            _complain(text)


def _is_there(stream: TextIO | None) -> bool:
    """False of a standard stream that this process was started without."""
    return stream is not None and not stream.closed


def _complain(text: str) -> None:
    lines = [clean(line) for line in text.split("\n")]
    if is_terminal(sys.stderr):
        head, _, rest = lines[0].partition(": ")
        _console(sys.stderr).print(
            _text([Cell(head, "bold red"), f": {rest}" if rest else ""]), soft_wrap=True
        )
        lines = lines[1:]
    for line in lines:
        print(line, file=sys.stderr)


def plain(blocks: Iterable[Block]) -> Iterator[str]:
    """Lines without any decoration; nothing is cut or wrapped."""
    above: Block = GAP
    for block in blocks:
        if isinstance(block, Table) and not block.rows:
            continue
        if isinstance(above, Table) and isinstance(block, Table):
            yield ""
        yield from (
            _aligned(block)
            if isinstance(block, Table)
            else ["".join(_words(block.cells))]
        )
        above = block


def _aligned(table: Table) -> Iterator[str]:
    rows = [[heading.upper() for heading in table.headings], *map(_words, table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if i in table.right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield _GAP.join(cells).rstrip()


def _words(cells: Cells) -> list[str]:
    return [clean(cell.text if isinstance(cell, Cell) else cell) for cell in cells]


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False, emoji=False)


def _text(cells: Cells, plain_font: bool = False) -> Text:
    from rich.text import Text

    parts = [cell if isinstance(cell, Cell) else Cell(cell) for cell in cells]
    if plain_font:
        parts = [Cell(part.text.replace(BAR, "#"), part.style) for part in parts]
    return Text.assemble(*((clean(part.text), part.style) for part in parts))


def _decorate(blocks: Iterable[Block]) -> None:
    console = _console(sys.stdout)
    above: Block = GAP
    for block in blocks:
        if isinstance(block, Table) and not block.rows:
            continue
        if isinstance(above, Table) and block is not GAP:
            console.print()
        if isinstance(block, Line):
            console.print(_text(block.cells))
        else:
            _draw(console, block)
        above = block


def _draw(console: Console, table: Table) -> None:
    from rich import box
    from rich.table import Table as Drawn

    drawn = Drawn(
        box=box.SIMPLE_HEAD,
        header_style="dim",
        border_style="dim",
        show_edge=False,
        pad_edge=False,
    )
    for i, heading in enumerate(table.headings):
        # Where a terminal is too narrow, text is folded, the longest first; numbers stay whole. Nothing is cut.
        whole = (
            max(len(heading), *(len(_words([row[i]])[0]) for row in table.rows))
            if i in table.right
            else None
        )
        drawn.add_column(
            heading,
            justify="right" if whole else "left",
            overflow="fold",
            min_width=whole,
            no_wrap=whole is not None,
        )
    plain_font = "utf" not in console.encoding
    stems = guides(table.depths, plain_font) if table.depths else []
    for i, (first, *others) in enumerate(table.rows):
        head = _text([Cell(stems[i], "dim"), first] if stems else [first])
        drawn.add_row(head, *(_text([cell], plain_font) for cell in others))
    console.print(drawn)


@contextmanager
def progress() -> Iterator[Progress]:
    """A bar on a terminal, else a line every few seconds, for what a command reports."""
    if not is_terminal(sys.stderr):
        yield _plain_progress()
        return
    with ExitStack() as shown:
        shown.enter_context(show_bars(transient=True))
        stages: list[events.Stage] = []

        def start(label: str, total: int) -> None:
            stages.append(events.start(events.TOTAL, events.Operation(label, "")))
            stages[0].todo = total
            shown.callback(events.finish, stages[0])

        yield Progress(start, lambda done: stages[0].advance(done))  # noqa: PLW0108 - not yet made


def _plain_progress() -> Progress:
    lock = threading.Lock()
    told: list[Callable[[int, int], None]] = []
    counts = [0, 0]

    def start(_label: str, total: int) -> None:
        from megackpt.cli.plain_progress import ProgressLines

        told.append(ProgressLines(sys.stderr))
        counts[1] = total

    def advance(done: int) -> None:
        with lock:
            counts[0] += done
            told[0](*counts)

    return Progress(start, advance)


def guides(depths: Sequence[int], ascii_only: bool = False) -> list[str]:
    """The branches of a drawn tree: for each node, given by its depth in depth-first order, what precedes its name."""
    corner, branch, bar, space = (
        ("`-- ", "|-- ", "|   ", "    ")
        if ascii_only
        else ("└── ", "├── ", "│   ", "    ")
    )
    drawn: list[str] = []
    open_below: list[
        bool
    ] = []  # for each depth: does another node of it follow, under the same parent?
    for depth in reversed(depths):
        del open_below[depth + 1 :]
        open_below += [False] * (depth + 1 - len(open_below))
        more, open_below[depth] = open_below[depth], True
        stems = "".join(bar if below else space for below in open_below[1:depth])
        drawn.append(stems + (branch if more else corner) if depth else "")
    return drawn[::-1]
