"""Which older steps stay, by number, by a metric, by age, by a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from megackpt.backends import Backend
from megackpt.distributed import attempt
from megackpt.strategies import Strategy, StrategyLike


@dataclass(frozen=True)
class KeepRules:
    """Which steps older than the newest ones stay.

    Args:
        keep_last: number of undamaged steps that stay; None keeps all.
        keep_every: steps that this number divides stay as well.
        keep_best: this number of undamaged steps with the best ``best_metric`` stay as well.
        best_mode: the best is the lowest ("min") or the highest ("max").
        keep_for: steps that were saved within this time stay as well.
        keep_fn: steps for which it is true stay as well.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    best_metric: str = "metric"
    best_mode: str = "min"
    keep_for: timedelta | None = None
    keep_fn: Callable[[int], bool] | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(
                    f"{name} is a number of steps, 1 or more, or None, not {value!r}"
                )
        for name in ("keep_every", "keep_best", "keep_for", "keep_fn"):
            if getattr(self, name) is not None and self.keep_last is None:
                raise ValueError(
                    f"{name} says which of the older steps stay; it needs keep_last, as without "
                    f"keep_last all steps stay: keep_last=1, {name}={getattr(self, name)!r}"
                )
        if not isinstance(self.keep_for, (timedelta, type(None))):
            raise ValueError(f"keep_for is a timedelta or None, not {self.keep_for!r}")
        if self.best_mode not in ("min", "max"):
            raise ValueError(f"best_mode is 'min' or 'max', not {self.best_mode!r}")

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

    def by_metric(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The steps with ``best_metric``, not NaN, the best first; of equal ones the newest."""
        name = self.best_metric
        values = {}
        for step, given in metrics.items():
            if name in given and not math.isnan(given[name]):
                values[step] = given[name]
        sign = -1 if self.best_mode == "max" else 1
        return sorted(values, key=lambda step: (sign * values[step], -step))

    def check_metrics(
        self, metrics: Mapping[str, float] | None, metric: float | None
    ) -> dict[str, float]:
        """The metrics of a save. ValueError if one is not a number, or is missing."""
        if not isinstance(metrics, (Mapping, type(None))):
            raise ValueError(
                f"metrics is a dict of numbers by name, not {metrics!r}; an object to save needs "
                "another name"
            )
        given = dict(metrics or {})
        if metric is not None:
            given["metric"] = metric
        numbers = {}
        for name, value in given.items():
            number = attempt(partial(float, value))
            if number.error or isinstance(value, (str, bytes, bool)):
                raise ValueError(
                    f"metrics[{name!r}] is {value!r}: a metric is a number with a name, such as "
                    "metrics={'loss': 1.2}"
                ) from number.error
            numbers[name] = number.get()
        if given and self.keep_best and self.best_metric not in given:
            raise ValueError(
                f"keep_best compares the metric {self.best_metric!r}, which is not in the metrics "
                f"{sorted(given)}: name one of them by best_metric=..., or give it, as NaN for a "
                "step without a value"
            )
        return numbers
