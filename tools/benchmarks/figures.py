"""The figures that are races or counts of bytes: which states, who takes part, and into which row it goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.memory import watched
from benchmarks.races import Arena, Entry, Times
from benchmarks.ranks import Team
from benchmarks.states import EIGHTHS, Spec
from benchmarks.table import Row, Section, Value


@dataclass(frozen=True)
class Course:
    """A section of the table in the making: who takes part in it, where, and which figures are asked for."""

    arena: Arena
    section: Section
    formats: Sequence[str]
    peers: Sequence[str]
    only: frozenset[str]

    @property
    def everybody(self) -> list[str]:
        return [*self.formats, *self.peers]

    def asks(self, *figures: str) -> bool:
        return bool(self.only.intersection(figures))

    def large(self, spec: Spec) -> None:
        """P1 to P4, and P17 of the races of P1 and P2."""
        parts = min(2, self.arena.ranks)
        if self.asks("P1", "P17"):
            self.arena.hold(spec, parts)
            row = start_row(self.section, "P1", "save / limit", "<= 1.25")
            times = self.arena.race("save", spec, entries(self.everybody))
            fill(row, times, spec.nbytes)
            self.cpu("save", times, spec.nbytes, "<= 0.45")
        if not self.asks("P2", "P3", "P4", "P17"):
            return self.arena.forget(spec)
        self.arena.saved(spec, ["limit", *self.everybody], parts)
        if self.asks("P2", "P17"):
            self.arena.hold(spec, parts)
            self.loads("P2", "load, same layout", spec, parts, ("<= 1.2", "<= 1.6"))
        if self.asks("P3") and self.arena.ranks > 1:
            for target in (1, self.arena.ranks):
                self.arena.hold(spec, target)
                what = f"load TP{parts} -> TP{target}"
                self.loads("P3", what, spec, target, ("<= 1.4", ""))
        if self.asks("P4"):
            self.slices(spec)
        return self.arena.forget(spec)

    def loads(
        self, figure: str, what: str, spec: Spec, parts: int, reach: tuple[str, str]
    ) -> None:
        taking = [*entries(self.everybody), *entries(self.formats, verify=True)]
        times = self.arena.race("load", spec, taking)
        for verify, how, goal in (
            (False, "unverified", reach[0]),
            (True, "verified", reach[1]),
        ):
            row = start_row(self.section, figure, f"{what}, {how} / limit", goal)
            mine = {entry: t for entry, t in times.items() if entry.verify is verify}
            moved = spec.nbytes * self.arena.ranks / parts
            fill(row, mine, moved)
            self.cpu(f"{what}, {how}", mine, moved, "<= 0.45" if verify else "")

    def cpu(
        self, what: str, times: dict[Entry, Times], moved: float, reach: str
    ) -> None:
        """P17: CPU seconds of all ranks for each GiB that all ranks together wrote or read."""
        if not self.asks("P17"):
            return
        row = start_row(self.section, "P17", f"{what}: CPU a GiB", reach, "s")
        row.values.update(
            (entry.name, Value.of([cpu / moved * 2**30 for cpu in t.cpu]))
            for entry, t in times.items()
        )

    def slices(self, spec: Spec) -> None:
        """P4: every rank asks for an eighth of the rows of every tensor."""
        self.arena.hold(spec, EIGHTHS)
        needed = spec.nbytes / EIGHTHS * self.arena.ranks
        for verify, how, goal in (
            (False, "unverified", "<= 1.05"),
            (True, "verified", "printed"),
        ):
            row = start_row(
                self.section, "P4", f"bytes read / needed, a 1/8 slice, {how}", goal
            )
            for entry in entries(
                self.formats if verify else self.everybody, verify=verify
            ):
                self.arena.load(spec, entry)  # whatever is read once only: code, caches
                taken = self.arena.load(spec, entry, check=True)
                row.values[entry.name] = Value.of([sum(t.read for t in taken) / needed])

    def small(self, spec: Spec, formats: Sequence[str], peers: Sequence[str]) -> None:
        """P5 and P6: many small tensors."""
        parts = min(2, self.arena.ranks)
        count, everybody = len(spec.rows), [*formats, *peers]
        if self.asks("P5"):
            self.arena.hold(spec, parts)
            row = start_row(
                self.section,
                "P5",
                f"save of {count:,} tensors of 4 to 64 KiB / limit",
                "<= 1.5",
            )
            fill(row, self.arena.race("save", spec, entries(everybody)), spec.nbytes)
        if self.asks("P6"):
            self.arena.saved(spec, ["limit", *everybody], parts)
            self.arena.hold(spec, parts)
            taking = [*entries(everybody), *entries(formats, verify=True)]
            times = self.arena.race("load", spec, taking)
            held = count * self.arena.ranks
            for verify, how, goals in (
                (False, "unverified", ("<= 1.8", "<= 15")),
                (True, "verified", ("", "")),
            ):
                mine = {
                    entry: t for entry, t in times.items() if entry.verify is verify
                }
                fill(
                    start_row(
                        self.section,
                        "P6",
                        f"load of {count:,} tensors, {how} / limit",
                        goals[0],
                    ),
                    mine,
                    spec.nbytes * self.arena.ranks / parts,
                )
                row = start_row(
                    self.section,
                    "P6",
                    f"load of {count:,} tensors, {how}: CPU a tensor and rank",
                    goals[1],
                    "us",
                )
                row.values.update(
                    (entry.name, Value.of([cpu / held * 1e6 for cpu in t.cpu]))
                    for entry, t in mine.items()
                    if entry.name != "limit"
                )
        self.arena.forget(spec)

    def training(self, spec: Spec, trainers: Sequence[str]) -> None:
        """P7 and P8: asynchronous saves while four ranks train; and what memory that takes."""
        if not self.asks("P7", "P8"):
            return
        self.arena.hold(spec, min(2, self.arena.ranks))
        share = spec.nbytes // self.arena.ranks
        blocked = start_row(
            self.section,
            "P7",
            "async save: training blocked / one copy of the bytes",
            "<= 1.3",
        )
        extra = start_row(
            self.section,
            "P14",
            f"extra memory of an async save, {share / 2**20:.0f} MiB a rank",
            "",
            "MiB",
        )
        for (
            name
        ) in trainers:  # to be watched costs time, so none of these rounds counts
            self.arena.teams[name].ask("bare")
            with watched(self.arena.teams[name].pids) as peaks:
                self.arena.train(spec, name, check=True)
            extra.values[name] = Value.of([max(peaks.extra.values()) / 2**20])
        waits: dict[str, list[float]] = {name: [] for name in trainers}
        for on_device, how in ((True, "on a device"), (False, "on these cores")):
            slower = start_row(
                self.section,
                "P8",
                f"async save: steps meanwhile / alone, {how}",
                "<= 1.15",
            )
            lost = start_row(
                self.section, "P8", f"async save: all time lost / one copy, {how}", ""
            )
            found: dict[str, list[tuple[float, float]]] = {
                name: [] for name in trainers
            }
            for number in range(self.arena.rounds + on_device):
                for name in trainers:
                    copy = max(self.arena.teams[name].ask("memcpy", share))
                    taken = self.arena.train(spec, name, on_device=on_device)
                    if number or not on_device:  # by then buffers have been used twice
                        waits[name].append(max(t.blocked for t in taken) / copy)
                        steps = sum(t.busy for t in taken) / sum(t.idle for t in taken)
                        found[name].append((steps, max(t.lost for t in taken) / copy))
            for row, column in ((slower, 0), (lost, 1)):
                row.values.update(
                    (name, Value.of([f[column] for f in all_]))
                    for name, all_ in found.items()
                )
        blocked.values.update(
            (name, Value.of(ratios)) for name, ratios in waits.items()
        )
        self.arena.forget(spec)

    def memory(self, spec: Spec) -> None:
        """P14: how much more a rank takes while it saves than before, at the most."""
        if not self.asks("P14"):
            return
        parts = min(2, self.arena.ranks)
        self.arena.saved(
            Spec.large(1 << 20), self.everybody, parts
        )  # whatever is loaded and made once
        for strided, how in ((False, "contiguous"), (True, "strided")):
            self.arena.hold(spec, parts, strided)
            held = max(spec.nbytes / parts, 1) / 2**20
            row = start_row(
                self.section,
                "P14",
                f"extra memory of a save, {how} tensors, {held:.0f} MiB a rank",
                "bounded: 256",
                "MiB",
            )
            for entry in entries(self.everybody):
                with watched(self.arena.teams[entry.name].pids) as peaks:
                    self.arena.save(spec, entry)
                row.values[entry.name] = Value.of([max(peaks.extra.values()) / 2**20])
            self.arena.forget(spec)


def start_row(section: Section, *words: str) -> Row:
    """Add a row, and print its name as progress."""
    print(
        f"{time.strftime('%H:%M:%S')} {' '.join(words[:2])}",
        file=sys.stderr,
        flush=True,
    )
    return section.row(*words)


def entries(names: Iterable[str], *, verify: bool = False) -> list[Entry]:
    return [Entry(name, verify) for name in names]


def fill(row: Row, times: dict[Entry, Times], moved: float) -> None:
    """``moved``: bytes that all ranks together wrote or read."""
    row.values.update((entry.name, t.ratio(moved)) for entry, t in times.items())


@dataclass(frozen=True)
class Desk:
    """The figures that need no race: P9, P10 and P13, in one process."""

    team: Team
    section: Section
    formats: Sequence[str]
    peers: Sequence[str]
    rounds: int
    only: frozenset[str]

    def planning(self, ranks: int) -> None:
        if "P9" not in self.only:
            return
        for copies in (1, 2, 8):
            shards = f"{ranks:,} ranks x 64 shards, DP {copies}"
            plan = start_row(
                self.section, "P9", f"plan, CPU a shard, {shards}", "<= 0.5", "us"
            )
            emit = start_row(
                self.section,
                "P9",
                f"emit .metadata, CPU a shard, {shards}",
                "<= 1.2",
                "us",
            )
            for name in self.formats:
                taken = self._told("plan_and_emit", name, ranks, copies, self.rounds)
                plan.values[name] = Value.of(taken["plan"])
                if "emit" in taken:
                    emit.values[name] = Value.of(taken["emit"])
            if "torch DCP" in self.peers and copies == 1:
                # It takes half a minute for all; its cost grows in proportion.
                taken = self._told("stock_plan", max(ranks // 64, 8), 1)
                plan.values["torch DCP"], emit.values["torch DCP"] = map(
                    Value.of, taken.values()
                )

    def opening(self, folder: Path, ranks: int) -> None:
        if "P10" not in self.only:
            return
        taken = self._told("index", str(folder), ranks, self.rounds)
        size = start_row(
            self.section, "P10", "index, bytes a shard, without digests", "<= 32", "B"
        )
        open_ = start_row(
            self.section, "P10", f"opening {ranks * 64:,} shards", "<= 0.1", "s"
        )
        for row, figure in ((size, "bytes"), (open_, "open")):
            row.values.update((name, Value.of(taken[figure])) for name in self.formats)
            if "torch DCP" in self.peers:
                row.values["torch DCP"] = Value.of(taken[f"DCP {figure}"])

    def digests(self, folder: Path, nbytes: int) -> None:
        if "P13" not in self.only:
            return
        row = start_row(
            self.section, "P13", "digests in the write pass / memcpy", "<= 0.6"
        )
        value = Value.of(self._told("digests", str(folder), nbytes, self.rounds))
        row.values.update(
            (name, value) for name in self.formats if name == "torch_dist"
        )

    def _told(self, figure: str, *arguments: object) -> Any:
        return self.team.ask("figure", figure, *arguments)[0]
