"""A registry of its own for each test, and packages that a test installs."""

from __future__ import annotations

import importlib

import pytest

from megackpt.strategies import (
    default_strategies,
)
from megackpt.strategies.formats import formats
from tests.strategies.plugged import BACKEND


@pytest.fixture(autouse=True)
def a_registry_of_its_own():
    """What a test registers ends with it."""
    formats.cache_clear()
    default_strategies.clear()
    yield
    formats.cache_clear()
    default_strategies.clear()


@pytest.fixture
def plug(tmp_path, monkeypatch):
    """Installs a package: its entry points, and its one module."""
    count = 0

    def install(
        entries: dict[str, str], source: str = BACKEND, package: str = "megackpt-mine"
    ) -> str:
        nonlocal count
        count += 1
        site, module = tmp_path / f"site{count}", f"plugged_{tmp_path.name}_{count}"
        info = site / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        info.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        lines = [
            f"{name} = {module}:{attribute}" for name, attribute in entries.items()
        ]
        info.joinpath("entry_points.txt").write_text(
            "\n".join(["[megackpt.backends]", *lines])
        )
        site.joinpath(f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(site)
        importlib.invalidate_caches()
        formats.cache_clear()
        return module

    return install
