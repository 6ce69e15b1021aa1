"""The plot of docs/scaling.md: how planning, payloads and the index grow with ranks and with tensors."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megackpt.errors import CheckpointingException
from megackpt.strategies import backend_named
from simulation.model import Model
from simulation.parallelism import Parallelism
from simulation.simulator import Save, simulate_save

RANKS = (64, 256, 1024, 4096, 16_384)
LAYERS = (32, 128, 512, 2048)
LAYERS_OF_RANKS = 32
FEW = Parallelism(tensor=8, pipeline=8, data=2)  # the ranks of the sweep over tensors
FORMATS = ("torch_dist", "zarr")
COLORS = ("#0969da", "#a06a00", "#2f7d6f", "#8b4a8b", "#57606a")  # dark enough for text


@dataclass(frozen=True)
class Point:
    """One simulated save of a sweep."""

    sweep: str  # "ranks" or "tensors"
    format: str
    ranks: int
    tensors: int
    shards: int
    coordinator: float  # CPU seconds: unpacking, planning, packing, tables of contents
    gather: int  # bytes that the coordinator gets
    scatter: int
    index: int  # without digests
    contents: int  # bytes of the table of contents of the format


def plot(file: Path) -> list[Point]:
    """Run both sweeps and draw them. Raises CheckpointingException where matplotlib is missing."""
    pyplot_for(file)
    points = []
    for point in sweeps():
        points.append(point)
        print(json.dumps(asdict(point)), file=sys.stderr, flush=True)
    draw_points(points, file)
    return points


def pyplot_for(file: Path) -> Any:
    """What draws to this file. Raises CheckpointingException where matplotlib is missing, or the file cannot be."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise CheckpointingException(
            "drawing needs matplotlib: pip install matplotlib"
        ) from error
    if (
        not os.path.isdir(file.parent)
        or file.suffix[1:] not in pyplot.gcf().canvas.get_supported_filetypes()
    ):
        raise CheckpointingException(
            f"cannot draw to {file}: is it a .png in a folder that is there?"
        )
    pyplot.close()
    return pyplot


def sweeps() -> Iterator[Point]:
    model = Model(layers=LAYERS_OF_RANKS)
    for ranks in RANKS:
        job = Parallelism(tensor=8, pipeline=8, data=ranks // 64)
        for name in FORMATS:
            yield point(
                "ranks", name, simulate_save(model.padded(8), job, backend_named(name))
            )
    for layers in LAYERS:
        for name in FORMATS:
            small = replace(model, layers=layers).padded(8)
            yield point("tensors", name, simulate_save(small, FEW, backend_named(name)))


def point(sweep: str, name: str, save: Save) -> Point:
    if save.plain_index is None:
        raise CheckpointingException(f"what {name} writes is not known before")
    steps = ("receive", "plan", "pack", "emit", "index")
    return Point(
        sweep,
        name,
        save.job.ranks,
        len(save.manifest.tensors),
        save.rows,
        sum(save.seconds[step] for step in steps),
        int(save.gathered.sum()),
        int(save.scattered.sum()),
        save.plain_index,
        sum(save.small.values()),
    )


def table_points(page: Path) -> list[Point]:
    """The points of the table in docs/scaling.md, which has some of a run. ValueError if there are none."""
    points = []
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 10 or cells[3] not in FORMATS:
            continue
        ranks, tensors, shards = (int(cell.replace(",", "")) for cell in cells[:3])
        sweep = "tensors" if ranks == FEW.ranks else "ranks"
        seconds = float(cells[4].removesuffix(" s"))
        gathered, _, *others = map(_bytes, cells[5:])
        one = Point(sweep, cells[3], ranks, tensors, shards, seconds, gathered, *others)
        points.append(one)
    if not points:
        raise ValueError(f"{page} has no table of simulated saves")
    return points


def _bytes(cell: str) -> int:
    number, unit = cell.split()
    return round(float(number) * {"kB": 1e3, "MB": 1e6}[unit])


def draw_points(points: Sequence[Point], file: Path) -> None:
    """One message in each panel: what the coordinator computes, and what travels and is stored."""
    pyplot = pyplot_for(file)
    mine = [point for point in points if point.sweep == "ranks"]
    by_name = {name: [p for p in mine if p.format == name] for name in FORMATS}
    across = [point.ranks for point in by_name[FORMATS[0]]]
    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    with pyplot.rc_context(style):
        figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.2))
        most = max(p.coordinator for p in mine)
        text = f"{across[-1]:,} ranks are planned in {most:.1f} CPU seconds"
        lines = {
            name: [p.coordinator for p in found] for name, found in by_name.items()
        }
        _draw_lines(panels[0], text, "CPU seconds of the coordinator", across, lines)
        first, second = by_name.values()
        lines = {
            "declarations, gathered": [p.gather / 1e6 for p in first],
            "plans, scattered": [p.scatter / 1e6 for p in first],
            "index, torch_dist": [p.index / 1e6 for p in first],
            "index, zarr": [p.index / 1e6 for p in second],
            ".metadata of torch_dist": [p.contents / 1e6 for p in first],
        }
        most = max(values[-1] for values in lines.values())
        text = f"each exchange and table, digests apart: {most:.0f} MB at most"
        _draw_lines(panels[1], text, "MB of all ranks", across, lines)
        figure.tight_layout(w_pad=3)
        figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _draw_lines(
    panel: Any,
    title: str,
    unit: str,
    across: Sequence[int],
    lines: dict[str, list[float]],
) -> None:
    """Lines of a panel, with their names at their ends."""
    panel.set_title(title, loc="left", fontsize=11, fontweight="bold")
    panel.set_ylabel(unit)
    panel.set_xlabel("ranks")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xticks(across, [f"{ranks:,}" for ranks in across])
    panel.minorticks_off()
    panel.yaxis.set_major_formatter("{x:g}")
    panel.grid(axis="y", color="#dddddd", linewidth=0.7)
    panel.set_axisbelow(True)
    lowest = 0.0
    for color, (name, values) in zip(COLORS, _by_last(lines), strict=False):
        panel.plot(across, values, "o-", color=color, linewidth=2, markersize=5)
        # Names of lines that end close together are moved apart: a factor, on a logarithmic axis.
        height = max(values[-1], lowest * 1.55)
        lowest = height
        label = f"  {name} {values[-1]:.3g}"
        panel.annotate(label, (across[-1], height), color=color, va="center")
    panel.set_xlim(across[0] * 0.8, across[-1] * 60)
    panel.set_ylim(top=lowest * 1.5)


def _by_last(lines: dict[str, list[float]]) -> list[tuple[str, list[float]]]:
    return sorted(lines.items(), key=lambda line: line[1][-1])
