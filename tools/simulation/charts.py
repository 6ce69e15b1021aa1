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
    pyplot = pyplot_for(file)
    points = []
    for point in sweeps():
        points.append(point)
        print(json.dumps(asdict(point)), file=sys.stderr, flush=True)
    _draw(pyplot, points, file)
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


def _draw(pyplot: Any, points: Sequence[Point], file: Path) -> None:
    figure, panels = pyplot.subplots(2, 2, figsize=(9, 6.5), constrained_layout=True)
    for column, sweep in enumerate(("ranks", "tensors")):
        times, sizes = panels[0][column], panels[1][column]
        for name, style in zip(FORMATS, ("o-", "s--"), strict=True):
            mine = [p for p in points if p.sweep == sweep and p.format == name]
            across = [p.ranks if sweep == "ranks" else p.tensors for p in mine]
            times.plot(
                across, [p.coordinator for p in mine], style, color="C0", label=name
            )
            for color, label, values in _sizes(mine, name):
                sizes.plot(
                    across, [v / 1e6 for v in values], style, color=color, label=label
                )
        fixed = (
            f"{LAYERS_OF_RANKS} layers" if sweep == "ranks" else f"{FEW.ranks:,} ranks"
        )
        times.set_title(f"growing {sweep}, {fixed}")
        times.set_ylabel("coordinator, CPU seconds a save")
        sizes.set_ylabel("MB")
        for panel in (times, sizes):
            panel.set_xlabel(sweep)
            panel.set_xscale("log", base=2 if sweep == "ranks" else 10)
            panel.set_yscale("log")
            panel.grid(alpha=0.3)
            panel.legend(fontsize=7)
    figure.savefig(file, dpi=110)


def _sizes(points: Sequence[Point], name: str) -> Iterator[tuple[str, str, list[int]]]:
    if name == FORMATS[0]:  # payloads hardly depend on the format
        yield "C1", "declarations gathered", [p.gather for p in points]
        yield "C2", "plans scattered", [p.scatter for p in points]
    yield "C3", f"index without digests, {name}", [p.index for p in points]
    yield "C4", f"table of contents, {name}", [p.contents for p in points]
