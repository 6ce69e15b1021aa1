"""A type checker sees wrong options: mypy over typed_calls.py, and the names in the annotations."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import megackpt
from megackpt.checkpoint.run_directory import NAMINGS, NamingStyle
from megackpt.planning.strict import StrictHandling, StrictName

ROOT = Path(__file__).resolve().parent.parent
CALLS = ROOT / "tests" / "typed_calls.py"


@pytest.mark.slow
def test_mypy_finds_the_wrong_calls_and_no_others() -> None:
    """With the cache of ``make types``; without it this takes about a minute."""
    wanted = {
        (number, match[1])
        for number, line in enumerate(CALLS.read_text().splitlines(), 1)
        if (match := re.search(r"  # ([a-z]+-[a-z]+)$", line))
    }
    command = [sys.executable, "-m", "mypy", "--no-pretty", str(CALLS)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    found = re.findall(r":(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.MULTILINE)
    assert {(int(number), code) for number, code in found} == wanted, done.stdout
    assert len(wanted) > 15


def test_the_names_in_the_annotations_are_those_that_work() -> None:
    assert set(get_args(StrictName)) == {flag.value for flag in StrictHandling}
    assert set(get_args(NamingStyle)) == {n.style for n in NAMINGS if n.template}


@pytest.mark.parametrize(
    ("method", "function"),
    [
        (megackpt.CheckpointManager.save, megackpt.save),
        (megackpt.CheckpointManager.restore, megackpt.load),
    ],
)
def test_the_manager_takes_the_options_of_save_and_load(method, function) -> None:
    fixed = {"checkpoint_dir", "sharded_strategy"}
    fixed |= {"async_sharded_save", "asynchronous"}
    fixed |= {"process_group", "timeout", "common_strategy"}
    mine = inspect.signature(method).parameters
    for name, option in inspect.signature(function).parameters.items():
        if name not in fixed and name != "sharded_state_dict":
            assert mine[name].default == option.default, name
            assert mine[name].annotation == option.annotation, name
