"""The table and the picture of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.chart import MARGIN, WIDTH, Bar, Panel, page

from goodput_runs.counting import Figures

HEAD = (
    "contestant",
    "useful steps / steps run",
    "training / paid time",
    "seconds paid",
    "lost steps",
    "restarts",
    "human actions",
    "wrong losses",
)


def table(found: Mapping[str, Figures]) -> str:
    """A table of Markdown, one row a contestant."""
    rows = [HEAD, ("---",) * len(HEAD)]
    for name, one in found.items():
        end = "" if one.finished else ", given up"
        share = f"{one.useful} / {one.run} = {one.useful_share:.3f}{end}"
        paid = f"{one.seconds:.0f}"
        counts = (one.lost, one.restarts, len(one.actions), one.wrong)
        rows.append((name, share, f"{one.time_share:.2f}", paid, *map(str, counts)))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def draw(found: Mapping[str, Figures], report: Mapping[str, Any]) -> str:
    """Bars of both shares, ours first, as SVG."""
    panels = []
    for title, share in (
        ("useful steps / steps run", "useful_share"),
        ("seconds of training / seconds paid", "time_share"),
    ):
        bars = [
            Bar(name, getattr(one, share), name == "megackpt")
            for name, one in found.items()
        ]
        panels.append(Panel(title, bars, 0))
    where, parts, y = report["where"], list[str](), MARGIN
    for panel in panels:
        parts.append(panel.svg(MARGIN, y))
        y += panel.height + MARGIN
    every, faults = report["options"]["every"], len(report["faults"])
    load = f"load {where['load_at_start']} to {where['load_at_end']}"
    machine = (
        f"{where['date'][:10]}, {where['cores']} cores, {load}, torch {where['torch']}"
    )
    lines = f"{faults} faults, one in {every} steps. More is better.", machine
    return page(WIDTH + MARGIN, y, parts, lines)
