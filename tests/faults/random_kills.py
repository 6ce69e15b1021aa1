"""A warm parent of jobs that save all the time, of which one rank is killed at a random moment.

``python random_kills.py KIND COUNT SEED FOLDER`` prints one line of JSON for each job: the victim, and
what each survivor raised. KIND is sync, thread or process. The tree has a fan-out of 2, so that seven
ranks have parents, children and leaves.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

import megackpt
import megackpt.backends.torch_dist
import megackpt.saver
from megackpt import AsyncCallsQueue, ShardedTensor
from megackpt.distributed import messages
from megackpt.errors import RankLost

SIZE = 7
TIMEOUT = timedelta(seconds=20)
PATIENCE = 60.0


def save_on(rank: int, kind: str, folder: str, line: Connection) -> None:
    """Save again and again, until a rank is lost."""
    w = torch.full((500,), float(rank))
    state = {"w": ShardedTensor.from_rank_offsets("w", w, (0, rank, SIZE))}
    queue = AsyncCallsQueue(persistent=kind == "process", timeout=TIMEOUT)
    for number in range(10_000):
        request = megackpt.save(
            state,
            f"{folder}/c{number % 3}",
            timeout=TIMEOUT,
            async_sharded_save=kind != "sync",
        )
        if request is not None:
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=number % 3 == 2)
        if number == 0:
            line.send("saving")


def run_rank(rank: int, kind: str, folder: str, line: Connection) -> None:
    store = dist.FileStore(f"{folder}/store", SIZE)
    dist.init_process_group("fake", store=store, rank=rank, world_size=SIZE)
    try:
        save_on(rank, kind, folder, line)
    except RankLost as error:
        line.send(
            {"failures": sorted(error.failures), "text": str(error), "at": time.time()}
        )
    except BaseException as error:  # noqa: BLE001 - checked by the test
        line.send({"failures": [], "text": repr(error), "at": time.time()})


def run_job(kind: str, chance: random.Random, above: str) -> dict[str, Any]:
    folder = tempfile.mkdtemp(dir=above)
    lines, pids = [], []
    for rank in range(SIZE):
        ours, theirs = multiprocessing.Pipe()
        pid = os.fork()
        if pid == 0:
            try:
                run_rank(rank, kind, folder, theirs)
            finally:
                os._exit(0)
        theirs.close()
        lines.append(ours)
        pids.append(pid)
    victim = chance.randrange(SIZE)
    report: dict[str, Any] = {"victim": victim, "told": {}}
    try:
        for line in lines:
            if not line.poll(PATIENCE) or (word := line.recv()) != "saving":
                raise TimeoutError(f"the job did not begin: {word}")
        time.sleep(chance.random() * 0.7)
        os.kill(pids[victim], signal.SIGKILL)
        killed = time.time()
        for rank, line in enumerate(lines):
            if rank != victim and line.poll(PATIENCE):
                told = line.recv()
                told["at"] -= killed
                report["told"][rank] = told
    except (OSError, EOFError) as error:
        report["broken"] = repr(error)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    shutil.rmtree(folder, ignore_errors=True)
    return report


def main() -> None:
    kind, count, seed, above = sys.argv[1:]
    messages.FAN_OUT = 2
    torch.set_num_threads(1)
    chance = random.Random(int(seed))
    for _ in range(int(count)):
        print(json.dumps(run_job(kind, chance, above)), flush=True)


if __name__ == "__main__":
    main()
