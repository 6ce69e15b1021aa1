"""Saves, fails and loads under telemetry, and prints the spans and the metrics as JSON."""

from __future__ import annotations

import json

import torch
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import megackpt
from megackpt.integrations.opentelemetry import telemetry

exporter = InMemorySpanExporter()
tracers = TracerProvider()
tracers.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(tracers)
reader = InMemoryMetricReader()
model = torch.nn.Linear(8, 8)
checkpoints = megackpt.CheckpointManager("run")

checkpoints.save(1, model=model)  # before the reports begin
watch = telemetry(meter_provider=MeterProvider([reader]))
with trace.get_tracer("training").start_as_current_span("training step"):
    checkpoints.save(2, model=model)
checkpoints.save(3, model=model, asynchronous=True)
checkpoints.close()
try:
    checkpoints.restore(model=torch.nn.Linear(9, 9))
except megackpt.MismatchError:
    checkpoints.restore(model=model)
watch.stop()
checkpoints.save(4, model=model)  # after the reports

spans = [
    {
        "name": span.name,
        "id": span.context.span_id,
        "parent": span.parent and span.parent.span_id,
        "start": span.start_time,
        "end": span.end_time,
        "status": span.status.status_code.name,
        "attributes": dict(span.attributes),
    }
    for span in exporter.get_finished_spans()
]
metrics = json.loads(reader.get_metrics_data().to_json())
print(json.dumps({"spans": spans, "metrics": metrics}))
