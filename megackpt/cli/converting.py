"""``megackpt convert``: format to format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from megackpt.cli.answers import (
    Answer,
    Block,
    Cell,
    Line,
    Progress,
    counted,
    number,
    size,
)
from megackpt.converter import Converted, convert as rewrite


def convert(arguments: Mapping[str, Any], progress: Progress) -> Answer:
    """Rewrite a checkpoint as another format's: arguments and errors are those of ``megackpt.convert``."""
    done = rewrite(**arguments, progress=_told(progress))
    facts = {"source": arguments["source"], **asdict(done)}
    return Answer(lambda: facts, lambda _pretty: _blocks(done))


def _told(progress: Progress) -> Any:
    """What the converter calls with the bytes done and the bytes in all."""
    before: list[int] = []

    def tell(done: int, total: int) -> None:
        if not before:
            progress.start("converting", total)
            before.append(0)
        progress.advance(done - before[0])
        before[0] = done

    return tell


def _blocks(done: Converted) -> Iterator[Block]:
    held = f"{counted(done.tensors, 'tensor')}, {counted(done.objects, 'object')}, {size(done.bytes)}"
    earlier = f", {size(done.resumed)} of it by an earlier run" if done.resumed else ""
    yield Line.of(
        Cell(done.target, "bold"), f": written as {done.format}: {held}{earlier}"
    )
    for key, count in done.overflows.items():
        told = f"{key}: {number(count)} finite values are beyond the range of what they were cast to"
        yield Line.of(Cell(told, "yellow"))
