"""The rows of P16: each door takes turns with megackpt.save or megackpt.load of the same state."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.doors import DOORS, ENGINE, Engine
from benchmarks.figures import start_row
from benchmarks.races import Arena, Entry
from benchmarks.ranks import Taken, Team
from benchmarks.states import Spec
from benchmarks.table import Row, Section, Value
from benchmarks.trainer_doors import TRAINER_DOORS

ALL_DOORS: dict[str, type[Engine]] = {**DOORS, **TRAINER_DOORS}
REACH = "<= 1.15"
_KINDS = "/ megackpt", "/ megackpt, CPU", "/ megackpt called alike, CPU"


def compare(
    root: Path, section: Section, specs: Mapping[str, Spec], rounds: int
) -> None:
    """Three rows for saves and three for loads of each state, for the doors that the section names.

    Seconds, CPU seconds of all ranks, and these over a call of megackpt that needs the same besides.
    Each trainer has separate processes: some of their packages do not go together.
    """
    rows: dict[tuple[str, str], list[Row]] = {}
    for what in specs:
        for verb in ("save", "load"):
            words = [f"{verb} of {what} {kind}" for kind in _KINDS]
            rows[verb, what] = [start_row(section, "P16", w, REACH) for w in words]
    teams = [[name for name in section.columns if name in DOORS]]
    teams += [[name] for name in section.columns if name in TRAINER_DOORS]
    for doors in teams:
        with Team(doors[-1], 4, root) as team:
            engines = [ALL_DOORS[door].alike for door in doors]
            names = dict.fromkeys([ENGINE, *engines, *doors])
            arena = Arena(root, dict.fromkeys(names, team), rounds)
            for what, spec in specs.items():
                arena.hold(spec, 2)
                for verb in ("save", "load"):
                    fill(rows[verb, what], race(arena, verb, spec), doors)
                arena.forget(spec)


def race(
    arena: Arena, verb: str, spec: Spec
) -> Mapping[str, list[tuple[float, float]]]:
    """The seconds and the CPU seconds of each contestant and round. The first round is not counted."""
    taken: dict[str, list[tuple[float, float]]] = defaultdict(list)
    act = arena.save if verb == "save" else partial(arena.load, check=True)
    for number in range(arena.rounds + 1):
        for name in arena.teams:
            os.sync()
            sums = _sums(act(spec, Entry(name, True)))
            if number:
                taken[name].append(sums)
    return taken


def fill(
    rows: Sequence[Row],
    taken: Mapping[str, list[tuple[float, float]]],
    doors: Sequence[str],
) -> None:
    seconds, cpu, cpu_alike = rows
    for door in doors:
        alike = ALL_DOORS[door].alike
        pairs = list(zip(taken[door], taken[ENGINE], strict=True))
        seconds.values[door] = Value.of([one[0] / base[0] for one, base in pairs])
        cpu.values[door] = Value.of([one[1] / base[1] for one, base in pairs])
        if alike != ENGINE:
            pairs = list(zip(taken[door], taken[alike], strict=True))
            cpu_alike.values[door] = Value.of([one[1] / base[1] for one, base in pairs])


def _sums(taken: Sequence[Taken]) -> tuple[float, float]:
    """The seconds of the slowest rank, and the CPU seconds of all ranks."""
    return max(each.seconds for each in taken), sum(each.cpu for each in taken)
