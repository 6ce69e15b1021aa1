"""The command line: arguments in, text out. What is printed is made here; what is known is asked elsewhere."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from megackpt import __version__
from megackpt.checkpoint import open_checkpoint, verify
from megackpt.converter import convert
from megackpt.errors import CheckpointingException
from megackpt.planning.manifest import Manifest

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0 as asked, 1 the checkpoint (or the disk) says no, 2 wrong usage."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except CheckpointingException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megackpt", description="Look at, check and convert checkpoints.")
    parser.add_argument("--version", action="version", version=f"megackpt {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    show = commands.add_parser("show", help="what a checkpoint holds: tensors, shapes, dtypes, chunks, bytes")
    show.add_argument("checkpoint")
    show.set_defaults(run=_show)

    check = commands.add_parser("verify", help="read everything and check every digest")
    check.add_argument("checkpoint")
    check.set_defaults(run=_verify)

    change = commands.add_parser("convert", help="rewrite a checkpoint in another format")
    change.add_argument("source")
    change.add_argument("target")
    change.add_argument("--to", required=True, metavar="FORMAT", help="torch_dist or zarr")
    change.add_argument(
        "--overwrite", action="store_true", help="replace a complete checkpoint at the target"
    )
    change.set_defaults(run=_convert)
    return parser


def _show(options: argparse.Namespace) -> int:
    manifest = open_checkpoint(options.checkpoint).manifest
    name, version = manifest.backend
    print(f"{options.checkpoint}: {name} version {version}, save {manifest.save_id or 'unknown (foreign)'}")
    rows = sorted(_lines(manifest))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    total = _bytes(int(manifest.chunks.length.sum()))
    print(f"{len(rows)} entries, {len(manifest.chunks)} chunks, {len(manifest.files)} files, {total}")
    return EXIT_OK


def _lines(manifest: Manifest) -> Iterator[tuple[str, str, str, str]]:
    count = len(manifest.tensors)
    chunks = np.bincount(manifest.chunks.tensor, minlength=count)
    octets = np.bincount(manifest.chunks.tensor, weights=manifest.chunks.length, minlength=count)
    for (key, meta), pieces, size in zip(manifest.tensors, chunks, octets, strict=True):
        shape = "x".join(map(str, meta.shape)) or "scalar"
        yield key, meta.dtype, shape, f"{pieces} chunk{'s' * int(pieces != 1)}, {_bytes(int(size))}"


def _bytes(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    power = min(4, (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {' KMGT'[power]}iB"


def _verify(options: argparse.Namespace) -> int:
    report = verify(options.checkpoint)
    print(report)
    return EXIT_FAILED if report.problems else EXIT_OK


def _convert(options: argparse.Namespace) -> int:
    convert(options.source, options.target, options.to, overwrite=options.overwrite)
    print(f"{options.target}: written as {options.to}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
