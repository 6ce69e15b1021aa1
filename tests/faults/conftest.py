"""Jobs that are killed on purpose, what a reader then finds, and the figures of it all."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import queue
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _sibling(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, Path(__file__).with_name(f"{name}.py")
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def states() -> ModuleType:
    """What the jobs save, and ``seen``: which of them stands in a directory, bit for bit."""
    return _sibling("states")


@pytest.fixture(scope="session")
def nursery() -> ModuleType:
    """Orders and their outcomes; see nursery.py."""
    return _sibling("nursery")


@pytest.fixture(scope="session")
def jobs(
    nursery: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Jobs]:
    """Warm parents of saving jobs."""
    if platform.machine() != "x86_64":
        pytest.skip("the filter of system calls knows the numbers of x86-64 only")
    pool = Jobs(lambda: nursery.Nursery(tmp_path_factory.mktemp("nursery")))
    yield pool
    pool.close()


class Jobs:
    """Carries out orders, several at a time: each warm parent is started when it is first wanted."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._all: list[Any] = []
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def __call__(self, order: Any) -> Any:
        try:
            parent = self._free.get_nowait()
        except queue.Empty:
            parent = self._start()
            self._all.append(parent)
        outcome = parent.run(order)
        self._free.put(parent)
        return outcome

    def each(
        self, work: Callable[[int], Any], points: Iterable[int], at_once: int
    ) -> list[Any]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(work, points))

    def close(self) -> None:
        for parent in self._all:
            parent.close()


@pytest.fixture(scope="session")
def worlds() -> Callable[[list[dict[str, Any]], Path], list[dict[str, Any]]]:
    """Carries out orders of jobs of three ranks, below a folder; their reports. See worlds.py."""

    def carried_out(orders: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
        here = Path(__file__)
        path = os.pathsep.join(
            filter(None, [str(here.parents[2]), os.environ.get("PYTHONPATH")])
        )
        done = subprocess.run(
            [
                sys.executable,
                str(here.with_name("worlds.py")),
                json.dumps(orders),
                str(folder),
            ],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        # Other lines are gloo's: that of torch 2.8 to 2.10 prints when it connects.
        return [
            json.loads(line)
            for line in done.stdout.splitlines()
            if line.startswith("{")
        ]

    return carried_out
