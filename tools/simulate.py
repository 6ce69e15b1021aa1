"""Plan a save and a load of a GPT at any parallelism in one process, and print their cost.

    python tools/simulate.py --tp 8 --pp 16 --dp 128 [--ep 1] [--format torch_dist --format zarr]
                             [--layers 32 --hidden 4096 --ffn 14336 --heads 32 --groups 8 --vocabulary 128256]
                             [--experts 0] [--dtype bfloat16] [--optimizer adam|none] [--replicated-optimizer]
                             [--load-tp 4 --load-pp 8 --load-dp 16] [--json]
    python tools/simulate.py --plot docs/scaling.png

Plans, files and bytes equal a real save of the same state. No tensor is made, no file is read or written.
docs/scaling.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from simulation.charts import draw_points, plot, table_points
from simulation.model import Model
from simulation.parallelism import Parallelism
from simulation.report import answer
from simulation.simulator import MOST_RANKS, Load, Save, simulate_load, simulate_save

from megackpt.cli.output import print_answer
from megackpt.errors import CheckpointingException
from megackpt.strategies import backend_named

LARGEST = 10_000_000  # of anything; their products have to fit into 64 bits, too


def main(arguments: list[str] | None = None) -> int:
    options = asked(arguments)
    try:
        if options.plot:
            if options.drawn_from:
                draw_points(table_points(options.drawn_from), options.plot)
            else:
                plot(options.plot)
            return 0
        saves, loads = simulate(options)
    except (CheckpointingException, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print_answer(answer(saves, loads), as_json=options.json)
    return 0


def simulate(options: argparse.Namespace) -> tuple[list[Save], list[Load | None]]:
    job = Parallelism(options.tp, options.pp, options.dp, options.ep)
    target = None
    if any((options.load_tp, options.load_pp, options.load_dp, options.load_ep)):
        target = Parallelism(
            options.load_tp or 1,
            options.load_pp or 1,
            options.load_dp or 1,
            options.load_ep or 1,
        )
    for shape in filter(None, (job, target)):
        if shape.ranks > MOST_RANKS:
            raise ValueError(
                f"{shape.ranks} ranks are more than the {MOST_RANKS} that are simulated"
            )
    model = Model(
        options.layers,
        options.hidden,
        options.ffn,
        options.heads,
        options.groups,
        options.vocabulary,
        options.experts,
        not options.plain_mlp,
        options.dtype,
        options.optimizer,
        not options.replicated_optimizer,
    ).padded(options.tp, options.vocabulary_multiple)
    saves: list[Save] = []
    loads: list[Load | None] = []
    for name in options.format or ["torch_dist", "zarr"]:
        saves.append(
            simulate_save(model, job, backend_named(name), options.common_bytes)
        )
        loads.append(
            None
            if target is None
            else simulate_load(model, target, saves[-1], options.load_ranks)
        )
    return saves, loads


def count(text: str) -> int:
    """A number of something that has to be there, on the command line."""
    if not 1 <= int(text) <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is not from 1 to {LARGEST:,}")
    return int(text)


def count_or_none(text: str) -> int:
    return 0 if text == "0" else count(text)


def asked(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for prefix, what in (("", "the save"), ("load-", "the load")):
        for name, long in (
            ("tp", "tensor"),
            ("pp", "pipeline"),
            ("dp", "data"),
            ("ep", "expert"),
        ):
            default = 0 if prefix else 1
            parser.add_argument(
                f"--{prefix}{name}",
                type=count,
                default=default,
                help=f"{long} ranks of {what}",
            )
    parser.add_argument(
        "--format", action="append", help="default: torch_dist and zarr"
    )
    model = Model()
    for name in ("layers", "hidden", "ffn", "heads", "groups", "vocabulary"):
        parser.add_argument(f"--{name}", type=count, default=getattr(model, name))
    parser.add_argument(
        "--experts", type=count_or_none, default=model.experts, help="0: a dense model"
    )
    parser.add_argument(
        "--vocabulary-multiple",
        type=count,
        default=128,
        help="padded to a multiple of this times TP",
    )
    parser.add_argument(
        "--plain-mlp",
        action="store_true",
        help="no gate: linear_fc1 is one matrix, not two",
    )
    parser.add_argument(
        "--dtype",
        default=model.dtype,
        help="of the model; the optimizer's state is float32",
    )
    parser.add_argument(
        "--optimizer", choices=("adam", "none"), default=model.optimizer
    )
    parser.add_argument(
        "--replicated-optimizer",
        action="store_true",
        help="its state is not cut over the data ranks",
    )
    parser.add_argument(
        "--common-bytes", type=count, default=4096, help="size of the common state"
    )
    parser.add_argument(
        "--load-ranks",
        type=count,
        default=8,
        help="so many ranks of the load are looked at",
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="run the sweeps of docs/scaling.md and draw",
    )
    parser.add_argument(
        "--drawn-from",
        type=Path,
        metavar="PAGE",
        help="simulate nothing: --plot draws the table of this page",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
