"""A warm parent that forks saving jobs and ends their ranks by SIGKILL: it imports torch once, a job takes moments.

Run as a program, it reads one order (a JSON line) after the other and answers each with one line.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, NoReturn

LATEST = 180.0
"""Seconds after which a job hangs, and is a failure."""
REFUSED = 3
"""How a rank ends to which save raised an error of the library's own."""


@dataclass(frozen=True)
class Order:
    """One saving job, and at which of its calls that change something below ``watch`` which ranks are to die.

    ``at``: before this call (counted from 1) over all victims together; 0: never. ``answers``: errnos of calls that
    are not to be carried out ("renameat2": ENOSYS, "fsync": 0). ``strace``: SYSCALL:NUMBER, kills the first victim
    by strace instead. ``of``: the names of the calls that ``at`` counts, if not all. ``refuse``: at that call nobody
    dies, this errno is its answer. ``short``: every write is carried out by half. ``timeout``: seconds that a rank
    waits for the others. ``copy``: a file that is copied into a folder, as N.img, before the N-th call.
    ``later``: the save is an asynchronous one, by a "thread" or a "process". ``writer``: of the victims only the calls
    of their writer processes count; "dies": it is these that die, "dies with its rank": both do.
    ``keep_last``: it is a manager that saves, and the directory is that of a run.
    """

    directory: str
    format: str
    value: int
    watch: str
    ranks: int = 1
    victims: tuple[int, ...] = (0,)
    at: int = 0
    answers: dict[str, int] = field(default_factory=dict)
    strace: str = ""
    refuse: int = 0
    of: tuple[str, ...] = ()
    short: bool = False
    timeout: float = 30
    copy: tuple[str, ...] = ()
    scratch: str = ""
    later: str = ""
    writer: str = ""
    keep_last: int = 0


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended (negative: the signal), which calls there were, what they said."""

    codes: list[int]
    calls: list[tuple[str, str]]
    story: str
    counted: list[tuple[str, str]]
    died: bool


class Nursery:
    """The caller's side: starts the program, and hands it one order at a time."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={
                **os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
                # Small files of asynchronous saves bypass the page cache, too.
                "MEGACKPT_DIRECT_BYTES": os.environ.get("MEGACKPT_DIRECT_BYTES", "1"),
            },
        )  # fmt: skip

    def run(self, order: Order) -> Outcome:
        told = asdict(order) | {"scratch": str(self.scratch)}
        print(json.dumps(told), file=_pipe(self._process.stdin), flush=True)
        answer = json.loads(_pipe(self._process.stdout).readline())
        calls, counted = (
            [tuple(call) for call in answer[which]] for which in ("calls", "counted")
        )
        outcome = Outcome(
            answer["codes"], calls, answer["story"], counted, answer["died"]
        )
        assert set(outcome.codes) <= {0, REFUSED, -signal.SIGKILL}, (
            outcome.codes,
            outcome.story,
        )
        return outcome

    def close(self) -> None:
        _pipe(self._process.stdin).close()  # it ends when there are no more orders
        self._process.wait(LATEST)
        _pipe(self._process.stdout).close()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def save(order: Order, rank: int) -> None:
    """What a rank of the job does."""
    import states
    import torch.distributed as dist

    import megackpt

    if order.ranks > 1:
        meeting = f"file://{order.scratch}/meeting"
        patience = timedelta(seconds=30)
        dist.init_process_group(
            "gloo",
            init_method=meeting,
            rank=rank,
            world_size=order.ranks,
            timeout=patience,
        )
    state = states.declared(order.value, rank, order.ranks)
    if order.keep_last:
        from megackpt.manager import CheckpointManager

        patience, later = timedelta(seconds=order.timeout), bool(order.later)
        with CheckpointManager(
            order.directory,
            order.format,
            keep_last=order.keep_last,
            asynchronous=later,
            timeout=patience,
        ) as manager:
            manager.save(order.value, state)
        return
    request = megackpt.save(
        state,
        order.directory,
        order.format,
        timeout=timedelta(seconds=order.timeout),
        async_sharded_save=bool(order.later),
    )
    if request is not None:
        queue = megackpt.AsyncCallsQueue(persistent=order.later == "process")
        queue.schedule_async_request(request)
        queue.close()


def rank_of_job(order: Order, rank: int, channel: socket.socket) -> NoReturn:
    """In a forked child: never returns."""
    from megackpt.errors import CheckpointingException

    code = 1
    try:
        said = os.open(f"{order.scratch}/story", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        if rank in order.victims:
            import watching

            socket.send_fds(
                channel, [b"x"], [said if order.strace else watching.watched()]
            )
            channel.recv(1)
        save(order, rank)
        code = 0
    except CheckpointingException:
        traceback.print_exc()
        code = REFUSED
    except BaseException:  # noqa: BLE001 - told in the story, and by the code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class Job:
    """One order being carried out."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.pids: list[int] = []
        self.calls: list[tuple[str, str]] = []
        self.listeners: dict[int, socket.socket] = {}
        self.codes: dict[int, int] = {}
        self.counted: list[tuple[str, str]] = []
        self.died = False
        self.tracer: subprocess.Popen[bytes] | None = None

    def run(self) -> Outcome:
        for name in ("story", "meeting"):
            Path(self.order.scratch, name).unlink(missing_ok=True)
        channels = [socket.socketpair() for _ in range(self.order.ranks)]
        for rank, (_, theirs) in enumerate(channels):
            pid = os.fork()
            if not pid:
                rank_of_job(self.order, rank, theirs)
            self.pids.append(pid)
        for victim in self.order.victims:
            ours = channels[victim][0]
            self.listeners[socket.recv_fds(ours, 1, 1)[1][0]] = ours
        if self.order.strace:
            self.trace(self.pids[self.order.victims[0]])
        for ours in self.listeners.values():
            ours.send(b"x")
        self.supervise()
        for pair in channels:
            for end in pair:
                end.close()
        for listener in self.listeners:
            os.close(listener)
        if self.tracer is not None:
            self.tracer.wait(LATEST)
        codes = [self.codes[pid] for pid in self.pids]
        died = self.died or -signal.SIGKILL in codes
        story = Path(self.order.scratch, "story").read_text()
        return Outcome(codes, self.calls, story, self.counted, died)

    def supervise(self) -> None:
        """Until all ranks have ended."""
        poll = select.poll()
        watched = () if self.order.strace else tuple(self.listeners)
        for listener in watched:
            poll.register(listener, select.POLLIN)
        ends = {os.pidfd_open(pid): pid for pid in self.pids}
        for end in ends:
            poll.register(end, select.POLLIN)
        deadline = time.monotonic() + LATEST
        while ends:
            ready = poll.poll(1000)
            if time.monotonic() > deadline:
                self.kill(self.pids)
            for number, event in ready:
                if number in ends:
                    pid = ends.pop(number)
                    self.codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    poll.unregister(number)
                    os.close(number)
                elif event & select.POLLIN:
                    self.answer(number)
                else:
                    poll.unregister(number)  # nobody is left to tell of calls
        if time.monotonic() > deadline:
            raise TimeoutError(f"{self.order} took longer than {LATEST} s")

    def answer(self, listener: int) -> None:
        import watching

        call = watching.next_call(listener)
        if call is None:
            return
        if not f"{call.path}/".startswith(f"{self.order.watch}/"):
            call.go_on()
            return
        self.calls.append((call.name, call.path))
        if self.order.copy:
            image, folder = self.order.copy
            copy = f"{folder}/{len(self.calls)}.img"
            subprocess.run(
                ["cp", "--sparse=always", image, copy],
                check=True,
                stdin=subprocess.DEVNULL,
            )
        counts, process = not self.order.of or call.name in self.order.of, call.process
        if self.order.writer:
            counts = counts and process not in (0, *self.pids)
        if counts:
            self.counted.append((call.name, call.path))
        reached = counts and len(self.counted) == self.order.at
        if reached and self.order.refuse:
            call.answer(self.order.refuse)
        elif reached:
            self.died = True
            if self.order.writer:
                os.kill(process, signal.SIGKILL)
            if self.order.writer != "dies":
                self.kill([self.pids[victim] for victim in self.order.victims])
        elif call.name in self.order.answers:
            call.answer(self.order.answers[call.name])
        elif self.order.short and call.name in watching.WRITES:
            call.cut_short()
        else:
            call.go_on()

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            if pid not in self.codes:
                os.kill(pid, signal.SIGKILL)

    def trace(self, pid: int) -> None:
        """Have strace kill this process, and wait until it watches."""
        name, _, number = self.order.strace.partition(":")
        self.tracer = subprocess.Popen(
            ["strace", "-f", "-qq", "-o", os.devnull, "-p", str(pid), "-e", f"trace={name}",
             "-e", f"inject={name}:signal=SIGKILL:when={number}"], stdin=subprocess.DEVNULL,
        )  # fmt: skip
        while "TracerPid:\t0" in Path(f"/proc/{pid}/status").read_text():
            if self.tracer.poll() is not None:
                raise OSError(errno.EPERM, "strace cannot watch a process here")
            time.sleep(0.002)


def main() -> None:
    """Import all that a job needs, without starting a thread, and wait for orders."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import states  # noqa: F401
    import torch.distributed  # noqa: F401
    import watching  # noqa: F401

    import megackpt.async_save.process_worker
    import megackpt.backends.safetensors
    import megackpt.backends.torch_dist
    import megackpt.backends.torch_file
    import megackpt.backends.zarr
    import megackpt.saver  # noqa: F401

    for line in sys.stdin:
        fields = json.loads(line)
        order = Order(**fields | {"victims": tuple(fields["victims"])})
        print(json.dumps(asdict(Job(order).run())), flush=True)


if __name__ == "__main__":
    main()
