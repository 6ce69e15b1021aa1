"""Runs one contestant: two hosts, a schedule of faults, and a supervisor that restarts the job."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from goodput_runs.contestants import FOLDERS
from goodput_runs.counting import Watch
from goodput_runs.schedule import HOSTS, RANKS, Fault, Schedule
from goodput_runs.storage import Storage
from goodput_runs.training import Order

ROOT = Path(__file__).resolve().parents[2]
RESTART_DELAY = 2.0
"""Seconds from the end of a job to the start of the next one, the same for all."""
OUTAGE = 6.0
"""Seconds for which the storage is full, over quota, slow or hung."""
STOPPED = 30.0
PORT = 29500
MEMORY = "/dev/shm"  # of each host its own
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
    "NO_PROXY": "*",
}


def namespaces() -> Any:
    """hosts_apart.py of the fault tests: two hosts as namespaces, and the network between them."""
    folder = str(ROOT / "tests" / "faults")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("hosts_apart")


class Host:
    """The process of host.py, in its namespaces, and what it says."""

    def __init__(self, network: Any, name: str, folder: Path, contestant: str) -> None:
        self.ended: list[dict[str, Any]] = []
        self.ready = threading.Event()
        words = [sys.executable, "-m", "goodput_runs.host", name, folder, contestant]
        command = [*network.enter(name), *namespaces().apart(name), *words]
        paths = ROOT, ROOT / "tools", *(ROOT / at for at in FOLDERS.get(contestant, ()))
        path = {"PYTHONPATH": ":".join(map(str, paths))}
        with (folder / f"{name}.txt").open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=os.environ | ENVIRONMENT | path,
                text=True,
                bufsize=1,
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            said = json.loads(line)
            if "ready" in said:
                self.ready.set()
            else:
                self.ended.append(said)

    @property
    def is_gone(self) -> bool:
        return self._process.poll() is not None

    def tell(self, **order: Any) -> None:
        if self._process.stdin is not None and not self.is_gone:
            self._process.stdin.write(json.dumps(order) + "\n")

    def kill(self) -> None:
        """All of its processes; /dev/shm goes with its mount namespace."""
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Outcome:
    """The log of a run, and what its supervisor saw."""

    entries: list[dict[str, Any]]
    seconds: float
    restarts: int
    actions: list[str]
    struck: list[dict[str, Any]]


class Supervisor:
    """One run. ``outcome`` blocks until the run has ended, or a person has given it up."""

    def __init__(
        self, contestant: str, plan: Schedule, seed: int, folder: Path, undo: ExitStack
    ) -> None:
        folder.mkdir(parents=True)
        self._folder, self._contestant, self._plan = folder, contestant, plan
        self._storage = undo.enter_context(Storage(folder))
        self._network = namespaces().Network()
        undo.callback(self._network.remove)
        self._hosts: dict[str, Host] = {}
        undo.callback(self._end_hosts)
        undo.callback(self._storage.end)  # before: no process ends on a frozen one
        for name in HOSTS:
            self._hosts[name] = self._host(name)
        lost = [fault.host for fault in plan.faults if fault.kind == "host"]
        self._spares = [(name, self._host(name)) for name in lost]
        where = str(self._storage.path)
        self._order = Order(contestant, where, MEMORY, plan.steps, seed)
        self._pending = list(plan.faults)
        self._struck: list[dict[str, Any]] = []
        self._over: tuple[float, Callable[[], None]] | None = None
        self._watch = Watch()
        self._life = -1
        self._log = folder / "log"
        self._read = 0
        self._entries: list[dict[str, Any]] = []
        self._furthest = 0
        self._moved = time.monotonic()

    def _host(self, name: str) -> Host:
        return Host(self._network, name, self._folder, self._contestant)

    def _end_hosts(self) -> None:
        for host in self._all():
            host.kill()

    def _all(self) -> list[Host]:
        return [*self._hosts.values(), *(host for _, host in self._spares)]

    def outcome(self) -> Outcome:
        for host in self._all():
            _wait(host.ready.is_set, 300, "a host does not begin")
        began = time.monotonic()
        self._start()
        while not self._is_done() and not self._watch.gives_up:
            time.sleep(0.02)
            self._look()
            self._heal()
            if self._has_ended() or self._is_silent():
                self._restart()
            else:  # a fault that falls due between two jobs strikes the next one
                self._strike()
        seconds = time.monotonic() - began
        actions = self._watch.actions
        return Outcome(self._entries, seconds, self._life, actions, self._struck)

    def _start(self) -> None:
        self._life += 1
        self._moved = time.monotonic()
        address = namespaces().ADDRESS[HOSTS[0]]
        job = {"life": self._life, "address": address, "port": PORT + self._life}
        for host in self._hosts.values():
            host.tell(start=asdict(self._order), **job)

    def _look(self) -> None:
        """Read what the ranks have told since the last look."""
        if not self._log.exists():
            return
        with self._log.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        for line in whole.splitlines():
            entry = json.loads(line)
            self._entries.append(entry)
            self._furthest = max(self._furthest, entry.get("step", 0))
            self._moved = time.monotonic()

    def _heal(self) -> None:
        """End the fault whose time is over."""
        if self._over is not None and time.monotonic() >= self._over[0]:
            self._over[1]()
            self._over = None

    def _strike(self) -> None:
        """Begin the next fault, if it is due and no other one lasts."""
        if self._over is not None or not self._pending:
            return
        if self._pending[0].step <= self._furthest:
            fault = self._pending.pop(0)
            now = time.monotonic()
            self._struck.append({"step": self._furthest, "kind": fault.kind, "at": now})
            self._begin(fault)

    def _begin(self, fault: Fault) -> None:
        host = self._hosts[fault.host]
        now = time.monotonic()
        if fault.kind == "kill":
            host.tell(signal=int(signal.SIGKILL), rank=fault.rank)
        elif fault.kind == "stop":
            host.tell(signal=int(signal.SIGSTOP), rank=fault.rank)
            self._over = now + STOPPED, lambda: self._go_on(fault)
        elif fault.kind == "host":
            host.kill()
        else:
            self._storage.begin(fault.kind)
            self._over = now + OUTAGE, self._storage.end

    def _go_on(self, fault: Fault) -> None:
        # Its host may have been replaced, and the rank have ended: then nothing happens.
        self._hosts[fault.host].tell(signal=int(signal.SIGCONT), rank=fault.rank)

    def _ends(self) -> list[dict[str, Any]]:
        """The ranks of this life that have ended."""
        said = [one for host in self._hosts.values() for one in tuple(host.ended)]
        return [one for one in said if one["life"] == self._life]

    def _is_done(self) -> bool:
        ends = self._ends()
        return len(ends) == RANKS and all(one["code"] == 0 for one in ends)

    def _has_ended(self) -> bool:
        """A rank has failed, or a host is lost."""
        is_lost = any(host.is_gone for host in self._hosts.values())
        return is_lost or any(one["code"] != 0 for one in self._ends())

    def _is_silent(self) -> bool:
        if self._over is not None:  # the fault lasts
            return False
        silence = time.monotonic() - self._moved
        return self._watch.silent(silence, self._furthest)

    def _restart(self) -> None:
        """End all ranks, replace a lost host, and start the job again."""
        for host in self._hosts.values():
            host.tell(end=True)
        alive = [host for host in self._hosts.values() if not host.is_gone]
        mine = RANKS // len(HOSTS)

        def all_ended() -> bool:
            self._look()
            self._heal()  # a process that waits for a hung storage ends when the fault does
            return all(
                host.is_gone
                or sum(one["life"] == self._life for one in tuple(host.ended)) == mine
                for host in alive
            )

        _wait(all_ended, 120, "ranks do not end")
        until = time.monotonic() + RESTART_DELAY
        for name, host in tuple(self._hosts.items()):
            if host.is_gone:
                self._replace(name)
        _wait(lambda: self._tick() > until, 60, "the delay")
        action = self._watch.restarted(self._furthest)
        if action is not None:
            self._act(action)
        if not self._watch.gives_up:
            self._start()

    def _replace(self, name: str) -> None:
        """A spare host gets the address of the lost one."""
        spare = next((one for one in self._spares if one[0] == name), None)
        if spare is None:
            text = (self._folder / f"{name}.txt").read_text()
            raise RuntimeError(f"host {name} has ended by itself: {text[-2000:]}")
        self._spares.remove(spare)
        self._hosts[name] = spare[1]

    def _tick(self) -> float:
        self._heal()
        return time.monotonic()

    def _act(self, action: str) -> None:
        """What a person does: wait until the storage is well; if need be, remove the newest step."""
        _wait(lambda: self._tick() and self._over is None, 120, "the storage")
        if action != "remove":
            return
        steps: list[tuple[int, Path]] = []
        for folder in self._storage.path.rglob("*"):
            number = re.search(r"(\d+)$", folder.name)
            if folder.is_dir() and number:
                steps.append((int(number[1]), folder))
        if steps:
            shutil.rmtree(max(steps)[1])


def _wait(true: Callable[[], Any], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} for {seconds:.0f} s")
        time.sleep(0.02)


def run(contestant: str, plan: Schedule, seed: int, folder: Path) -> Outcome:
    """One contestant under this schedule, in a new folder. Needs root and Linux."""
    with ExitStack() as undo:
        return Supervisor(contestant, plan, seed, folder, undo).outcome()


def undisturbed(steps: int, seed: int, folder: Path) -> Sequence[dict[str, Any]]:
    """The log of a run without faults and without checkpoints."""
    return run("undisturbed", Schedule((), steps), seed, folder).entries
