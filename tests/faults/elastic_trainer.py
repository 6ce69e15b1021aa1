"""The trainer that torchrun starts on two hosts: it restores the latest step, and then saves step after step.

``elastic_trainer.py KIND ROOT FOLDER [POINT]``. All ranks append what they do to FOLDER/log. At POINT
("write" or "publish") of the first save whose number is divisible by four, the coordinator waits until
FOLDER/go is there, once. ``elastic_trainer.py check ROOT`` prints the steps below ROOT, verified.
``elastic_trainer.py serve ADDRESS PORT`` is an object store.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

LENGTH = 1200  # divisible by all sizes of the world
TIMEOUT = 5.0


def check(root: str) -> None:
    from megackpt.checkpoint import open_checkpoint, verify
    from megackpt.manager import CheckpointManager

    steps = {}
    for step in CheckpointManager(root, naming="plain").steps():
        where = f"{root}/{step.name}"
        if step.complete:
            found = open_checkpoint(where).manifest.save_id
            steps[step.step] = {"save_id": found, "ok": verify(where).ok}
    print(json.dumps(steps))


def serve(address: str, port: str) -> None:
    import boto3
    from moto.server import ThreadedMotoServer

    ThreadedMotoServer(address, int(port), verbose=False).start()
    endpoint = f"http://{address}:{port}"
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="run")
    print("ready", flush=True)
    signal.pause()


def hold_at(point: str, folder: Path, tell: Any) -> None:
    """The coordinator of the fourth save waits there, until it may go on."""
    from megackpt.checkpoint import transaction

    def hold(location: str) -> None:
        if not location.rstrip("/").endswith("4") or (folder / "held").exists():
            return
        (folder / "held").touch()
        tell(point=point)
        while not (folder / "go").exists():
            time.sleep(0.02)

    if point == "write":
        write = transaction.Writing.__call__

        def held(self: Any, advance: Any) -> Any:
            hold(self.directory)
            return write(self, advance)

        transaction.Writing.__call__ = held
        return
    for target in (transaction.DirectoryTarget, transaction.ObjectTarget):
        real = target.publish

        def publish(
            self: Any,
            record: Any,
            names: Any,
            replaces: Any,
            confirm: Any,
            real: Any = real,
        ) -> None:
            def confirm_and_hold() -> None:
                confirm()
                hold(self.location)

            real(self, record, names, replaces, confirm_and_hold)

        target.publish = publish


def time_waits() -> list[float]:
    """The seconds of each wait for other ranks, from now on."""
    from megackpt.distributed.process_group import ProcessGroup

    waits: list[float] = []
    real = ProcessGroup._result

    def result(*args: Any) -> Any:
        begun = time.monotonic()
        try:
            return real(*args)
        finally:
            waits.append(time.monotonic() - begun)

    ProcessGroup._result = result
    return waits


def train(kind: str, root: str, folder: Path, point: str = "") -> None:
    began = time.monotonic()
    import torch
    import torch.distributed as dist

    import megackpt
    from megackpt import AsyncCallsQueue, LocalTier, ShardedTensor
    from megackpt.manager import CheckpointManager

    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(**fields: Any) -> None:
        line = {"rank": rank, "life": life, **fields, "at": time.monotonic()}
        os.write(log, (json.dumps(line) + "\n").encode())

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    life = began
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    tell(pid=os.getpid(), count=int(count), host=os.uname().nodename)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    if point and not (folder / "held").exists():
        if (
            size < 3
        ):  # the other host has not joined yet: torchrun starts all again when it has
            signal.pause()
        if rank == 0:
            hold_at(point, folder, tell)
    manager = CheckpointManager(root, naming="plain", timeout=timedelta(minutes=1))
    if kind == "local":  # nothing is ever saved below ROOT
        manager = CheckpointManager(
            root,
            save_interval=1_000_000,
            local=LocalTier("/dev/shm/steps", every=1),
            asynchronous=True,
            timeout=timedelta(seconds=3 * TIMEOUT),
        )
    w = torch.zeros(LENGTH // size)
    state = {"w": ShardedTensor.from_rank_offsets("w", w, (0, rank, size))}
    restored = manager.restore(state)
    step = restored.step if restored is not None else 0
    source = restored.source if restored is not None else ""
    tell(restored=step, right=bool((w == step).all()), source=source)
    # The writer process starts with what processor time others leave.
    queue = AsyncCallsQueue(persistent=kind == "process", timeout=timedelta(minutes=2))
    waits = time_waits()
    while True:
        step += 1
        w.fill_(step)
        waits.clear()
        begun = time.monotonic()
        try:
            request = None
            if kind == "local":
                manager.should_save(step)
                manager.save(step, state)
                manager.finalize()
            else:
                request = megackpt.save(
                    state,
                    manager.path(step),
                    timeout=timedelta(seconds=TIMEOUT),
                    async_sharded_save=kind != "sync",
                )
            if request is not None:
                queue.schedule_async_request(request)
                queue.maybe_finalize_async_calls(blocking=True)
        except BaseException as error:
            call = time.monotonic() - begun
            named = sorted(getattr(error, "failures", ()))
            what = f"{type(error).__name__}: {error}"
            waited = max(waits, default=0.0)
            tell(raised=what, step=step, named=named, waited=waited, call=call)
            raise
        tell(saved=step, seconds=time.monotonic() - begun)
        time.sleep(0.2)


if __name__ == "__main__":
    if sys.argv[1] == "check":
        check(sys.argv[2])
    elif sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        train(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
