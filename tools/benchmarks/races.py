"""Races: contestants do the same thing to the same bytes, in turns, and are compared with the plain-I/O limit."""

from __future__ import annotations

import os
import shutil
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.ranks import BenchmarkFailed, Taken, Team
from benchmarks.states import Spec
from benchmarks.table import Value
from benchmarks.training import Trained

FAR = 4.0
"""A contestant that takes this many times the limit in the first measured round leaves the race."""


class Entry(NamedTuple):
    """A contestant, and whether its loads check digests."""

    name: str
    verify: bool = False


@dataclass
class Times:
    """The times of one entry in each round: seconds, seconds over the limit's, CPU seconds of all ranks."""

    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def ratio(self, moved: float) -> Value:
        """With the GB/s of the bytes that all ranks together wrote or read."""
        return Value.of(self.ratios, moved / statistics.median(self.seconds) / 1e9)


@dataclass(frozen=True)
class Arena:
    """Where races are held: the folder, the team of each contestant, how many rounds count."""

    root: Path
    teams: dict[str, Team]
    rounds: int

    @property
    def places(self) -> list[Team]:
        return list(dict.fromkeys(self.teams.values()))

    @property
    def ranks(self) -> int:
        return len(self.teams["limit"].pids)

    def hold(self, spec: Spec | None, parts: int, strided: bool = False) -> None:
        for team in self.places:
            team.send("hold", spec, parts, strided)
        for team in self.places:
            team.answers()

    def folder(self, spec: Spec, name: str) -> Path:
        return self.root / f"{spec.name}.{name.replace(' ', '-')}"

    def save(self, spec: Spec, entry: Entry) -> list[Taken]:
        """Save into a folder that does not exist, on an idle disk."""
        team, folder = self.teams[entry.name], self.folder(spec, entry.name)
        shutil.rmtree(folder, ignore_errors=True)
        team.ask("declare", entry.name)
        os.sync()
        return team.ask("save", entry.name, folder)

    def load(self, spec: Spec, entry: Entry, check: bool = False) -> list[Taken]:
        """From the page cache. ``check``: and see whether everything came."""
        team, folder = self.teams[entry.name], self.folder(spec, entry.name)
        team.ask("declare", entry.name)
        if check:
            team.ask("blank")
        os.sync()
        taken = team.ask("load", entry.name, folder, entry.verify)
        if check and entry.name != "limit":
            wrong = team.ask("wrong")
            if any(wrong):
                raise BenchmarkFailed(f"{entry.name} loaded wrong values: {wrong}")
        team.ask("fill") if check else None
        return taken

    def train(
        self, spec: Spec, name: str, *, check: bool = False, on_device: bool = False
    ) -> list[Trained]:
        """Save while training continues, into a new folder.

        ``check``: change all tensors as soon as that is allowed, and see whether they were saved as they had been.
        """
        team, folder = self.teams[name], self.folder(spec, name)
        shutil.rmtree(folder, ignore_errors=True)
        if check:
            team.ask("fill")
        os.sync()
        taken: list[Trained] = team.ask("train", name, folder, check, on_device)
        if check:
            team.ask("declare_for", name)
            team.ask("load", name, folder, False)
            wrong = team.ask("wrong")
            if any(wrong):
                raise BenchmarkFailed(f"{name} saved wrong values: {wrong}")
        return taken

    def saved(self, spec: Spec, names: Iterable[str], parts: int) -> None:
        """See that all have saved this state."""
        absent = [name for name in names if not self.folder(spec, name).exists()]
        if absent:
            self.hold(spec, parts)
            for name in absent:
                self.save(spec, Entry(name))

    def forget(self, spec: Spec) -> None:
        for folder in self.root.glob(f"{spec.name}.*"):
            shutil.rmtree(folder, ignore_errors=True)

    def race(
        self, verb: str, spec: Spec, entries: Sequence[Entry]
    ) -> dict[Entry, Times]:
        """``save`` or ``load`` of the state that is held, by all in turn; the first round is not counted.

        The limit comes first in each round. The order of all other entries moves on by one from round to round.
        """
        times: dict[Entry, Times] = defaultdict(Times)
        here = list(entries)
        for number in range(self.rounds + 1):
            turn = number % max(len(here), 1)
            limit = 0.0
            for entry in [Entry("limit"), *here[turn:], *here[:turn]]:
                act = (
                    self.save
                    if verb == "save"
                    else partial(self.load, check=number == 0)
                )
                taken = act(spec, entry)
                seconds = max(t.seconds for t in taken)
                if entry.name == "limit":
                    limit = seconds
                if number:
                    times[entry].seconds.append(seconds)
                    times[entry].ratios.append(seconds / limit)
                    times[entry].cpu.append(sum(t.cpu for t in taken))
            here = [
                entry for entry in here if not number or times[entry].ratios[-1] < FAR
            ]
        return times
