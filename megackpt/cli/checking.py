"""``megackpt verify``: is all of a checkpoint as it was written?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from megackpt.checkpoint import Report, verify
from megackpt.cli.answers import Answer, Block, Cell, Line, Progress, counted, size

FAILED, REFUSED = 1, 6


def check(checkpoint: str, progress: Progress) -> Answer:
    """Read everything, compare it with the digests. Raises NotACheckpoint where there is nothing to check."""
    report = verify(
        checkpoint,
        start=lambda total: progress.start("checking", total),
        advance=progress.advance,
    )
    return Answer(
        lambda: {"ok": report.ok, **asdict(report)},
        lambda _pretty: _blocks(report),
        FAILED if report.problems else REFUSED if report.unread else 0,
    )


def _blocks(report: Report) -> Iterator[Block]:
    if report.problems:
        verdict = Cell(counted(len(report.problems), "problem"), "bold red")
    elif report.unread:
        verdict = Cell(
            f"{counted(len(report.unread), 'part')} could not be read", "bold red"
        )
    else:
        verdict = Cell("all good", "bold green")
    held = f"{counted(report.tensors, 'entry')}, {size(report.bytes)} in {counted(report.files, 'file')}"
    yield Line.of(Cell(report.location, "bold"), f": {held}: ", verdict)
    for problem in report.problems:
        for i, line in enumerate(problem.split("\n")):
            yield Line.of(Cell("  " if i else "  - ", "red"), line)
    for part in report.unread:
        for i, line in enumerate(part.split("\n")):
            yield Line.of(Cell("    " if i else "  could not be read: ", "red"), line)
    for one in report.untrusted:
        yield Line.of(Cell("  needs trusted=: ", "yellow"), one)
    if report.ok and not report.checked:
        yield Line.of(
            Cell("  it has no digests: sizes were checked, not the content", "yellow")
        )
    if report.foreign:
        yield Line.of(
            Cell(f"  not part of the checkpoint: {', '.join(report.foreign)}", "yellow")
        )
