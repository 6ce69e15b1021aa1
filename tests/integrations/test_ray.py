"""Ray Train with our manager: a worker is killed, a node is taken away, other workers go on."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import megackpt
from tests.conftest import PEERS, ROOT, Ranks
from tests.integrations.programs import Program

pytestmark = pytest.mark.ray

ENV = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}
DRIVER = """
import os, signal, sys, time
from unittest.mock import MagicMock

for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)  # Ray gives them to its workers
import ray
import torch.distributed as dist

RUN = os.path.abspath("ray/run")
LOSSES = os.path.abspath("losses.txt")


def note(line, flush):
    with open(LOSSES, "a") as file:
        print(line, file=file)
    time.sleep(0.3)  # a step of a real model takes longer than a save
    if line.startswith("step 7:") and open(LOSSES).read().count("step 7:") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if line.startswith("step 9:"):
        take_the_node_away()
    if line.startswith("step 10:"):
        with open(LOSSES, "a") as file:
            print("directories", *sorted(os.listdir(RUN)), file=file)


def take_the_node_away():
    "As a cloud announces it, in ten minutes; returns when Ray Train knows it."
    from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION
    from ray.train.v2._internal.execution.context import get_train_context

    context = ray.get_runtime_context()
    client = ray._raylet.GcsClient(address=context.gcs_address)
    end = int(time.time() + 600) * 1000
    node = context.get_node_id()
    accepted, why = client.drain_node(node, DRAIN_NODE_REASON_PREEMPTION, "a test", end)
    assert accepted, why
    while get_train_context().preemption_context.preemption_info is None:
        time.sleep(0.1)


def run(steps, workers):
    changed = source.replace("STEPS = 12", f"STEPS = {steps}")
    changed = changed.replace("num_workers=2", f"num_workers={workers}")
    exec(changed.replace('print(f"step', 'note(f"step'), {"__name__": "__main__", "note": note})


source = open("train.py").read()

# Undisturbed: without Ray, without checkpoints, in one process.
names = {"__name__": "train", "print": lambda line, flush: print(line)}
exec(source, names)
names["CheckpointManager"] = MagicMock()
manager = names["CheckpointManager"].return_value.__enter__.return_value
manager.restore.return_value = None
manager.should_save.return_value = False
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
names["train"]()
dist.destroy_process_group()

ray.init(
    num_cpus=2, include_dashboard=False, object_store_memory=80_000_000,
    log_to_driver=False, _temp_dir=sys.argv[1],
)  # fmt: skip
run(8, 2)
run(12, 1)
ray.shutdown()
"""


def losses(text: str) -> list[tuple[int, float]]:
    lines = re.findall(r"^step (\d+): (\S+)$", text, re.MULTILINE)
    return [(int(step), float(loss)) for step, loss in lines]


def started_in(folder: str) -> list[int]:
    """The processes of Ray, which write their output to files in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        with suppress(OSError):
            if os.readlink(path).startswith(folder):
                found.append(int(path.parts[2]))
    return found


@pytest.fixture
def folder() -> Iterator[str]:
    """Where Ray keeps its sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="ray") as path:
        yield path
        for pid in started_in(path):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_worker_is_killed_and_others_resume(
    ranks: Ranks, tmp_path: Path, folder: str
) -> None:
    program = Program("ray.md", tmp_path, ranks, "ray")
    (tmp_path / "train.py").write_text(program.source)
    (tmp_path / "driver.py").write_text(DRIVER)
    env = ENV | {"PYTHONPATH": f"{ROOT}:{PEERS / 'ray'}", "HOME": str(tmp_path)}
    driver = tmp_path / "driver.py"
    done = ranks(driver, 1, folder, timeout=700, env=env, cwd=tmp_path)[0]
    end = time.monotonic() + 60
    while started_in(folder) and time.monotonic() < end:
        time.sleep(0.1)
    assert started_in(folder) == []

    undisturbed = losses(done.stdout)
    assert [step for step, _ in undisturbed] == list(range(1, 13))
    text = (tmp_path / "losses.txt").read_text()
    steps = [step for step, _ in losses(text)]
    assert steps[:7] == list(range(1, 8))
    assert 2 < steps[7] <= 8  # after a restored step
    assert steps[7:] == list(range(steps[7], 13))
    for step, loss in losses(text):
        assert loss == pytest.approx(dict(undisturbed)[step], abs=2e-6), step

    # Step 9 is saved because the node is taken away. Ray keeps two.
    before = next(line for line in text.splitlines() if line.startswith("directories"))
    assert {"checkpoint-8", "checkpoint-9"} < set(before.split())
    assert "checkpoint-6" not in before
    run = megackpt.CheckpointManager(tmp_path / "ray/run")
    assert [step.name for step in run.steps()] == ["checkpoint-10", "checkpoint-12"]
    assert all(step.complete for step in run.steps())
    results = re.findall(
        r"^/.*/ray/run/(checkpoint-\d+) (.*)$", done.stdout, re.MULTILINE
    )
    assert [name for name, _ in results] == ["checkpoint-8", "checkpoint-12"]
    assert "'step': 12" in results[1][1]
