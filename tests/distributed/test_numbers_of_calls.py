"""Ranks number their calls alike after messages were lost, and a stall is not taken for another call."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt import AsyncCallsQueue, AsyncRequest, ShardedTensor, limits
from megackpt.distributed import messages, process_group
from megackpt.distributed.calls import Calls
from megackpt.distributed.rank_tree import Tree

WAIT = 3.0  # the timeout of a save


def test_calls_begin_while_the_steps_of_others_are_looked_at() -> None:
    interval = sys.getswitchinterval()
    loop = asyncio.new_event_loop()
    calls = Calls(loop)
    over = threading.Event()

    def begin() -> None:
        kept: deque[messages.CollectiveStep] = deque(maxlen=20)
        for number in count(1):
            kept.append(messages.CollectiveStep(number, 0, 1.0, "", "", ""))
            calls.begin(kept[-1], "")
            if over.is_set():
                return

    thread = threading.Thread(target=begin)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        until = time.monotonic() + 1
        while time.monotonic() < until:
            calls.current()
    finally:
        over.set()
        thread.join()
        loop.close()
        sys.setswitchinterval(interval)


def state() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    w = torch.full((100,), 1.0)
    return {"w": ShardedTensor.from_rank_offsets("w", w, (0, rank, size))}


def lose_the_last_message_of(call: int, monkeypatch: Any) -> list[float]:
    """On this rank: of a call, and all others for some time. Returns when the cut ends."""
    handle = Tree._handle
    numbers: dict[int, list[int]] = {}
    cut = [0.0]

    def lossy(self: Any, link: Any, message: Any) -> None:
        if message.kind == messages.SENT:
            numbers.setdefault(message.call, []).append(message.number)
            is_last = message.number == max(numbers.get(call - 1, [0]))
            if message.call == call and is_last and not cut[0]:
                cut[0] = time.monotonic() + 2 * WAIT + 4
        if time.monotonic() >= cut[0]:
            handle(self, link, message)

    monkeypatch.setattr(Tree, "_handle", lossy)
    return cut


def tried(directory: str, queue: AsyncCallsQueue | None = None) -> str:
    try:
        request = megackpt.save(
            state(),
            directory,
            timeout=timedelta(seconds=WAIT),
            async_sharded_save=queue is not None,
        )
        if queue is not None and request is not None:
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
        return "saved"
    except megackpt.CheckpointingException as error:
        return f"{type(error).__name__}: {error}"


def one_is_behind(folder: str) -> None:
    """Rank 0 has begun a save more than rank 1, which has lost messages."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            lose_the_last_message_of(3, patch)
        began = time.monotonic()
        for n in (1, 2, 3):
            tried(f"{folder}/c{n}")
        if dist.get_rank() == 0:
            tried(f"{folder}/c4")
        time.sleep(max(0.0, began + 2 * WAIT + 8 - time.monotonic()))
        for n in range(5, 9):
            dist.barrier()
            assert tried(f"{folder}/c{n}") == "saved"


def one_has_not_scheduled(folder: str) -> None:
    """Rank 0 has scheduled an asynchronous save which has failed on rank 1."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            lose_the_last_message_of(3, patch)
        queue = AsyncCallsQueue(timeout=timedelta(seconds=WAIT))
        began = time.monotonic()
        for n in (1, 2, 3):
            tried(f"{folder}/c{n}", queue)
        time.sleep(max(0.0, began + 2 * WAIT + 8 - time.monotonic()))
        for n in range(4, 8):
            dist.barrier()
            assert tried(f"{folder}/c{n}", queue) == "saved"


class Interrupting(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise KeyboardInterrupt


def an_exception_in_the_first_save(folder: str) -> None:
    """A signal handler raises on one rank before any connection is made."""
    if dist.get_rank() == 1:
        with pytest.raises(KeyboardInterrupt):
            megackpt.save(Interrupting(state()), f"{folder}/c1")
    else:
        assert "rank 1 left: KeyboardInterrupt" in tried(f"{folder}/c1")
    dist.barrier()
    assert tried(f"{folder}/c2") == "saved"


def lose_the_first_greeting(monkeypatch: Any) -> list[Any]:
    """On this rank: the first message of the next connection. Returns the messages that are lost."""
    handle = Tree._handle
    lost: list[Any] = []

    def lossy(self: Any, link: Any, message: Any) -> None:
        if message.kind == messages.HELLO and not lost:
            lost.append(message)
        else:
            handle(self, link, message)

    monkeypatch.setattr(Tree, "_handle", lossy)
    return lost


def a_greeting_is_lost(folder: str) -> None:
    """A connection whose first message never comes is made again, and the save does not fail."""
    for rank in (0, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(limits, "GREETING_SECONDS", 0.5)
            lost = lose_the_first_greeting(patch) if dist.get_rank() == rank else [1]
            assert tried(f"{folder}/c{rank}") == "saved"
            assert lost
        dist.barrier()
        for ranks in process_group._known[dist.group.WORLD].values():
            for link in ranks.tree._links.values():
                link.shut()
        dist.barrier()


def an_exception_in_save(folder: str) -> None:
    """A signal handler raises on one rank, before the save has begun there and in it."""
    queue = AsyncCallsQueue()
    assert tried(f"{folder}/c0", queue) == "saved"
    if dist.get_rank() == 1:
        with pytest.raises(KeyboardInterrupt):
            megackpt.save(
                Interrupting(state()), f"{folder}/c1", async_sharded_save=True
            )
    else:
        assert "rank 1 left: KeyboardInterrupt" in tried(f"{folder}/c1", queue)
    dist.barrier()
    assert tried(f"{folder}/c2", queue) == "saved"
    if dist.get_rank() == 0:  # rank 1 is interrupted before its call counts
        assert "rank 1 did not answer" in tried(f"{folder}/c3", queue)
    dist.barrier()
    assert tried(f"{folder}/c4", queue) == "saved"


def an_exception_in_a_poll(folder: str) -> None:
    """A signal handler raises on one rank, while a request that was made by hand is in flight."""
    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(time.sleep, (1,), []))
    error: type[BaseException] = megackpt.RankLost
    if dist.get_rank() == 1:
        error = KeyboardInterrupt
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.4)
    began = time.monotonic()
    with pytest.raises(error):
        queue.maybe_finalize_async_calls(blocking=True)
    assert time.monotonic() - began < 20
    dist.barrier()
    assert tried(f"{folder}/c", queue) == "saved"


def one_polls_where_the_others_save(folder: str) -> None:
    """One rank is interrupted before its call counts, and goes on with a request that is in flight."""
    for n in (0, 1):
        queue = AsyncCallsQueue()
        request = megackpt.save(state(), f"{folder}/a{n}", async_sharded_save=True)
        assert request is not None
        queue.schedule_async_request(request)
        if dist.get_rank() == n:
            with pytest.raises(megackpt.RankLost):
                queue.maybe_finalize_async_calls(blocking=True)
        else:
            assert tried(f"{folder}/b{n}").startswith("RankLost")
        queue.close(abort=True)
        dist.barrier()
        assert tried(f"{folder}/c{n}") == "saved"


def stalls(folder: str) -> None:
    """Rank 1 is stopped for 3 s at ten moments. No save fails."""
    stop = "for i in 1 2 3 4 5 6; do sleep 0.7; kill -STOP $1; sleep 2.6; kill -CONT $1; done"
    stopper = None
    if dist.get_rank() == 1:
        stopper = subprocess.Popen(["sh", "-c", stop, "sh", str(os.getpid())])
    over = torch.zeros(1)
    n = 0
    while not over.item():
        n += 1
        megackpt.save(state(), f"{folder}/c{n % 3}", timeout=timedelta(seconds=60))
        if n % 10 == 0:
            over[0] = float(stopper is not None and stopper.poll() is not None)
            dist.all_reduce(over)
    if stopper is not None:
        stopper.send_signal(signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        one_is_behind,
        one_has_not_scheduled,
        an_exception_in_the_first_save,
        a_greeting_is_lost,
        an_exception_in_save,
        an_exception_in_a_poll,
        one_polls_where_the_others_save,
        stalls,
    ],
)
def test_the_next_save_works(ranks: Any, tmp_path: Any, job: Any) -> None:
    ranks(job, 2, tmp_path, timeout=120)
