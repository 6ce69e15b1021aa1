"""What OpenTelemetry, TensorBoard, W&B and MLflow are told about saves; none of them uses a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PEERS, ROOT
from tests.integrations.programs import FENCE

pytestmark = pytest.mark.dashboards


def run(folder: Path, program: str) -> str:
    """What a program prints."""
    path = ":".join(map(str, (ROOT, PEERS / "dashboards")))
    settings = {
        "PYTHONPATH": path,
        "HOME": str(folder),
        "WANDB_MODE": "offline",
        # MLflow asks for a database, whose packages would be installed for this test alone.
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": f"file:{folder}/mlruns",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def page(name: str) -> str:
    """The program of a page."""
    path = ROOT / "docs" / "integrations" / f"{name}.md"
    (program,) = FENCE.findall(path.read_text(encoding="utf-8"))
    return program


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    program = ROOT / "tests" / "integrations" / "spans_and_metrics.py"
    folder = tmp_path_factory.mktemp("opentelemetry")
    return json.loads(run(folder, program.read_text(encoding="utf-8")))


def test_operations_are_spans_with_their_stages_below(told: dict[str, Any]) -> None:
    spans = told["spans"]
    (step,) = [span for span in spans if span["name"] == "training step"]
    saves = [span for span in spans if span["name"] == "save"]
    assert [span["attributes"]["megackpt.step"] for span in saves] == [2, 3]
    assert [span["parent"] for span in saves] == [step["id"], None]
    usual = {"save declare", "save begin", "save write", "save commit"}
    plan = {"save plan"}  # the plan of an earlier save may be used again
    for save, more in zip(saves, (set(), {"save stage"}), strict=True):
        stages = {span["name"] for span in spans if span["parent"] == save["id"]}
        assert stages - plan == usual | more
        assert save["status"] == "UNSET"
        attributes = save["attributes"]
        assert attributes["megackpt.bytes"] > 8 * 8 * 4 + 8 * 4
        name = f"run/iter_000000{attributes['megackpt.step']}"
        assert attributes["megackpt.path"].endswith(name)


def test_a_failure_is_the_status_of_the_span(told: dict[str, Any]) -> None:
    loads = [span for span in told["spans"] if span["name"] == "load"]
    failed = loads[0]
    assert failed["status"] == "ERROR"
    assert failed["attributes"]["megackpt.error"].startswith("MismatchError: ")
    assert loads[-1]["status"] == "UNSET"


def test_gauges_describe_the_last_save(told: dict[str, Any]) -> None:
    (resource,) = told["metrics"]["resource_metrics"]
    (scope,) = resource["scope_metrics"]
    values = {}
    for metric in scope["metrics"]:
        (point,) = metric["data"]["data_points"]
        assert point["attributes"] == {"rank": 0}
        values[metric["name"]] = point["value"]
    assert values["megackpt.bytes"] > 8 * 8 * 4 + 8 * 4
    assert values["megackpt.step"] == 3
    # The save is asynchronous. It blocks until it has copied the tensors.
    whole = [span for span in told["spans"] if span["name"] == "save"][-1]
    (stage,) = [span for span in told["spans"] if span["name"] == "save stage"]
    assert values["megackpt.seconds"] == whole["attributes"]["megackpt.seconds"]
    blocked = (stage["end"] - whole["start"]) / 1e9
    assert values["megackpt.blocked_seconds"] == pytest.approx(blocked, abs=1e-6)
    assert blocked < values["megackpt.seconds"]


def test_the_page_on_opentelemetry_runs(tmp_path: Path) -> None:
    printed = run(tmp_path, page("opentelemetry"))
    assert '"name": "save"' in printed
    assert '"megackpt.blocked_seconds"' in printed


def test_tensorboard_has_scalars_of_each_save(tmp_path: Path) -> None:
    check = """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator("run/tensorboard")
events.Reload()
for name in sorted(events.Tags()["scalars"]):
    print(name, [(e.step, e.value > 288) for e in events.Scalars(name)])
"""
    assert run(tmp_path, page("tensorboard") + check).splitlines() == [
        "checkpoint/bytes [(100, True), (200, True)]",
        "checkpoint/failed [(100, False), (200, False)]",
        "checkpoint/seconds [(100, False), (200, False)]",
    ]


def test_wandb_has_values_of_each_save(tmp_path: Path) -> None:
    check = "print(json.dumps(dict(run.summary)))\n"
    program = page("wandb").replace("run.finish()", f"{check}run.finish()")
    summary = json.loads(run(tmp_path, f"import json\n{program}"))
    assert summary["checkpoint/step"] == 200
    assert summary["checkpoint/bytes"] > 288
    assert summary["checkpoint/failed"] == 0
    assert summary["checkpoint/seconds"] > 0
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert file.stat().st_size


def test_mlflow_has_metrics_of_each_save(tmp_path: Path) -> None:
    check = """
client = mlflow.MlflowClient()
(done,) = client.search_runs(["0"])
for name in sorted(done.data.metrics):
    found = client.get_metric_history(done.info.run_id, name)
    print(name, [(m.step, m.value > 288) for m in found])
"""
    assert run(tmp_path, page("mlflow") + check).splitlines() == [
        "checkpoint/bytes [(100, True), (200, True)]",
        "checkpoint/failed [(100, False), (200, False)]",
        "checkpoint/seconds [(100, False), (200, False)]",
    ]
