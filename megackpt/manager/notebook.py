"""The steps of a run as notebooks show them: a table of HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable
from datetime import UTC, datetime

from megackpt.checkpoint.run_directory import Step
from megackpt.events import format_size


def steps_table(title: str, steps: Iterable[Step]) -> str:
    """The steps, one a row. Names and reasons are untrusted text, and are escaped."""
    table = f"<table><caption>{html.escape(title)}</caption>"
    table += "<tr><th>step<th>state<th>bytes<th>saved (UTC)<th>metrics"
    for step in steps:
        name, state = html.escape(step.name), html.escape(step.reason or "complete")
        saved = f"{datetime.fromtimestamp(step.saved, UTC):%Y-%m-%d %H:%M}"
        metrics = [f"{name} {value}" for name, value in step.metrics.items()]
        told = html.escape(", ".join(metrics))
        size = format_size(step.bytes)
        table += f"<tr><td>{name}<td>{state}<td>{size}<td>{saved}<td>{told}"
    # A name may contain bytes that are not Unicode.
    return f"{table}</table>".encode(errors="replace").decode()
