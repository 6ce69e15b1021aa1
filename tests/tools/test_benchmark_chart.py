"""The bar chart of a benchmark: which bars, how long, and what of the machine it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHERE = {
    "date": "2026-11-23 14:00 UTC",
    "cpu": "A <fast> processor",
    "cores": 2,
    "memory_gib": 24,
    "file_system": "ext4",
    "load_at_start": 0.5,
    "versions": {"torch": "2.13.0"},
}


def row(figure: str, what: str, **speeds: float) -> dict[str, Any]:
    values = {name: {"median": 1.0, "gbs": gbs} for name, gbs in speeds.items()}
    return {"figure": figure, "what": what, "values": values}


def section(*rows: dict[str, Any]) -> dict[str, Any]:
    columns = ["torch_dist", "zarr", "peer", "limit"]
    return {"title": "1.00 GiB, median of 3", "columns": columns, "rows": list(rows)}


def report(*sections: dict[str, Any]) -> dict[str, Any]:
    return {"options": {"quick": "True"}, "where": WHERE, "sections": list(sections)}


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], str]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return import_module("benchmarks.chart").draw


def test_the_chart_of_a_run(draw: Callable[[dict[str, Any]], str]) -> None:
    """Bars as long as their GB/s, ours first; of two states of small tensors that with the peers."""
    large = row("P1", "save / limit", peer=0.5, zarr=1.0, torch_dist=2.0, limit=2.5)
    loads = (
        row("P2", "load, same layout, unverified / limit", torch_dist=4.0, limit=5.0),
        row("P2", "load, same layout, verified / limit", torch_dist=3.0),
    )
    alone = row("P5", "save of 20,000 tensors / limit", torch_dist=0.2, limit=0.4)
    small = row("P5", "save of 5,000 tensors / limit", torch_dist=0.1, limit=0.4)
    other = {"figure": "P14", "what": "memory", "values": {"zarr": {"median": 1.0}}}
    chart = draw(report(section(large, *loads, alone, small, other)))
    picture = ET.fromstring(chart)
    texts = [element.text for element in picture.iter() if element.tag.endswith("text")]
    bars = [
        (element.get("class"), float(element.get("width", 0)))
        for element in picture.iter()
        if element.get("class") in ("ours", "peer")
    ]
    # The fastest of both sides, where the ratio is largest, is the headline.
    assert texts[0] == "Save, 1.00 GiB: 4.0 times as fast, GB/s"
    assert [kind for kind, _ in bars[:2]] == ["ours", "peer"]
    assert bars[0][1] == pytest.approx(4 * bars[1][1], abs=0.1)
    del bars[:2]
    assert [kind for kind, _ in bars] == ["ours", "ours", "peer", *["ours"] * 3]
    assert bars[0][1] == pytest.approx(2 * bars[1][1], abs=0.1)
    assert bars[2][1] == pytest.approx(bars[1][1] / 2, abs=0.1)
    assert "… with digests checked" in texts
    # The line of the limit is behind the bars.
    assert chart.index('class="limit"') < chart.rindex(">peer<")
    assert "save of 5,000 tensors" in texts
    assert "save of 20,000 tensors" not in texts
    assert any(
        re.search(r"--quick.*A <fast> processor, 2 cores", t or "") for t in texts
    )


def test_a_run_without_speeds_has_no_chart(
    draw: Callable[[dict[str, Any]], str],
) -> None:
    with pytest.raises(ValueError, match="none of the figures P1, P2, P5 and P6"):
        draw(report(section()))
