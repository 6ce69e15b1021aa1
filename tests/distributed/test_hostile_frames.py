"""Damaged frames, of strangers and of ranks, end their connection. The process and its ranks go on."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megackpt.distributed import messages, rank_tree, rendezvous
from megackpt.distributed.messages import _HEADER, Verdict, join
from megackpt.distributed.wire_format import compress, pack
from tests.faults.share import part

TOKEN = b"secret"
FRAMES = part(10_000)
LARGEST_GROWTH = 300 << 20
"""Bytes of memory of the process, by all frames together."""
LABEL = "save\nwrite\n/checkpoints/3"


class Store:
    """The job's store for ranks that are objects of this process."""

    def __init__(self) -> None:
        self.addresses: dict[int, Any] = {}

    def is_silent(self, timeout: float = 0.0) -> bool:
        return False

    async def use(self, _: Any) -> list[str]:
        return ["127.0.0.1"]

    async def token(self) -> bytes:
        return TOKEN

    async def publish(self, rank: int, listener: rendezvous.Listener) -> None:
        self.addresses[rank] = await listener.open(self)  # type: ignore[arg-type]

    async def find(self, rank: int) -> Any:
        while rank not in self.addresses:
            await asyncio.sleep(0.01)
        return self.addresses[rank]


class Job:
    """Three ranks in this process, and someone who sends frames to rank 0."""

    def __init__(self) -> None:
        self.store = Store()
        self.trees = [rank_tree.Tree(rank, 3, self.store) for rank in range(3)]  # type: ignore[arg-type]
        self.calls = 1 << 40
        self.meet()

    def meet(self) -> None:
        """A step of all ranks in a call of its own. A rank that lost its connection makes one."""
        self.calls += 1
        gathered = []
        for tree in self.trees:
            step = messages.CollectiveStep(self.calls, 1, 30.0, "write", "save", "c")
            tree.calls.begin(step, "save c")
            gathered.append((step, tree.start(self.vote(tree, step))))
        for _, future in gathered:
            future.result(60)

    async def vote(self, tree: rank_tree.Tree, step: messages.CollectiveStep) -> None:
        """As ranks do it: who has sent its part waits for the answer, and sends again."""
        merged = await tree.gather(step, bytes([tree.rank]), b"".join)
        await tree.broadcast(step, merged)

    @property
    def place(self) -> tuple[str, int]:
        (place,), _ = self.store.addresses[0]
        return place

    def connected(self, kind: int, rank: int) -> socket.socket:
        """A connection of someone who knows the token."""
        made = socket.create_connection(self.place, 30)
        _, nonce = rendezvous._CHALLENGE.unpack(made.recv(24, socket.MSG_WAITALL))
        made.sendall(self.greeting(nonce, kind, rank))
        assert len(made.recv(32, socket.MSG_WAITALL)) == 32
        return made

    def greeting(self, nonce: bytes, kind: int, rank: int) -> bytes:
        greeting = rendezvous._GREETING.pack(kind, rank, 5, 1, bytes(16))
        name = self.store.addresses[0][1]
        return greeting + rendezvous._proof(TOKEN, "connect", name, nonce, greeting)

    def close(self) -> None:
        for tree in self.trees:
            tree.close()


@pytest.fixture
def job(caplog: pytest.LogCaptureFixture) -> Iterator[Job]:
    caplog.set_level(logging.ERROR)
    made = Job()
    yield made
    made.close()
    assert not caplog.records


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) << 12


def frame(kind: int, payload: bytes, label: str = LABEL) -> bytes:
    text = label.encode()
    return _HEADER.pack(kind, len(text), 5, 1, len(payload)) + text + payload


@cache
def frames() -> list[bytes]:
    """One of each kind, as ranks send them."""
    parts = join([pack({"columns": np.arange(1000)}), pack([1, "x"])])
    verdict = Verdict({1: messages.Reason.SLOW}).packed()
    bomb = compress(pack(np.zeros(1 << 18)))
    return [
        frame(messages.GATHERED, parts),
        frame(messages.SENT, bomb),
        frame(messages.CONFIRM, b""),
        frame(messages.CONFIRMED, b""),
        frame(messages.ASK, b""),
        frame(messages.STATE, Verdict({}, LABEL).packed(), ""),
        frame(messages.REPORT, verdict, ""),
        frame(messages.FAILED, verdict, ""),
        frame(messages.HELLO, b"[[4, %b]]" % verdict, ""),
    ]


def flipped(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for at in dice.sample(range(min(len(changed), 100)), dice.randrange(1, 4)):
        changed[at] ^= 1 << dice.randrange(8)
    return bytes(changed)


def cut(data: bytes, dice: random.Random) -> bytes:
    return data[: dice.randrange(len(data))]


def huge(data: bytes, dice: random.Random) -> bytes:
    """A length, of the label or of the payload, that is not true."""
    number = dice.choice([1 << 63, 1 << 40, 1 << 33, 0xFFFF, dice.randrange(1 << 20)])
    if dice.random() < 0.5:
        return data[:1] + struct.pack("!H", number & 0xFFFF) + data[3:]
    return data[:19] + struct.pack("!Q", number) + data[27:]


def several(data: bytes, dice: random.Random) -> bytes:
    """Frames of all kinds, in any order."""
    every = [*frames(), data]
    dice.shuffle(every)
    return b"".join(every)


CHANGES: list[Callable[[bytes, random.Random], bytes]] = [flipped, cut, huge, several]


def send(made: socket.socket, data: bytes, dice: random.Random) -> None:
    """Send all, and often read what comes until the other end has closed."""
    with made, suppress(OSError):
        made.settimeout(30)
        made.sendall(data)
        made.shutdown(socket.SHUT_WR)
        while dice.random() < 0.9 and made.recv(1 << 16):
            continue


@pytest.mark.slow
def test_damaged_frames_of_a_rank_end_its_connection(job: Job) -> None:
    dice, before = random.Random(5), resident()
    samples = frames()
    for number in range(FRAMES // 2):
        made = job.connected(messages.LINK, dice.choice([1, 2]))
        data = dice.choice(CHANGES)(dice.choice(samples), dice)
        send(made, data, dice)
        if number % 250 == 0:
            job.meet()
    job.meet()
    assert resident() - before < LARGEST_GROWTH


@pytest.mark.slow
def test_damaged_greetings_end_their_connection(job: Job) -> None:
    dice, before = random.Random(7), resident()
    for number in range(FRAMES // 2):
        made = socket.create_connection(job.place, 30)
        kind, rank = dice.choice([(messages.LINK, 1), (messages.DATA, 2), (77, 9)])
        nonce = made.recv(24, socket.MSG_WAITALL)[8:]
        greeting = job.greeting(nonce, kind, rank)
        change = dice.choice([flipped, cut, lambda data, _: data[::-1]])
        data = change(greeting, dice) + dice.choice(frames())
        if data.startswith(greeting):  # the frame begins with the byte that was cut off
            data = b""
        send(made, data, dice)
        if number % 250 == 0:
            job.meet()
    job.meet()
    assert resident() - before < LARGEST_GROWTH
    assert not job.trees[0]._arrivals.keys() & {(2, messages.DATA, 5, 1)}


def test_a_connection_that_ends_before_its_first_message_is_made_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, ended = messages.Link.receive, list[messages.Link]()

    async def end(link: messages.Link) -> messages.Message:
        if link.rank == 0 and len(ended) < 2:
            ended.append(link)
            link.shut()
        return await receive(link)

    monkeypatch.setattr(messages.Link, "receive", end)
    for tree in job.trees[1:]:
        tree._links[0].shut()
    began = time.monotonic()
    job.meet()
    assert time.monotonic() - began < 20


def test_a_failure_of_no_call_leaves_connections_alone(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, failed = messages.Link.receive, set[int]()

    async def fail(link: messages.Link) -> messages.Message:
        if link.rank == 0 and id(link) not in failed:
            failed.add(id(link))
            verdict = Verdict({1: messages.Reason.SLOW}).packed()
            return messages.Message(messages.FAILED, 0, 0, "", verdict)
        return await receive(link)

    monkeypatch.setattr(messages.Link, "receive", fail)
    for tree in job.trees[1:]:
        tree._links[0].shut()
    began = time.monotonic()
    job.meet()
    assert time.monotonic() - began < 20
    assert failed


def test_messages_for_no_step_are_not_kept_without_end(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megackpt.distributed.rank_tree._MOST_ARRIVALS", 100)
    made = job.connected(messages.LINK, 2)
    with made, suppress(OSError):
        made.settimeout(30)
        for call in range(job.calls + 1, job.calls + 201):
            text = LABEL.encode()
            head = _HEADER.pack(messages.GATHERED, len(text), call, 1, 4)
            made.sendall(head + text + b"1234")
        while made.recv(1 << 16):
            continue
    assert len(job.trees[0]._arrivals) <= 100
