"""One host: a warm parent of its ranks. ``python -m goodput_runs.host NAME FOLDER`` in its namespaces.

It reads orders as lines of JSON: ``{"start": ORDER, "life": n, "address": ..., "port": ...}``,
``{"signal": number, "rank": r}`` and ``{"end": true}``; it writes ``{"ready": true}`` and, for each
rank that has ended, ``{"ended": rank, "code": c, "life": n}``.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from goodput_runs.contestants import CONTESTANTS
from goodput_runs.schedule import HOSTS, RANKS, RANKS_PER_HOST
from goodput_runs.training import Order, environment, text, train


def say(**fields: Any) -> None:
    os.write(1, (json.dumps(fields) + "\n").encode())


def start(rank: int, order: Order, told: dict[str, Any], log: Path) -> int:
    """Fork a rank. What it tells goes into the log of the run, what it prints to stderr."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    lines = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(**fields: Any) -> None:
        line = {"life": told["life"], "rank": rank, **fields, "at": time.monotonic()}
        os.write(lines, (json.dumps(line) + "\n").encode())

    try:
        # The pipe of orders is the parent's.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        environment(rank, RANKS, told["address"], told["port"])
        train(rank, order, tell)
        code = 0
    except BaseException as error:  # noqa: BLE001 - told, and the process ends
        traceback.print_exc()
        tell(raised=f"{type(error).__name__}: {error}"[:2000])
    finally:
        os._exit(code)


class Host:
    """The ranks of one host."""

    def __init__(self, name: str, folder: Path) -> None:
        first = HOSTS.index(name) * RANKS_PER_HOST
        self._ranks = range(first, first + RANKS_PER_HOST)
        self._log = folder / "log"
        self._pids: dict[int, int] = {}
        self._life = 0

    def obey(self, line: str) -> None:
        told = json.loads(line)
        if "start" in told:
            self._life = told["life"]
            order = Order(**told["start"])
            for rank in self._ranks:
                self._pids[rank] = start(rank, order, told, self._log)
        elif "signal" in told:
            self._signal(told["rank"], told["signal"])
        else:
            for rank in self._pids:
                self._signal(rank, signal.SIGKILL)

    def _signal(self, rank: int, number: int) -> None:
        if rank in self._pids:
            with suppress(ProcessLookupError):
                os.kill(self._pids[rank], number)

    def reap(self) -> None:
        for rank, pid in tuple(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[rank]
                code = os.waitstatus_to_exitcode(status)
                say(ended=rank, code=code, life=self._life)


def main(name: str, folder: Path, contestant: str) -> None:
    CONTESTANTS[contestant].prepare()
    text()
    host = Host(name, folder)
    say(ready=True)
    orders = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.05)
        if readable:
            found = os.read(0, 65536)
            if not found:
                return
            *lines, orders = (orders + found).split(b"\n")
            for line in lines:
                host.obey(line.decode())
        host.reap()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
