"""The overview of the shard map: a row for each layer or branch, and a column for each rank.

``overview_data`` chooses the rows, for the page and for ``overview_svg``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from html import escape as escape_markup
from typing import Any

import numpy as np

from megackpt.cli.output import escape
from megackpt.events import format_size

MAX_ROWS = 48
MAX_COLUMNS = 256
"""More ranks than this share columns."""
MAX_LABEL = 34
LEFT, CHART = 244, 680
"""Where the columns of the picture begin, and the width of all of them."""
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


def overview_svg(data: dict[str, Any], title: str, style: str) -> str:
    """The overview in the data of a page, as a picture."""
    overview, pieces = data["overview"], data["pieces"]
    labels = overview["labels"]
    row = np.zeros(len(pieces["count"]), np.int64)
    for number, tensors in enumerate(overview["tensors"]):
        row[tensors] = number
    row = np.repeat(row, pieces["count"])
    unit, column = "rank", np.array(pieces["writer"], np.int64)
    if (column < 0).all() and "file" in pieces:
        unit, column = "file", np.array(pieces["file"], np.int64)
    length = np.array(pieces["length"], np.float64)
    many = int(column.max(initial=0)) + 1
    step = -(-many // MAX_COLUMNS)
    wide = -(-many // step)
    written = np.zeros((len(labels), wide))
    known = column >= 0
    np.add.at(written, (row[known], column[known] // step), length[known])
    # The bytes of one rank, where several share a column.
    written /= np.minimum(step, many - step * np.arange(wide))
    total = np.bincount(row, length, len(labels))
    least = 15 * len(labels)
    space = max(least, min(2 * least, 420)) - least
    heights = 15 + space * total / max(1.0, total.sum())
    bottoms = 78 + np.cumsum(heights)
    last = bottoms.max(initial=78)
    facts = (
        f"{format_size(total.sum())}, {many:,} {unit}s ({step} in a column); "
        "bars: bytes, in proportion to the largest in the row"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {last + 16:.0f}">',
        f'<style>{style}</style><rect class="paper" width="100%" height="100%"/>',
        _text(16, 30, title[-90:], "title"),
        _text(16, 50, facts),
    ]
    for label, size, y, height in zip(labels, total, bottoms, heights, strict=True):
        if len(label) > MAX_LABEL:
            label = f"{label[:11]}…{label[12 - MAX_LABEL :]}"
        baseline = y - height / 2 + 3
        parts += [
            f'<path class="row" d="M{LEFT} {y - 1:.1f}h{CHART}v{1 - height:.1f}h-{CHART}z"/>',
            _text(LEFT - 8, baseline, label, "end"),
            _text(992, baseline, format_size(size), "end"),
        ]
    places = np.linspace(0, len(RAMP) - 1, wide)
    anchors = np.array([list(bytes.fromhex(colour)) for colour in RAMP])
    ramp = [np.interp(places, range(len(RAMP)), part) for part in anchors.T]
    colours = np.stack(ramp, axis=1).astype(np.uint8)
    across = CHART / wide
    tick = 2 ** max(0, int(np.ceil(np.log2(36 / across))))
    bars = (heights[:, None] - 1) * written / written.max(axis=1, initial=1.0)[:, None]
    for number in range(wide):
        x = LEFT + across * number
        if number % tick == 0:
            parts.append(_text(x + across / 2, 70, str(number * step), "middle"))
        path = ""
        for at in np.flatnonzero(bars[:, number]).tolist():
            bar = max(1.0, bars[at, number])
            path += f"M{x:.1f} {bottoms[at] - 1:.1f}v-{bar:.1f}h{across * 0.97:.2f}v{bar:.1f}z"
        if path:
            parts.append(
                f'<path fill="#{colours[number].tobytes().hex()}" d="{path}"/>'
            )
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    """A key may hold anything, also characters that XML cannot."""
    markup = escape_markup(escape(text))
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{markup}</text>'
