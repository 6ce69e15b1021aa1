"""The whole loop in real processes: a trainer under torchrun, and an engine that follows it. Both are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megackpt.deltas import latest_version, materialize

pytestmark = pytest.mark.slow

TRAINER = """
import sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from megackpt.deltas import WeightPublisher, latest_version

url, last = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 50))
fully_shard(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
with WeightPublisher(url, dtype=torch.bfloat16, anchor_every=4) as publisher:
    done = latest_version(url)
    dist.barrier()
    for version in range(0 if done is None else done + 1, last + 1):
        net(torch.randn(4, 200)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        publisher.publish(version, net.state_dict(), asynchronous=True)
dist.destroy_process_group()
"""

ENGINE = """
import sys
from megackpt.deltas import apply, follow, materialize, version_of

url, directory, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
held = version_of(directory)
for version in follow(url, after=held, poll_seconds=0.05):
    if held is None:
        materialize(url, version, directory)
    else:
        apply(directory, url, version, in_place=version % 2 == 0)
    held = version
    print(version, flush=True)
    if version == last:
        break
"""


def start(*words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def start_trainer(folder: Path, last: int) -> subprocess.Popen[str]:
    program = folder / "trainer.py"
    program.write_text(TRAINER)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return start(*launch, str(program), str(folder / "weights"), str(last))


def close(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        if process.stdout is not None:
            process.stdout.close()


def test_a_trainer_and_an_engine_that_are_killed(tmp_path: Path) -> None:
    url, directory = tmp_path / "weights", tmp_path / "engine"
    engine_words = ("-c", ENGINE, str(url), str(directory))
    trainer = start_trainer(tmp_path, 1000)
    engine = start(*engine_words, "1000")
    lines = iter(engine.stdout or ())
    while int(next(lines)) < 5:
        pass
    engine.kill()
    engine.wait()
    os.killpg(trainer.pid, signal.SIGKILL)  # torchrun and its ranks
    trainer.wait()
    close(trainer, engine)
    reached = latest_version(url)
    assert reached is not None
    last = reached + 6
    trainer, engine = start_trainer(tmp_path, last), start(*engine_words, str(last))
    assert trainer.wait(120) == 0
    assert engine.wait(120) == 0
    materialize(url, last, tmp_path / "expected")
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    found = load_file(directory / "model.safetensors")
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(found[key], value), key
    close(trainer, engine)
