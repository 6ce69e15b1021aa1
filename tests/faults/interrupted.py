"""One job of ranks over gloo that is disturbed many times; after each time the next save has to work.

``python interrupted.py MODE SEED COUNT FOLDER`` prints one line of JSON for each disturbance of one rank during a
save: an exception at some line of megackpt, an exception of a signal handler, a stop, broken connections, or lost
messages. MODE is "sync", "thread", "process" (saves of an AsyncCallsQueue) or "manager".
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megackpt
from megackpt import AsyncCallsQueue, CheckpointManager, ShardedTensor
from megackpt.distributed import process_group
from megackpt.distributed.rank_tree import Tree

PACKAGE = os.path.dirname(megackpt.__file__) + os.sep
SHORT = 3.0  # the timeout of a save that is disturbed
LONG = timedelta(seconds=90)
KINDS = [*["line"] * 7, "signal", "signal", "break", "stop", "drop"]


class Alarm(Exception):
    """What a trainer's own handler raises."""


EXCEPTIONS: list[type[BaseException]] = [KeyboardInterrupt, Alarm]


class Lines:
    """Counts the lines of megackpt that this thread comes to, and raises at one of them.

    A trace function is also called at a ``with`` that is left, before its end. No signal handler runs there, and an
    exception there would leave a lock locked, so that is no line.
    """

    def __init__(self, at: int = 0, error: type[BaseException] = Alarm) -> None:
        self.count, self._at, self._error = 0, at, error
        self.where = ""

    def call(self, frame: Any, event: str, _: Any) -> Any:
        ours = frame.f_code.co_filename.startswith(PACKAGE)
        return partial(self.line, set()) if ours else None

    def line(self, withs: set[int], frame: Any, event: str, _: Any) -> Any:
        if event == "line" and frame.f_lineno not in withs:
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if text.lstrip().startswith("with "):
                withs.add(frame.f_lineno)
            self.count += 1
            if self.count == self._at:
                code = frame.f_code
                name = code.co_filename.removeprefix(PACKAGE)
                self.where = f"{name}:{frame.f_lineno} {code.co_qualname}"
                raise self._error("it was to be here")
        return partial(self.line, withs)

    @contextmanager
    def counted(self) -> Any:
        sys.settrace(self.call)
        try:
            yield
        finally:
            sys.settrace(None)


class Job:
    """One rank: how it saves, and how it is disturbed."""

    def __init__(self, mode: str, rank: int, size: int, folder: str) -> None:
        self.mode, self.rank, self.size, self.folder = mode, rank, size, folder
        self.where = ""
        self.queue = AsyncCallsQueue(persistent=mode == "process")
        self.managers = {}
        if mode == "manager":
            for timeout in (LONG, timedelta(seconds=SHORT)):
                self.managers[timeout] = CheckpointManager(
                    f"{folder}/run", keep_last=5, asynchronous=True, timeout=timeout
                )

    def state(self, number: int) -> dict[str, Any]:
        w = torch.full((64,), float(number))
        cut = ShardedTensor.from_rank_offsets("w", w, (0, self.rank, self.size))
        return {"w": cut, "number": number}

    def begin(self, number: int, timeout: timedelta) -> None:
        if self.mode == "manager":
            self.managers[timeout].save(number, self.state(number))
            return
        request = megackpt.save(
            self.state(number),
            f"{self.folder}/c{number}",
            timeout=timeout,
            async_sharded_save=self.mode != "sync",
        )
        if request is not None:
            self.queue.schedule_async_request(request)

    def end(self, timeout: timedelta) -> None:
        if self.mode == "manager":
            self.managers[timeout].poll()
            self.managers[timeout].finalize()
        else:
            self.queue.maybe_finalize_async_calls()
            self.queue.maybe_finalize_async_calls(blocking=True)

    def save(self, number: int, timeout: timedelta) -> None:
        self.begin(number, timeout)
        self.end(timeout)

    def drain(self, timeout: timedelta) -> None:
        """As a trainer that has caught an exception and goes on."""
        for _ in range(4):
            try:
                self.end(timeout)
                return
            except megackpt.CheckpointingException:
                pass

    def found(self, number: int) -> int:
        directory = f"{self.folder}/c{number}"
        if self.mode == "manager":
            directory = self.managers[LONG].path(number)
        return int(
            megackpt.load(self.state(0), directory, timeout=LONG)["w"].unique().item()
        )

    def disturbed(
        self, kind: str, fraction: float, error: type[BaseException], run: Any
    ) -> None:
        """Disturb this rank once while it runs."""
        delay = fraction * self.seconds
        self.where = f"after {delay:.4f} s"
        if kind == "line":
            lines = Lines(1 + int(fraction * self.lines), error)
            try:
                with lines.counted():
                    run()
            finally:
                self.where = lines.where
        elif kind == "signal":

            def handle(*_: Any) -> None:
                raise error("it was to be here")

            signal.signal(signal.SIGALRM, handle)
            signal.setitimer(signal.ITIMER_REAL, max(delay, 1e-4))
            try:
                run()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        elif kind == "stop":
            stop = "sleep $2; kill -STOP $1; sleep $3; kill -CONT $1"
            words = [
                str(os.getpid()),
                f"{delay:.4f}",
                f"{SHORT * (0.5 + fraction):.3f}",
            ]
            with subprocess.Popen(["sh", "-c", stop, "sh", *words]):
                run()
        elif kind == "break":
            timer = threading.Timer(delay, self.break_links)
            timer.start()
            try:
                run()
            finally:
                timer.join()
        elif kind == "drop":
            began = time.monotonic()
            after = began + delay
            until = after + SHORT * (0.1 + 2.5 * fraction)
            handle = Tree._handle

            def lossy(tree: Any, link: Any, message: Any) -> None:
                if not after < time.monotonic() < until:
                    handle(tree, link, message)

            Tree._handle = lossy  # type: ignore[method-assign]
            try:
                run()
            finally:
                time.sleep(max(0.0, until - time.monotonic()))
                Tree._handle = handle  # type: ignore[method-assign]

    def break_links(self) -> None:
        for ranks in [
            r for kept in process_group._known.values() for r in kept.values()
        ]:
            for link in tuple(ranks.tree._links.values()):
                link.shut()

    def measure(self) -> None:
        """How many lines, and how long, a save takes on this rank."""
        self.save(1, LONG)
        self.save(2, LONG)
        began = time.monotonic()
        self.save(3, LONG)
        self.seconds = time.monotonic() - began
        lines = Lines()
        with lines.counted():
            self.save(4, LONG)
        self.lines = lines.count


def outcome(run: Callable[[], Any]) -> str:
    try:
        run()
        return ""
    except (megackpt.CheckpointingException, *EXCEPTIONS) as error:
        return f"{type(error).__name__}: {error}"


def events(job: Job, seed: int, count: int) -> None:
    dice = random.Random(seed)
    short = timedelta(seconds=SHORT)
    number = 10
    for event in range(count):
        kind, victim = dice.choice(KINDS), dice.randrange(job.size)
        fraction, error = dice.random(), dice.choice(EXCEPTIONS)
        in_flight = dice.random() < 0.3
        number += 3
        faulthandler.dump_traceback_later(25)
        dist.barrier()  # a training step
        if in_flight:
            job.begin(number, short)
        began = time.monotonic()

        def run(number: int = number) -> None:
            job.save(number + 1, short)

        def disturbed(
            kind: str = kind,
            fraction: float = fraction,
            error: type[BaseException] = error,
        ) -> None:
            job.disturbed(kind, fraction, error, run)

        said = outcome(disturbed if job.rank == victim else run)
        waited = time.monotonic() - began
        job.drain(short)
        dist.barrier()
        next_one = outcome(lambda n=number: job.save(n + 2, LONG))
        found = -1
        if not next_one:
            dist.barrier()
            found = job.found(number + 2)
        told = {
            "event": event,
            "rank": job.rank,
            "victim": victim,
            "kind": kind,
            "fraction": fraction,
            "in flight": in_flight,
            "where": job.where if job.rank == victim else "",
            "said": said,
            "waited": waited,
            "next": next_one,
            "right": found == number + 2,
        }
        os.write(1, (json.dumps(told) + "\n").encode())


def run_rank(mode: str, rank: int, seed: int, count: int, folder: str) -> None:
    size = 2 + seed % 3
    store = dist.FileStore(f"{folder}/rendezvous", size)
    wait = timedelta(seconds=300)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=wait
    )
    job = Job(mode, rank, size, folder)
    job.measure()
    events(job, seed, count)


def main() -> None:
    mode, seed, count, folder = sys.argv[1:]
    torch.set_num_threads(1)
    Path(folder).mkdir(parents=True, exist_ok=True)
    pids = []
    for rank in range(2 + int(seed) % 3):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run_rank(mode, rank, int(seed), int(count), folder)
                code = 0
            finally:
                if code:
                    import traceback

                    traceback.print_exc()
                os._exit(code)
        pids.append(pid)
    ended = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(ended):
        sys.exit("a rank has crashed")


if __name__ == "__main__":
    main()
