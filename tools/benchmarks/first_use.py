"""P15: the first save, asynchronous save and load of new processes, over the next ones of the same processes."""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import start_row
from benchmarks.ranks import Taken, Team
from benchmarks.states import Spec
from benchmarks.table import Section, Value
from benchmarks.training import PREPARED, Trained

NEXT = 3
"""Saves or loads of the same processes, whose median the first one is compared with."""
_VERBS = {
    "save": "save",
    "load": "load, verified",
    "loaded": "async save after a load: training blocked",
    "train": "async save: training blocked",
    "prepared": "async save with staging_bytes: training blocked",
}
_numbers = itertools.count()


@dataclass(frozen=True)
class FirstUse:
    """The formats to compare, and the section of the table."""

    root: Path
    section: Section
    formats: Sequence[str]
    rounds: int

    def compare(self, spec: Spec) -> None:
        for verb, what in _VERBS.items():
            row = start_row(
                self.section, "P15", f"{what}, the first / the next ones", "<= 1.3"
            )
            for name in self.formats:
                ratios = [self.ratio(verb, name, spec) for _ in range(self.rounds)]
                row.values[name] = Value.of(ratios)
        for name in self.formats:
            shutil.rmtree(self.folder(name), ignore_errors=True)

    def folder(self, name: str) -> Path:
        return self.root / f"first.{name.replace(' ', '-')}"

    def ratio(self, verb: str, name: str, spec: Spec) -> float:
        """First seconds over later seconds, in new processes that have imported the library and hold the state."""
        with Team(f"new{next(_numbers)}", 4, self.root) as team:
            team.ask("hold", spec, 2)
            team.ask("look_up")
            team.ask("declare", name)
            if verb == "loaded":
                team.ask("load", name, self.folder(name), True)
            taken = [self.seconds(team, verb, name) for _ in range(1 + NEXT)]
        return taken[0] / statistics.median(taken[1:])

    def seconds(self, team: Team, verb: str, name: str) -> float:
        folder = self.folder(name)
        if verb != "load":  # it loads what the last process has saved
            shutil.rmtree(folder, ignore_errors=True)
        os.sync()
        if verb in ("loaded", "train", "prepared"):
            trained = name + PREPARED if verb == "prepared" else name
            blocked: list[Trained] = team.ask("train", trained, folder, False, True)
            return max(each.blocked for each in blocked)
        arguments = (True,) if verb == "load" else ()
        taken: list[Taken] = team.ask(verb, name, folder, *arguments)
        return max(each.seconds for each in taken)
