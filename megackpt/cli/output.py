"""Prints the answer of a command: as JSON, or as lines of text, with colours on a terminal.

An answer has data for JSON, and blocks for text. A block is a line or a table.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple, TextIO

from megackpt.progress_line import is_open, is_terminal

_COLUMN_GAP = "  "
_CODES = {
    "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"
}  # fmt: skip
"""Escape codes of terminals."""


class Cell(NamedTuple):
    """Text, and its style on a terminal: "bold", "red", "bold green"."""

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
    if not is_open(sys.stdout):
        return
    if as_json:
        print(json.dumps(to_json(answer.data), indent=2, allow_nan=False))
    else:
        for line in format_blocks(answer.blocks, _shows_styles(sys.stdout)):
            print(line)
    sys.stdout.flush()


def print_error(text: str) -> None:
    """Print a message to stderr. The exit status reports the error, too, so this may fail."""
    if not is_open(sys.stderr):
        return
    first, *others = text.split("\n")
    kind, colon, rest = first.partition(": ")
    lines: list[Line] = [(Cell(kind, "bold red"), colon, rest)]
    lines += [(line,) for line in others]
    with suppress(OSError):
        for line in format_blocks(lines, _shows_styles(sys.stderr)):
            print(line, file=sys.stderr)


def _shows_styles(stream: TextIO) -> bool:
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def format_blocks(blocks: Iterable[Block], has_styles: bool) -> Iterator[str]:
    """The blocks as lines. No line is cut or wrapped."""
    follows_table = False
    for block in blocks:
        if not isinstance(block, Table):
            yield "".join(_format_cell(cell, 0, has_styles) for cell in block)
        elif block.rows:
            if follows_table:
                yield ""
            yield from _table_lines(block, has_styles)
        else:
            continue
        follows_table = isinstance(block, Table)


def _table_lines(table: Table, has_styles: bool) -> Iterator[str]:
    rows = [[Cell(heading.upper(), "dim") for heading in table.headings], *table.rows]
    widths = [0] * len(table.headings)
    for row in rows:
        for i, cell in enumerate(row):
            widths[i] = max(widths[i], len(_format_cell(cell, 0, False)))
    for row in rows:
        cells = []
        for i, cell in enumerate(row):
            # Negative: aligned left.
            width = widths[i] if i in table.right else -widths[i]
            cells.append(_format_cell(cell, width, has_styles))
        yield _COLUMN_GAP.join(cells).rstrip()


def _format_cell(cell: Cell | str, width: int, has_styles: bool) -> str:
    """The text, escaped, aligned and styled."""
    if isinstance(cell, str):
        cell = Cell(cell)
    text = escape(cell.text)
    text = text.rjust(width) if width > 0 else text.ljust(-width)
    if not has_styles or not cell.style:
        return text
    codes = ";".join(_CODES[name] for name in cell.style.split())
    return f"\x1b[{codes}m{text}\x1b[0m"


def to_json(value: Any) -> Any:
    """A value that JSON can hold.

    NaN and infinities become text, tensors their dtype and shape, dataclasses and named tuples
    objects (without fields that are ``...``), other types their repr.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(k): to_json(v) for k, v in value.items() if v is not ...}
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
