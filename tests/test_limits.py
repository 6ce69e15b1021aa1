"""docs/limits.md lists the thresholds as they are; environment variables override some."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from megackpt import limits

ROOT = Path(__file__).resolve().parent.parent


def shown(name: str, value: float) -> str:
    """A value as the table has it: sizes in binary units where these are exact."""
    if "BYTES" in name or "MEMORY" in name:
        for power, unit in ((30, "GiB"), (20, "MiB")):
            if int(value) % (1 << power) == 0:
                return f"{int(value) >> power} {unit}"
    return f"{value:,g}" if isinstance(value, float) else f"{value:,}"


def rows() -> list[tuple[str, ...]]:
    """Each threshold of the module, with the text that follows it."""
    body = ast.parse((ROOT / "megackpt" / "limits.py").read_text()).body
    found = []
    for node, after in pairwise(body):
        if isinstance(node, ast.Assign):
            assert isinstance(after, ast.Expr), f"line {node.lineno} has no text"
            assert isinstance(after.value, ast.Constant)
            name = node.targets[0].id  # type: ignore[attr-defined]
            text = " ".join(str(after.value.value).split())
            found.append((name, shown(name, getattr(limits, name)), text))
    return found


def test_the_table_lists_every_threshold() -> None:
    page = (ROOT / "docs" / "limits.md").read_text()
    table = re.findall(r"^\| `([A-Z_]+)` \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    assert table == rows()


def test_every_text_has_a_unit_and_a_reason() -> None:
    for name, _, text in rows():
        assert re.match(
            r"(Seconds|Bytes|Connections|Levels|Values|Tasks|Rows|Bytes a stored byte)\. \w",
            text,
        ), name


def test_a_variable_that_is_named_is_read() -> None:
    named = [re.findall(r"`MEGACKPT_(\w+)`", text) for _, _, text in rows()]
    for name in (name for names in named for name in names):
        if name != "WAIT_WARNING_SECONDS":  # is read at each wait
            assert run(name, "12345") == "12345"


@pytest.mark.parametrize("text", ["0", "-1", "1e9", "many"])
def test_a_malformed_variable_is_an_error(text: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run("PICKLE_LEAVES", text)
    assert (
        f"MEGACKPT_PICKLE_LEAVES is '{text}': give a whole number"
        in failed.value.stderr
    )


def run(name: str, text: str) -> str:
    """The value of a threshold in a process with this environment variable."""
    code = f"from megackpt import limits; print(limits.{name})"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, f"MEGACKPT_{name}": text},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
