"""The table: figures by contestant, with the goals; as text, as Markdown, as JSON."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Value:
    """One figure of one contestant: the median of the rounds, and their range.

    ``gbs``: where seconds were measured, the bytes of all ranks in the median of these, in GB/s.
    """

    median: float
    low: float
    high: float
    rounds: int = 1
    gbs: float | None = None

    @classmethod
    def of(cls, taken: Sequence[float], gbs: float | None = None) -> Value:
        return cls(statistics.median(taken), min(taken), max(taken), len(taken), gbs)


@dataclass
class Row:
    """One figure of all contestants. ``reach``: its upper bound, as text."""

    figure: str
    what: str
    reach: str
    unit: str = ""
    values: dict[str, Value] = field(default_factory=dict)


@dataclass
class Section:
    """Rows that have their contestants in common."""

    title: str
    columns: list[str]
    rows: list[Row] = field(default_factory=list)

    def row(self, figure: str, what: str, reach: str, unit: str = "") -> Row:
        self.rows.append(Row(figure, what, reach, unit))
        return self.rows[-1]

    def cells(self) -> list[list[str]]:
        head = ["figure", "", *self.columns, "reach"]
        body = [
            [
                row.figure,
                row.what,
                *(
                    shown(row.values[name], row.unit) if name in row.values else ""
                    for name in self.columns
                ),
                row.reach,
            ]
            for row in self.rows
        ]
        return [head, *body]


def shown(value: Value, unit: str) -> str:
    number = value.median
    digits = 0 if number >= 100 else 1 if number >= 20 else 2
    speed = "" if value.gbs is None else f" ({in_gbs(value.gbs)})"
    return f"{number:.{digits}f}{' ' if unit else ''}{unit}{speed}"


def in_gbs(speed: float) -> str:
    """Two digits that count: 1.6, 0.43, 0.012."""
    return f"{speed:.{max(1 - math.floor(math.log10(speed)), 0)}f}"


def machine(folder: Path) -> dict[str, Any]:
    """The facts about the machine that a reader of the figures should know."""
    packages = (
        *("torch", "megatron-core", "safetensors", "tensorstore", "zarr", "numpy"),
        *("torch_checkpointing", "orbax-checkpoint"),
    )
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        ),
        "file_system": _file_system(folder),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "versions": {name: version for name in packages if (version := _version(name))},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return " ".join(value.split())
    return platform.machine()


def _version(package: str) -> str | None:
    peers = Path(__file__).resolve().parents[2] / ".peers"
    folders = [str(peers / name) for name in ("", "torch_checkpointing", "orbax")]
    found = [
        *metadata.distributions(name=package),
        *metadata.distributions(name=package, path=folders),
    ]
    return found[0].version if found else None


def _file_system(folder: Path) -> str:
    """The type of the deepest mount that the folder is under."""
    mounts = [
        line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()
    ]
    under = [
        (len(at), kind) for at, kind in mounts if folder.resolve().is_relative_to(at)
    ]
    return max(under, default=(0, "unknown"))[1]


@dataclass
class Report:
    """All that a run has to say."""

    options: dict[str, Any]
    where: dict[str, Any]
    sections: list[Section] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def section(self, title: str, columns: list[str]) -> Section:
        self.sections.append(Section(title, columns))
        return self.sections[-1]

    def text(self, markdown: bool) -> str:
        parts = [_described(self.where), *self.notes]
        for section in self.sections:
            if section.rows:
                lines = (
                    _markdown(section.cells()) if markdown else _plain(section.cells())
                )
                parts.append(
                    "\n".join([section.title, *([""] if markdown else []), *lines])
                )
        return "\n\n".join(parts) + "\n"

    def json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def _described(where: dict[str, Any]) -> str:
    versions = ", ".join(
        f"{name} {version}" for name, version in where["versions"].items()
    )
    return (
        f"{where['date']}: {where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB, {where['file_system']}, "
        f"Linux {where['kernel']}, load {where['load_at_start']} at the start; "
        f"Python {where['python']}, {versions}"
    )


def _plain(cells: list[list[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(padded).rstrip()


def _markdown(cells: list[list[str]]) -> Iterable[str]:
    head, *body = cells
    for row in [head, ["---"] * 2 + ["---:"] * (len(head) - 2), *body]:
        yield "| " + " | ".join(row) + " |"
