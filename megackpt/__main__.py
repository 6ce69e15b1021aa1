"""The command line: parses the arguments, runs one command, prints its answer."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, TypeAlias

from megackpt import __version__, errors
from megackpt.cli.output import Answer, print_answer, print_error
from megackpt.progress_line import show_progress

EXIT_OK, EXIT_NO, EXIT_USAGE, EXIT_NOTHING, EXIT_CORRUPT = range(5)
EXIT_FORMAT, EXIT_STORAGE, EXIT_UNCHECKED = range(5, 8)
EXIT_INTERRUPTED, EXIT_PIPE = 130, 141

STATUS = f"""\
exit status:
  {EXIT_OK}    success: verified, the same, written
  {EXIT_NO}    no: damaged (verify), different (diff), refused (target exists, save in progress)
  {EXIT_USAGE}    wrong usage
  {EXIT_NOTHING}    nothing found: no such directory, no complete checkpoint in it, no such key
  {EXIT_CORRUPT}    the checkpoint cannot be read: damaged, cut off, contradictory, hostile
  {EXIT_FORMAT}    the format: unknown, too new, its package missing, or unable to hold this
  {EXIT_STORAGE}    the storage failed: no permission, no space, an input/output error
  {EXIT_UNCHECKED}    nothing is damaged, but without digests only sizes were checked (verify)
  {EXIT_INTERRUPTED}  interrupted"""

# The first class that fits decides.
_STATUS_OF: tuple[tuple[type[BaseException], int], ...] = (
    (errors.NotACheckpoint, EXIT_NOTHING),
    (errors.MismatchError, EXIT_NOTHING),
    (errors.CorruptCheckpoint, EXIT_CORRUPT),
    (errors.BackendError, EXIT_FORMAT),
    (errors.StorageError, EXIT_STORAGE),
    (OSError, EXIT_STORAGE),
    (errors.CheckpointingException, EXIT_NO),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Wrong usage raises SystemExit."""
    for stream in (sys.stdout, sys.stderr):
        # Keys may have characters that the encoding of the terminal lacks.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if arguments is None:
        arguments = sys.argv[1:]
    options = _parser(arguments).parse_args(arguments)
    try:
        with show_progress():
            # Imported late, so that --help is quick.
            commands = import_module("megackpt.cli.commands")
            answer: Answer = getattr(commands, options.command.replace("-", "_"))(
                options
            )
        print_answer(answer, options.json)
    except BrokenPipeError:
        _discard_output()
        return EXIT_PIPE
    except (errors.CheckpointingException, OSError) as error:
        # The option has another name here.
        text = str(error).replace("overwrite=True", "--overwrite")
        kind = type(error).__name__
        if options.json:
            try:
                print_answer(Answer({"error": {"kind": kind, "message": text}}), True)
            except OSError:
                # The error may be of stdout itself.
                _discard_output()
        print_error(f"{kind}: {text}")
        return next(status for cls, status in _STATUS_OF if isinstance(error, cls))
    except KeyboardInterrupt:
        print_error("interrupted")
        return EXIT_INTERRUPTED
    return answer.status


def _discard_output() -> None:
    """Discard buffered output, so that the interpreter does not fail to write it at its end."""
    if sys.stdout is not None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megackpt",
        description="Look at, check, compare, convert and remove checkpoints.",
        epilog=f"{STATUS}\n\nEach command has its own help: megackpt COMMAND --help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"megackpt {__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    help_text = "list the checkpoints of a run: complete or not, and the latest"
    ls = _add_command(commands, "ls", help_text)
    help_text = "a run or a checkpoint (default: the current directory)"
    ls.add_argument("directory", metavar="DIR", nargs="?", default=".", help=help_text)

    place = "a checkpoint of any format: a directory, file or URL"
    _add_show(commands, place)

    help_text = "read everything and check every digest"
    verify = _add_command(commands, "verify", help_text)
    help_text = f"{place}; or a run: all its steps are read"
    verify.add_argument("checkpoint", metavar="CKPT", help=help_text)
    help_text = "how many steps of a run are read at once (default: 1)"
    verify.add_argument("--jobs", type=_count, metavar="N", default=1, help=help_text)
    help_text = f"exit with {EXIT_OK}, not {EXIT_UNCHECKED}, without digests"
    verify.add_argument("--allow-unchecked", action="store_true", help=help_text)

    help_text = "compare two checkpoints, of any formats"
    more = (
        "Bit for bit, unless a tolerance is given: |a - b| <= ATOL + RTOL * |b|. Tensors that both "
        "cut alike are compared by their digests, without reading them."
    )
    diff = _add_command(commands, "diff", help_text, more)
    diff.add_argument("a", metavar="A", help=place)
    diff.add_argument("b", metavar="B", help="another one")
    help_text = "read tensors whose digests differ, and list the elements that differ"
    diff.add_argument("--read", action="store_true", help=help_text)
    diff.add_argument("--rtol", type=_tolerance, help="relative tolerance")
    diff.add_argument("--atol", type=_tolerance, help="absolute tolerance")
    help_text = "only the keys that match: 'decoder.*'"
    diff.add_argument("--select", default="*", metavar="PATTERN", help=help_text)
    help_text = "write a page that shows what differs and how each is cut"
    diff.add_argument("--html", metavar="FILE", help=help_text)

    help_text = "rewrite a checkpoint in another format"
    more = "Memory is bounded, and several processes work at once."
    convert = _add_command(commands, "convert", help_text, more)
    convert.set_defaults(usage_error=convert.error)
    _add_export(commands, place)
    help_text = "remove old checkpoints of a run"
    more = "Only what megackpt has written, and never the newest complete one."
    prune = _add_command(commands, "prune", help_text, more)
    prune.set_defaults(usage_error=prune.error)
    prune.add_argument("directory", metavar="DIR", help="a run")
    help_text = "the newest undamaged ones that stay"
    number: _Option = {"type": int, "metavar": "N"}
    prune.add_argument("--keep-last", **number, required=True, help=help_text)
    help_text = "steps that N divides stay as well"
    prune.add_argument("--keep-every", **number, help=help_text)
    help_text = (
        "those with the best metrics, as given to CheckpointManager.save, stay as well"
    )
    prune.add_argument("--keep-best", **number, help=help_text)
    help_text = "the metric that is compared (default: metric)"
    prune.add_argument("--best-metric", default="metric", help=help_text)
    help_text = "whether the lowest or the highest is best (default: min)"
    modes = ("min", "max")
    prune.add_argument("--best-mode", choices=modes, default="min", help=help_text)
    help_text = "those that are not older stay as well"
    prune.add_argument("--keep-days", type=_tolerance, metavar="DAYS", help=help_text)
    help_text = "remove nothing, and list what would be removed"
    prune.add_argument("--dry-run", action="store_true", help=help_text)

    help_text = "remove checkpoints"
    more = "Only what megackpt has written; files of others stay."
    rm = _add_command(commands, "rm", help_text, more)
    rm.add_argument("checkpoints", metavar="CKPT", nargs="+", help="a directory or URL")
    if "convert" in arguments:
        # Only the options of ``convert`` need an import of torch.
        from megackpt.cli.convert_options import add_arguments

        add_arguments(convert)
    return parser


_Option: TypeAlias = dict[str, Any]
_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _add_show(commands: _Commands, place: str) -> None:
    help_text = (
        "show the content of a checkpoint: tensors, shapes, dtypes, chunks, bytes"
    )
    more = "With the key of one entry: the location of each of its chunks."
    show = _add_command(commands, "show", help_text, more)
    show.add_argument("checkpoint", metavar="CKPT", help=place)
    help_text = "one key, or a pattern: 'decoder.*.bias'"
    show.add_argument("key", metavar="KEY", nargs="?", help=help_text)
    help_text = "the layout of every entry shown"
    show.add_argument("--chunks", action="store_true", help=help_text)
    help_text = "on a terminal: every key, also of layers that are alike"
    show.add_argument("--all", action="store_true", help=help_text)
    help_text = "what the save has noted of the values: how many are NaN or infinite, the largest"
    show.add_argument("--stats", action="store_true", help=help_text)
    help_text = "the common state; none of its classes is imported"
    show.add_argument("--common", action="store_true", help=help_text)
    help_text = "write the shard map, one page that opens offline"
    show.add_argument("--html", metavar="FILE", help=help_text)


def _add_export(commands: _Commands, place: str) -> None:
    help_text = "write a directory that from_pretrained of transformers opens"
    more = "The checkpoint is of a model of transformers, under the names of the model."
    export = _add_command(commands, "export-hf", help_text, more)
    export.set_defaults(usage_error=export.error)
    export.add_argument("source", metavar="CKPT", help=place)
    export.add_argument("target", metavar="DIR", help="the directory to write")
    help_text = (
        "a config.json, or the directory of a model, of which all is copied but weights (default: "
        "the files that our Trainer and Accelerator have stored)"
    )
    export.add_argument("--config", metavar="DIR_OR_FILE", help=help_text)
    help_text = "what precedes the names of the model in the keys (default: model.)"
    export.add_argument("--prefix", metavar="TEXT", default="model.", help=help_text)
    help_text = "of a file of weights: 500MiB, 5GB, bytes (default: 5GB)"
    size: _Option = {"metavar": "SIZE", "default": "5GB"}
    export.add_argument("--max-shard-size", **size, help=help_text)
    help_text = "the dtype of floating tensors: bf16, fp16, fp32 (default: as stored)"
    export.add_argument("--cast", metavar="DTYPE", help=help_text)


def _add_command(
    commands: _Commands, name: str, help_text: str, more: str = ""
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=help_text,
        description=f"{help_text.capitalize()}. {more}".strip(),
        epilog=STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    help_text = "print the answer as JSON"
    command.add_argument("--json", action="store_true", help=help_text)

    command.set_defaults(command=name)
    return command


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a tolerance")
    return value


if __name__ == "__main__":
    sys.exit(main())
