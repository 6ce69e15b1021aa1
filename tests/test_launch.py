"""The parent that forks the ranks of tests (launch.py, conftest.py)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.conftest import Parent


@pytest.mark.parametrize(
    "command", [["true"], ["sh", "-c", "read order"]], ids=["before", "during"]
)
def test_a_parent_that_ended_is_named_and_made_anew(
    command: list[str], tmp_path: Path
) -> None:
    """It ended before it got an order, or while it carried one out."""
    parent = Parent()
    parent._process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with pytest.raises(pytest.fail.Exception, match="the parent of the ranks ended"):
        parent([], {}, tmp_path, 1, timeout=1)
    assert parent._process is None
