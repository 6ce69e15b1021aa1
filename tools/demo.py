"""The demo: a training job dies and resumes at three other parallelisms. `make demo` runs it.

Everything happens in real processes of tools/train_gpt.py. Each promise is checked: the first promise
that does not hold ends the demo with exit status 1. Checkpoints, logs and the picture stay in .demo.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import megackpt

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / ".demo"
RUN, ZARR = OUT / "run", OUT / "zarr"
STEPS, SAVE_EVERY, DEATH = (
    80,
    20,
    30,
)  # the job dies in step 31; its newest checkpoint is of step 20
HANDED_ON = 40  # the step whose checkpoint becomes zarr
PATIENCE = 300  # seconds for any one start of the trainer
TOLERANCE = 1e-4  # of losses, whose sums are taken in another order at each parallelism

Curve = dict[int, float]  # step -> loss


class Broken(Exception):
    """Something is not as promised."""


def promise(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Broken(otherwise)


def say(text: str) -> None:
    print(
        textwrap.fill(text, 100, initial_indent="   ", subsequent_indent="   "),
        flush=True,
    )


def checkpoint(step: int) -> Path:
    return RUN / f"iter_{step:07d}"


# ------------------------------------------------------------------------------- legs: processes that train


@dataclass(frozen=True)
class Leg:
    """One start of the trainer, on some ranks, until it ends or is ended."""

    name: str
    tp: int
    pp: int
    dp: int

    def __str__(self) -> str:
        return f"{self.name} (TP{self.tp} x PP{self.pp} x DP{self.dp})"

    @property
    def slug(self) -> str:
        return self.name.replace(" ", "-")

    @property
    def log(self) -> Path:
        return OUT / f"{self.slug}.jsonl"

    @property
    def output(self) -> Path:
        return OUT / f"{self.slug}.txt"

    @property
    def resaved(self) -> Path:
        """Where the leg saves its loaded state, before its first step."""
        return OUT / "resaved" / self.slug

    @contextmanager
    def running(self, *options: str | Path) -> Iterator[subprocess.Popen[bytes]]:
        """The trainer's processes, which are gone at the end, whatever happens."""
        ranks = self.tp * self.pp * self.dp
        torchrun = (
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        )
        command = [
            sys.executable,
            *(torchrun if ranks > 1 else ()),
            HERE / "train_gpt.py",
            *options,
        ]
        command += [f"--tp={self.tp}", f"--pp={self.pp}", "--losses", self.log]
        command += ["--audit=full"]  # a save raises if replicas differ
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with self.output.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        try:
            yield process
        finally:
            process.terminate()
            process.wait()

    def train(self, *options: str | Path) -> None:
        """From start to end."""
        started = time.monotonic()
        with self.running(*options) as process:
            promise(process.wait(PATIENCE) == 0, f"the trainer failed:\n{self.tail()}")
        curve = self.curve()
        first, last = min(curve), max(curve)
        say(
            f"Steps {first} to {last}: loss {curve[first]:.3f} -> {curve[last]:.3f} "
            f"({time.monotonic() - started:.0f} s, with starting the processes)."
        )

    def tail(self) -> str:
        """The end of what the processes printed."""
        return self.output.read_text()[-4000:]

    def curve(self) -> Curve:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return {entry["step"]: entry["loss"] for entry in map(json.loads, lines)}

    def process_of(self, rank: int) -> int:
        found = re.search(rf"rank {rank} is process (\d+)", self.output.read_text())
        promise(
            found is not None, f"{self.output} does not name the process of rank {rank}"
        )
        return int(found[1]) if found else 0


REFERENCE = Leg("uninterrupted", tp=2, pp=1, dp=2)
KILLED = Leg("killed", tp=2, pp=1, dp=2)
PIPELINE = Leg("resumed on 2 ranks", tp=1, pp=2, dp=1)
TENSOR = Leg("resumed on 4 ranks", tp=4, pp=1, dp=1)
ALONE = Leg("resumed on 1 process", tp=1, pp=1, dp=1)
LEGS = (KILLED, PIPELINE, TENSOR, ALONE)


# ------------------------------------------------------------------------------------- the promises


def equal_bits(a: Tensor, b: Tensor) -> bool:
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    return same_kind and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )


def check_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], what: str) -> None:
    """All tensors of two checkpoints, bit by bit."""
    promise(
        ours.keys() == theirs.keys(),
        f"{what}: other keys: {sorted(ours.keys() ^ theirs.keys())}",
    )
    different = [key for key in ours if not equal_bits(ours[key], theirs[key])]
    promise(not different, f"{what}: other values in {different}")
    moments = sum(key.startswith("optimizer.") for key in ours)
    promise(
        0 < moments < len(ours),
        f"{what}: no parameters or no optimizer state in {sorted(ours)}",
    )
    numbers = sum(tensor.numel() for tensor in ours.values())
    say(
        f"Checked: {what} is equal to the last bit: {len(ours) - moments} parameters and {moments} tensors of "
        f"optimizer state, {numbers:,} numbers."
    )


def check_loaded(leg: Leg, source: Path) -> None:
    """Check that a leg held the source's state after loading (the leg saved the state again at once)."""
    ours, theirs = (
        megackpt.load_plain_tensors(directory) for directory in (leg.resaved, source)
    )
    check_equal(
        ours, theirs, f"what the ranks hold after loading {source.relative_to(OUT)}"
    )
    mine, common = (
        megackpt.load_common_state_dict(directory)
        for directory in (leg.resaved, source)
    )
    for key in ("step", "position", "scheduler"):
        promise(
            mine[key] == common[key],
            f"{leg}: {key} is {mine[key]}, but {common[key]} in {source}",
        )


def check_curve(leg: Leg, reference: Curve) -> None:
    """The leg computes what the uninterrupted run computes, but for the order of its sums."""
    away = {step: abs(loss - reference[step]) for step, loss in leg.curve().items()}
    worst = max(away, key=lambda step: away[step])
    first, last = min(away), max(away)
    say(
        f"{leg!s:38} steps {first:2} to {last}: {away[first]:.1e} at first, {away[worst]:.1e} at most"
    )
    promise(away[worst] <= TOLERANCE, f"{leg} left the curve at step {worst}")


# ------------------------------------------------------------------------------------------- the acts


def uninterrupted() -> None:
    say(
        f"For comparison: {STEPS} steps of a small GPT on the source of Python's own library, on "
        "4 processes. Each holds half of every matrix (TP2), sees half of every batch and has half of Adam's "
        "state (DP2). It is not interrupted."
    )
    REFERENCE.train(
        "--dir", OUT / "reference", "--steps", str(STEPS), "--save-every", "1000"
    )
    curve = REFERENCE.curve()
    promise(
        curve[STEPS] < curve[1] - 1.5,
        f"it learns nothing: {curve[1]:.3f} -> {curve[STEPS]:.3f}",
    )


def killed() -> None:
    say(
        f"The same once more, saving every {SAVE_EVERY} steps. After step {DEATH}, in the middle of the next "
        "one, rank 2 is killed with signal 9."
    )
    with KILLED.running(
        "--dir", RUN, "--steps", str(STEPS), "--save-every", str(SAVE_EVERY)
    ) as process:
        while process.poll() is None and max(KILLED.curve(), default=0) < DEATH:
            time.sleep(0.02)
        promise(process.poll() is None, f"the trainer ended early:\n{KILLED.tail()}")
        os.kill(KILLED.process_of(2), signal.SIGKILL)
        promise(process.wait(PATIENCE) != 0, "a job that lost a rank reports success")
    saved = sorted(RUN.glob("iter_*"))
    promise(
        saved == [checkpoint(20)],
        f"the run left {saved}, not the checkpoint of step 20",
    )
    say(
        f"The job died in step {max(KILLED.curve()) + 1}. It leaves {saved[0].relative_to(OUT)}."
    )


def pipeline() -> None:
    say(
        "Now there are only 2 processes. The run resumes from its newest checkpoint as a pipeline of two "
        "stages (PP2): each process holds two of the four layers, whole, and every batch passes both."
    )
    options = ("--dir", RUN, "--steps", str(HANDED_ON), "--save-every", str(SAVE_EVERY))
    PIPELINE.train(*options, "--resave", PIPELINE.resaved)
    check_loaded(PIPELINE, checkpoint(DEATH - DEATH % SAVE_EVERY))


def converted() -> None:
    source = checkpoint(HANDED_ON)
    say(
        f"tools/convert.py makes a zarr copy of {source.relative_to(OUT)}: one array for each tensor."
    )
    options = (source, ZARR, "--to", "zarr")
    subprocess.run(
        [sys.executable, HERE / "convert.py", *options],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    ours, theirs = (
        megackpt.load_plain_tensors(directory) for directory in (ZARR, source)
    )
    check_equal(ours, theirs, f"the zarr copy of {source.relative_to(OUT)}")


def tensor_parallel() -> None:
    say(
        "From the zarr copy, on 4 processes, each with a quarter of every matrix (TP4), one attention head."
    )
    options = ("--dir", OUT / "tp4", "--steps", str(STEPS - 20), "--load", ZARR)
    TENSOR.train(*options, "--resave", TENSOR.resaved)
    check_loaded(TENSOR, ZARR)


def alone() -> None:
    say(
        "And from the zarr copy in one process, without torchrun and without any process group."
    )
    options = ("--dir", OUT / "alone", "--steps", str(STEPS), "--load", ZARR)
    ALONE.train(*options, "--resave", ALONE.resaved)
    check_loaded(ALONE, ZARR)


def curves() -> None:
    say("The curve of the interrupted run beside the uninterrupted one:")
    reference = REFERENCE.curve()
    print(text_plot(reference, LEGS))
    say(
        "How far the loss is from that of the uninterrupted run (each parallelism adds in another order):"
    )
    for leg in LEGS:
        check_curve(leg, reference)
    picture = OUT / "loss.svg"
    picture.write_text(svg_plot(reference, LEGS))
    say(f"The same as a picture: {picture}")


def stock_dcp() -> None:
    say(
        "PyTorch's own torch.distributed.checkpoint, which knows nothing of megackpt, opens it unchanged."
    )
    source = checkpoint(HANDED_ON)
    stored = FileSystemReader(source).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(tensor.size, dtype=tensor.properties.dtype, device="cpu")
        for key, tensor in stored.items()
        if isinstance(tensor, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is one process only
        dcp_load(tensors, checkpoint_id=source, no_dist=True)
    ours = megackpt.load_plain_tensors(source)
    check_equal(tensors, ours, f"the tensors of {source.relative_to(OUT)}")


def looked_at() -> None:
    say("Its contents, and a check of every byte:")
    for command in ("show", "verify"):
        print(f"\n$ megackpt {command} {checkpoint(HANDED_ON)}", flush=True)
        arguments = [sys.executable, "-m", "megackpt", command, checkpoint(HANDED_ON)]
        subprocess.run(arguments, check=True, cwd=HERE.parent)


ACTS: Sequence[tuple[str, Callable[[], None]]] = (
    ("A run without interruption", uninterrupted),
    ("A run that dies", killed),
    ("It resumes as a pipeline", pipeline),
    ("Its checkpoint becomes zarr", converted),
    ("It resumes, tensor-parallel", tensor_parallel),
    ("It resumes on one process", alone),
    ("As if nothing had happened", curves),
    ("Open to others", stock_dcp),
    ("Looked at", looked_at),
)


# -------------------------------------------------------------------------------------------- pictures


def text_plot(
    reference: Curve, legs: Sequence[Leg], width: int = 90, height: int = 16
) -> str:
    """The reference as dots, over it the legs as digits, over the later ones the earlier."""
    low, high = min(reference.values()), max(reference.values())
    rows = [[" "] * width for _ in range(height)]
    marked = [
        (".", reference),
        *((str(number), leg.curve()) for number, leg in enumerate(legs, 1)),
    ]
    for mark, curve in (marked[0], *reversed(marked[1:])):
        for step, loss in curve.items():
            row = round((high - loss) / (high - low) * (height - 1))
            rows[min(max(row, 0), height - 1)][
                (step - 1) * (width - 1) // (STEPS - 1)
            ] = mark
    lines = [
        f"   {'loss' if not number else '':4} |{''.join(row)}"
        for number, row in enumerate(rows)
    ]
    lines[0] = f"   {high:4.1f} |{''.join(rows[0])}"
    lines[-1] = f"   {low:4.1f} |{''.join(rows[-1])}"
    key = [
        "   . " + str(REFERENCE),
        *(f"   {number} {leg}" for number, leg in enumerate(legs, 1)),
    ]
    return "\n".join(
        [
            *lines,
            "        +" + "-" * width,
            f"         step 1{f'step {STEPS}':>{width - 6}}",
            *key,
        ]
    )


def svg_plot(reference: Curve, legs: Sequence[Leg]) -> str:
    """The same as a picture that needs only a browser."""
    width, height, left, top = 860, 420, 60, 50
    low, high = min(reference.values()) - 0.1, max(reference.values()) + 0.1

    def x(step: float) -> float:
        return round(left + (step - 1) / (STEPS - 1) * (width - left - 20), 1)

    def y(loss: float) -> float:
        return round(top + (high - loss) / (high - low) * (height - top - 50), 1)

    def line(curve: Curve, style: str) -> str:
        points = " ".join(
            f"{x(step)},{y(loss)}" for step, loss in sorted(curve.items())
        )
        return f'<polyline points="{points}" fill="none" {style}/>'

    def label(text: str, at_x: float, at_y: float, style: str = "") -> str:
        return f'<text x="{at_x}" y="{at_y}" {style}>{text}</text>'

    size = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        label(
            "Loss of a run that was killed and went on at other parallelisms",
            left,
            24,
            'font-size="16"',
        ),
    ]
    whole = range(int(low) + 1, int(high) + 1)
    parts += [
        f'<path d="M{left} {y(loss)}H{width - 20}" stroke="#ddd"/>' for loss in whole
    ]
    parts += [
        label(str(loss), left - 10, y(loss) + 4, 'text-anchor="end"') for loss in whole
    ]
    steps = (1, *range(20, STEPS + 1, 20))
    parts += [
        label(str(step), x(step), height - 28, 'text-anchor="middle"') for step in steps
    ]
    parts.append(label("step", x(STEPS / 2), height - 8, 'text-anchor="middle"'))
    parts.append(
        line(reference, 'stroke="#bbb" stroke-width="10" stroke-linejoin="round"')
    )
    names = [(str(REFERENCE), "#bbb")]
    names += zip(
        map(str, legs), ("#d62728", "#1f77b4", "#2ca02c", "#9467bd"), strict=True
    )
    for number in reversed(
        range(len(legs))
    ):  # earlier legs over later ones, and thinner, so that all are seen
        style = f'stroke="{names[number + 1][1]}" stroke-width="{1.5 + number}"'
        parts.append(line(legs[number].curve(), style))
    death = max(KILLED.curve())
    parts.append(
        f'<circle cx="{x(death)}" cy="{y(reference[death])}" r="5" fill="#d62728"/>'
    )
    parts.append(
        label(
            "kill -9",
            x(death),
            y(reference[death]) - 12,
            'text-anchor="middle" fill="#d62728"',
        )
    )
    for number, (name, colour) in enumerate(names):
        parts.append(
            f'<rect x="{width - 330}" y="{top + 20 * number}" width="24" height="5" fill="{colour}"/>'
        )
        parts.append(label(name, width - 298, top + 20 * number + 8))
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    started = time.monotonic()
    for number, (title, act) in enumerate(ACTS, 1):
        print(f"\n{number}/{len(ACTS)} {title}", flush=True)
        try:
            act()
        except (
            Broken,
            subprocess.SubprocessError,
            megackpt.CheckpointingException,
        ) as error:
            print(f"\nFAILED in step {number}, {title!r}: {error}", flush=True)
            return 1
    print(
        f"\nAll promises kept, in {time.monotonic() - started:.0f} s. The picture: {OUT / 'loss.svg'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
