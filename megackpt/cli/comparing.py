"""``megackpt diff``: what differs between two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megackpt.checkpoint import open_checkpoint
from megackpt.cli import values
from megackpt.cli.answers import (
    Answer,
    Block,
    Cell,
    Line,
    Progress,
    Table,
    counted,
    figure,
    number,
    shaped,
    size,
)
from megackpt.cli.differences import Comparison, TensorDifference, Tolerance, compare
from megackpt.errors import MismatchError
from megackpt.planning.box import Box
from megackpt.planning.manifest import TensorMeta

DIFFERENT = 1


def diff(
    a: str,
    b: str,
    progress: Progress,
    *,
    select: str = "*",
    tolerance: Tolerance | None = None,
) -> Answer:
    """Compare two checkpoints. Raises MismatchError where no key matches, NotACheckpoint, CorruptCheckpoint."""
    found = compare(
        open_checkpoint(a),
        open_checkpoint(b),
        select=select,
        tolerance=tolerance,
        start=lambda total: progress.start("comparing", total),
        advance=progress.advance,
    )
    if select != "*" and not (found.compared or found.only_a or found.only_b):
        raise MismatchError(f"neither {a} nor {b} holds a key that matches {select!r}")
    status = 0 if found.same else DIFFERENT
    return Answer(
        lambda: _facts(a, b, found), lambda _pretty: _blocks(a, b, found), status
    )


def _facts(a: str, b: str, found: Comparison) -> dict[str, Any]:
    return {
        "a": a,
        "b": b,
        "same": found.same,
        "compared": found.compared,
        "by_digest": found.by_digest,
        "bytes_read": found.bytes_read,
        "only_a": found.only_a,
        "only_b": found.only_b,
        "described": [
            {"key": key, "a": mine._asdict(), "b": yours._asdict()}
            for key, mine, yours in found.described
        ],
        "tensors": [_tensor_facts(tensor) for tensor in found.tensors],
        "objects": [
            {
                "key": one.key,
                "offset": one.box.offset,
                "changes": [
                    {"path": list(map(_step, path)), **_sides(x, y)}
                    for path, x, y in one.changes
                ],
            }
            for one in found.objects
        ],
    }


def _tensor_facts(tensor: TensorDifference) -> dict[str, Any]:
    return {
        "key": tensor.key,
        "total": tensor.total,
        "elements": tensor.elements,
        "max": tensor.largest,
        "mean": tensor.mean,
        "nans": {"a": tensor.nans[0], "b": tensor.nans[1]},
        "first": [{"index": e.index, "a": e.a, "b": e.b} for e in tensor.first],
    }


def _step(key: Any) -> Any:
    return key if isinstance(key, int) else str(key)


def _sides(x: Any, y: Any) -> dict[str, Any]:
    """What is on a side; a side that has nothing there has no field."""
    return {
        name: values.facts(value)
        for name, value in (("a", x), ("b", y))
        if value is not ...
    }


def _blocks(a: str, b: str, found: Comparison) -> Iterator[Block]:
    yield Line.of("A: ", Cell(a, "bold"))
    yield Line.of("B: ", Cell(b, "bold"))
    yield Table(
        ("only in", "key"),
        [["A", key] for key in found.only_a] + [["B", key] for key in found.only_b],
    )
    yield Table(
        ("of other shape or dtype", "a", "b"),
        [
            [key, Cell(_described(mine), "red"), Cell(_described(yours), "green")]
            for key, mine, yours in found.described
        ],
    )
    yield Table(
        ("tensor", "differing", "of", "max", "mean", "nan in a", "nan in b"),
        [_row(tensor) for tensor in found.tensors],
        right=range(1, 7),
    )
    yield Table(
        ("first elements of", "at", "a", "b"),
        [
            [
                tensor.key,
                _index(e.index),
                Cell(_said(e.a), "red"),
                Cell(_said(e.b), "green"),
            ]
            for tensor in found.tensors
            for e in tensor.first
        ],
        right=(2, 3),
    )
    yield Table(
        ("object", "part", "a", "b"),
        [
            [
                _object(one.key, one.box),
                _path(path),
                Cell(_short(x), "red"),
                Cell(_short(y), "green"),
            ]
            for one in found.objects
            for path, x, y in one.changes
        ],
    )
    yield _verdict(found)


def _row(tensor: TensorDifference) -> list[Cell | str]:
    return [
        tensor.key,
        Cell(number(tensor.elements), "yellow"),
        number(tensor.total),
        Cell(figure(tensor.largest), "bold"),
        figure(tensor.mean),
        *(Cell(number(count), "bold red" if count else "dim") for count in tensor.nans),
    ]


def _verdict(found: Comparison) -> Line:
    how = f"{number(found.by_digest)} the same by digest, {size(found.bytes_read)} read"
    compared = f"{counted(found.compared, 'key')} compared ({how})"
    if found.same:
        return Line.of(Cell("the same", "bold green"), f": {compared}")
    parts = {
        "only in A": len(found.only_a),
        "only in B": len(found.only_b),
        "of other shape or dtype": len(found.described),
        "of other values": len(found.tensors),
        "objects that differ": len({one.key for one in found.objects}),
    }
    told = ", ".join(
        f"{number(count)} {what}" for what, count in parts.items() if count
    )
    return Line.of(Cell("different", "bold red"), f": {told}; {compared}")


def _described(meta: TensorMeta) -> str:
    return f"{meta.dtype} {shaped(meta.shape)}"


def _index(index: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, index))}]"


def _said(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _object(key: str, box: Box) -> str:
    return f"{key} {_index(box.offset)}" if box.offset else key


def _path(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path)) or "(all of it)"


def _short(value: Any) -> str:
    text = values.said(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
