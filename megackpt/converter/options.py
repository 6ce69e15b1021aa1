"""A conversion's options on a command line: names, meanings, and the arguments of ``convert`` that they become."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megackpt.converter.budget import parse_size
from megackpt.converter.selecting import CASTS, Choice
from megackpt.strategies import Strategy

FORMATS = ("torch_dist", "zarr", "safetensors", "torch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything but the progress bar and the form of the answer, which are the caller's."""
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a checkpoint of any format: a directory, or one file",
    )
    parser.add_argument(
        "target",
        metavar="DST",
        help="a directory; or a name like x.safetensors, x.pt: one file",
    )
    parser.add_argument(
        "--to",
        required=True,
        metavar="FORMAT",
        help=", ".join(FORMATS) + ", or a plug-in's name",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a complete checkpoint at DST"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read everything again before the commit, and check it",
    )
    parser.add_argument(
        "--trust-source",
        action="store_true",
        help="do not check the source's digests (by default they are)",
    )
    parser.add_argument(
        "--no-resume",
        action="store_true",
        help="begin anew where an earlier run was cut off",
    )
    what = parser.add_argument_group(
        "what is carried (patterns: *, ? and [...], as in the shell; repeatable)"
    )
    what.add_argument(
        "--select",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only keys that fit",
    )
    what.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="no keys that fit",
    )
    what.add_argument(
        "--rename", action="append", default=[], type=_parsed(_rename), metavar="OLD=NEW",
        help="each * in OLD is any text, and the n-th * in NEW what the n-th was: 'model.*=*' drops a prefix",
    )  # fmt: skip
    what.add_argument(
        "--cast",
        type=_parsed(_cast),
        metavar="DTYPE",
        help=f"of floating tensors: {', '.join(CASTS)}",
    )
    what.add_argument(
        "--no-state", action="store_true", help="leave out all that is no tensor"
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--max-memory", type=_parsed(parse_size), default=parse_size("512MiB"), metavar="SIZE",
        help="of all processes together, above idle: 64MiB, 1GB, bytes (default: 512MiB)",
    )  # fmt: skip
    how.add_argument(
        "--workers",
        type=_parsed(_count),
        metavar="N",
        help="processes (default: by size and CPUs)",
    )
    how.add_argument(
        "--option", action="append", default=[], type=_parsed(_option), metavar="NAME=VALUE",
        help="an option of the format, as compression=zstd for zarr (repeatable)",
    )  # fmt: skip
    how.add_argument(
        "--shards",
        type=_parsed(_count),
        metavar="N",
        help="files to write, where that can be chosen",
    )


def from_options(options: argparse.Namespace) -> dict[str, Any]:
    """What was given, as keyword arguments of ``convert``."""
    return {
        "source": options.source,
        "target": options.target,
        "to": Strategy(options.to, options=dict(options.option))
        if options.option
        else options.to,
        "overwrite": options.overwrite,
        "verify": not options.trust_source,
        "verify_target": options.verify,
        "max_memory": options.max_memory,
        "workers": options.workers,
        "select": options.select,
        "exclude": options.exclude,
        "rename": options.rename,
        "cast": options.cast,
        "state": not options.no_state,
        "shards": options.shards,
        "resume": not options.no_resume,
    }


def _parsed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """For argparse: its error tells what a ValueError says."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def _rename(text: str) -> tuple[str, str]:
    return Choice.of(rename=text).rename[0]


def _cast(text: str) -> str | None:
    return Choice.of(cast=text).cast


def _option(text: str) -> tuple[str, str | int]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ValueError(f"an option is NAME=VALUE, not {text!r}")
    return name, int(value) if value.isdecimal() else value


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{text!r} is no number from 1 on")
    return int(text)
