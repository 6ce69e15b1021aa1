"""Columns joined: those of several ranks into one, with one table behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.planning.manifest.naming import Int32


def renumbered(column: Int32, names: Sequence[Any], table: dict[Any, int]) -> Int32:
    numbers = list(map(table.get, names))
    if None in numbers:  # seldom: most ranks bring names that another one brought
        numbers = [table.setdefault(name, len(table)) for name in names]
    return np.array(numbers, np.int32)[column]


def joined(columns: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(columns) if columns else np.zeros(0, dtype)
