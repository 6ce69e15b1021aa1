"""The report of a simulated save and load, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megackpt.cli.output import Answer, Block, Table, counted
from megackpt.events import format_size
from megackpt.planning.box import Int64
from simulation.parallelism import Parallelism
from simulation.simulator import (
    AGAIN_COLLECTIVES,
    LOAD_COLLECTIVES,
    SAVE_COLLECTIVES,
    Load,
    Save,
    per_shard,
)

STEPS = {
    "receive": "unpack what all ranks declare",
    "plan": "merge, check coverage, choose writers (P9)",
    "pack": "pack each rank's plan",
    "emit": "the format's table of contents (P9)",
    "index": "megackpt.index, without digests",
    "open": "open it again (P10)",
}


def answer(saves: Sequence[Save], loads: Sequence[Load | None]) -> Answer:
    return Answer(_facts(saves, loads), _blocks(saves, loads))


def _facts(saves: Sequence[Save], loads: Sequence[Load | None]) -> dict[str, Any]:
    return {
        "simulations": [
            save_facts(save) | {"load": load and load_facts(load)}
            for save, load in zip(saves, loads, strict=True)
        ]
    }


def save_facts(save: Save) -> dict[str, Any]:
    return {
        "format": save.format,
        **_job(save.job),
        "shards_declared": save.rows,
        "chunks": save.chunks,
        "files": save.all_files,
        "bytes": _spread(save.written),
        "imbalance": save.imbalance,
        "gather_bytes": _spread(save.gathered),
        "scatter_bytes": _spread(save.scattered),
        "index_bytes": save.index,
        "index_bytes_without_digests": save.plain_index,
        "small_files_bytes": sum(save.small.values()) if save.small else None,
        "metadata_bytes": save.small.get(".metadata"),
        "cpu_seconds": save.seconds,
        "cpu_microseconds_per_shard": per_shard(save),
        "again": asdict(save.again),
        "collectives": {"first": SAVE_COLLECTIVES, "again": AGAIN_COLLECTIVES},
    }


def load_facts(load: Load) -> dict[str, Any]:
    return {
        **_job(load.job),
        "ranks_looked_at": len(load.ranks),
        "planning_cpu_seconds_of_a_rank": float(load.seconds.mean()),
        "planning_cpu_seconds_of_all": float(load.seconds.mean()) * load.job.ranks,
        "needed": _spread(load.needed),
        "read": _spread(load.read),
        "read_over_needed": float(load.read.sum() / max(1, load.needed.sum())),
        "requests": _spread(load.requests),
        "collectives": LOAD_COLLECTIVES,
    }


def _job(job: Parallelism) -> dict[str, int]:
    return {
        "tp": job.tensor,
        "pp": job.pipeline,
        "dp": job.data,
        "ep": job.expert,
        "ranks": job.ranks,
    }


def _spread(column: Int64) -> dict[str, float]:
    return {
        "min": int(column.min()),
        "mean": float(column.mean()),
        "max": int(column.max()),
        "all": int(column.sum()),
    }


def _blocks(saves: Sequence[Save], loads: Sequence[Load | None]) -> Iterator[Block]:
    for save, load in zip(saves, loads, strict=True):
        yield from _save(save)
        if load is not None:
            yield from _load(load)


def _save(save: Save) -> Iterator[Block]:
    shards = counted(save.rows, "shard")
    yield (f"A save by {_shape(save.job)} as {save.format}: {shards} declared",)
    rows = [
        _row("bytes written", save.written, format_size),
        _row("files", save.files, _number),
        _row("declarations sent (gather)", save.gathered, format_size),
        _row("plan received (scatter)", save.scattered, format_size),
    ]
    yield Table(
        ("of a rank", "in all", "least", "mean", "most"), rows, right=range(1, 5)
    )
    facts = [
        f"imbalance {save.imbalance:.2f} (the busiest rank over the mean)",
        f"{counted(save.all_files, 'file')} of data, {counted(save.chunks, 'chunk')}",
    ]
    if save.index is None or save.plain_index is None:
        facts.append(
            "the locations, and so the index, are known after a real save only"
        )
    else:
        each = save.plain_index / max(1, save.chunks)
        facts.append(
            f"table of contents {format_size(sum(save.small.values()))} in {counted(len(save.small), 'file')}; "
            f"index {format_size(save.index)}, without digests {format_size(save.plain_index)} ({each:.1f} B a chunk)"
        )
    facts.append(
        f"collectives: {', '.join(SAVE_COLLECTIVES)}; saved again: {', '.join(AGAIN_COLLECTIVES)}"
    )
    yield from ((fact,) for fact in facts)
    times = per_shard(save)
    steps = [
        [label, f"{save.seconds[step]:.3f} s", f"{times[step]:.2f} us"]
        for step, label in STEPS.items()
        if step in times
    ]
    yield Table(("CPU of the coordinator", "in all", "a shard"), steps, right=(1, 2))
    yield Table(
        ("CPU of planning", "coordinator", "another rank"),
        _planning(save),
        right=(1, 2),
    )


def _planning(save: Save) -> list[list[str]]:
    """The cost without and with a reused plan (P11)."""
    again, planned = (
        save.again,
        sum(save.seconds[step] for step in ("receive", "plan", "pack")),
    )
    known = _milliseconds(again.fingerprint)
    return [
        ["planned again", _milliseconds(planned + again.fingerprint), known],
        ["plan used again: a fingerprint and a vote", known, known],
    ]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _load(load: Load) -> Iterator[Block]:
    looked = (
        ""
        if len(load.ranks) == load.job.ranks
        else f", {len(load.ranks)} of them simulated"
    )
    yield (f"A load by {_shape(load.job)}{looked}",)
    rows = [
        _row("bytes needed", load.needed, format_size),
        _row("bytes read", load.read, format_size),
        _row("requests", load.requests, _number),
    ]
    yield Table(
        ("of a rank", "in all", "least", "mean", "most"), rows, right=range(1, 5)
    )
    ratio = load.read.sum() / max(1, load.needed.sum())
    mean = float(np.mean(load.seconds))
    yield (
        f"read over needed {ratio:.3f} (digests not checked; checked, whole blocks of 1 MiB)",
    )
    yield (
        f"planning {mean * 1e3:.1f} ms CPU a rank, {mean * load.job.ranks:.1f} s of all together",
    )
    yield (f"collectives: {', '.join(LOAD_COLLECTIVES)}",)


def _number(count: int) -> str:
    return f"{count:,}"


def _shape(job: Parallelism) -> str:
    experts = f", EP {job.expert}" if job.expert > 1 else ""
    return f"{counted(job.ranks, 'rank')} (TP {job.tensor} x PP {job.pipeline} x DP {job.data}{experts})"


def _row(what: str, column: Int64, show: Any) -> list[str]:
    mean = float(column.mean())
    return [
        what,
        show(int(column.sum())),
        show(int(column.min())),
        show(round(mean)),
        show(int(column.max())),
    ]
