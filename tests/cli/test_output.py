"""What is printed on terminals and into pipes."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor, events, limits
from megackpt.cli.compare import Change
from megackpt.cli.output import text_lines
from megackpt.progress_line import show_progress

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
NEW = GOLDEN / "mcore-0.16.1-tp2pp1dp2"
COMMAND = [sys.executable, "-m", "megackpt"]
ESCAPE = "\x1b"


@pytest.mark.slow
def test_names_cannot_steer_a_terminal(
    tmp_path: Path,
    plain: Callable[..., str],
    on_terminal: Callable[..., Any],
    piped: Callable[..., Any],
) -> None:
    """Keys, file names, directories, texts of errors: nothing of them reaches the terminal as it is."""
    evil = "k\x1b]0;owned\x07\x1b[2J\nfake\u202e.w"
    folder = tmp_path / "d\x1b[31mred"
    megackpt.save(
        {
            "w": ShardedTensor.from_rank_offsets(evil, torch.zeros(2)),
            evil: {evil: evil},
        },
        folder,
    )
    (folder / "x\x1b[5m").touch()
    for words in (
        ["show", folder],
        ["show", folder, "--common"],
        ["show", folder, evil],
        ["verify", folder],
    ):
        for printed in (plain(*words), plain(*words, "--json")):
            assert printed
            assert all(c.isprintable() or c == "\n" for c in printed)
            assert "fake" not in [line.strip() for line in printed.splitlines()]
        shown = on_terminal(*words)
        assert shown.status == 0
        assert "\x07" not in shown.raw
        assert f"{ESCAPE}[2J" not in shown.raw
        assert f"{ESCAPE}[5m" not in shown.raw
    wrong = piped("show", tmp_path / "no\x1b[31m")
    assert wrong.returncode == 3
    assert ESCAPE not in wrong.stderr


def test_a_pipe_gets_every_key_whole(tmp_path: Path, piped: Callable[..., Any]) -> None:
    key = "layers." + "long_" * 80 + "weight"
    megackpt.save(
        {"w": ShardedTensor.from_rank_offsets(key, torch.zeros(2))}, tmp_path / "c"
    )
    done = piped("show", tmp_path / "c", COLUMNS="20", FORCE_COLOR="1")
    assert any(
        line.startswith(f"{key}  float32  [2] ") for line in done.stdout.splitlines()
    )
    assert ESCAPE not in done.stdout
    assert not done.stderr


def test_narrow_terminals_cut_nothing(
    tmp_path: Path, on_terminal: Callable[..., Any]
) -> None:
    key = "a_very_long_name_" * 6
    megackpt.save(
        {"w": ShardedTensor.from_rank_offsets(key, torch.zeros(2, 3))}, tmp_path / "c"
    )
    shown = on_terminal("show", tmp_path / "c", width=60)
    assert key in shown.text


def test_ascii_terminals(on_terminal: Callable[..., Any]) -> None:
    shown = on_terminal(
        "show", NEW, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"
    )
    assert shown.status == 0
    assert shown.raw.isascii()
    assert "self_attention" in shown.text


def test_values_that_are_lists_of_dicts_are_no_tables() -> None:
    changes = [
        Change(("x",), [{"p": 1}, {"q": 2}], 5),
        Change(("y",), ..., list(range(1000))),
    ]
    lines = list(text_lines({"objects": [{"key": "k", "changes": changes}]}))
    assert re.search(
        r"\['x'\] +\[\{'p': 1\}, \{'q': 2\}\] +5$", "\n".join(lines), re.MULTILINE
    )
    assert max(map(len, lines)) < 300


def test_without_a_terminal_progress_is_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(limits, "PROGRESS_SECONDS", 0.01)
    operation, stage = events.operation("diff", "a"), events.stage("read")
    with show_progress(), operation, stage as read:
        read.todo = 4 << 20
        time.sleep(0.2)
        assert not capsys.readouterr().err
        read.advance(3 << 20)
        deadline = time.monotonic() + 20
        printed = ""
        while "75 %" not in printed and time.monotonic() < deadline:
            time.sleep(0.1)
            printed += capsys.readouterr().err
    assert printed == "diff: read, 75 %, 3.0 MiB of 4.0 MiB\n"


def test_on_a_terminal_the_line_is_redrawn_and_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    operation, stage = events.operation("verify", "a"), events.stage("read")
    with show_progress(), operation, stage as read:
        read.todo = 4 << 20
        read.advance(3 << 20)
        deadline = time.monotonic() + 20
        while "75 %" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    line = "\r\x1b[Kverify: read, 75 %, 3.0 MiB of 4.0 MiB"
    assert stream.getvalue().endswith(f"{line}\r\x1b[K")
