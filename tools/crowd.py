"""How the ranks of a large job connect: real processes on this machine, forked from one that has torch.

    python tools/crowd.py --ranks 256           our control plane: connect, vote, plan and save
    python tools/crowd.py --ranks 256 --gloo    torch.distributed.new_group(backend="gloo") and a barrier

The default group has torch's "fake" backend, which makes no connections: only megackpt's are counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

import megackpt
import megackpt.backends.torch_dist
import megackpt.saver
from megackpt import ShardedTensor
from megackpt.distributed import process_group

PATIENCE = timedelta(seconds=300)


def sockets() -> int:
    """Open sockets of this process."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:  # the directory itself
            continue
    return sum(link.startswith("socket:") for link in links)


def private_memory() -> int:
    """Bytes that this process shares with no other."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(
        int(line.split()[1]) << 10 for line in text.splitlines() if "Private_" in line
    )


def state(rank: int, size: int) -> dict[str, Any]:
    w = torch.full((4,), float(rank), device="cpu")
    return {"w": ShardedTensor.from_rank_offsets("w", w, (0, rank, size)), "step": 1}


def run_rank(
    rank: int, size: int, port: int, directory: str, gloo: bool
) -> dict[str, Any]:
    store = TCPStore("127.0.0.1", port, None, False, timeout=PATIENCE)
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    store.add("here", 1)
    while store.add("here", 0) < size:  # all have been forked
        time.sleep(0.1)
    before, memory, begun = sockets(), private_memory(), time.monotonic()
    found: dict[str, Any] = {}
    if gloo:
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        dist.barrier(group)
    else:
        with process_group.group_over(None, PATIENCE) as ranks:
            ranks.all_agree(1)
        found["connect"] = time.monotonic() - begun
        begun = time.monotonic()
        megackpt.save(state(rank, size), directory, timeout=PATIENCE)
        found["first"] = time.monotonic() - begun
        begun = time.monotonic()
        megackpt.save(state(rank, size), directory, timeout=PATIENCE)
        tree = next(iter(process_group._known.values()))[""].tree
        found |= tree.counts
    return found | {
        "seconds": time.monotonic() - begun,
        "sockets": sockets() - before,
        "memory": private_memory() - memory,
    }


def serve(line: Connection) -> None:
    """Holds the job's store."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    line.send(store.port)
    line.recv()


def fork(target: Any, *args: Any) -> Connection:
    ours, theirs = Pipe()
    if os.fork() == 0:
        code = 1
        try:
            ours.close()
            target(theirs, *args)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    theirs.close()
    return ours


def rank_main(line: Connection, *args: Any) -> None:
    line.send(run_rank(*args))
    line.recv()  # until all have been counted


def crowd(size: int, gloo: bool) -> dict[str, Any]:
    """The figures of one job of ``size`` ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16), hard))
    folder = tempfile.mkdtemp(prefix="crowd-")
    gc.freeze()  # collections in the ranks must not copy pages that they share with this process
    try:
        server = fork(serve)
        port = server.recv()
        lines = [
            fork(rank_main, rank, size, port, f"{folder}/c", gloo)
            for rank in range(size)
        ]
        told: list[dict[str, Any]] = []
        for line in lines:
            wait([line])
            told.append(line.recv())
        for line in (*lines, server):
            line.send("end")
        if not gloo:
            loaded = megackpt.load_plain_tensors(f"{folder}/c")["w"]
            wanted = torch.arange(
                size, dtype=torch.float32, device="cpu"
            ).repeat_interleave(4)
            if not torch.equal(loaded, wanted):
                raise AssertionError(
                    "the checkpoint does not hold what the ranks saved"
                )
        return {
            "ranks": size,
            "connect": max(one.get("connect", 0.0) for one in told),
            "first": max(one.get("first", 0.0) for one in told),
            "seconds": max(one["seconds"] for one in told),
            "sockets of rank 0": told[0]["sockets"],
            "sockets, most": max(one["sockets"] for one in told),
            "sockets, all": sum(one["sockets"] for one in told),
            "memory, all": sum(one["memory"] for one in told),
            "messages": sum(one.get("messages", 0) for one in told),
            "bytes": sum(one.get("bytes", 0) for one in told),
        }
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--gloo", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(crowd(options.ranks, options.gloo)))


if __name__ == "__main__":
    main()
