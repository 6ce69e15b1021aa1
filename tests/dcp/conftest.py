"""Fixtures of the tests of torch DCP."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def where(tmp_path: Path) -> Path:
    return tmp_path / "run" / "c"
