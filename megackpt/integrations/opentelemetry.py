"""OpenTelemetry: spans of operations and their stages, and metrics of saves."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from typing import Any

from opentelemetry import metrics, trace

from megackpt import Event, watching
from megackpt.events import Watch

__all__ = ["telemetry"]


def telemetry(tracer_provider: Any = None, meter_provider: Any = None) -> Watch:
    """Report each save, load and verification of this process until ``stop`` of the result.

    When an operation ends, it becomes a span with the name of the operation, and each of its
    stages a span below it. The attributes are the fields of ``Event``, such as ``megackpt.path``,
    and ``megackpt.step``, if the name of the directory ends with a number. A span that failed has
    the error as its status.

    Each save that succeeded sets these gauges, with the attribute ``rank``: ``megackpt.seconds``
    (an asynchronous save ends when it is finalized), ``megackpt.blocked_seconds`` (until the
    tensors are copied, if the save is asynchronous, and until its end, if not),
    ``megackpt.bytes`` (of all ranks) and ``megackpt.step``.

    Args:
        tracer_provider: of the spans; None is the global one.
        meter_provider: of the metrics; None is the global one.
    """
    tracer = trace.get_tracer("megackpt", tracer_provider=tracer_provider)
    meter = metrics.get_meter("megackpt", meter_provider=meter_provider)
    names = ("seconds", "blocked_seconds", "bytes", "step")
    gauges = [meter.create_gauge(f"megackpt.{name}") for name in names]
    # Of operations that run: each event, and when it came, in nanoseconds since 1970.
    running: dict[tuple[str, str], list[tuple[Event, int]]] = {}

    def report(whole: Event) -> None:
        operation = whole.operation, whole.path
        running.setdefault(operation, []).append((whole, time.time_ns()))
        if whole.stage != "total":
            return
        digits = re.search(r"\d+$", whole.path)
        step = digits and int(digits[0])
        context = None
        blocked, began = whole.seconds, 0
        for event, ended in reversed(running.pop(operation)):
            start = ended - int(event.seconds * 1e9)
            name = f"{event.operation} {event.stage}".removesuffix(" total")
            span = tracer.start_span(name, context, start_time=start)
            for field, value in {**asdict(event), "step": step}.items():
                if value is not None:
                    span.set_attribute(f"megackpt.{field}", value)
            if event.error is not None:
                span.set_status(trace.StatusCode.ERROR, event.error)
            span.end(ended)
            if event is whole:
                context, began = trace.set_span_in_context(span), start
            elif event.stage == "stage":
                blocked = (ended - began) / 1e9
        if whole.operation == "save" and whole.error is None:
            values = (whole.seconds, blocked, whole.bytes, step)
            for gauge, value in zip(gauges, values, strict=True):
                if value is not None:
                    gauge.set(value, {"rank": whole.rank})

    return watching(report)
