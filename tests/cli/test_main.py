"""Arguments, exit statuses and messages of the command line."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megackpt import errors
from megackpt.__main__ import main
from megackpt.cli import commands

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
NEW = GOLDEN / "mcore-0.16.1-tp2pp1dp2"
COMMAND = [sys.executable, "-m", "megackpt"]
ESCAPE = "\x1b"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.NotACheckpoint, 3),
        (errors.CorruptCheckpoint, 4),
        (errors.UntrustedClass, 4),
        (errors.BackendError, 5),
        (errors.StorageError, 6),
        (PermissionError, 6),
        (errors.MismatchError, 3),
        (errors.CheckpointExists, 1),
        (errors.SaveInProgress, 1),
        (KeyboardInterrupt, 130),
    ],
)
def test_every_error_has_its_status(
    kind: type[BaseException],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(options: argparse.Namespace) -> None:
        raise kind(f"of {options.directory}")

    monkeypatch.setattr(commands, "ls", fails)
    assert main(["ls", "x"]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "interrupted\n" if status == 130 else f"{kind.__name__}: of x\n"
    )


def test_messages_say_what_is_wrong(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(tmp_path / "no")]) == 3
    assert "does not exist" in capsys.readouterr().err
    assert main(["convert", str(checkpoint), str(tmp_path / "x"), "--to", "zrr"]) == 5
    assert "unknown format 'zrr': known are" in capsys.readouterr().err
    (checkpoint / "megackpt.index").write_bytes(b"megackpt" + bytes(100))
    assert main(["diff", str(checkpoint), str(checkpoint)]) in (4, 5)
    with pytest.raises(SystemExit) as usage:
        main(["frobnicate"])
    assert usage.value.code == 2


def test_help_explains_every_status(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["show"], ["convert"]):
        with pytest.raises(SystemExit) as left:
            main([*arguments, "--help"])
        assert left.value.code == 0
        told = re.findall(r"^  (\d+) +\S", capsys.readouterr().out, re.MULTILINE)
        assert told == ["0", "1", "2", "3", "4", "5", "6", "7", "130"]


def test_a_reader_that_goes_away(checkpoint: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "show", checkpoint],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_interrupted(tmp_path: Path) -> None:
    """A real SIGINT, while a command waits."""
    script = (
        "import os, signal, sys; from megackpt.cli import commands; from megackpt.__main__ import main;"
        "commands.ls = lambda options: os.kill(os.getpid(), signal.SIGINT) or signal.pause();"
        "sys.exit(main(['ls']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_looking_needs_no_torch(checkpoint: Path) -> None:
    script = (
        "import sys; from megackpt.__main__ import main; main(sys.argv[1:]);"
        "sys.exit('torch' in sys.modules)"
    )
    for words in (["ls", checkpoint], ["show", checkpoint], ["show", NEW],
                  ["diff", checkpoint, checkpoint]):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", script, *words],
            capture_output=True,
            cwd=ROOT,
            check=False,
        )
        assert done.returncode == 0, words
