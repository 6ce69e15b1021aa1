"""The rows of the overview of the shard map: one for each layer or branch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

MAX_ROWS = 48
RAMP = ("41518f", "387aa0", "4aa291", "97c070", "e9c452")
"""The colours of the first to the last rank. They become lighter: print and most eyes show that."""
Parts = tuple[str, ...]


def overview_data(keys: Sequence[str], nbytes: Sequence[int]) -> dict[str, Any]:
    """The labels of the rows, and the numbers of the tensors of each."""
    known = set(keys)
    parts = []
    for key in keys:
        own = tuple(key.split(".", 32))
        if "optim" in key:
            own = _weight_of(own, known)
        parts.append(own)
    rows = _rows(parts, nbytes)
    names = sorted(rows, key=_natural)
    labels = [".".join(name) for name in names]
    return {"labels": labels, "tensors": [rows[name] for name in names], "ramp": RAMP}


def _weight_of(parts: Parts, keys: set[str]) -> Parts:
    """The key of the weight that is within the key of an optimizer's tensor; else that key."""
    for begin in range(1, len(parts)):
        for end in (len(parts), len(parts) - 1):
            if ".".join(parts[begin:end]) in keys:
                return parts[begin:end]
    return parts


def _rows(parts: Sequence[Parts], nbytes: Sequence[int]) -> dict[Parts, list[int]]:
    """The tensors of at most MAX_ROWS rows. The largest branches are split, down to layers."""
    rows: dict[Parts, list[int]] = {(): list(range(len(parts)))}
    waiting = dict.fromkeys(rows, 0)
    while waiting:
        branch = max(waiting, key=waiting.__getitem__)
        del waiting[branch]
        below: dict[Parts, list[int]] = defaultdict(list)
        for tensor in rows[branch]:
            below[parts[tensor][: len(branch) + 1]].append(tensor)
        room = MAX_ROWS - len(rows) + 1
        step = max(1, -(-len(below) // room))
        if step > 1 and room < 2:
            break
        del rows[branch]
        names = sorted(below, key=_natural)
        for start in range(0, len(names), step):
            # Where too many are below, neighbours share a row.
            group = names[start : start + step]
            name = group[0]
            if len(group) > 1:
                name = (*branch, f"{name[-1]}–{group[-1][-1]}")
            elif name != branch and not name[-1].isdecimal():
                waiting[name] = sum(nbytes[tensor] for tensor in below[name])
            rows[name] = [tensor for own in group for tensor in below[own]]
    return rows


def _natural(name: Parts) -> list[Any]:
    """Sorts layer 10 after layer 9."""
    pieces: list[Any] = re.split(r"(\d{1,9})", ".".join(name), flags=re.ASCII)
    pieces[1::2] = map(int, pieces[1::2])
    return pieces
