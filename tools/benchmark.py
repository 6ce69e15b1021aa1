"""Compare megackpt with its peers and the plain-I/O limit, on the same bytes, in one run.

    python tools/benchmark.py [--quick] [--gib 1] [--rounds 3] [--dir DIR] [--only P1,P5] [--formats torch_dist zarr]
                              [--peers "torch DCP" Megatron ...] [--markdown] [--json FILE] [--chart FILE]
    python tools/benchmark.py --drawn-from FILE --chart FILE

Every figure is a ratio taken inside this run, or a count. docs/benchmarks.md says what each one means.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks import beside, deltas
from benchmarks.chart import draw
from benchmarks.door_rows import compare as compare_doors
from benchmarks.doors import DOORS
from benchmarks.figures import Course, Desk
from benchmarks.first_use import FirstUse
from benchmarks.peers import TRAINERS, missing
from benchmarks.races import Arena
from benchmarks.ranks import BenchmarkFailed, Team
from benchmarks.states import Spec
from benchmarks.table import Report, machine
from benchmarks.training import TRAINERS as TRAINING

TEAM = ("torch DCP", "Megatron", "Megatron FP")
ALONE = ("safetensors", "tensorstore", "zarr-python", "torch_checkpointing", "orbax")
RACES, ALONE_RACES = (
    ("P1", "P2", "P3", "P4", "P5", "P6", "P14", "P17"),
    ("P1", "P2", "P17"),
)
LATER = ("P7", "P8")
IN_THE_BACKGROUND = {
    peer: [name for name in TRAINING if name.startswith(f"{peer}, ")]
    for peer in ("torch DCP", "Megatron")
}
DESK = ("P9", "P10", "P13")
FIGURES = (*RACES, *LATER, *DESK, "P15", "P16", "P18", "P19")
MANY = 20_000  # small tensors a GiB


def main() -> int:
    options = asked()
    if options.drawn_from:
        options.chart.write_text(draw(json.loads(options.drawn_from.read_text())))
        return 0
    with tempfile.TemporaryDirectory(
        prefix="megackpt-bench-", dir=options.dir
    ) as folder:
        report = Report(
            {key: str(value) for key, value in vars(options).items()},
            machine(Path(folder)),
        )
        try:
            run(options, Path(folder), report)
        except (BenchmarkFailed, KeyboardInterrupt) as error:
            print(
                f"{report.text(options.markdown)}\nthe benchmark failed: {error}",
                file=sys.stderr,
            )
            return 1
    print(report.text(options.markdown), end="")
    if options.json:
        options.json.write_text(report.json())
    if options.chart:
        options.chart.write_text(draw(json.loads(report.json())))
    return 0


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="about a minute: 1/8 GiB and one round that counts",
    )
    parser.add_argument("--gib", type=float, help="unique bytes, in GiB (1)")
    parser.add_argument(
        "--rounds", type=int, help="rounds that count; the median is printed (3)"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        help="of the saves that are only planned, for P9 and P10 (8192)",
    )
    parser.add_argument(
        "--dir", type=Path, help="where to write (a disk, not a RAM disk)"
    )
    parser.add_argument("--only", default="", help="figures, such as P1,P5 (all)")
    parser.add_argument(
        "--formats",
        nargs="+",
        default=["torch_dist", "zarr"],
        help="megackpt's formats to compare",
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        default=[*TEAM, *ALONE, *TRAINERS],
        help="of " + ", ".join((*TEAM, *ALONE, *TRAINERS)),
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the tables as Markdown"
    )
    parser.add_argument(
        "--json", type=Path, help="write all figures, with their ranges, to this file"
    )
    parser.add_argument(
        "--chart",
        type=Path,
        help="draw GB/s of saves and loads, as SVG, into this file",
    )
    parser.add_argument(
        "--drawn-from",
        type=Path,
        help="measure nothing: draw the chart of this JSON file",
    )
    options = parser.parse_args()
    if options.drawn_from and not options.chart:
        parser.error("--drawn-from needs --chart")
    unknown = set(options.peers).difference(TEAM, ALONE, TRAINERS)
    if unknown:
        parser.error(f"no such peer: {', '.join(sorted(unknown))}")
    strange = set(filter(None, options.only.split(","))).difference(FIGURES)
    if strange:
        parser.error(
            f"no such figure: {', '.join(sorted(strange))} (of {', '.join(FIGURES)})"
        )
    files = (options.json, options.chart, options.drawn_from)
    for folder in (options.dir, *(file.parent for file in files if file)):
        if folder and not folder.is_dir():
            parser.error(f"no such directory: {folder}")
    if min(options.gib or 1, options.rounds or 1, options.ranks or 1) <= 0:
        parser.error("--gib, --rounds and --ranks are more than 0")
    # Ours have the same names as some peers.
    options.formats = [
        f"megackpt {name}" if name in ALONE else name for name in options.formats
    ]
    options.gib = options.gib or (1 / 8 if options.quick else 1)
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.ranks = options.ranks or (1024 if options.quick else 8192)
    options.only = list(filter(None, options.only.split(",")))
    return options


def run(options: argparse.Namespace, root: Path, report: Report) -> None:
    """All sections, in order."""
    absent = {name: why for name in options.peers if (why := missing(name))}
    report.notes += [f"{name} takes no part: {why}" for name, why in absent.items()]
    peers = [name for name in options.peers if name not in absent]
    only = frozenset(options.only or FIGURES)
    team = [name for name in peers if name in TEAM]
    if only.intersection(RACES):
        together(options, root, report, team, only)
    if only.intersection(LATER):
        training(options, root, report, team)
    if only.intersection((*ALONE_RACES, *DESK)):
        alone(options, root, report, peers, only)
    if "P15" in only:
        what = f"{options.gib:.2f} GiB, four new ranks TP2 x DP2 for each round, median of {options.rounds}"
        section = report.section(what, options.formats)
        first = FirstUse(root, section, options.formats, options.rounds)
        first.compare(Spec.large(options.gib * 2**30))
    if "P16" in only:
        through_doors(options, root, report, peers)
    if "P18" in only:
        what = f"{options.gib:.2f} GiB, one process, not in the page cache, median of {options.rounds}"
        section = report.section(what, options.formats)
        beside.compare(root, section, options.gib * 2**30, options.rounds)
    if "P19" in only:
        versions_of_weights(options, root, report)


def together(
    options: argparse.Namespace,
    root: Path,
    report: Report,
    peers: list[str],
    only: frozenset[str],
) -> None:
    """The races of four ranks."""
    with ExitStack() as stack:
        teams = teams_of_four(stack, root, [*options.formats, *peers])
        what = (
            f"{options.gib:.2f} GiB, four ranks TP2 x DP2, median of {options.rounds}; "
            "/ limit: seconds over its (GB/s of all ranks)"
        )
        section = report.section(what, [*options.formats, *peers, "limit"])
        course = Course(
            Arena(root, teams, options.rounds), section, options.formats, peers, only
        )
        large = Spec.large(options.gib * 2**30)
        many = max(round(MANY * options.gib), 64)
        course.large(large)
        # A format with a file for each tensor takes minutes here, and so do the peers: both race with a quarter.
        course.small(
            Spec.small(many), [name for name in options.formats if name != "zarr"], []
        )
        course.small(Spec.small(many // 4), options.formats, peers)
        course.memory(large)


def teams_of_four(stack: ExitStack, root: Path, names: list[str]) -> dict[str, Team]:
    """The processes of each contestant: four of ours, and four of Megatron's where it takes part."""
    ours = stack.enter_context(Team("ours", 4, root))
    teams = dict.fromkeys(("limit", *names), ours)
    foreign = [name for name in names if name.startswith("Megatron")]
    if foreign:
        theirs = stack.enter_context(Team("megatron", 4, root))
        teams |= dict.fromkeys(foreign, theirs)
    return teams


def training(
    options: argparse.Namespace, root: Path, report: Report, peers: list[str]
) -> None:
    """Asynchronous saves of four ranks that train.

    They are new processes: what the peers keep of the races before takes gigabytes.
    """
    with ExitStack() as stack, tempfile.TemporaryDirectory(dir=root) as folder:
        place = Path(folder)
        teams = teams_of_four(stack, place, [*options.formats, *peers])
        ours = {
            f"{name}{how}": teams[name]
            for name in options.formats
            for how in ("", ", process")
        }
        theirs = {
            name: teams[peer]
            for peer in peers
            for name in IN_THE_BACKGROUND.get(peer, ())
        }
        what = f"{options.gib:.2f} GiB, four ranks TP2 x DP2 that train, median of {options.rounds}"
        section = report.section(what, [*ours, *theirs])
        arena = Arena(
            place, {"limit": teams["limit"], **ours, **theirs}, options.rounds
        )
        course = Course(arena, section, list(ours), list(theirs), frozenset(LATER))
        course.training(Spec.large(options.gib * 2**30), [*ours, *theirs])


def through_doors(
    options: argparse.Namespace, root: Path, report: Report, peers: list[str]
) -> None:
    """The calls of other libraries, over megackpt's, of the same state of four ranks."""
    what = f"{options.gib:.2f} GiB of DTensors, four ranks TP2 x DP2, median of {options.rounds}"
    doors = [*DOORS, *(name for name in peers if name in TRAINERS)]
    section = report.section(what, doors)
    many = max(round(MANY * options.gib), 64)
    specs = {
        f"{many:,} small tensors": Spec.small(many),
        "large tensors": Spec.large(options.gib * 2**30),
    }
    compare_doors(root, section, specs, options.rounds)


def versions_of_weights(
    options: argparse.Namespace, root: Path, report: Report
) -> None:
    """Weights that change a little from version to version."""
    if why := missing("MiniLM"):
        report.notes.append(f"MiniLM takes no part: {why}")
    size = options.gib / 4
    what = f"{size:.2f} GiB of bf16 weights, one process, median of {options.rounds}"
    section = report.section(what, [deltas.OURS, deltas.XOR, deltas.PAIRS])
    deltas.compare(root, section, size * 2**30, options.rounds)


def alone(
    options: argparse.Namespace,
    root: Path,
    report: Report,
    peers: list[str],
    only: frozenset[str],
) -> None:
    """The races of one process, and the figures of scale."""
    with Team("alone", 1, root) as lone:
        size = options.gib / 4
        lonely = [name for name in peers if name in ALONE]
        if only.intersection(ALONE_RACES):
            what = (
                f"{size:.2f} GiB, one process, median of {options.rounds}; "
                "/ limit: seconds over its own (GB/s)"
            )
            section = report.section(what, [*options.formats, *lonely, "limit"])
            teams = dict.fromkeys(("limit", *options.formats, *lonely), lone)
            arena = Arena(root, teams, options.rounds)
            course = Course(
                arena, section, options.formats, lonely, only.intersection(ALONE_RACES)
            )
            course.large(Spec.large(size * 2**30))
        if only.intersection(DESK):
            stock = [name for name in peers if name == "torch DCP"]
            section = report.section("One process, no race", [*options.formats, *stock])
            desk = Desk(lone, section, options.formats, stock, options.rounds, only)
            desk.planning(options.ranks)
            desk.opening(root, options.ranks)
            desk.digests(root, int(size * 2**30))


if __name__ == "__main__":
    sys.exit(main())
