"""The commands ``ls``, ``verify``, ``diff`` and ``convert``: options in, an answer out."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

from megackpt import events
from megackpt.checkpoint import Report, open_checkpoint, verify as verify_checkpoint
from megackpt.cli.compare import Comparison, Tolerance, compare
from megackpt.cli.output import (
    Answer,
    Block,
    Cell,
    Line,
    Table,
    counted,
    format_age,
    format_shape,
    one_line,
)
from megackpt.errors import MismatchError, NotACheckpoint
from megackpt.events import format_size
from megackpt.manager import Run, Step, list_run

_MAX_VALUE_LENGTH = 200


def ls(options: argparse.Namespace) -> Answer:
    """The checkpoints of a run. Raises the reason if the directory neither is nor has one."""
    run = list_run(options.directory)
    if not run.steps and run.itself is None:
        try:
            open_checkpoint(options.directory)
        except NotACheckpoint as error:
            raise NotACheckpoint(
                f"{error}; it contains no checkpoint either"
            ) from error
    data = {
        "location": run.location,
        "checkpoint": run.itself,
        "steps": run.steps,
        "trackers": run.trackers,
        "latest": run.latest.name if run.latest else None,
    }
    return Answer(data, _run_blocks(run))


def _run_blocks(run: Run) -> Iterator[Block]:
    location = Cell(run.location, "bold")
    if step := run.itself:
        size = f"{counted(step.files, 'file')}, {format_size(step.bytes)}"
        text = f"{_format(step)}, {size}, saved {format_age(step.saved)} ago"
        yield location, f" is a checkpoint: {text}"
    if not run.steps:
        return
    complete = sum(bool(step.complete) for step in run.steps)
    yield location, f": {counted(len(run.steps), 'checkpoint')}, {complete:,} complete"
    headings = ("name", "step", "format", "files", "size", "age", "state")
    rows = [_step_row(step, step is run.latest) for step in run.steps]
    yield Table(headings, rows, right=(1, 3, 4, 5))
    for step in run.steps:
        if step.reason:
            yield Cell(step.name, "bold"), f": {step.reason}"
    for tracker in run.trackers:
        verdict = Cell("correct", "green")
        if tracker.problem:
            verdict = Cell(tracker.problem, "red")
        text = f" names {tracker.says or 'nothing'} as the latest: "
        yield Cell(tracker.name, "bold"), text, verdict


def _step_row(step: Step, is_latest: bool) -> Line:
    state = Cell("incomplete", "red")
    if is_latest:
        state = Cell("complete, latest", "bold green")
    elif step.complete:
        state = Cell("complete", "green")
    elif step.complete is None:
        state = Cell("not readable", "yellow")
    return [
        Cell(step.name, "bold" if is_latest else ""),
        "-" if step.step is None else str(step.step),
        Cell(_format(step), "cyan"),
        f"{step.files:,}",
        format_size(step.bytes),
        format_age(step.saved) if step.saved else "-",
        state,
    ]


def _format(step: Step) -> str:
    return f"{step.format} {step.version}" if step.format else "-"


def verify(options: argparse.Namespace) -> Answer:
    """Read everything and compare the digests. Raises NotACheckpoint if there is none."""
    report = verify_checkpoint(options.checkpoint)
    status = 0
    if report.problems:
        status = 1
    elif report.unread:
        status = 6
    return Answer({"ok": report.ok, **vars(report)}, _report_blocks(report), status)


def _report_blocks(report: Report) -> Iterator[Block]:
    verdict = Cell("all good", "bold green")
    if report.problems:
        verdict = Cell(counted(len(report.problems), "problem"), "bold red")
    elif report.unread:
        text = f"{counted(len(report.unread), 'part')} could not be read"
        verdict = Cell(text, "bold red")
    size = f"{format_size(report.bytes)} in {counted(report.files, 'file')}"
    entries = counted(report.tensors, "entry")
    yield Cell(report.location, "bold"), f": {entries}, {size}: ", verdict
    lists = [
        ("  - ", "red", report.problems),
        ("  could not be read: ", "red", report.unread),
        ("  needs trusted=: ", "yellow", report.untrusted),
    ]
    for label, style, texts in lists:
        for text in texts:
            first, *others = text.split("\n")
            yield Cell(label, style), first
            for line in others:
                yield "    ", line
    if report.ok and not report.checked:
        text = "  it has no digests: sizes were checked, not the content"
        yield (Cell(text, "yellow"),)
    if report.foreign:
        text = f"  not part of the checkpoint: {', '.join(report.foreign)}"
        yield (Cell(text, "yellow"),)


def diff(options: argparse.Namespace) -> Answer:
    """Compare two checkpoints. Raises MismatchError if no key of either matches."""
    tolerance = None
    if options.rtol is not None or options.atol is not None:
        tolerance = Tolerance(options.rtol or 0.0, options.atol or 0.0)
    a, b = open_checkpoint(options.a), open_checkpoint(options.b)
    found = compare(a, b, options.select, tolerance)
    is_empty = not (found.compared or found.only_a or found.only_b)
    if is_empty and options.select != "*":
        raise MismatchError(
            f"neither {options.a} nor {options.b} has a key that matches {options.select!r}"
        )
    data = {"a": options.a, "b": options.b, "same": found.same, **vars(found)}
    blocks = _comparison_blocks(options.a, options.b, found)
    return Answer(data, blocks, 0 if found.same else 1)


def _comparison_blocks(a: str, b: str, found: Comparison) -> Iterator[Block]:
    yield "A: ", Cell(a, "bold")
    yield "B: ", Cell(b, "bold")
    only = [("A", key) for key in found.only_a] + [("B", key) for key in found.only_b]
    yield Table(("only in", "key"), only)
    described: list[Line] = []
    tensors: list[Line] = []
    elements: list[Line] = []
    objects: list[Line] = []
    for key, *metas in found.described:
        texts = [f"{meta.dtype} {format_shape(meta.shape)}" for meta in metas]
        described.append([key, *_side_cells(texts)])
    for tensor in found.tensors:
        count = Cell(f"{tensor.elements:,}", "yellow")
        largest = Cell(f"{tensor.max:.9g}", "bold")
        tensors.append([tensor.key, count, f"{tensor.total:,}", largest])
        for index, *values in tensor.first:
            elements.append([tensor.key, str(list(index)), *_side_cells(values)])
    for shard in found.objects:
        name = f"{shard.key} {list(shard.offset)}" if shard.offset else shard.key
        for path, *values in shard.changes:
            where = ".".join(map(str, path)) or "(all of it)"
            objects.append([name, where, *_side_cells(map(_shortened, values))])
    yield Table(("different shape or dtype", "a", "b"), described)
    yield Table(("tensor", "differing", "of", "max"), tensors, right=(1, 2, 3))
    yield Table(("first elements of", "at", "a", "b"), elements, right=(2, 3))
    yield Table(("object", "part", "a", "b"), objects)
    compared = (
        f"{counted(found.compared, 'key')} compared ({found.by_digest:,} the same by digest, "
        f"{format_size(found.bytes_read)} read)"
    )
    if found.same:
        yield Cell("the same", "bold green"), f": {compared}"
        return
    counts = {
        "only in A": len(found.only_a),
        "only in B": len(found.only_b),
        "of different shape or dtype": len(found.described),
        "tensors with different values": len(found.tensors),
        "different objects": len({shard.key for shard in found.objects}),
    }
    texts = [f"{count:,} {text}" for text, count in counts.items() if count]
    yield Cell("different", "bold red"), f": {', '.join(texts)}; {compared}"


def _side_cells(values: Iterable[Any]) -> list[Cell]:
    texts = [f"{v:.9g}" if isinstance(v, float) else str(v) for v in values]
    return [Cell(texts[0], "red"), Cell(texts[1], "green")]


def _shortened(value: Any) -> str:
    if value is ...:
        return "-"
    text = one_line(value)
    if len(text) <= _MAX_VALUE_LENGTH:
        return text
    return f"{text[:_MAX_VALUE_LENGTH]}... ({len(text)} characters)"


def convert(options: argparse.Namespace) -> Answer:
    """Rewrite a checkpoint in another format; errors are those of ``megackpt.convert``."""
    # Imports torch.
    from megackpt.cli.convert_options import convert_arguments
    from megackpt.converter import convert as convert_checkpoint

    operation = events.operation("convert", options.target)
    with operation as running, events.stage("write") as stage:

        def report_progress(done: int, total: int) -> None:
            stage.done, stage.todo = done, total

        try:
            arguments = convert_arguments(options)
            done = convert_checkpoint(**arguments, progress=report_progress)
        except ValueError as error:
            # An option has a wrong value, or options contradict each other.
            options.usage_error(str(error))
            raise
        running.bytes = done.bytes
    data = {"source": options.source, **vars(done)}
    counts = [
        counted(done.tensors, "tensor"),
        counted(done.objects, "object"),
        format_size(done.bytes),
    ]
    if done.resumed:
        counts.append(f"{format_size(done.resumed)} of it by an earlier run")
    text = f": written as {done.format}: {', '.join(counts)}"
    blocks: list[Block] = [(Cell(done.target, "bold"), text)]
    for key, count in done.overflows.items():
        text = f"{key}: {count:,} finite values are out of range of the target dtype"
        blocks.append((Cell(text, "yellow"),))
    return Answer(data, blocks)
