"""What the ranks of a tree send one another, and over which connections."""

from __future__ import annotations

import asyncio
import enum
import json
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from megackpt import limits
from megackpt.distributed.rendezvous import receive
from megackpt.waiting import interval, warn_after

Payload = bytes | memoryview

FAN_OUT = 32
"""Children of a rank at each level: at most 31, 62 or 93 of up to 32, 1,024 or 32,768 ranks."""

GATHERED, SENT, CONFIRM, CONFIRMED, ASK, STATE, REPORT, FAILED = range(8)
"""The kinds of messages."""
LINK, DATA = 8, 9
"""The kinds of connections: in the tree, and for the bytes of an exchange."""
HELLO = 10
"""The kind of the first message on each connection of the tree: the calls that have failed."""
_KINDS = {*range(FAILED + 1), HELLO}


class Reason(enum.StrEnum):
    """Why a rank is missing. The word for a rank begins with one of these texts."""

    ENDED = "did not answer: its process has ended"
    BROKEN = "did not answer: its connection broke"
    GAVE_UP = "gave it up"
    REFUSED = (
        "began one while another thread of its process was at work over the same group, "
        "and was refused"
    )
    SILENT = "did not answer: its process is stopped, or its host is cut off"
    ABSENT = (
        "did not answer: it has not connected (it has not called this, or is still "
        "starting)"
    )
    SLOW = (
        "did not answer in time: its process is alive, so it is slow or in no save or "
        "load"
    )
    OTHER = ""
    """Of a rank that has failed by itself: the word is its exit reason."""

    @classmethod
    def of(cls, word: str) -> Reason:
        return next(reason for reason in cls if word.startswith(reason))


_HEADER = struct.Struct("!BHQQQ")  # kind, length of the label, call, number, length


def children_of(rank: int, size: int) -> dict[int, int]:
    """The children of a rank, each with the most ranks of its subtree, itself included."""
    children, span = {}, 1
    while span < size and rank % (span * FAN_OUT) == 0:
        for child in range(rank + span, min(rank + span * FAN_OUT, size), span):
            children[child] = span
        span *= FAN_OUT
    return children


def parent_of(rank: int) -> int:
    """Ranks of a subtree are consecutive, so hosts are mostly within one."""
    span = FAN_OUT
    while rank % span == 0:
        span *= FAN_OUT
    return rank - rank % span


def join(parts: Sequence[Payload]) -> bytes:
    lengths = struct.pack(f"!I{len(parts)}Q", len(parts), *map(len, parts))
    return b"".join([lengths, *parts])


def split(packed: Payload) -> list[memoryview]:
    """The parts of ``join``. Raises ValueError or struct.error for malformed bytes."""
    (count,) = struct.unpack_from("!I", packed)
    parts, start = [], 4 + 8 * count
    for length in struct.unpack_from(f"!{count}Q", packed, 4):
        parts.append(memoryview(packed)[start : start + length])
        start += length
    if start != len(packed):
        raise ValueError(f"parts of {start} bytes in a message of {len(packed)}")
    return parts


@dataclass(eq=False)
class CollectiveStep:
    """The collective step of a call in which this rank is, or was last."""

    call: int
    number: int
    timeout: float
    stage: str
    operation: str
    path: str
    began: float = field(default_factory=time.monotonic)
    asked: float = field(default_factory=time.monotonic)
    warned: bool = False
    awaited: set[int] = field(default_factory=set)
    """The neighbours for which this rank waits now."""
    gave: bool = False
    """Whether this rank has sent its part. The answer then holds the parts of all ranks."""
    sent: dict[int, tuple[int, Payload]] = field(default_factory=dict)
    """In a first collective step: the last message to each neighbour, for a repetition."""
    questions: dict[int, float] = field(default_factory=dict)
    """Neighbours that have a question to answer, and when it was sent."""
    crossed: dict[int, float] = field(default_factory=dict)
    """Neighbours that wait for this rank in another call, and when the first answer said so."""

    def under(self, call: int) -> CollectiveStep:
        """The same collective step, from its start, of a call with another number."""
        words = self.stage, self.operation, self.path
        return CollectiveStep(call, self.number, self.timeout, *words)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def pause(self) -> float:
        """Seconds between two questions to a rank that is awaited."""
        return min(interval(warn_after()), self.timeout / 4)

    @property
    def label(self) -> str:
        return f"{self.operation}\n{self.stage}\n{self.path}"


class Verdict(NamedTuple):
    """Why a call has failed: the known facts about the missing ranks, or a text."""

    missing: dict[int, str]
    text: str = ""
    name: str | None = ""
    """What the call was to do. None: the ranks were in different ones."""

    @property
    def reasons(self) -> set[Reason]:
        return {Reason.of(word) for word in self.missing.values()}

    def packed(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def unpacked(cls, payload: Payload, ranks: int) -> Verdict:
        """Raises ValueError or TypeError for bytes that ``packed`` does not make."""
        return cls.of(json.loads(bytes(payload)), ranks)

    @classmethod
    def of(cls, fields: Any, ranks: int) -> Verdict:
        """Raises ValueError or TypeError for fields that no verdict has."""
        named, text, name = fields
        missing = {int(rank): word for rank, word in named.items()}
        are_texts = {*map(type, (text, name or "", *missing.values()))} == {str}
        if not are_texts or not all(0 <= rank < ranks for rank in missing):
            raise ValueError("a verdict that names no ranks of this group")
        return cls(missing, text, name)


class Message(NamedTuple):
    kind: int
    call: int
    number: int
    label: str
    payload: memoryview


class CallFailed(Exception):
    """The call has failed on all ranks; ``verdict`` says why."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict)
        self.verdict = verdict


class Link:
    """An open connection to a neighbour in the tree."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.socket = connection
        self.heard = time.monotonic()
        self.state: tuple[int, int, Verdict] | None = None  # call, number, its answer
        self.lock = asyncio.Lock()

    async def send(
        self, kind: int, call: int, number: int, label: str = "", payload: Payload = b""
    ) -> None:
        text = label.encode(errors="replace")[:60000]
        head = _HEADER.pack(kind, len(text), call, number, len(payload)) + text
        loop = asyncio.get_running_loop()
        async with self.lock:
            try:
                await loop.sock_sendall(self.socket, head)
                await loop.sock_sendall(self.socket, payload)
            except asyncio.CancelledError:  # a part of it may have left
                self.shut()
                raise

    async def receive(self) -> Message:
        def note() -> None:
            self.heard = time.monotonic()

        head = await receive(self.socket, memoryview(bytearray(_HEADER.size)), note)
        kind, label, call, number, length = _HEADER.unpack(head)
        if kind not in _KINDS or length > limits.CONTROL_MESSAGE_BYTES:
            raise ConnectionError(
                f"a control message {kind} of {length} bytes is refused"
            )
        text = await receive(self.socket, memoryview(bytearray(label)), note)
        # Memory without values: the system gives it as the bytes arrive.
        room = np.empty(length, np.uint8).data
        payload = await receive(self.socket, room, note)
        return Message(kind, call, number, str(text, errors="replace"), payload)

    def shut(self) -> None:
        """Both ends notice; the reader of this one closes the connection."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


def describe_calls(labels: dict[int, str]) -> str:
    described = []
    for rank in sorted(labels):
        operation, stage, path = labels[rank].split("\n", 2)
        inside = f"{operation} {path}".strip() or "a vote"
        described.append(f"rank {rank} is in {inside} (stage {stage!r})")
    return (
        f"the ranks are in different calls: {', '.join(described)}; all ranks of the process group "
        "have to call save, load and the like alike"
    )
