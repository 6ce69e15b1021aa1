"""The timeline: what its ranks note is what the picture says of synchronous and asynchronous saves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "timeline.py"
WAYS = ("sync", "process")


@pytest.mark.slow
def test_a_save_commits_in_the_call_that_began_it_or_in_a_later_one(
    tmp_path: Path,
) -> None:
    command = [
        sys.executable,
        TOOL,
        "--mib=1",
        "--steps=8",
        "--every=4",
        f"--spans={tmp_path / 'spans.json'}",
    ]
    command += [f"--dir={tmp_path}", *(f"--way={way}" for way in WAYS)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    # gloo of torch 2.8 prints there, too, and its lines run into one another.
    ways = re.findall(r"^((?:a?synchronous)[a-z, ]*):", ended.stdout, re.MULTILINE)
    assert ways == ["synchronous", "asynchronous, writer process"]
    spans = json.loads((tmp_path / "spans.json").read_text())
    assert os.listdir(tmp_path) == ["spans.json"]
    for way in WAYS:
        for rank in (0, 1):
            mine = [
                span for span in spans if (span["way"], span["rank"]) == (way, rank)
            ]
            counted = Counter(span["what"] for span in mine)
            assert counted["step"] == 8
            assert counted["write"] == counted["declare"] == 2  # saves
            assert counted["commit"] == counted["begin"] == (2 if rank == 0 else 0)
            assert counted["stage"] == (0 if way == "sync" else 2)
            begun, ended_in = (
                {call_of(mine, span)["start"] for span in mine if span["what"] == stage}
                for stage in ("declare", "commit")
            )
            assert (
                ended_in == begun
                if (way, rank) == ("sync", 0)
                else not ended_in & begun
            )


def call_of(spans: list[dict[str, Any]], inner: dict[str, Any]) -> dict[str, Any]:
    """The one call of megackpt in which this was done."""
    calls = [span for span in spans if span["what"] == "still"]
    (call,) = (
        c for c in calls if c["start"] <= inner["start"] and inner["end"] <= c["end"]
    )
    return call
