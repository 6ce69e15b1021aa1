"""Jobs that lose processes, or are told to end: they go on from the latest good step, also on fewer processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from megackpt.manager import CheckpointManager
from tests.ports import unused_port

pytestmark = pytest.mark.slow

TRAINER = Path(__file__).resolve().parent.parent / "tools" / "train_gpt.py"
LATEST = 240.0  # seconds after which a job hangs, and is a failure
TOLERANCE = 1e-4  # of losses, whose sums are taken in another order at each parallelism
# torch 2.13: without this a second life finds the addresses of the first in the agent's store, and cannot connect.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TWO = ("--standalone", "--nproc-per-node=2", "--monitor-interval=0.1")


@dataclass
class Job:
    """The trainer in one run, however often it is started."""

    run: Path

    @property
    def log(self) -> Path:
        return self.run.with_suffix(".jsonl")

    @property
    def output(self) -> Path:
        return self.run.with_suffix(".txt")

    @contextmanager
    def started(self, steps: int, *torchrun: str) -> Iterator[subprocess.Popen[bytes]]:
        """Under torchrun, if it is given any options."""
        launcher = ("-m", "torch.distributed.run", *torchrun) if torchrun else ()
        options = (
            "--dir",
            self.run,
            f"--steps={steps}",
            "--save-every=4",
            "--keep-last=2",
            "--losses",
            self.log,
        )
        with self.output.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *launcher, TRAINER, *options],
                stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT},
            )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()  # of a test that failed; workers end with their agent
            process.wait()

    def succeeds(self, process: subprocess.Popen[bytes]) -> None:
        assert process.wait(LATEST) == 0, self.output.read_text()[-6000:]

    def reaches(self, step: int, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + LATEST
        while max(self.steps(), default=0) < step:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(
                    f"step {step} is not reached:\n{self.output.read_text()[-6000:]}"
                )
            time.sleep(0.02)

    def workers(self, rank: int) -> list[int]:
        """The process that was this rank in each life."""
        return [
            int(pid)
            for pid in re.findall(
                rf"rank {rank} is process (\d+)", self.output.read_text()
            )
        ]

    def losses(self) -> list[tuple[int, float]]:
        """Of each step that was done, in whatever life."""
        lines = self.log.read_text().split("\n")[:-1] if self.log.exists() else []
        return [(entry["step"], entry["loss"]) for entry in map(json.loads, lines)]

    def steps(self) -> list[int]:
        return [step for step, _ in self.losses()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Step -> loss of a run on two ranks that nobody disturbs."""
    job = Job(tmp_path_factory.mktemp("uninterrupted") / "run")
    with job.started(16, *TWO) as process:
        job.succeeds(process)
    return dict(job.losses())


def test_a_worker_is_killed_and_then_there_are_fewer(
    tmp_path: Path, uninterrupted: dict[int, float]
) -> None:
    job = Job(tmp_path / "run")
    with job.started(12, *TWO, "--max-restarts=1") as process:
        job.reaches(6, process)
        os.kill(job.workers(1)[0], signal.SIGKILL)
        job.succeeds(process)
    assert len(job.workers(0)) == 2  # torchrun has started all of them anew
    assert job.steps().count(1) == 1  # and they have not begun anew
    assert set(job.steps()) == set(range(1, 13))
    assert all(loss == uninterrupted[step] for step, loss in job.losses())

    # Now there is one process, and it is told to end: it saves the step that it is at.
    with job.started(1000) as process:
        job.reaches(14, process)
        process.terminate()
        job.succeeds(process)
    assert job.steps().count(13) == 1
    latest = CheckpointManager(job.run).latest(verify=True)
    assert latest is not None
    assert latest.step == job.steps()[-1] < 1000
    for step, loss in job.losses():
        if step in uninterrupted:
            assert loss == pytest.approx(uninterrupted[step], abs=TOLERANCE)


@pytest.mark.campaign
def test_a_node_is_lost_and_the_other_goes_on_alone(
    tmp_path: Path, uninterrupted: dict[int, float]
) -> None:
    """Two agents meet; one of them dies with its worker, and torchrun itself goes on with a smaller world."""
    meeting = (
        "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.1", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{unused_port()}", "--rdzv-id=job", "--local-addr=localhost",
    )  # fmt: skip
    job = Job(tmp_path / "run")
    with ExitStack() as nodes:
        staying = nodes.enter_context(
            job.started(16, *meeting, "--rdzv-conf=last_call_timeout=15,is_host=1")
        )
        lost = nodes.enter_context(
            job.started(16, *meeting, "--rdzv-conf=last_call_timeout=15,is_host=0")
        )
        job.reaches(6, staying)
        workers = {job.workers(rank)[-1] for rank in (0, 1)}
        (theirs,) = workers & set(children(lost.pid))
        lost.kill()
        os.kill(theirs, signal.SIGKILL)
        job.succeeds(staying)
    assert job.steps().count(1) == 1
    assert set(job.steps()) == set(range(1, 17))
    for step, loss in job.losses():
        assert loss == pytest.approx(uninterrupted[step], abs=TOLERANCE)


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
