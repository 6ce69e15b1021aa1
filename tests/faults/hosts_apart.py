"""Two hosts of one job: network, pid and uts namespaces, with a bridge between them that can be cut.

``python hosts_apart.py KIND FAULT STORE FOLDER`` (as root) runs ranks 0 and 1 on host "one" and ranks 2
and 3 on host "two", which save all the time; the job's store is on host STORE. FAULT is "cut" (packets
between the hosts vanish for CUT seconds), "one dies", "two dies" (all of its processes, without a
packet) or "worker" (rank 3 is killed). Prints one line of JSON: when each rank raised, what it said,
what was committed meanwhile, and how the run went on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

SIZE = 4
TIMEOUT = 5.0
CUT = float(os.environ.get("CUT_SECONDS", "50"))
PORT = 29400
ADDRESS = {"one": "10.77.0.1", "two": "10.77.0.2"}
STORAGE = "10.78.0.3"
PATIENCE = 120.0


# One host: a warm parent of its ranks, and of the job's store.


def tell(**fields: Any) -> None:
    os.write(1, (json.dumps({**fields, "at": time.monotonic()}) + "\n").encode())


def until(true: Callable[[], Any], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def run_rank(rank: int, kind: str, master: str, folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    import megackpt
    from megackpt import AsyncCallsQueue, ShardedTensor
    from megackpt.errors import RankLost

    wait = timedelta(seconds=TIMEOUT)
    store = TCPStore(master, PORT, None, False, timeout=timedelta(seconds=60))
    dist.init_process_group("fake", store=store, rank=rank, world_size=SIZE)
    w = torch.full((500,), float(rank))
    state = {"w": ShardedTensor.from_rank_offsets("w", w, (0, rank, SIZE))}
    # The writer process starts with what processor time others leave.
    queue = AsyncCallsQueue(persistent=kind == "process", timeout=timedelta(minutes=2))

    def save(name: str) -> None:
        later = kind != "sync"
        request = megackpt.save(
            state, folder / name, timeout=wait, async_sharded_save=later
        )
        if request is not None:
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)

    number, begun = 0, time.monotonic()
    try:
        while not (folder / "over").exists():
            begun = time.monotonic()
            save(f"c{number}")
            tell(rank=rank, saved=number)
            number += 1
    except RankLost as error:
        waited = time.monotonic() - begun
        tell(rank=rank, raised=str(error), named=sorted(error.failures), waited=waited)
    until((folder / "go on").exists, 2 * PATIENCE)
    for attempt in range(4):
        begun = time.monotonic()
        try:
            save(f"again{attempt}")
            tell(rank=rank, again=attempt, seconds=time.monotonic() - begun)
            break
        except megackpt.CheckpointingException as error:
            tell(
                rank=rank, again=None, seconds=time.monotonic() - begun, why=str(error)
            )
            time.sleep(1.5 * TIMEOUT - (time.monotonic() - begun) % TIMEOUT)


def run_host(name: str, kind: str, store: str, folder: Path) -> None:
    from torch._C._distributed_c10d import TCPStore
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    import megackpt.backends.torch_dist
    import megackpt.saver  # noqa: F401

    pids = []
    if name == store:
        pid = os.fork()
        if pid == 0:
            server = TCPStore("0.0.0.0", PORT, None, True, wait_for_workers=False)
            signal.pause()
            del server
            os._exit(0)
    for rank in (0, 1) if name == "one" else (2, 3):
        pid = os.fork()
        if pid == 0:
            try:
                run_rank(rank, kind, ADDRESS[store], folder)
            except BaseException as error:  # noqa: BLE001 - shown by the test
                tell(rank=rank, crashed=repr(error))
            finally:
                os._exit(0)
        pids.append(pid)
        tell(rank=rank, pid=pid)
    for pid in pids:
        os.waitpid(pid, 0)


# The controller.


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Network:
    """Three namespaces: two hosts, and the switches between them.

    A second network leads to storage, at STORAGE. It is never cut.
    """

    def __init__(self) -> None:
        self.names = {
            name: f"megackpt-{os.getpid()}-{name}" for name in ("mid", *ADDRESS)
        }
        mid = self.names["mid"]
        ip("netns", "add", mid)
        ip("-n", mid, "link", "set", "lo", "up")
        for switch in ("switch", "storage"):
            ip("-n", mid, "link", "add", switch, "type", "bridge")
            ip("-n", mid, "link", "set", switch, "up")
        ip("-n", mid, "addr", "add", f"{STORAGE}/24", "dev", "storage")
        for name in ADDRESS:
            self._add(name)

    def _add(self, name: str) -> None:
        host, mid = self.names[name], self.names["mid"]
        ip("netns", "add", host)
        ip("-n", host, "link", "set", "lo", "up")
        to_storage = STORAGE.rpartition(".")[0] + "." + ADDRESS[name].rpartition(".")[2]
        for device, address, port, switch in (
            ("eth0", ADDRESS[name], name, "switch"),
            ("eth1", to_storage, f"{name}-storage", "storage"),
        ):
            pair = f"{device} type veth peer name {port} netns {mid}"
            ip("-n", host, "link", "add", *pair.split())
            ip("-n", host, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", host, "link", "set", device, "up")
            ip("-n", mid, "link", "set", port, "up", "master", switch)

    def enter(self, name: str) -> list[str]:
        """The command before one that runs on this host."""
        return ["ip", "netns", "exec", self.names[name]]

    def cut(self) -> None:
        ip("-n", self.names["mid"], "link", "set", "two", "nomaster")

    def mend(self) -> None:
        ip("-n", self.names["mid"], "link", "set", "two", "master", "switch")

    def replace(self, name: str) -> None:
        """A new host with the address of one whose processes are gone."""
        for port in (name, f"{name}-storage"):
            ip("-n", self.names["mid"], "link", "del", port)
        ip("netns", "del", self.names[name])
        self._add(name)
        self.mend()

    def remove(self) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], check=False)


def apart(name: str) -> list[str]:
    """The command before one with a host name, process ids and /dev/shm of its own."""
    options = "--pid --fork --uts --mount-proc --kill-child"
    return [
        "unshare",
        *options.split(),
        "sh",
        "-c",
        f'hostname {name}; mount -t tmpfs tmpfs /dev/shm; exec "$@"',
        "sh",
    ]


class Job:
    """The processes of both hosts, and what they have told."""

    def __init__(self, network: Network, kind: str, store: str, folder: Path) -> None:
        self.told: list[dict[str, Any]] = []
        self.hosts: dict[str, subprocess.Popen[str]] = {}
        folder.mkdir()
        self.folder = folder
        for name in ADDRESS:
            host = [sys.executable, __file__, "host", name, kind, store, str(folder)]
            self.hosts[name] = subprocess.Popen(
                [*network.enter(name), *apart(name), *host],
                stdout=subprocess.PIPE,
                text=True,
            )
            threading.Thread(target=self._listen, args=(name,), daemon=True).start()

    def _listen(self, name: str) -> None:
        for line in self.hosts[name].stdout or ():
            self.told.append(json.loads(line))

    def by_rank(self, field: str) -> dict[int, dict[str, Any]]:
        return {one["rank"]: one for one in tuple(self.told) if field in one}

    def kill(self, name: str) -> None:
        with suppress(ProcessLookupError):
            self.hosts[name].kill()  # unshare takes its namespace with it
        self.hosts[name].wait()


def committed(folder: Path) -> dict[str, float]:
    """Complete checkpoints, and when each was."""
    offset = time.monotonic() - time.time()
    return {
        path.parent.name: path.stat().st_mtime + offset
        for path in folder.glob("*/metadata.json")
    }


def run(kind: str, fault: str, store: str, above: Path) -> dict[str, Any]:
    network = Network()
    job = Job(network, kind, store, above / "run")
    jobs = [job]
    try:
        if not until(lambda: len(job.by_rank("saved")) == SIZE, PATIENCE):
            raise TimeoutError(f"the job did not begin: {job.told}")
        time.sleep(1.0)
        began = time.monotonic()
        survivors = set(range(SIZE))
        if fault == "worker":
            os.kill(last_rank(job), signal.SIGKILL)
            survivors = {0, 1, 2}
        else:
            network.cut()
        if fault == "one dies":
            job.kill("one")
            survivors = {2, 3}
        elif fault == "two dies":
            job.kill("two")
            survivors = {0, 1}
        until(lambda: survivors <= set(job.by_rank("raised")), PATIENCE)
        raised = job.by_rank("raised")
        report: dict[str, Any] = {
            "kind": kind,
            "fault": fault,
            "store": store,
            "raised": {rank: one["at"] - began for rank, one in raised.items()},
            "waited": {rank: one["waited"] for rank, one in raised.items()},
            "named": {rank: one["named"] for rank, one in raised.items()},
            "text": {
                rank: one["raised"].split("): ")[-1].splitlines()[0]
                for rank, one in raised.items()
            },
            "silent": sorted(survivors - set(raised)),
        }
        mended = began + CUT
        if fault == "cut":
            time.sleep(max(0.0, mended - time.monotonic()))
            network.mend()
            time.sleep(
                3.0
            )  # TCP sends again what was lost, after a pause that has grown
        late = [
            at - began for at in committed(above / "run").values() if at > began + 0.5
        ]
        report["committed while cut"] = [at for at in late if began + at < mended]
        if fault == "cut":
            (above / "run" / "go on").touch()
        else:  # as torchrun does: all workers are ended, and a job of new ones begins
            job.kill("one")
            job.kill("two")
            network.mend()
            job = Job(network, kind, store, above / "restarted")
            jobs.append(job)
        field = "again" if fault == "cut" else "saved"
        until(
            lambda: (
                len(
                    [
                        r
                        for r, one in job.by_rank(field).items()
                        if one[field] is not None
                    ]
                )
                == SIZE
            ),
            2 * PATIENCE,
        )
        again = job.by_rank(field)
        report["went on"] = sorted(
            r for r, one in again.items() if one[field] is not None
        )
        report["attempts"] = (
            max((one[field] or 0 for one in again.values()), default=0) + 1
        )
        report["why"] = [one["why"] for one in job.told if "why" in one]
        report["crashed"] = [one for one in job.told if "crashed" in one]
        return report
    finally:
        for each in jobs:
            for name in ADDRESS:
                each.kill(name)
        network.remove()


def last_rank(job: Job) -> int:
    """The process id of rank 3, as this namespace sees it."""
    inside = job.by_rank("pid")[3]["pid"]
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            for line in status.read_text().splitlines():
                numbers = line.split()
                if (
                    numbers[0] == "NSpid:"
                    and len(numbers) == 3
                    and int(numbers[2]) == inside
                ):
                    command = Path(status.parent, "cmdline").read_bytes()
                    if {b"two", os.fsencode(job.folder)} <= {*command.split(b"\0")}:
                        return int(numbers[1])
    raise ProcessLookupError("rank 3")


def main() -> None:
    if sys.argv[1] == "host":
        name, kind, store, folder = sys.argv[2:]
        run_host(name, kind, store, Path(folder))
        return
    kind, fault, store, above = sys.argv[1:]
    print(json.dumps(run(kind, fault, store, Path(above))))


if __name__ == "__main__":
    main()
