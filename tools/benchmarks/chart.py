"""The bar chart of the README: GB/s of saves and loads, drawn as SVG from the JSON of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.table import in_gbs

OURS = {"torch_dist": "megackpt torch_dist", "zarr": "megackpt zarr"}
CHECKED = "… with digests checked"
NAMES = {
    "torch DCP": "torch DCP",
    "Megatron": "Megatron-Core",
    "Megatron FP": "Megatron-Core, parallel",
}
WIDTH, LABEL, BAR, MARGIN = 520, 160, 17, 12
"""Pixels: of a panel, of the names in it, from one bar to the next, around a panel."""
LEGEND = (
    "GB/s of all ranks together: more is better. The dashed line is plain pwritev and fsync, or preadv,",
    "of the same bytes by the same processes. It writes through the page cache: a save past it can be faster.",
)
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 12px }
.headline { font-weight: 600; font-size: 16px }
.number { font-weight: 600; paint-order: stroke; stroke-width: 3px; stroke: #ffffff; stroke-linejoin: round }
.small { font-size: 10px; fill: #57606a }
.back { fill: #ffffff } .ours { fill: #0969da } .peer { fill: #afb8c1 }
.limit { stroke: #8c959f; stroke-dasharray: 3 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 }
  .back { fill: #0d1117 } .ours { fill: #4493f8 } .peer { fill: #59636e } .number { stroke: #0d1117 }
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
    """The bars of one figure, and the plain-I/O limit (0: not drawn)."""

    title: str
    bars: Sequence[Bar]
    limit: float

    @property
    def height(self) -> int:
        return MARGIN * 3 + BAR * len(self.bars)

    @property
    def fastest(self) -> list[Bar]:
        """The fastest of ours, and the fastest peer, if there is one."""
        found = []
        for ours in (True, False):
            bars = [bar for bar in self.bars if bar.is_ours == ours]
            found += sorted(bars, key=lambda bar: bar.gbs)[-1:]
        return found

    @property
    def ratio(self) -> float:
        """How many times as fast as the fastest peer ours is; 0 without both."""
        if len(self.fastest) < 2:
            return 0
        ours, peer = self.fastest
        return ours.gbs / peer.gbs

    def svg(self, x: int, y: int) -> str:
        """At this place; the longest bar, or the limit, fills the width."""
        most = max(self.limit, *(bar.gbs for bar in self.bars))
        scale = (WIDTH - LABEL - MARGIN - 34) / most
        top = y + MARGIN * 2
        line = x + LABEL + self.limit * scale
        # The line is drawn first, so that it runs behind the numbers.
        parts = [
            _text(x, y + MARGIN, self.title, "title"),
        ]
        if self.limit:
            parts.append(_text(line, top - 7, "plain I/O", "small", anchor="middle"))
            parts.append(
                f'<line class="limit" x1="{line:.1f}" x2="{line:.1f}" y1="{top - 4}" '
                f'y2="{top + BAR * len(self.bars)}"/>'
            )
        for number, bar in enumerate(self.bars):
            at, length = top + number * BAR, bar.gbs * scale
            kind = "ours" if bar.is_ours else "peer"
            parts += [
                _text(x + LABEL - 6, at + BAR - 6, bar.name, anchor="end"),
                _rectangle(kind, x + LABEL, at, length, BAR - 4),
                _text(x + LABEL + length + 4, at + BAR - 6, in_gbs(bar.gbs), "number"),
            ]
        return "\n".join(parts)


def draw(report: dict[str, Any]) -> str:
    """The chart of a run. Raises ValueError if it has no figure with GB/s."""
    lines = [panel for section in report["sections"] for panel in _panels(section)]
    if not lines:
        raise ValueError("this run has none of the figures P1, P2, P5 and P6")
    parts, y = [], MARGIN
    # The pair with the largest ratio is the headline. One column can be read on a phone.
    best = max(lines, key=lambda panel: panel.ratio)
    if best.ratio:
        ratio = f"{best.ratio:.1f}" if best.ratio < 10 else f"{best.ratio:.0f}"
        text = f"{best.title}: {ratio} times as fast, GB/s"
        parts.append(_text(MARGIN, y + MARGIN, text[0].upper() + text[1:], "headline"))
        lines = [Panel("", best.fastest, 0), *lines]
    for panel in lines:
        parts.append(panel.svg(MARGIN, y))
        y += panel.height + MARGIN
    return page(WIDTH + MARGIN, y, parts, (*LEGEND, *_machine(report)))


def page(width: int, y: int, parts: Sequence[str], lines: Sequence[str]) -> str:
    """The whole SVG: these parts, which end at ``y``, and below them lines of small text."""
    parts = list(parts)
    for line in lines:
        parts.append(_text(MARGIN, y + 6, line, "small"))
        y += BAR
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" '
        f'width="{width}" height="{y}" role="img">'
    )
    back = _rectangle("back", 0, 0, width, y)
    return "\n".join([head, f"<style>{STYLE}</style>", back, *parts, "</svg>\n"])


def _panels(section: dict[str, Any]) -> list[Panel]:
    """Saves and loads of large tensors, then of small ones."""
    found = []
    for save, load in (("P1", "P2"), ("P5", "P6")):
        rows = [row for row in section["rows"] if _has_speed(row)]
        saves = [row for row in rows if row["figure"] == save]
        loads = [row for row in rows if row["figure"] == load]
        # Of several states of small tensors the last: in that one the peers take part.
        plain = [row for row in loads if "unverified" in row["what"]][-1:]
        checked = [row for row in loads if "unverified" not in row["what"]][-1:]
        where = section["title"].partition(", median")[0]
        for verb, timed, also in (("save", saves[-1:], []), ("load", plain, checked)):
            if timed and "limit" in timed[0]["values"]:
                what = f"{verb}, {where}"
                if save == "P5":
                    what = f"{timed[0]['what'].split(' / ')[0].split(', unv')[0]}"
                found.append(_panel(what, section["columns"], timed[0], *also))
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
                bars.append(Bar(CHECKED, speed, True))
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
