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
from simulation.wire import Wire


def answer(saves: Sequence[Save], loads: Sequence[Load | None]) -> Answer:
    simulations = []
    # As text each is a list of lines: a table would be wide.
    text: dict[str, Any] = {}
    for i, (save, load) in enumerate(zip(saves, loads, strict=True)):
        facts = save_facts(save)
        facts["load"] = load and load_facts(load)
        wires = dict(save.wires)
        if load is not None and load.sends is not None:
            wires["load"] = load.sends
        table = [wire_facts(name, wire) for name, wire in wires.items()]
        simulations.append({**facts, "wire": table})
        text[f"simulation_{i}"] = facts
        text[f"wire_{i}"] = table
    return Answer({"simulations": simulations}, text=text)


def wire_facts(operation: str, wire: Wire) -> dict[str, Any]:
    """The figures of rank 0, and the largest ones of all other ranks (``others``)."""
    return {
        "operation": operation,
        "ranks": len(wire.sent),
        "connections_rank_0": int(wire.connections[0]),
        "connections_others": _most(wire.connections),
        "rounds": wire.rounds,
        "messages": int(wire.messages.sum()),
        "sent_rank_0": int(wire.sent[0]),
        "sent_others": _most(wire.sent),
        "received_rank_0": int(wire.received[0]),
        "received_others": _most(wire.received),
        "sent_all": int(wire.sent.sum()),
    }


def _most(column: Int64) -> int:
    return int(column[1:].max(initial=0))


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
