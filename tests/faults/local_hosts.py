"""Four hosts of two ranks each, which save on the hosts at every step; hosts are lost at random moments.

``local_hosts.py LIVES LOST SEED FOLDER MEMORY`` prints one line of JSON for each life but the first: a job of
eight new processes, after LOST neighbouring hosts were killed and what they had in MEMORY, a tmpfs, was
removed. A line says which step the job had to find, which it restored, from where, and whether all values
are right; how many bytes went over the wire for each byte that was lost; and how much of MEMORY was used,
as a share of (1 + copies) x generations x the state.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megackpt.saver  # noqa: F401 - loaded once, before the ranks are forked
from megackpt import CheckpointManager, LocalTier, ShardedTensor
from megackpt.async_save.worker_process import die_with_parent

HOSTS, PER_HOST = 4, 2
RANKS = HOSTS * PER_HOST
LENGTH = 1 << 20  # float32, of each rank
EACH = 4 * LENGTH
PATIENCE = 120.0


def after(rank: int, step: int) -> torch.Tensor:
    """The parameters of a rank after this step: each is that of the last one, changed."""
    return torch.arange(float(LENGTH)).mul_(1 + rank).add_(step)


def sent_bytes() -> int:
    """What all processes of this network namespace have sent."""
    line = next(t for t in Path("/proc/net/dev").read_text().split("\n") if " lo:" in t)
    return int(line.split()[1])


def train(rank: int, life: int, folder: Path, memory: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store{life}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=PATIENCE),
    )
    host = f"host{rank // PER_HOST}"
    local = LocalTier(memory / host, every=1, host=host)
    manager = CheckpointManager(
        folder / "run", local=local, save_interval=20, asynchronous=True
    )
    w = torch.zeros(LENGTH)
    state = {"w": ShardedTensor.from_rank_offsets("w", w, (0, rank, RANKS))}
    manager.steps()  # what a first call loads
    dist.barrier()
    before = sent_bytes()
    found = manager.restore(state)
    dist.barrier()
    sent = sent_bytes() - before
    step = found.step if found is not None else 0
    (folder / f"life{life}.{rank}").write_text(
        json.dumps(
            {
                "step": step,
                "source": found.source if found is not None else "",
                "right": torch.equal(w, after(rank, step))
                if found is not None
                else True,
                "sent": sent,
            }
        )
    )
    while True:
        step += 1
        w.copy_(after(rank, step))
        if manager.should_save(step):
            manager.save(step, state)
        w.fill_(-1)
        manager.poll()


def start(life: int, folder: Path, memory: Path) -> list[int]:
    ranks = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            try:
                train(rank, life, folder, memory)
            except BaseException as error:  # noqa: BLE001 - shown by the test
                (folder / f"crash{life}.{rank}").write_text(repr(error))
            finally:
                os._exit(1)
        ranks.append(pid)
    return ranks


def end(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


def whole_steps(memory: Path) -> list[int]:
    """The steps of which each rank's shards are on a host."""
    found = defaultdict(set)
    for piece in memory.glob("*/*/step_*/rank_?_of_*"):
        if piece.name.count(".") == 0:
            found[piece.parent.name].add(piece.name)
    return sorted(
        int(name.split("_")[1]) for name, ranks in found.items() if len(ranks) == RANKS
    )


def stored_steps(folder: Path) -> list[int]:
    return [
        step.step
        for step in CheckpointManager(folder / "run").steps()
        if step.complete and step.step is not None
    ]


def used_bytes(memory: Path) -> int:
    room = os.statvfs(memory)
    return (room.f_blocks - room.f_bfree) * room.f_frsize


@contextmanager
def watched(memory: Path) -> Iterator[list[int]]:
    """The most bytes that were used at any time."""
    most, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            most[0] = max(most[0], used_bytes(memory))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def is_beyond(memory: Path, step: int) -> bool:
    try:
        return any(number > step for number in whole_steps(memory))
    except FileNotFoundError:  # a rank removes an old step meanwhile
        return False


def until(true: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.02)


def main(lives: int, lost: int, seed: int, folder: Path, memory: Path) -> None:
    chance = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for life in range(lives + 1):
        expected: dict[str, Any] = {
            "local": whole_steps(memory),
            "stored": stored_steps(folder),
        }
        ranks = start(life, folder, memory)
        told = [folder / f"life{life}.{rank}" for rank in range(RANKS)]

        def all_told(told: list[Path] = told, life: int = life) -> bool:
            crashed = sorted(folder.glob(f"crash{life}.*"))
            if crashed:
                raise RuntimeError(f"{crashed[0].name}: {crashed[0].read_text()}")
            return all(path.exists() and path.stat().st_size for path in told)

        until(all_told, f"life {life} has not begun")
        reports = [json.loads(path.read_text()) for path in told]
        with watched(memory) as most:
            begun = reports[0]["step"]
            until(partial(is_beyond, memory, begun + 2), "no step was saved")
            time.sleep(chance.uniform(0, 0.6))
            first = chance.randrange(HOSTS)
            gone = [(first + i) % HOSTS for i in range(lost)]
            dead = [pid for i, pid in enumerate(ranks) if i // PER_HOST in gone]
            end(dead)
            time.sleep(chance.uniform(0, 0.2))
            end([pid for pid in ranks if pid not in dead])
        for host in gone:
            shutil.rmtree(memory / f"host{host}")
        if life:
            print(
                json.dumps(
                    {
                        "expected": expected,
                        "steps": sorted({report["step"] for report in reports}),
                        "sources": sorted({report["source"] for report in reports}),
                        "right": all(report["right"] for report in reports),
                        "wire": max(r["sent"] for r in reports)
                        / (lost * PER_HOST * EACH),
                        "memory": most[0] / (2 * 2 * RANKS * EACH),
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *map(Path, sys.argv[4:]))
