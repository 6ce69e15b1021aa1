"""Behaviours that torch's own checkpoint tests check, each to be run with stock and with ours.

A behaviour is a function of a folder. It takes every class from ``torch.distributed.checkpoint`` when it
runs, so ``megackpt.dcp.install()`` decides whose storage it uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import megackpt.dcp

MODULES = (
    "local_values",
    "local_storage",
    "local_planners",
    "local_calls",
    "several_sharded",
    "several_dtensors",
    "several_trainings",
)

DIFFERENT = {
    "saves_without_collectives": "ours commits when all ranks have written, which takes messages",
    "planner_data_of_any_class": "ours reads .metadata without running code: planner_data is plain",
}
"""Behaviours of stock that ours does not have, by name, and why."""

BEHAVIOURS: dict[str, Behaviour] = {}


@dataclass(frozen=True)
class Behaviour:
    function: Callable[..., None]
    ranks: int
    quick: bool
    since: tuple[int, int]
    commits: bool
    """Whether it leaves a checkpoint of FileSystemWriter behind."""
    arguments: dict[str, Any] = field(default_factory=dict)

    def run(self, folder: Path, library: str) -> None:
        """With this library, in this process."""
        context: Any = nullcontext()
        if library == "ours":
            context = megackpt.dcp.install()
        with context:
            self.function(folder, **self.arguments)


def behaviour(
    ranks: int = 1,
    quick: bool = False,
    since: tuple[int, int] = (2, 8),
    commits: bool = True,
    **choices: Sequence[Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """List a function, once for each combination of the choices."""

    def list_function(function: Callable[..., None]) -> Callable[..., None]:
        for values in itertools.product(*choices.values()):
            arguments = dict(zip(choices, values, strict=True))
            name = function.__name__
            if values:
                name += "-" + "-".join(map(str, values))
            assert name not in BEHAVIOURS, name
            BEHAVIOURS[name] = Behaviour(
                function, ranks, quick, since, commits, arguments
            )
        return function

    return list_function


def collect() -> dict[str, Behaviour]:
    for name in MODULES:
        import_module(f"tests.dcp.behaviours.{name}")
    return BEHAVIOURS
