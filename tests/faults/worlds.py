"""A warm parent of whole jobs: for each order it forks ranks over gloo, of which one raises, dies or stops.

``python worlds.py ORDERS`` (JSON) prints one line of JSON for each order: what each rank was told, what was to be
read afterwards, and whether the trainer's process groups still worked. It waits for events, never for time.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import megackpt
from megackpt import AsyncCallsQueue, ShardedTensor
from megackpt.backends import torch_dist, zarr
from megackpt.checkpoint import Transaction, save_session
from megackpt.distributed.process_group import ProcessGroup
from megackpt.errors import StorageError
from megackpt.loader import load_operation
from megackpt.saver import save_request

SIZE = 3
AT_ONCE = 8  # worlds, for they mostly wait
SHORT = timedelta(seconds=3)  # how long the ranks wait for the one that fails
LONG = timedelta(seconds=60)
PATIENCE = 90.0  # of this parent, for one report


def state(value: float, rank: int, size: int) -> dict[str, Any]:
    cut = {
        f"w{i}": ShardedTensor.from_rank_offsets(
            f"w{i}", torch.full((1000,), value), (0, rank, size)
        )
        for i in range(3)
    }
    # Other tensors than in the save before: so that it is planned anew.
    new = ShardedTensor.from_rank_offsets(
        f"new{value}", torch.full((3,), value), replica_id=rank
    )
    return {**cut, "new": new, "value": value}


def fill(
    value: float,
    directory: str,
    strategy: str,
    group: Any = None,
    timeout: timedelta = LONG,
    later: str = "",
    flying: int = 1,
) -> None:
    """``later``: asynchronously, by a "thread" or a "process". ``flying``: so many, in directories of their own."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    queue = AsyncCallsQueue(persistent=later == "process", process_group=group)
    try:
        for number in range(flying):
            request = megackpt.save(
                state(value, rank, size),
                f"{directory}{number or ''}",
                strategy,
                process_group=group,
                timeout=timeout,
                async_sharded_save=bool(later),
            )
            if request is not None:
                queue.schedule_async_request(request)
    finally:
        queue.close()


def seen(directory: str, group: Any = None, timeout: timedelta = LONG) -> float | None:
    """The one value of the checkpoint (None: there is none), as this rank reads it whole."""
    whole = megackpt.load_tensors_metadata(directory)
    found = megackpt.load(
        {**whole, "value": 0.0},
        directory,
        validate_access_integrity=False,
        process_group=group,
        timeout=timeout,
    )
    values = {found["value"], *(float(v) for k in whole for v in found[k].unique())}
    if len(values) != 1:
        raise AssertionError(f"a mix: {values}")
    return values.pop()


def _see_another_disk(folder: str) -> None:
    """From here on this process sees a file system of its own at the folder, as on a host that does not share it."""
    os.makedirs(folder, exist_ok=True)
    if ctypes.CDLL(None, use_errno=True).unshare(0x20000):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)


class Fault:
    """Lets this rank raise, die or stop when it first comes to one point of a save or load."""

    def __init__(self, point: str, action: str) -> None:
        self.point, self.action, self.waiting = point, action, True
        for name in ("_lowest", "_gather", "_scatter", "_broadcast"):
            self.message(name)
        self.before(save_request, "declare", "declare")
        self.before(save_session, "begin", "begin")
        self.after(Transaction, "_complete", "commit")
        self.before(load_operation._LoadOperation, "compare", "compare")
        self.before(AsyncCallsQueue, "schedule_async_request", "returned")
        self.before(AsyncCallsQueue, "_vote", "look")
        for backend in (torch_dist.TorchDist, zarr.Zarr):
            self.before(backend, "write", "write")
            self.after(backend, "write", "written")
            self.before(backend, "read", "read")

    def at(self, point: str) -> None:
        if point != self.point or not self.waiting:
            return
        self.waiting = False
        if self.action == "raise":
            raise StorageError("it was to fail here")
        os.kill(
            os.getpid(), {"die": signal.SIGKILL, "stop": signal.SIGSTOP}[self.action]
        )

    def message(self, name: str) -> None:
        real = getattr(ProcessGroup, name)

        def moved(group: Any, stage: Any, *rest: Any) -> Any:
            self.at(f"{name[1:]} {stage}" if rest else name[1:])
            return real(group, stage, *rest)

        setattr(ProcessGroup, name, moved)

    def before(self, owner: Any, name: str, point: str) -> None:
        real = getattr(owner, name)

        def called(*args: Any, **options: Any) -> Any:
            self.at(point)
            return real(*args, **options)

        setattr(owner, name, called)

    def after(self, owner: Any, name: str, point: str) -> None:
        real = getattr(owner, name)

        def called(*args: Any, **options: Any) -> Any:
            result = real(*args, **options)
            self.at(point)
            return result

        setattr(owner, name, called)


def run_rank(rank: int, order: dict[str, Any], folder: str, parent: Connection) -> None:
    store = dist.FileStore(f"{folder}/rendezvous", SIZE)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=SIZE, timeout=LONG
    )
    victim, directory, strategy = order["victim"], f"{folder}/c", order["strategy"]
    flying = order.get("flying", 1)
    survivors = dist.new_group([r for r in range(SIZE) if r != victim])
    alone = dist.new_group([victim])
    if order["action"] == "hosts":
        directory = f"{folder}/disk/c"
        if order["job"] == "load" and rank != victim:
            fill(1.0, directory, strategy, survivors)
        dist.barrier()
        if rank == victim:
            _see_another_disk(f"{folder}/disk")
        if order["job"] == "load" and rank == victim and order["before"]:
            megackpt.save(state(1.0, 0, 1), directory, strategy, process_group=alone)
    elif order["before"]:
        fill(1.0, directory, strategy)
    dist.barrier()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == victim and order["action"] == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    elif rank == victim and order["action"] != "hosts":
        Fault(order["point"], order["action"])
    patience = SHORT if order["action"] in ("die", "stop") else LONG
    said: dict[str, Any] = {"rank": rank, "error": None, "text": "", "failures": []}
    try:
        if order["job"] == "save":
            fill(
                2.0, directory, strategy, None, patience, order.get("later", ""), flying
            )
        elif order["action"] == "hosts":
            megackpt.load({"value": 0.0}, directory, timeout=patience)
        else:
            seen(directory, timeout=patience)
    except megackpt.CheckpointingException as error:
        failures = sorted(getattr(error, "failures", {}))
        said |= {
            "error": type(error).__name__,
            "text": str(error),
            "failures": failures,
        }
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    parent.send(said)
    for step in iter(parent.recv, "end"):
        group = survivors if step.startswith("survivors") else None
        ones = torch.ones(1)
        dist.all_reduce(ones, group=group)  # the trainer's own group
        found = seen(directory, group) if "look" in step else None
        if "save" in step:
            fill(3.0, directory, strategy, group, flying=flying)
            found = seen(directory, group)
        parent.send({"ones": int(ones), "found": found})


def child(
    rank: int, order: dict[str, Any], folder: str, parent: Connection
) -> NoReturn:
    try:
        run_rank(rank, order, folder, parent)
    except BaseException:  # noqa: BLE001 - told to the test
        parent.send({"rank": rank, "crashed": traceback.format_exc()})
    finally:
        os._exit(0)


class World:
    """The ranks of one order."""

    def __init__(self, order: dict[str, Any], folder: str) -> None:
        self.order, self.victim, self.folder = order, order["victim"], folder
        self.heard: dict[str, Any] = {"order": order}
        self.lines: list[Connection] = []
        self.pids: list[int] = []
        for rank in range(SIZE):
            ours, theirs = multiprocessing.Pipe()
            pid = os.fork()
            if pid == 0:
                child(rank, order, folder, theirs)
            theirs.close()
            self.lines.append(ours)
            self.pids.append(pid)
        self.others = [rank for rank in range(SIZE) if rank != self.victim]

    def hear(self, ranks: list[int]) -> list[Any]:
        heard = []
        for rank in ranks:
            if not self.lines[rank].poll(PATIENCE):
                raise TimeoutError(f"rank {rank} has not answered for {PATIENCE} s")
            heard.append(self.lines[rank].recv())
        return heard

    def do(self, step: str, ranks: list[int]) -> list[Any]:
        for rank in ranks:
            self.lines[rank].send(step)
        return self.hear(ranks)

    def run(self) -> dict[str, Any]:
        action, everyone, victim = (
            self.order["action"],
            list(range(SIZE)),
            self.pids[self.victim],
        )
        report = self.heard
        if action in ("raise", "hosts", "disk"):
            report["told"] = self.hear(everyone)
        else:
            _await_end_or_stop(victim)
            report["told"] = self.hear(self.others)
        if action == "die":
            report["after"] = self.do("survivors save", self.others)
            return report
        if action == "stop":
            if self.order.get("meanwhile"):
                report["meanwhile"] = self.do("survivors save", self.others)
            os.kill(victim, signal.SIGCONT)
            report["late"] = self.hear([self.victim])
        if action == "hosts":
            report["after"] = self.do("survivors save", self.others)
            return report
        report["found"] = self.do(
            "look" if self.order["before"] or self.order.get("meanwhile") else "",
            everyone,
        )
        report["after"] = self.do("save", everyone)
        return report

    def end(self) -> None:
        """Nothing of it is needed any more, and gloo has no way to part in order from ranks that are gone."""
        for pid in self.pids:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        shutil.rmtree(self.folder)

    def report(self) -> dict[str, Any]:
        try:
            found = self.run()
            return found | {"left": sorted(os.listdir(self.folder))}
        except (OSError, EOFError) as error:
            return self.heard | {"hung": repr(error)}
        finally:
            self.end()


def _await_end_or_stop(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while os.waitpid(pid, os.WNOHANG | os.WUNTRACED) == (0, 0):
        if time.monotonic() > deadline:
            raise TimeoutError(
                "the victim has not come to the point where it was to die or stop"
            )
        time.sleep(0.01)


def main() -> None:
    orders, above = json.loads(sys.argv[1]), sys.argv[2]
    for first in range(0, len(orders), AT_ONCE):
        # All are forked before there are threads.
        worlds = [
            World(order, tempfile.mkdtemp(dir=above))
            for order in orders[first : first + AT_ONCE]
        ]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for report in pool.map(World.report, worlds):
                print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
