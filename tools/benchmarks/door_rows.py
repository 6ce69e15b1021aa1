"""The rows of P16: each door takes turns with megackpt.save or megackpt.load of the same state."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

from benchmarks.doors import DOORS, ENGINE
from benchmarks.figures import start_row
from benchmarks.races import Arena, Entry
from benchmarks.ranks import Taken
from benchmarks.states import Spec
from benchmarks.table import Section, Value


def compare(arena: Arena, section: Section, spec: Spec, what: str) -> None:
    """Two rows for saves and two for loads of one state: seconds, and CPU seconds of all ranks."""
    arena.hold(spec, 2)
    for verb in ("save", "load"):
        seconds = start_row(section, "P16", f"{verb} of {what} / megackpt", "<= 1.15")
        cpu = start_row(section, "P16", f"{verb} of {what} / megackpt, CPU", "<= 1.15")
        ratios = _ratios(arena, verb, spec)
        for door, pairs in ratios.items():
            seconds.values[door], cpu.values[door] = map(
                Value.of, zip(*pairs, strict=True)
            )
    arena.forget(spec)


def _ratios(
    arena: Arena, verb: str, spec: Spec
) -> Mapping[str, list[tuple[float, float]]]:
    """For each door and round its seconds and CPU seconds over the engine's.

    The first round is not counted.
    """
    ratios: dict[str, list[tuple[float, float]]] = defaultdict(list)
    act = arena.save if verb == "save" else partial(arena.load, check=True)
    for number in range(arena.rounds + 1):
        os.sync()
        base = _sums(act(spec, Entry(ENGINE, True)))
        for door in [name for name in DOORS if name != ENGINE]:
            seconds, cpu = _sums(act(spec, Entry(door, True)))
            if number:
                ratios[door].append((seconds / base[0], cpu / base[1]))
    return ratios


def _sums(taken: Sequence[Taken]) -> tuple[float, float]:
    """The seconds of the slowest rank, and the CPU seconds of all ranks."""
    return max(each.seconds for each in taken), sum(each.cpu for each in taken)
