"""The command line: arguments in, an answer and an exit status out. What is answered is known in ``commands``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from megackpt import __version__, errors
from megackpt.cli import terminal
from megackpt.cli.answers import Answer, Progress

EXIT_OK, EXIT_NO, EXIT_USAGE, EXIT_NOTHING, EXIT_CORRUPT, EXIT_FORMAT, EXIT_STORAGE = (
    range(7)
)
EXIT_INTERRUPTED, EXIT_PIPE = 130, 141

STATUS = f"""\
exit status:
  {EXIT_OK}    as asked: verified, the same, written
  {EXIT_NO}    no: damage found (verify), different (diff), refused (the target exists, a save goes on)
  {EXIT_USAGE}    wrong usage
  {EXIT_NOTHING}    nothing there: no such directory, no complete checkpoint in it, no such key
  {EXIT_CORRUPT}    the checkpoint cannot be read: damaged, cut off, contradicting itself, hostile
  {EXIT_FORMAT}    the format: unknown, not known to this release, its package missing, or unable to hold this
  {EXIT_STORAGE}    the storage refused: no permission, no space, an input/output error
  {EXIT_INTERRUPTED}  interrupted"""

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
    """Run one command; the exit status (see STATUS). Wrong usage leaves through SystemExit."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(
                errors="backslashreplace"
            )  # keys hold what a terminal's encoding may not
    options = _parser().parse_args(arguments)
    try:
        return _answer(options)
    except BrokenPipeError:
        _drop_output()
        return EXIT_PIPE
    except (errors.CheckpointingException, OSError) as error:
        text = str(error).replace(
            "overwrite=True", "--overwrite"
        )  # the name that it has here
        if options.json:
            facts = {"error": {"kind": type(error).__name__, "message": text}}
            try:
                terminal.tell(Answer(lambda: facts, lambda _pretty: []), as_json=True)
            except OSError:  # the error may be of the output itself
                _drop_output()
        terminal.complain(f"{type(error).__name__}: {text}")
        return next(status for kind, status in _STATUS_OF if isinstance(error, kind))
    except KeyboardInterrupt:
        terminal.complain("interrupted")
        return EXIT_INTERRUPTED


def _drop_output() -> None:
    """Let what cannot be written go, so that the interpreter does not fail of it once more as it ends."""
    if sys.stdout is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _answer(options: argparse.Namespace) -> int:
    run: Callable[[argparse.Namespace, Progress], Answer] = options.run
    with terminal.progress() as progress:
        answer = run(options, progress)
    terminal.tell(answer, options.json)
    return answer.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megackpt",
        description="Look at, check, compare and convert checkpoints.",
        epilog=f"{STATUS}\n\nEach command explains itself: megackpt COMMAND --help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"megackpt {__version__}"
    )
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=_Command
    )
    for add in (_add_ls, _add_show, _add_verify, _add_diff, _add_convert):
        add(commands)
    return parser


class _Command(argparse.ArgumentParser):
    """A command; ``late`` adds arguments that only the converter knows, once they are needed: importing takes time."""

    late: Callable[[argparse.ArgumentParser], None] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        late, self.late = self.late, None
        if late is not None:
            late(self)
        return super().parse_known_args(args, namespace)


_Commands: TypeAlias = (
    "argparse._SubParsersAction[_Command]"  # argparse has no public name for it
)


def _command(commands: _Commands, name: str, what: str, more: str = "") -> _Command:
    command = commands.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}. {more}".strip(),
        epilog=STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--json", action="store_true", help="print facts for programs, as JSON"
    )
    return command


def _add_ls(commands: _Commands) -> None:
    command = _command(
        commands,
        "ls",
        "the checkpoints of a run: which steps, complete or not, which is the latest",
    )
    command.add_argument("directory", metavar="DIR", nargs="?", default=".")
    command.set_defaults(run=_ls)


def _ls(options: argparse.Namespace, _progress: Progress) -> Answer:
    from megackpt.cli.listing import ls

    return ls(options.directory)


def _add_show(commands: _Commands) -> None:
    command = _command(
        commands,
        "show",
        "what a checkpoint holds: tensors, shapes, dtypes, chunks, bytes",
        "With the key of one entry: where each of its chunks lies.",
    )
    command.add_argument("checkpoint", metavar="CKPT")
    command.add_argument(
        "key", metavar="KEY", nargs="?", help="one key, or a pattern: 'decoder.*.bias'"
    )
    command.add_argument(
        "--chunks", action="store_true", help="the layout of every entry shown"
    )
    command.add_argument(
        "--all",
        action="store_true",
        help="on a terminal: every key in full, no tree, no folding",
    )
    command.add_argument(
        "--common",
        action="store_true",
        help="the common state; no class of it is imported",
    )
    command.add_argument(
        "--html",
        metavar="FILE",
        help="write the shard map, one page that opens offline",
    )
    command.set_defaults(run=_show)


def _show(options: argparse.Namespace, _progress: Progress) -> Answer:
    from megackpt.cli.showing import show

    return show(
        options.checkpoint,
        options.key,
        chunks=options.chunks,
        common=options.common,
        unfolded=options.all,
        html=options.html,
    )


def _add_verify(commands: _Commands) -> None:
    command = _command(commands, "verify", "read everything and check every digest")
    command.add_argument("checkpoint", metavar="CKPT")
    command.set_defaults(run=_verify)


def _verify(options: argparse.Namespace, progress: Progress) -> Answer:
    from megackpt.cli.checking import check

    return check(options.checkpoint, progress)


def _add_diff(commands: _Commands) -> None:
    command = _command(
        commands,
        "diff",
        "what differs between two checkpoints, of whatever formats",
        "Bit for bit, unless a tolerance is given: |a - b| <= ATOL + RTOL * |b|.",
    )
    command.add_argument("a", metavar="A")
    command.add_argument("b", metavar="B")
    command.add_argument(
        "--rtol", type=_tolerance, metavar="RTOL", help="relative tolerance"
    )
    command.add_argument(
        "--atol", type=_tolerance, metavar="ATOL", help="absolute tolerance"
    )
    command.add_argument(
        "--select",
        default="*",
        metavar="PATTERN",
        help="only the keys that match: 'decoder.*'",
    )
    command.set_defaults(run=_diff)


def _diff(options: argparse.Namespace, progress: Progress) -> Answer:
    from megackpt.cli.comparing import diff
    from megackpt.cli.differences import Tolerance

    given = options.rtol is not None or options.atol is not None
    tolerance = Tolerance(options.rtol or 0.0, options.atol or 0.0) if given else None
    return diff(
        options.a, options.b, progress, select=options.select, tolerance=tolerance
    )


def _tolerance(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no tolerance")


def _add_convert(commands: _Commands) -> None:
    command = _command(
        commands,
        "convert",
        "rewrite a checkpoint in another format",
        "In pieces, within a memory limit, by several processes. The same call goes on where one was cut off.",
    )
    command.late = _add_convert_arguments
    command.set_defaults(run=_convert, usage_error=command.error)


def _add_convert_arguments(command: argparse.ArgumentParser) -> None:
    from megackpt.cli.convert_options import add_arguments

    add_arguments(command)


def _convert(options: argparse.Namespace, progress: Progress) -> Answer:
    from megackpt.cli.convert_options import convert_arguments
    from megackpt.cli.converting import convert

    try:
        return convert(convert_arguments(options), progress)
    except ValueError as error:  # of arguments that contradict each other
        options.usage_error(str(error))
        raise


if __name__ == "__main__":
    sys.exit(main())
