"""Two hosts under torchrun elastic, of which one is lost. See elastic_trainer.py and hosts_apart.py.

``elastic_hosts.py host KIND FAULT STORE FOLDER`` (as root): two ranks on each host, which save all the
time. FAULT is "cut", "one dies", "two dies" or "worker"; the agent on host STORE has the rendezvous.
``elastic_hosts.py coordinator POINT FAULT PLACE FOLDER``: the coordinator is alone on host one, and that
host is lost in the middle of a save (FAULT "kill", "stop" or "cut"). Host two goes on alone. PLACE
is "directory" or "bucket". Both print one line of JSON.

An agent that ends is started again, as a cluster's scheduler does, and a dead host is replaced.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hosts_apart import ADDRESS, CUT, STORAGE, Network, apart, committed, until

TRAINER = str(Path(__file__).with_name("elastic_trainer.py"))
TIMEOUT = 5.0
REPLACED = 20.0  # seconds after which a dead host has a successor
LATEST = 200.0  # seconds; the run goes on, or has hung
RENDEZVOUS_PORT, STORE_PORT = 29400, 29500
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
    # torch 2.13: without this a second life finds the addresses of the first, and cannot connect.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "AWS_ACCESS_KEY_ID": "somebody",
    "AWS_SECRET_ACCESS_KEY": "something",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_ENDPOINT_URL": f"http://{STORAGE}:{STORE_PORT}",
    "NO_PROXY": "*",
}


class Cluster:
    """Both hosts, an agent on each, and what the trainers have written into the log."""

    def __init__(
        self, folder: Path, store: str, nodes: str, workers: dict[str, int], *job: str
    ) -> None:
        self.folder = folder
        self.network = Network()
        self.restarts: list[tuple[str, float, int]] = []
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._store, self._nodes, self._workers, self._job = store, nodes, workers, job
        self._server: subprocess.Popen[bytes] | None = None
        self._env = {**os.environ, **ENVIRONMENT}

    def start(self, *names: str) -> None:
        for name in names:
            host = int(name == self._store)
            rendezvous = f"is_host={host},join_timeout=300,last_call_timeout=2"
            options = {
                "nnodes": self._nodes,
                "nproc-per-node": self._workers[name],
                "max-restarts": 9,
                "monitor-interval": 0.2,
                "rdzv-backend": "c10d",
                "rdzv-endpoint": f"{ADDRESS[self._store]}:{RENDEZVOUS_PORT}",
                "rdzv-id": "run",
                "rdzv-conf": f"{rendezvous},keep_alive_interval=2",
                "local-addr": ADDRESS[name],
            }
            agent = [sys.executable, "-m", "torch.distributed.run"]
            agent += [f"--{key}={value}" for key, value in options.items()]
            with (self.folder / f"{name}.txt").open("ab") as output:
                self._agents[name] = subprocess.Popen(
                    [
                        *self.network.enter(name),
                        *apart(name),
                        *agent,
                        TRAINER,
                        *self._job,
                    ],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._env,
                )

    def serve(self) -> None:
        """Start the object store, on the network of storage."""
        serving = [sys.executable, TRAINER, "serve", STORAGE, str(STORE_PORT)]
        with (self.folder / "store.txt").open("ab") as output:
            self._server = subprocess.Popen(
                [*self.network.enter("mid"), *serving],
                stdout=subprocess.PIPE,
                stderr=output,
                env=self._env,
            )
        assert self._server.stdout is not None
        self._server.stdout.readline()

    def check(self, root: str) -> dict[int, dict[str, Any]]:
        """The complete steps: the id of the save of each, and whether all of it is right."""
        command = [*self.network.enter("mid"), sys.executable, TRAINER, "check", root]
        done = subprocess.run(
            command, env=self._env, check=True, stdout=subprocess.PIPE
        )
        return {int(step): found for step, found in json.loads(done.stdout).items()}

    def log(self, field: str, since: float = 0.0) -> list[dict[str, Any]]:
        """What trainers that began after ``since`` have written with this field."""
        path = self.folder / "log"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        entries = [json.loads(line) for line in lines]
        return [one for one in entries if field in one and one["life"] > since]

    def until(self, true: Callable[[], Any], seconds: float = LATEST) -> bool:
        """Wait, and start agents again that have ended."""

        def looked() -> bool:
            for name, agent in tuple(self._agents.items()):
                code = agent.poll()
                if code is not None:
                    self.restarts.append((name, time.monotonic(), code))
                    self.start(name)
            return bool(true())

        return until(looked, seconds)

    def kill(self, name: str) -> None:
        """All processes of a host, which is not started again by itself."""
        agent = self._agents.pop(name, None)
        if agent is not None:
            agent.kill()  # unshare takes its namespace with it
            agent.wait()

    def replace(self, name: str) -> None:
        self.network.replace(name)
        self.start(name)

    def signal(self, name: str, number: int) -> None:
        for pid in self.processes(name):
            os.kill(pid, number)

    def processes(self, name: str) -> list[int]:
        listed = ["ip", "netns", "pids", self.network.names[name]]
        done = subprocess.run(listed, check=True, stdout=subprocess.PIPE, text=True)
        return [int(pid) for pid in done.stdout.split()]

    def worker(self, name: str, rank: int) -> int:
        """The process of a rank."""
        for pid in self.processes(name):
            with suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if (
                    f"RANK={rank}".encode() in environment
                    and TRAINER.encode() in command
                ):
                    return pid
        raise ProcessLookupError(f"rank {rank}")

    def close(self) -> None:
        for name in ADDRESS:
            self.kill(name)
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        self.network.remove()


def lose_a_host(kind: str, fault: str, store: str, folder: Path) -> dict[str, Any]:
    root = folder / "run"
    workers = {"one": 2, "two": 2}
    cluster = Cluster(folder, store, "2", workers, kind, str(root), str(folder))
    try:
        cluster.start(*ADDRESS)
        if not cluster.until(lambda: len(ranks(cluster.log("saved"))) == 4):
            raise TimeoutError("the job did not begin")
        time.sleep(1.0)
        began = time.monotonic()
        surviving, back = {"one", "two"}, began
        if fault == "worker":
            os.kill(cluster.worker("two", 3), signal.SIGKILL)
        else:
            cluster.network.cut()
            back = began + CUT
        if fault.endswith("dies"):
            dead = fault.split(maxsplit=1)[0]
            surviving.remove(dead)
            cluster.kill(dead)
            back = began + REPLACED
        of_host = {0: "one", 1: "one", 2: "two", 3: "two"}

        def raised() -> list[dict[str, Any]]:
            return [e for e in cluster.log("raised") if e["life"] < began <= e["at"]]

        cluster.until(
            lambda: surviving == {of_host[e["rank"]] for e in raised()},
            back - time.monotonic() if fault != "worker" else 3,
        )
        cluster.until(lambda: time.monotonic() > back)
        last = max(e["saved"] for e in cluster.log("saved") if e["life"] < began)
        during: list[str] = []
        if fault != "worker":
            at_once = began + 0.5  # packets that were under way
            during = [name for name, at in committed(root).items() if at > at_once]
        if fault == "cut":
            cluster.network.mend()
        elif fault != "worker":
            cluster.replace(dead)
        went_on = cluster.until(lambda: len(ranks(cluster.log("saved", began))) == 4)
        first = min((e["at"] for e in cluster.log("saved", began)), default=0.0)
        agents = [
            (name, code)
            for name, at, code in cluster.restarts
            if at < first or not first
        ]
        steps = cluster.check(str(root))
        restored = cluster.log("restored", began)
        return {
            "kind": kind,
            "fault": fault,
            "store": store,
            "raised": [
                {
                    "rank": e["rank"],
                    "host": of_host[e["rank"]],
                    "after": e["at"] - began,
                    "waited": e["waited"],
                    "call": e["call"],
                    "named": e["named"],
                    "text": essence(e["raised"]),
                }
                for e in raised()
            ],
            "silent": sorted(surviving - {of_host[e["rank"]] for e in raised()}),
            "committed while cut": during,
            "last": last,
            "restored": sorted({e["restored"] for e in restored}),
            "right": all(e["right"] for e in restored),
            "sources": sorted({e["source"] for e in restored}),
            "bad": [step for step, found in steps.items() if not found["ok"]],
            "went on": went_on,
            "back": back - began,
            "first save": first - began,
            "failed again": [
                essence(e["raised"]) for e in cluster.log("raised", began)
            ],
            "agents": agents,
            "counts": sorted({e["count"] for e in cluster.log("count", began)}),
        }
    finally:
        cluster.close()


def essence(raised: str) -> str:
    return raised.rsplit("): ", maxsplit=1)[-1].splitlines()[0]


def ranks(entries: Sequence[dict[str, Any]]) -> set[int]:
    return {entry["rank"] for entry in entries}


def lose_the_coordinator(
    point: str, fault: str, place: str, folder: Path
) -> dict[str, Any]:
    root = str(folder / "run") if place == "directory" else "s3://run/job"
    workers = {"one": 1, "two": 2}
    job = "sync", root, str(folder), point
    cluster = Cluster(folder, "two", "1:2", workers, *job)
    try:
        if place == "bucket":
            cluster.serve()
        cluster.start("two", "one")
        if not cluster.until(lambda: cluster.log("point")):
            raise TimeoutError("the job did not begin")
        held = cluster.log("point")[0]
        coordinator = cluster.worker("one", 0)
        began = time.monotonic()
        if fault == "cut":
            cluster.network.cut()
            for pid in cluster.processes("one"):
                # Or its agent would end a coordinator that is late.
                if pid != coordinator:
                    os.kill(pid, signal.SIGSTOP)
            if point == "write":
                (folder / "go").touch()
        elif fault == "stop":
            cluster.signal("one", signal.SIGSTOP)
        else:
            cluster.network.cut()
            cluster.kill("one")

        def won() -> list[dict[str, Any]]:
            return [e for e in cluster.log("saved", began) if e["saved"] == 4]

        went_on = cluster.until(lambda: len(ranks(won())) == 2)
        winner = cluster.check(root)
        (folder / "go").touch()
        if fault == "stop":
            for pid in cluster.processes("one"):
                if pid == coordinator:
                    os.kill(pid, signal.SIGCONT)

        def woken() -> list[dict[str, Any]]:
            return [e for e in cluster.log("raised") if e["life"] == held["life"]]

        def done() -> bool:
            others = {e["saved"] for e in cluster.log("saved", began)}
            return max(others, default=0) > 5 and bool(fault == "kill" or woken())

        went_further = cluster.until(done, 60)
        steps = cluster.check(root)
        first = won()
        own = [e["saved"] for e in cluster.log("saved") if e["life"] == held["life"]]
        return {
            "point": point,
            "fault": fault,
            "place": place,
            "went on": went_on,
            "went further": went_further,
            "others raised": [
                {"after": e["at"] - began, "text": essence(e["raised"])}
                for e in cluster.log("raised")
                if e["life"] < began and e["rank"] and e["at"] > began
            ],
            "failed again": [
                essence(e["raised"]) for e in cluster.log("raised", began)
            ],
            "restored": sorted({e["restored"] for e in cluster.log("restored", began)}),
            "first save": min((e["at"] for e in first), default=0.0) - began,
            "first save took": max((e["seconds"] for e in first), default=0.0),
            "coordinator raised": [
                {"after": e["at"] - began, "waited": e["waited"], "text": e["raised"]}
                for e in woken()
            ],
            "coordinator saved": [step for step in own if step > 3],
            "winner": winner.get(4),
            "stands": steps.get(4),
            "bad": [step for step, found in steps.items() if not found["ok"]],
        }
    finally:
        cluster.close()


if __name__ == "__main__":
    measure = {"host": lose_a_host, "coordinator": lose_the_coordinator}[sys.argv[1]]
    above = Path(sys.argv[5])
    above.mkdir(exist_ok=True)
    print(json.dumps(measure(*sys.argv[2:5], above)))
