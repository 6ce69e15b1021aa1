"""``megackpt plan``: what a save at another parallelism would write, rank by rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from megackpt.checkpoint import open_checkpoint
from megackpt.commands.answers import BAR, Answer, Block, Cell, Line, Table, counted, number, size
from megackpt.planning.box import Int64
from megackpt.planning.resharding import Parallelism
from megackpt.rehearsal import Rehearsal, rehearse
from megackpt.strategies import backend_named

_ALL = 16  # ranks that are all shown; of more, the busiest and the idlest
_SOME = 5
_WIDTH = 30


def plan(checkpoint: str, job: Parallelism, to: str | None) -> Answer:
    """Rehearse a save in the checkpoint's own format, or in ``to``. Raises NotACheckpoint, BackendError."""
    manifest = open_checkpoint(checkpoint).manifest
    found = rehearse(manifest, job, backend_named(to or manifest.backend[0]))
    return Answer(lambda: _facts(checkpoint, found), lambda pretty: _blocks(checkpoint, found, pretty))


def _facts(checkpoint: str, found: Rehearsal) -> dict[str, Any]:
    job = found.job
    return {
        "location": checkpoint,
        "format": found.format,
        "tp": job.tensor,
        "pp": job.pipeline,
        "dp": job.data,
        "ep": job.expert,
        "fully_sharded": job.fully_sharded,
        "ranks": job.ranks,
        "bytes": int(found.bytes.sum()),
        "files": found.all_files,
        "chunks": found.chunks,
        "index_bytes": found.index,
        "imbalance": found.imbalance,
        "bytes_per_rank": found.bytes.tolist(),
        "files_per_rank": found.files.tolist(),
        "uneven": found.uneven,
        "axes": {key: axes._asdict() for key, axes in found.axes.items()},
    }


def _blocks(checkpoint: str, found: Rehearsal, pretty: bool) -> Iterator[Block]:
    job = found.job
    shape = f"TP {job.tensor} x PP {job.pipeline} x DP {job.data}" + (f", EP {job.expert}" * (job.expert > 1))
    yield Line.of(
        Cell(checkpoint, "bold"), f" on {counted(job.ranks, 'rank')} ({shape}), saved as {found.format}"
    )
    yield Table(
        ("of a rank", "in all", "least", "mean", "most"),
        [
            ["bytes", size(int(found.bytes.sum())), *map(size, _spread(found.bytes))],
            ["files", number(found.all_files), *map(_count, _spread(found.files))],
        ],
        right=range(1, 5),
    )
    yield _ranks(found, pretty)
    worse = "green" if found.imbalance < 1.2 else "yellow"
    yield Line.of("imbalance ", Cell(f"{found.imbalance:.2f}", worse), " (the busiest rank over the mean)")
    yield Line.of(f"index about {size(found.index)}, {counted(found.chunks, 'chunk')}")
    yield from _notes(found)


def _count(value: float) -> str:
    return number(value) if isinstance(value, int) else f"{value:.1f}"


def _spread(column: Int64) -> tuple[float, ...]:
    return int(column.min()), float(column.mean()), int(column.max())


def _ranks(found: Rehearsal, pretty: bool) -> Table:
    order = np.argsort(-found.bytes, kind="stable")
    every = len(order) <= _ALL
    shown = range(len(order)) if every else [*order[:_SOME].tolist(), *order[-_SOME:].tolist()]
    places = list(found.job.places())
    most = max(1, int(found.bytes.max()))
    rows: list[list[Cell | str]] = []
    for rank in shown:
        stage, data, cut = places[rank]
        octets = int(found.bytes[rank])
        row: list[Cell | str] = [
            str(rank),
            str(cut),
            str(stage),
            str(data),
            number(int(found.files[rank])),
            size(octets),
        ]
        rows.append([*row, Cell(BAR * round(_WIDTH * octets / most), "cyan")] if pretty else row)
    if not every:
        rows.insert(_SOME, [Cell("...", "dim"), *[""] * (len(rows[0]) - 1)])
    headings = ("rank", "tp", "pp", "dp", "files", "size", *([""] if pretty else []))
    return Table(headings, rows, right=range(6))


def _notes(found: Rehearsal) -> Iterator[Line]:
    cut = sum(axes.cut is not None for axes in found.axes.values())
    stacks = sum(axes.layers is not None for axes in found.axes.values())
    yield Line.of(
        f"inferred from the stored chunks: {counted(cut, 'tensor')} of {number(len(found.axes))} cut, "
        f"{counted(stacks, 'stack')} of layers; the others count as replicas"
    )
    if found.uneven:
        some = ", ".join(found.uneven[:_SOME]) + (", ..." if len(found.uneven) > _SOME else "")
        note = f"{counted(len(found.uneven), 'tensor')} cut unevenly: {some}"
        yield Line.of(Cell(note, "yellow"))
