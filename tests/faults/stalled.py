"""One job of three ranks that save all the time; one of them is stopped for some time, again and again.

``python stalled.py SEED COUNT LOSS FOLDER`` prints one line of JSON: the saves, and what failed. Between calls there
is a collective of the trainer where SEED is even. LOSS: percent of the packets between ranks, which TCP repeats.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import struct
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import megackpt
from megackpt import ShardedTensor
from megackpt.distributed import rendezvous

SIZE = 3
TIMEOUT = timedelta(seconds=60)


def lose_packets(percent: int) -> None:
    """Each connection of the control plane gets a filter that drops so many of the packets that arrive."""
    random_number, least = 0xFFFFF000 + 56, 2**32 * (100 - percent) // 100
    code = [
        (0x20, 0, 0, random_number),
        (0x35, 0, 1, least),
        (6, 0, 0, 0),
        (6, 0, 0, 2**32 - 1),
    ]
    packed = b"".join(struct.pack("HBBI", *each) for each in code)
    held = ctypes.create_string_buffer(packed)
    program = struct.pack("HL", len(code), ctypes.addressof(held))
    tune = rendezvous.tune

    def lossy(connection: socket.socket) -> None:
        tune(connection)
        connection.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER
        _held.append(held)

    rendezvous.tune = lossy


_held: list[object] = []


def run_rank(rank: int, seed: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/rendezvous", SIZE)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=SIZE, timeout=timedelta(minutes=10)
    )
    number, failed, over = 0, [], torch.zeros(1)
    while not over.item():
        number += 1
        w = torch.full((64,), float(number))
        state = {"w": ShardedTensor.from_rank_offsets("w", w, (0, rank, SIZE))}
        try:
            megackpt.save(state, f"{folder}/c{number % 3}", timeout=TIMEOUT)
        except megackpt.CheckpointingException as error:
            failed.append(f"rank {rank}, save {number}: {error}")
        if number == 3:
            Path(folder, f"ready{rank}").touch()
        if number % (10 if seed % 2 else 1) == 0:
            over[0] = os.path.exists(f"{folder}/over")
            dist.all_reduce(over)
    Path(folder, f"told{rank}").write_text(json.dumps([number, failed]))


def main() -> None:
    seed, count, loss, folder = *map(int, sys.argv[1:4]), sys.argv[4]
    if loss:
        lose_packets(loss)
    torch.set_num_threads(1)
    Path(folder).mkdir(parents=True)
    pids = []
    for rank in range(SIZE):
        pid = os.fork()
        if pid == 0:
            try:
                run_rank(rank, seed, folder)
            finally:
                os._exit(0)
        pids.append(pid)
    while len([*Path(folder).glob("ready*")]) < SIZE:
        time.sleep(0.1)
    dice = random.Random(seed)
    for _ in range(count):
        victim = pids[dice.randrange(SIZE)]
        time.sleep(dice.uniform(0.1, 0.8))
        os.kill(victim, signal.SIGSTOP)
        time.sleep(dice.uniform(0.5, 10.0))
        os.kill(victim, signal.SIGCONT)
    Path(folder, "over").touch()
    for pid in pids:
        os.waitpid(pid, 0)
    told = [json.loads(Path(folder, f"told{r}").read_text()) for r in range(SIZE)]
    failed = [text for _, texts in told for text in texts]
    print(json.dumps({"saves": told[0][0], "failed": failed}))


if __name__ == "__main__":
    main()
