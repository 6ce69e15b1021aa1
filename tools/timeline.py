"""Train and save on a few ranks, and draw the time line of each: where training was blocked, and background work.

    python tools/timeline.py [--plot docs/async-timeline.png] [--ranks 2] [--mib 512] [--steps 22] [--every 11]
                             [--way sync --way threads --way process] [--dir FOLDER] [--spans FILE]

Each rank trains for some steps, which wait for one another like steps of data-parallel ranks, and saves its share of
``--mib`` MiB on the way: at once, in threads, or by a writer process. The times come from the events of megackpt and
from the calls into it. docs/async.md shows the picture.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from simulation.charts import pyplot_for

import megackpt
from megackpt import AsyncCallsQueue, Event, ShardedTensor
from megackpt.errors import CheckpointingException

WAYS = {
    "sync": "synchronous",
    "threads": "asynchronous, threads",
    "process": "asynchronous, writer process",
}
STEP, STILL = "step", "still"
KIND = {"declare": "plan", "begin": "plan"}  # drawn as one
COLORS = {
    STEP: "#9ecae1",
    STILL: "#e6550d",
    "plan": "#31a354",
    "stage": "#fdd835",
    "write": "#756bb1",
    "commit": "#222222",
}
NAMES = {
    STEP: "training step",
    STILL: "waits for other ranks",
    "plan": "declare, begin, plan",
    "stage": "stage (copy)",
    "write": "write",
    "commit": "commit",
}
SIDE = 2048  # of the square float32 matrices that are trained: 16 MiB each
BATCH = 64
FIRST = 4  # steps before the first save
PATIENCE = timedelta(minutes=5)


@dataclass(frozen=True)
class Span:
    """One rank's work for a while: a training step, a stage of a save; or a wait in a call of megackpt."""

    way: str
    rank: int
    what: str
    start: float  # seconds since the first step of this way
    end: float


class Trainer:
    """One rank: its share of the matrices, and the notes of when it did what."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.options = options
        rows = max(1, (options.mib << 20) // (4 * SIDE))
        self.weights = [
            torch.randn(min(SIDE, rows - start), SIDE, device="cpu")
            for start in range(0, rows, SIDE)
        ]
        self.spans: list[Span] = []
        self.way = ""
        self.began = 0.0

    def state(self, step: int) -> dict[str, Any]:
        cut = (0, self.rank, self.ranks)
        weights = {
            f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", w, cut)
            for i, w in enumerate(self.weights)
        }
        return {**weights, "step": step}

    def now(self) -> float:
        return time.perf_counter() - self.began

    def note(self, what: str, start: float, end: float) -> None:
        self.spans.append(Span(self.way, self.rank, what, start, end))

    @contextmanager
    def noted(self, what: str) -> Iterator[None]:
        start = self.now()
        yield
        self.note(what, start, self.now())

    def hear(self, event: Event) -> None:
        if event.stage != "total":
            now = self.now()
            self.note(event.stage, now - event.seconds, now)

    def step(self) -> None:
        """Forwards through all matrices, an update in place, and a sum over the ranks."""
        with self.noted(STEP):
            x = torch.ones(BATCH, SIDE, device="cpu")
            for weight in self.weights:
                x = torch.tanh(x[:, : weight.shape[0]] @ weight)
                weight.mul_(0.999)
            dist.all_reduce(x[0])

    def run(self, way: str) -> None:
        queue = AsyncCallsQueue(persistent=way == "process")
        dist.barrier()
        self.way, self.began = way, time.perf_counter()
        with megackpt.watching(self.hear):
            for step in range(self.options.steps):
                self.step()
                if way != "sync":
                    with self.noted(STILL):
                        queue.maybe_finalize_async_calls()
                if step >= FIRST - 1 and (step + 1 - FIRST) % self.options.every == 0:
                    with self.noted(STILL):
                        self.save(queue, step)
            with self.noted(STILL):
                queue.maybe_finalize_async_calls(blocking=True)
            queue.close()

    def save(self, queue: AsyncCallsQueue, step: int) -> None:
        folder = Path(self.options.dir) / f"{self.way}_{step:07d}"
        later = self.way != "sync"
        request = megackpt.save(
            self.state(step), folder, async_sharded_save=later, timeout=PATIENCE
        )
        if request is not None:
            queue.schedule_async_request(request)


def train(options: argparse.Namespace) -> None:
    """The program of each rank: one way."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    dist.init_process_group("gloo", timeout=PATIENCE)
    trainer = Trainer(options)
    trainer.step()  # the first one is slow
    trainer.spans.clear()
    trainer.run(*options.way)
    spans = [asdict(span) for span in trainer.spans]
    (Path(options.dir) / f"spans_{trainer.rank}.json").write_text(json.dumps(spans))
    dist.barrier()
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> list[Span]:
    """Start ranks for each way, wait for them, and read their notes."""
    numbers = [
        f"--{name}={getattr(options, name)}"
        for name in ("ranks", "mib", "steps", "every")
    ]
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={options.ranks}",
        __file__,
    ]
    spans: list[Span] = []
    for way in options.way:
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="timeline_") as folder:
            run = [
                sys.executable,
                *command,
                *numbers,
                f"--way={way}",
                f"--dir={folder}",
            ]
            ended = subprocess.run(
                run, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
            ).returncode
            if ended:
                raise CheckpointingException(
                    f"the ranks ended with status {ended}; they have said why"
                )
            files = [
                Path(folder) / f"spans_{rank}.json" for rank in range(options.ranks)
            ]
            spans += [
                Span(**span) for file in files for span in json.loads(file.read_text())
            ]
    return spans


def report(spans: Sequence[Span], way: str) -> str:
    """One line: how long training stood still for each save, and the steps with and without a save at the same time."""
    spans = [span for span in spans if span.way == way]
    writes = [s for s in spans if s.what == "write"]
    steps = {
        s: any(w.rank == s.rank and _meet(w, s) for w in writes)
        for s in spans
        if s.what == STEP
    }
    alone = [_length(s) for s, beside in steps.items() if not beside]
    beside = [_length(s) for s, beside in steps.items() if beside]
    lengths = sorted(map(_length, writes))
    line = f"{headline(spans, way)}; writing took {lengths[0]:.2f} to {lengths[-1]:.2f} s; "
    line += (
        f"{len(alone)} steps of {median(alone):.3f} s"
        if alone
        else "no step without a write"
    )
    return line + (
        f", {len(beside)} beside a write of {median(beside):.3f} s" if beside else ""
    )


def headline(spans: Sequence[Span], way: str) -> str:
    """With the seconds for which training stood still for each save, from its call to the next one's."""
    ranks = {span.rank for span in spans}
    seconds = [
        f"{max(each):.2f}"
        for each in zip(*(stood_still(spans, rank) for rank in ranks), strict=True)
    ]
    return f"{WAYS[way]}: training stood still for {' and '.join(seconds)} s"


def stood_still(spans: Sequence[Span], rank: int) -> list[float]:
    mine = [span for span in spans if span.rank == rank]
    calls = [span for span in mine if span.what == STILL]
    starts = [span.start for span in mine if span.what == "declare"]
    ends = [*starts[1:], float("inf")]
    return [
        sum(_length(call) for call in calls if start < call.end <= end)
        for start, end in zip(starts, ends, strict=True)
    ]


def _length(span: Span) -> float:
    return span.end - span.start


def _meet(one: Span, other: Span) -> bool:
    return one.start < other.end and other.start < one.end


def draw(pyplot: Any, spans: Sequence[Span], ways: Sequence[str], file: Path) -> None:
    """One panel for each way; in it, for each rank, the trainer's lane and the lane of its background work."""
    ranks = 1 + max(span.rank for span in spans)
    lanes = sum(ranks * (1 if way == "sync" else 2) for way in ways)
    figure, panels = pyplot.subplots(
        len(ways),
        1,
        figsize=(11, 1.1 + 0.9 * len(ways) + 0.34 * lanes),
        sharex=True,
        squeeze=False,
        constrained_layout=True,
        height_ratios=[ranks * (1 if way == "sync" else 2) + 0.6 for way in ways],
    )
    for way, panel in zip(ways, panels[:, 0], strict=True):
        _panel(panel, [span for span in spans if span.way == way], ranks, way)
    panels[-1, 0].set_xlim(0, max(span.end for span in spans))
    panels[-1, 0].set_xlabel("seconds since the first step")
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(
        patches,
        [NAMES[what] for what in COLORS],
        loc="outside upper center",
        ncols=len(COLORS),
    )
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _panel(panel: Any, spans: Sequence[Span], ranks: int, way: str) -> None:
    beside = way != "sync"
    for order, what in enumerate(COLORS):
        for span in (s for s in spans if KIND.get(s.what, s.what) == what):
            lane = _lane(span.rank, what == "write" and beside, beside)
            edge = "white" if what == STEP else "none"
            panel.barh(
                -lane,
                _length(span),
                left=span.start,
                height=0.8,
                color=COLORS[what],
                edgecolor=edge,
                zorder=order + 2,
            )
    ticks = {_lane(rank, False, beside): f"rank {rank}" for rank in range(ranks)}
    if beside:
        ticks |= {_lane(rank, True, beside): "its writer" for rank in range(ranks)}
    panel.set_yticks([-lane for lane in ticks], list(ticks.values()))
    panel.set_title(headline(spans, way), loc="left", fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="x", alpha=0.3, zorder=0)


def _lane(rank: int, beside: bool, two: bool) -> float:
    return rank * (2.2 if two else 1) + (0.85 if beside else 0)


def asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="It prints one line for each way; --spans writes all that was measured as JSON.",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw to this .png (needs matplotlib)"
    )
    parser.add_argument(
        "--spans", type=Path, metavar="FILE", help="write the measured spans, as JSON"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--mib", type=int, default=512, help="what each rank trains and saves (512)"
    )
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument(
        "--every", type=int, default=11, help="steps from one save to the next (11)"
    )
    parser.add_argument(
        "--way", choices=WAYS, action="append", help="which to run (all)"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help="where to save, in a folder of its own (the system's temporary one)",
    )
    options = parser.parse_args(arguments)
    options.way = options.way or list(WAYS)
    if min(options.ranks, options.mib, options.every) < 1 or options.steps < FIRST:
        parser.error(f"--ranks, --mib and --every are 1 at least, --steps {FIRST}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = asked(arguments)
    if "RANK" in os.environ:
        train(options)
        return 0
    try:
        pyplot = pyplot_for(options.plot) if options.plot else None
        spans = measure(options)
    except CheckpointingException as error:
        print(error, file=sys.stderr)
        return 1
    for way in options.way:
        print(report(spans, way))
    if options.spans:
        options.spans.write_text(json.dumps([asdict(span) for span in spans], indent=1))
    if pyplot:
        draw(pyplot, spans, options.way, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
