"""What a command answers: facts for programs, blocks of text for people, and an exit status."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megackpt.events import format_size


class Cell(NamedTuple):
    """A piece of text, and a style for terminals (rich's words: "bold", "red", "dim cyan")."""

    text: str
    style: str = ""


Cells = Sequence[Cell | str]
size = format_size


@dataclass(frozen=True)
class Line:
    """One line of text."""

    cells: Cells

    @classmethod
    def of(cls, *cells: Cell | str) -> Line:
        return cls(cells)


@dataclass(frozen=True)
class Table:
    """Rows under headings. ``right``: numbers of the columns that are aligned to the right.

    ``depths``: the rows are the nodes of a tree, depth first, and a terminal shows its branches.
    """

    headings: Sequence[str]
    rows: Sequence[Cells]
    right: Collection[int] = ()
    depths: Sequence[int] = ()


Block = Line | Table
GAP = Line(())
BAR = "━"
"""One step of a bar; "#" where a terminal has no such character."""


@dataclass(frozen=True)
class Answer:
    """``facts`` makes what ``--json`` prints, ``blocks`` the text, for a terminal (True) or plain (False)."""

    facts: Callable[[], Mapping[str, Any]]
    blocks: Callable[[bool], Iterable[Block]]
    status: int = 0


@dataclass(frozen=True)
class Progress:
    """What a long command tells on its way: a label, a total in bytes, then bytes done. See ``terminal.progress``."""

    start: Callable[[str, int], None]
    advance: Callable[[int], None]


def clean(text: str) -> str:
    """The text with everything that could steer a terminal (or cannot be printed) escaped; line breaks, too."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def number(count: int) -> str:
    return f"{count:,}"


def counted(count: int, noun: str) -> str:
    """1 chunk, 2 chunks, 12,000 entries, 3 keys."""
    plural = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"
    return f"{number(count)} {noun if count == 1 else plural}"


def shaped(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def age(moment: float) -> str:
    """How long ago, in the largest unit that fits."""
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def figure(value: float) -> str:
    """A measured value: exact where it is a whole number, else six digits."""
    if isinstance(value, int) or (
        math.isfinite(value) and value == int(value) and abs(value) < 1e15
    ):
        return str(int(value))
    return f"{value:.6g}"


def jsonable(value: Any) -> Any:
    """Numbers that JSON does not have (nan, inf) as text; tuples as lists; keys as text."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(key): jsonable(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [jsonable(item) for item in value]
    return repr(value)
