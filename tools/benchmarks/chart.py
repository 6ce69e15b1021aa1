"""The bar chart of the README: GB/s of saves and loads, drawn as SVG from the JSON of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.table import in_gbs

OURS = {"torch_dist": "megackpt torch_dist", "zarr": "megackpt zarr"}
CHECKED = ", digests checked"
NAMES = {
    "torch DCP": "torch DCP",
    "Megatron": "Megatron-Core",
    "Megatron FP": "Megatron-Core, parallel",
}
WIDTH, LABEL, BAR, MARGIN = 470, 212, 16, 12
"""Pixels: of a panel, of the names in it, from one bar to the next, around a panel."""
LEGEND = (
    "GB/s of all ranks together: more is better. The dashed line is plain pwritev and fsync, or preadv, "
    "of the same bytes by the same processes."
)
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 12px }
.small { font-size: 10px; fill: #57606a }
.back { fill: #ffffff } .ours { fill: #0969da } .peer { fill: #afb8c1 }
.limit { stroke: #24292f; stroke-dasharray: 3 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 }
  .back { fill: #0d1117 } .ours { fill: #4493f8 } .peer { fill: #59636e } .limit { stroke: #e6edf3 }
}
"""


@dataclass(frozen=True)
class Bar:
    """One contestant of a panel."""

    name: str
    gbs: float
    is_ours: bool


@dataclass(frozen=True)
class Panel:
    """The bars of one figure, and the plain-I/O limit."""

    title: str
    bars: Sequence[Bar]
    limit: float

    @property
    def height(self) -> int:
        return MARGIN * 3 + BAR * len(self.bars)

    def svg(self, x: int, y: int) -> str:
        """At this place; the longest bar, or the limit, fills the width."""
        most = max(self.limit, *(bar.gbs for bar in self.bars))
        scale = (WIDTH - LABEL - MARGIN - 34) / most
        parts = [_text(x, y + MARGIN, self.title, "title")]
        top = y + MARGIN * 2
        for number, bar in enumerate(self.bars):
            at, length = top + number * BAR, bar.gbs * scale
            kind = "ours" if bar.is_ours else "peer"
            parts += [
                _text(x + LABEL - 6, at + BAR - 6, bar.name, anchor="end"),
                _rectangle(kind, x + LABEL, at, length, BAR - 4),
                _text(x + LABEL + length + 4, at + BAR - 6, in_gbs(bar.gbs), "small"),
            ]
        line = x + LABEL + self.limit * scale
        parts.append(
            f'<line class="limit" x1="{line:.1f}" x2="{line:.1f}" y1="{top - 4}" '
            f'y2="{top + BAR * len(self.bars)}"/>'
        )
        return "\n".join(parts)


def draw(report: dict[str, Any]) -> str:
    """The chart of a run. Raises ValueError if it has no figure with GB/s."""
    rows = [pair for pair in map(_panels, report["sections"]) if pair]
    lines = [panel for pairs in rows for panel in pairs]
    if not lines:
        raise ValueError("this run has none of the figures P1, P2, P5 and P6")
    parts, y = [], MARGIN
    for pair in lines:
        parts += [p.svg(MARGIN + i * WIDTH, y) for i, p in enumerate(pair)]
        y += max(panel.height for panel in pair) + MARGIN
    for line in (LEGEND, *_machine(report)):
        parts.append(_text(MARGIN, y + 6, line, "small"))
        y += BAR
    width = 2 * WIDTH + MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" '
        f'width="{width}" height="{y}" role="img">'
    )
    back = _rectangle("back", 0, 0, width, y)
    return "\n".join([head, f"<style>{STYLE}</style>", back, *parts, "</svg>\n"])


def _panels(section: dict[str, Any]) -> list[list[Panel]]:
    """Rows of two panels: saves and loads of large tensors, then of small ones."""
    found = []
    for save, load in (("P1", "P2"), ("P5", "P6")):
        rows = [row for row in section["rows"] if _has_speed(row)]
        saves = [row for row in rows if row["figure"] == save]
        loads = [row for row in rows if row["figure"] == load]
        # Of several states of small tensors the last: in that one the peers take part.
        plain = [row for row in loads if "unverified" in row["what"]][-1:]
        checked = [row for row in loads if "unverified" not in row["what"]][-1:]
        where = section["title"].partition(", median")[0]
        pair = []
        for verb, timed, also in (("save", saves[-1:], []), ("load", plain, checked)):
            if timed and "limit" in timed[0]["values"]:
                what = f"{verb}, {where}"
                if save == "P5":
                    what = f"{timed[0]['what'].split(' / ')[0].split(', unv')[0]}"
                pair.append(_panel(what, section["columns"], timed[0], *also))
        if pair:
            found.append(pair)
    return found


def _has_speed(row: dict[str, Any]) -> bool:
    return any(value.get("gbs") for value in row["values"].values())


def _panel(
    title: str, names: Sequence[str], row: dict[str, Any], *checked: dict[str, Any]
) -> Panel:
    bars = []
    for name in names:
        value = row["values"].get(name)
        if name == "limit" or value is None:
            continue
        bars.append(
            Bar(OURS.get(name, NAMES.get(name, name)), value["gbs"], name in OURS)
        )
        for other in checked:
            if name in other["values"]:
                speed = other["values"][name]["gbs"]
                bars.append(Bar(f"{OURS.get(name, name)}{CHECKED}", speed, True))
    bars.sort(key=lambda bar: not bar.is_ours)
    return Panel(title, bars, row["values"]["limit"]["gbs"])


def _machine(report: dict[str, Any]) -> tuple[str, str]:
    where = report["where"]
    quick = ", --quick" if report["options"].get("quick") == "True" else ""
    machine = (
        f"{where['date'][:10]}{quick}, load {where['load_at_start']}: {where['cpu']}, "
        f"{where['cores']} cores, {where['memory_gib']} GiB, {where['file_system']}"
    )
    return machine, ", ".join(f"{name} {v}" for name, v in where["versions"].items())


def _rectangle(kind: str, x: float, y: float, width: float, height: float) -> str:
    place = f'x="{x}" y="{y}" width="{width:.1f}" height="{height}"'
    return f'<rect class="{kind}" {place}/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    options = f' class="{kind}"' if kind else ""
    options += f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{options}>{escape(text)}</text>'
