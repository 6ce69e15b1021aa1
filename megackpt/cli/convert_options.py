"""The options of ``megackpt convert``. They have the names of the function's arguments."""

from __future__ import annotations

import argparse
import inspect
from datetime import timedelta
from typing import Any

from megackpt import limits
from megackpt.converter import convert
from megackpt.converter.selection import CASTS
from megackpt.strategies import Strategy

FORMATS = ("torch_dist", "zarr", "safetensors", "torch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all options. ``convert`` itself checks their values."""
    add = parser.add_argument
    place = "a checkpoint of any format: a directory, file or URL"
    add("source", metavar="SRC", help=place)
    place = "a directory or URL; or one file: x.safetensors, x.pt"
    add("target", metavar="DST", help=place)
    formats = ", ".join(FORMATS)
    add("--to", required=True, metavar="FORMAT", help=f"{formats}, or a plug-in's name")
    add("--overwrite", action="store_true", help="replace a complete checkpoint at DST")
    add(
        "--verify",
        dest="verify_target",
        action="store_true",
        help="read everything again before the commit, and check it",
    )
    add(
        "--trust-source",
        dest="verify",
        action="store_false",
        help="do not check the source's digests (by default they are checked)",
    )
    add(
        "--no-resume",
        dest="resume",
        action="store_false",
        help="start from zero if an earlier run was interrupted",
    )
    group = parser.add_argument_group(
        "selection (patterns: *, ? and [...], as in the shell; repeatable)"
    )
    add = group.add_argument
    patterns: dict[str, Any] = {"action": "append", "default": []}
    add("--select", **patterns, metavar="PATTERN", help="only keys that match")
    add("--exclude", **patterns, metavar="PATTERN", help="no keys that match")
    add(
        "--rename",
        **patterns,
        metavar="OLD=NEW",
        help="each * in OLD is any text, and the n-th * in NEW what the n-th was: "
        "'model.*=*' drops a prefix",
    )
    add("--cast", metavar="DTYPE", help=f"of floating tensors: {', '.join(CASTS)}")
    add(
        "--no-state",
        dest="state",
        action="store_false",
        help="leave out everything but tensors",
    )
    add = parser.add_argument_group("how").add_argument
    add(
        "--max-memory",
        default="512MiB",
        metavar="SIZE",
        help="of all processes together, above idle: 64MiB, 1GB, bytes (default: 512MiB)",
    )
    add(
        "--workers", type=int, metavar="N", help="processes (default: by size and CPUs)"
    )
    add(
        "--option",
        **patterns,
        metavar="NAME=VALUE",
        help="an option of the format, as compression=zstd for zarr, or "
        "torch_metadata=false for torch_dist (repeatable)",
    )
    add("--shards", type=int, metavar="N", help="files to write, if that can be chosen")
    add(
        "--timeout",
        type=_duration,
        default=timedelta(seconds=limits.RANK_TIMEOUT_SECONDS),
        metavar="SECONDS",
        help="how long a storage may not answer (default: "
        f"{limits.RANK_TIMEOUT_SECONDS})",
    )


def _duration(text: str) -> timedelta:
    seconds = float(text)
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return timedelta(seconds=seconds)


def convert_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``convert``. Raises ValueError for a malformed ``--option``."""
    parameters = inspect.signature(convert).parameters
    arguments = {n: value for n, value in vars(options).items() if n in parameters}
    words = {"true": True, "false": False}
    values: dict[str, str | int] = {}
    for text in options.option:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ValueError(f"an option is NAME=VALUE, not {text!r}")
        values[name] = words.get(value.lower(), value)
        if value.isdecimal():
            values[name] = int(value)
    if values:
        arguments["to"] = Strategy(options.to, options=values)
    return arguments
