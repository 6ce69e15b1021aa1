"""The report of a simulated save and load, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megackpt.cli.output import Answer
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


def answer(saves: Sequence[Save], loads: Sequence[Load | None]) -> Answer:
    simulations = []
    for save, load in zip(saves, loads, strict=True):
        facts = save_facts(save)
        facts["load"] = load and load_facts(load)
        simulations.append(facts)
    # As text each is a list of lines: a table would be wide.
    text = {f"simulation_{i}": facts for i, facts in enumerate(simulations)}
    return Answer({"simulations": simulations}, text=text)


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
