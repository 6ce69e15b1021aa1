"""Which older steps stay, by number, by a metric, by age. The metrics are a file of the run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from megackpt.backends import Backend
from megackpt.checkpoint.run_directory import METRICS, read_metrics
from megackpt.storage import Advance, Storage
from megackpt.strategies import Strategy, StrategyLike


@dataclass(frozen=True)
class KeepRules:
    """Which steps older than the newest ones stay.

    Args:
        keep_last: number of undamaged steps that stay; None keeps all.
        keep_every: steps that this number divides stay as well.
        keep_best: this number of undamaged steps with the best metrics stay as well.
        best: the best metric is the "lowest" or the "highest".
        keep_for: steps that were saved within this time stay as well.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    best: str = "lowest"
    keep_for: timedelta | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(
                    f"{name} is a number of steps, 1 or more, or None, not {value!r}"
                )
        for name in ("keep_every", "keep_best", "keep_for"):
            if getattr(self, name) is not None and self.keep_last is None:
                raise ValueError(
                    f"{name} says which of the older steps stay; it needs keep_last, as without "
                    f"keep_last all steps stay: keep_last=1, {name}={getattr(self, name)!r}"
                )
        if not isinstance(self.keep_for, (timedelta, type(None))):
            raise ValueError(f"keep_for is a timedelta or None, not {self.keep_for!r}")
        if self.best not in ("lowest", "highest"):
            raise ValueError(f"best is 'lowest' or 'highest', not {self.best!r}")

    def refuse_unindexed(self, strategy: StrategyLike) -> StrategyLike:
        """The strategy. ValueError if its saves could not be removed."""
        if self.keep_last is None:
            return strategy
        backend = strategy
        if isinstance(strategy, Strategy):
            backend = strategy.make_backend()
        if isinstance(backend, Backend) and not backend.properties.indexed:
            raise ValueError(
                f"keep_last={self.keep_last} removes older steps, but {backend} saves without "
                "megackpt.index, and such checkpoints are never removed: give keep_last=None, or "
                "index=True"
            )
        return strategy

    def by_metric(self, metrics: dict[int, float]) -> list[int]:
        """The steps, the best first; of equal ones the newest first."""
        sign = -1 if self.best == "highest" else 1
        return sorted(metrics, key=lambda step: (sign * metrics[step], -step))


def write_metric(
    root: Storage,
    steps: Iterable[int],
    step: int,
    metric: float | None,
    advance: Advance,
) -> None:
    """Note the metric of a step, and forget metrics of steps that are gone. NaN is not a metric.

    ``advance`` raises if the storage was given up.
    """
    known = read_metrics(root)
    kept = {number: known[number] for number in steps if number in known}
    kept.pop(step, None)
    if metric is not None and not math.isnan(metric):
        kept[step] = metric
    if kept != known:
        advance(0)
        root.put(METRICS, json.dumps(kept).encode())
