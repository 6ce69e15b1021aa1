"""The control plane: a tree of connections between the ranks of one process group.

Messages go up merged and down split, so no rank holds more than a hundred connections among 16,384.
One thread of the process runs an event loop with all connections. It also answers the questions of
other ranks while the training's threads are at work, so a slow rank differs from a dead one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from selectors import PollSelector
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakSet, WeakValueDictionary

from megackpt import limits
from megackpt.distributed.rendezvous import (
    STORE_SILENT,
    Address,
    JobStore,
    Listener,
    StoreLost,
    connect,
    own_address,
    receive,
)
from megackpt.distributed.waiting import interval, warn, warn_after
from megackpt.errors import name_ranks

T = TypeVar("T")
Payload = bytes | memoryview

FAN_OUT = 32
"""Children of a rank at each level: at most 31, 62 or 93 of up to 32, 1,024 or 32,768 ranks."""

GATHERED, SENT, CONFIRM, CONFIRMED, ASK, STATE, REPORT, FAILED = range(8)
"""The kinds of messages."""
LINK, DATA = 8, 9
"""The kinds of connections: in the tree, and for the bytes of an exchange."""

ENDED = "did not answer: its process has ended"
BROKEN = "did not answer: its connection broke"
GAVE_UP = "gave it up"
CONSEQUENCES = (ENDED, BROKEN, GAVE_UP)
SILENT = "did not answer: its process is stopped, or its host is cut off"
ABSENT = "did not answer: it has not connected (it has not called this, or is still starting)"
SLOW = (
    "did not answer in time: its process is alive, so it is slow or in no save or load"
)

_HEADER = struct.Struct("!BHQQQ")  # kind, length of the label, call, number, length
_GRACE = 0.2  # seconds in which rank 0 collects reports of one failure
_VERDICT_SECONDS = 3.0  # after these a rank does not wait for rank 0's verdict
_CROSSED_SECONDS = (
    2.0  # two ranks that wait for one another in two calls will go on waiting
)
_CAUSE_SECONDS = 5.0
_NAMED = 64  # ranks that one answer names
_REMEMBERED = 64  # failed calls

logger = logging.getLogger("megackpt.distributed")


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
    (count,) = struct.unpack_from("!I", packed)
    parts, start = [], 4 + 8 * count
    for length in struct.unpack_from(f"!{count}Q", packed, 4):
        parts.append(memoryview(packed)[start : start + length])
        start += length
    return parts


@dataclass(eq=False)
class Step:
    """The step of a call in which this rank is, or was last."""

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
    """Why a call has failed: what is known of the missing ranks, or a text."""

    missing: dict[int, str]
    text: str = ""

    def packed(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def unpacked(cls, payload: Payload) -> Verdict:
        missing, text = json.loads(bytes(payload))
        return cls({int(rank): word for rank, word in missing.items()}, text)


class CallFailed(Exception):
    """The call has failed on all ranks; ``verdict`` says why."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict)
        self.verdict = verdict


class _Link:
    """An open connection to a neighbour in the tree."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.socket = connection
        self.heard = time.monotonic()
        self.state: tuple[int, int, Verdict] | None = None  # call, number, its answer
        self.crossed = (
            time.monotonic()
        )  # since when it waits for this rank in another call
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

    async def receive(self) -> tuple[int, int, int, str, memoryview]:
        def note() -> None:
            self.heard = time.monotonic()

        head = await receive(self.socket, memoryview(bytearray(_HEADER.size)), note)
        kind, label, call, number, length = _HEADER.unpack(head)
        if length > limits.CONTROL_MESSAGE_BYTES:
            raise ConnectionError(f"a control message of {length} bytes is refused")
        text = await receive(self.socket, memoryview(bytearray(label)), note)
        payload = await receive(self.socket, memoryview(bytearray(length)), note)
        return kind, call, number, bytes(text).decode(), payload

    def shut(self) -> None:
        """Both ends notice; the reader of this one closes the connection."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class Tree:
    """The connections of this rank. Its coroutines run on the thread of the event loop.

    A *call* is one save or load, including its asynchronous completion, with the same number on all
    ranks. Its steps are numbered, too, so messages of several calls do not mix.
    """

    def __init__(self, rank: int, size: int, store: JobStore) -> None:
        self.rank, self.size, self.store = rank, size, store
        self.parent = parent_of(rank) if rank else None
        self.children = children_of(rank, size)
        self.steps: WeakValueDictionary[int, Step] = WeakValueDictionary()
        self.counts = {"messages": 0, "bytes": 0}
        """What this rank has sent."""
        self._links: dict[int, _Link] = {}
        self._arrivals: dict[tuple[int, int, int, int], asyncio.Future[Any]] = {}
        self._failures: OrderedDict[int, asyncio.Future[Verdict]] = OrderedDict()
        self._reports: dict[int, Verdict] = {}
        self._ended: dict[int, str] = {}
        self._cause, self._failed_at = Verdict({}), -math.inf
        self._listener: Listener | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._outgoing: dict[int, socket.socket] = {}
        self._incoming: dict[int, socket.socket] = {}
        self._swapping: asyncio.Future[Any] | None = None
        self._connecting = False
        self._loop = _running_loop()
        _trees.add(self)

    # Called by other threads.

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def verdict(self, call: int) -> Verdict | None:
        """Why this call has failed, if it has."""
        failure = self._failures.get(call)
        return failure.result() if failure is not None and failure.done() else None

    def last_failure(self) -> int:
        return max(
            (call for call, f in tuple(self._failures.items()) if f.done()), default=0
        )

    def close(self) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._close)

    def sockets(self) -> list[socket.socket]:
        """All open sockets of this rank."""
        listening = [self._listener.socket] if self._listener is not None else []
        data = [*self._outgoing.values(), *self._incoming.values()]
        return [*(link.socket for link in self._links.values()), *listening, *data]

    # The steps.

    async def gather(
        self, step: Step, own: Payload, merge: Callable[[list[Payload]], bytes]
    ) -> bytes | None:
        """On rank 0 the merged payloads of all ranks; None elsewhere.

        ``merge`` takes this rank's own payload first, then those of its children in order.
        """
        arrived = await self._collect(step, GATHERED, self.children, step.timeout)
        merged = merge([own, *arrived])
        if self.parent is None:
            return merged
        await self._send(step, {self.parent: merged}, GATHERED)
        return None

    async def scatter(self, step: Step, parts: Sequence[Payload] | None) -> Payload:
        """This rank's part of those of rank 0."""
        if parts is None:
            parts = split(await self._from_parent(step))
        shares = {
            child: join(parts[child - self.rank :][:span])
            for child, span in self.children.items()
        }
        await self._send(step, shares, SENT)
        return parts[0]

    async def broadcast(self, step: Step, payload: Payload | None) -> Payload:
        if payload is None:
            payload = await self._from_parent(step)
        await self._send(step, dict.fromkeys(self.children, payload), SENT)
        return payload

    async def confirm(self, step: Step) -> None:
        """Ask all ranks whether they are still waiting in this step; raise CallFailed if not."""
        await self._send(step, dict.fromkeys(self.children, b""), CONFIRM)
        seconds = step.elapsed + step.timeout
        await self._collect(step, CONFIRMED, self.children, seconds)

    async def fail(self, call: int, verdict: Verdict) -> None:
        """Let a call fail on all ranks, and wait until that is on its way."""
        self._report(call, verdict)
        if self.parent is None:
            await self._settle(call)
            return
        link = self._links.get(self.parent)
        if link is not None:  # to be behind the report
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await link.send(STATE, call, 0, "", Verdict({}).packed())

    async def swap(
        self,
        step: Step,
        to: tuple[int, Address | None],
        leaving: memoryview,
        source: int,
        coming: memoryview,
    ) -> None:
        """Send bytes to one rank and receive bytes from another, after those of the swap before."""
        before, self._swapping = (
            self._swapping,
            asyncio.get_running_loop().create_future(),
        )
        ended = self._swapping
        try:
            if before is not None:
                await before
            await asyncio.gather(
                self._guard(step, to[0], self._give(step, to, leaving)),
                self._guard(step, source, self._take(step, source, coming)),
            )
        finally:
            if not ended.done():
                ended.set_result(None)

    async def address(self) -> Address:
        listener = self._listen()
        return await self.store.use(
            lambda store: own_address(listener.port, listener.token, store)
        )

    async def end_swaps(self) -> None:
        """Close the connections of an exchange."""
        for connection in (*self._outgoing.values(), *self._incoming.values()):
            connection.close()
        self._outgoing.clear()
        self._incoming.clear()

    async def _give(
        self, step: Step, to: tuple[int, Address | None], data: memoryview
    ) -> None:
        rank, address = to
        if not data:
            return
        if rank not in self._outgoing:
            made = await connect(
                cast("Address", address), DATA, self.rank, step.call, step.number
            )
            for other in self._outgoing.values():
                other.close()
            self._outgoing = {rank: made}
        await asyncio.get_running_loop().sock_sendall(self._outgoing[rank], data)
        self.counts["bytes"] += len(data)

    async def _take(self, step: Step, rank: int, into: memoryview) -> None:
        if not into:
            return
        if rank not in self._incoming:
            key = rank, DATA, step.call, step.number
            accepted = await asyncio.shield(self._arrival(key))
            self._arrivals.pop(key, None)
            for other in self._incoming.values():
                other.close()
            self._incoming = {rank: accepted}
        await receive(self._incoming[rank], into)

    async def _guard(self, step: Step, rank: int, work: Awaitable[None]) -> None:
        """Wait for an exchange of bytes, while the tree shows which ranks are at work."""
        task = asyncio.ensure_future(work)
        neighbours = {*self.children, *([] if self.parent is None else [self.parent])}
        try:
            await self._watch(step, {task: neighbours}, step.elapsed + step.timeout)
            task.result()
        except (OSError, EOFError) as error:
            self._report(step.call, Verdict({rank: f"{BROKEN} ({error})"}))
            await self._failed(step)
        finally:
            task.cancel()

    async def _from_parent(self, step: Step) -> Payload:
        parent = [cast("int", self.parent)]
        await self._link_to(step, parent)
        # Rank 0 itself waits for the others before it answers.
        return (await self._collect(step, SENT, parent, 2 * step.timeout))[0]

    async def _send(
        self, step: Step, payloads: Mapping[int, Payload], kind: int
    ) -> None:
        async def send(rank: int, payload: Payload) -> None:
            link = self._links.get(rank)
            if link is not None:  # else its loss is reported
                with suppress(OSError):
                    await link.send(kind, step.call, step.number, step.label, payload)
            self.counts["messages"] += 1
            self.counts["bytes"] += len(payload)

        await self._link_to(step, payloads)
        sends = {
            asyncio.ensure_future(send(rank, payload)): {rank}
            for rank, payload in payloads.items()
        }
        try:
            await self._watch(step, sends, max(2 * step.timeout, step.elapsed + 2))
        finally:
            for task in sends:
                task.cancel()

    async def _link_to(self, step: Step, ranks: Collection[int]) -> None:
        """Wait until these neighbours are connected. Children connect by themselves."""
        seconds = max(step.timeout, step.elapsed + 2)
        parent = self.parent
        if parent is not None and parent in ranks:
            seconds = 2 * step.timeout
            if parent not in self._links and not self._connecting:
                self._connecting = True
                self._spawn(self._connect(step, self._ended.pop(parent, "")))
        self._listen_for_children()
        waits = {self._arrival((r, LINK, 0, 0)): {r} for r in ranks}
        await self._watch(step, waits, seconds)

    async def _collect(
        self, step: Step, kind: int, ranks: Iterable[int], seconds: float
    ) -> list[Payload]:
        """The payloads of these neighbours, in order."""
        self._listen_for_children()
        keys = [(rank, kind, step.call, step.number) for rank in ranks]
        await self._watch(step, {self._arrival(key): {key[0]} for key in keys}, seconds)
        payloads = []
        for key in keys:
            label, payload = self._arrivals.pop(key).result()
            if self._differs(step, key[0], label):
                await self._failed(step)
            payloads.append(payload)
        return payloads

    async def _watch(
        self, step: Step, pending: Mapping[Any, set[int]], seconds: float
    ) -> None:
        """Wait until all futures are done. Each comes with the neighbours that are asked meanwhile.

        Raises CallFailed; also where this takes longer than ``seconds`` since the step began.
        """
        failure = self._failure(step.call)
        try:
            while not failure.done():
                step.awaited = set()
                for future, ranks in pending.items():
                    if not future.done():
                        step.awaited |= ranks
                if not step.awaited:
                    return
                ended = {r: self._ended[r] for r in step.awaited if r in self._ended}
                if ended:
                    self._report(step.call, Verdict(ended))
                elif step.elapsed > seconds:
                    self._report(step.call, self._missing(step))
                waiting = [future for future in pending if not future.done()]
                await asyncio.wait(
                    [*waiting, failure],
                    timeout=step.pause,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                self._ask(step)
                self._warn(step)
            raise CallFailed(failure.result())
        finally:
            step.awaited = set()

    async def _failed(self, step: Step) -> None:
        await asyncio.wait([self._failure(step.call)])
        raise CallFailed(self._failure(step.call).result())

    # Which ranks are missing.

    def _ask(self, step: Step) -> None:
        """Ask the neighbours for which this rank has waited for some time."""
        now = time.monotonic()
        if now - step.asked < step.pause:
            return
        step.asked = now
        for rank in step.awaited:
            link = self._links.get(rank)
            if link is not None:
                self._spawn(link.send(ASK, step.call, step.number, step.label))

    def _state(self, asking: int, call: int, number: int, label: str) -> Verdict:
        """The answer to a neighbour that waits for this rank in a step: whom it waits for itself."""
        step = self.steps.get(call)
        if step is not None and step.number == number:
            if self._differs(step, asking, label) or not step.awaited:
                return Verdict({self.rank: SLOW})
            return self._missing(step, asking)
        if step is not None and step.number > number:
            return Verdict({})
        for other in tuple(self.steps.values()):
            if other.call != call and other.awaited:
                if asking in other.awaited:
                    return Verdict({self.rank: SLOW}, other.label)
                missing = self._missing(other, asking).missing
                return Verdict(missing or {self.rank: SLOW})
        return Verdict({self.rank: SLOW})

    def _missing(self, step: Step, asking: int | None = None) -> Verdict:
        """The ranks for which this one waits in a step, as far as its neighbours know."""
        missing: dict[int, str] = {}
        for rank in step.awaited - {asking}:
            link = self._links.get(rank)
            if link is None:
                missing[rank] = self._ended.get(rank, ABSENT)
            elif time.monotonic() - link.heard > 3 * step.pause + 0.2:
                missing[rank] = SILENT
            elif link.state is not None and link.state[:2] == (step.call, step.number):
                missing |= link.state[2].missing
            else:
                missing[rank] = SLOW
            if len(missing) > _NAMED:
                break
        if ABSENT in missing.values() and self.store.silent:
            return Verdict({}, STORE_SILENT)
        missing.pop(self.rank, None)
        if not missing and asking is None:
            missing = dict.fromkeys(step.awaited, SLOW)
        return Verdict(missing)

    def _differs(self, step: Step, rank: int, label: str) -> bool:
        """Whether a neighbour is in another step, which is reported."""
        operation, stage = label.split("\n", 2)[:2]
        if (operation, stage) == (step.operation, step.stage):
            return False
        calls = {self.rank: step.label, rank: label}
        self._report(step.call, Verdict({}, _describe_calls(calls)))
        return True

    def _warn(self, step: Step) -> None:
        after = warn_after()
        if step.warned or not step.awaited or step.elapsed < after:
            return
        if after > 0:
            step.warned = True
            missing = self._missing(step)
            whom = name_ranks(missing.missing) if missing.missing else missing.text
            warn(self.rank, step.stage, whom, step.operation, step.path, step.timeout)

    # Failures: reported to rank 0, which sends one verdict to all.

    def _failure(self, call: int) -> asyncio.Future[Verdict]:
        if call not in self._failures:
            self._failures[call] = self._loop.create_future()
            while len(self._failures) > _REMEMBERED and not self.steps.get(
                next(iter(self._failures))
            ):
                self._failures.popitem(last=False)
        return self._failures[call]

    def _report(self, call: int, verdict: Verdict) -> None:
        if self._failure(call).done():
            return
        words = verdict.missing.values()
        if words and all(word.startswith(CONSEQUENCES) for word in words):
            # Ranks that have raised for an earlier failure may end, or give up other calls.
            lately = time.monotonic() - self._failed_at < _CAUSE_SECONDS
            if lately or any(w.startswith(ENDED) for w in self._cause.missing.values()):
                verdict = self._cause
        first = call not in self._reports
        known = self._reports.setdefault(call, Verdict({}))
        merged = Verdict(verdict.missing | known.missing, known.text or verdict.text)
        if merged == known and not first:
            return
        self._reports[call] = merged
        link = None if self.parent is None else self._links.get(self.parent)
        seconds = _GRACE
        if link is not None:
            self._spawn(link.send(REPORT, call, 0, "", merged.packed()))
            seconds = _VERDICT_SECONDS
        if first:
            self._loop.call_later(seconds, lambda: self._spawn(self._settle(call)))

    async def _settle(self, call: int) -> None:
        await self._spread(call, self._reports.get(call, Verdict({})))

    async def _spread(self, call: int, verdict: Verdict) -> None:
        """Send the verdict down before this rank knows it: it may end the process at once."""
        if self._failure(call).done():
            return
        packed = verdict.packed()
        sends = [
            asyncio.ensure_future(self._links[child].send(FAILED, call, 0, "", packed))
            for child in self.children
            if child in self._links
        ]
        if sends:
            _, late = await asyncio.wait(sends, timeout=1.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*sends, return_exceptions=True)
        if verdict.missing:
            self._cause, self._failed_at = verdict, time.monotonic()
        if not self._failure(call).done():
            self._failure(call).set_result(verdict)
        self._reports.pop(call, None)
        for key in tuple(self._arrivals):
            if key[2] == call:
                del self._arrivals[key]

    # Connections.

    def _listen(self) -> Listener:
        if self._listener is None:
            self._listener = Listener(self._on_greeting)
            self._spawn(self._listener.serve())
        return self._listener

    def _listen_for_children(self) -> None:
        if self.children and self._listener is None:
            listener = self._listen()
            self._spawn(self.store.publish(self.rank, listener.port, listener.token))

    async def _connect(self, step: Step, known: str) -> None:
        """Connect to the parent; where that fails, the call fails. ``known``: how it has ended."""
        parent = cast("int", self.parent)
        patience = 0.0 if known else limits.CONNECT_SECONDS
        why = Verdict({parent: ABSENT})
        try:
            async with asyncio.timeout(max(0.0, 2 * step.timeout - step.elapsed)):
                while parent not in self._links:
                    address = await self.store.find(parent)
                    try:
                        made = await connect(address, LINK, self.rank, 0, 0)
                    except OSError as error:
                        why = Verdict({parent: f"{known or ENDED} ({error})"})
                        if step.elapsed > patience:
                            raise
                        await asyncio.sleep(_GRACE)
                    else:
                        self._add_link(parent, made)
        except StoreLost as error:
            self._report(step.call, Verdict({}, str(error)))
        except OSError:  # and TimeoutError
            silent = self.store.silent
            self._report(step.call, Verdict({}, STORE_SILENT) if silent else why)
        finally:
            self._connecting = False

    def _on_greeting(
        self, accepted: socket.socket, kind: int, rank: int, call: int, number: int
    ) -> None:
        if kind == LINK and rank in self.children:
            link = self._add_link(rank, accepted)
            for failed in tuple(self._failures):
                verdict = self.verdict(failed)
                if verdict is not None:
                    self._spawn(link.send(FAILED, failed, 0, "", verdict.packed()))
        elif kind == DATA and not self._arrival((rank, DATA, call, number)).done():
            self._arrival((rank, DATA, call, number)).set_result(accepted)
        else:
            accepted.close()

    def _add_link(self, rank: int, connection: socket.socket) -> _Link:
        if rank in self._links:
            self._links[rank].shut()
        link = self._links[rank] = _Link(rank, connection)
        self._ended.pop(rank, None)
        arrival = self._arrival((rank, LINK, 0, 0))
        if not arrival.done():
            arrival.set_result(None)
        self._spawn(self._read(link))
        return link

    async def _read(self, link: _Link) -> None:
        try:
            while True:
                self._handle(link, *await link.receive())
        except (OSError, EOFError) as error:
            link.socket.close()
            if self._links.get(link.rank) is link:
                self._lose(link, error)

    def _lose(self, link: _Link, error: Exception) -> None:
        del self._links[link.rank]
        self._arrivals.pop((link.rank, LINK, 0, 0), None)
        word = ENDED
        if isinstance(error, (EOFError, ConnectionError)):
            self._ended[link.rank] = word
        else:  # a host that is silent; it may connect again
            word = f"{SILENT} ({error})"
        for step in tuple(self.steps.values()):
            if link.rank in step.awaited:
                self._report(step.call, Verdict({link.rank: word}))

    def _arrival(self, key: tuple[int, int, int, int]) -> asyncio.Future[Any]:
        if key not in self._arrivals:
            self._arrivals[key] = self._loop.create_future()
        return self._arrivals[key]

    def _handle(
        self,
        link: _Link,
        kind: int,
        call: int,
        number: int,
        label: str,
        payload: Payload,
    ) -> None:
        if kind == ASK:
            state = self._state(link.rank, call, number, label)
            self._spawn(link.send(STATE, call, number, "", state.packed()))
        elif kind == STATE:
            self._on_state(link, call, number, Verdict.unpacked(payload))
        elif kind == REPORT:
            self._report(call, Verdict.unpacked(payload))
        elif kind == FAILED:
            self._spawn(self._spread(call, Verdict.unpacked(payload)))
        elif kind == CONFIRM:
            self._spawn(self._on_confirm(link, call, number))
        elif self.verdict(call) is None:
            arrival = self._arrival((link.rank, kind, call, number))
            if not arrival.done():
                arrival.set_result((label, payload))

    def _on_state(self, link: _Link, call: int, number: int, state: Verdict) -> None:
        link.state = call, number, state
        now = time.monotonic()
        if not state.text:
            link.crossed = now
        step = self.steps.get(call)
        if step is None or link.rank not in step.awaited:
            return
        if now - link.crossed > _CROSSED_SECONDS:
            # Both wait for one another, in different calls.
            calls = {self.rank: step.label, link.rank: state.text}
            self._report(call, Verdict({}, _describe_calls(calls)))

    async def _on_confirm(self, link: _Link, call: int, number: int) -> None:
        """Answer whether this rank and those below wait in the step."""
        step = self.steps.get(call)
        verdict = self.verdict(call)
        if verdict is not None:  # the coordinator was cut off, or asleep
            await link.send(REPORT, call, 0, "", verdict.packed())
        if verdict is not None or step is None or step.number != number:
            return
        asked = replace(step, began=time.monotonic(), awaited=set())
        with suppress(CallFailed):
            await self.confirm(asked)
            await link.send(CONFIRMED, call, number, step.label)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        async def contained() -> None:
            try:
                await work
            except (OSError, EOFError):
                pass  # the reader of the connection finds it broken
            except Exception:
                logger.exception("the control connections of rank %d", self.rank)

        task = self._loop.create_task(contained())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        for each in self.sockets():
            each.close()


def _describe_calls(labels: dict[int, str]) -> str:
    described = []
    for rank in sorted(labels):
        operation, stage, path = labels[rank].split("\n", 2)
        inside = f"{operation} {path}".strip() or "a vote"
        described.append(f"rank {rank} is in {inside} (stage {stage!r})")
    return (
        f"the ranks are in different calls: {', '.join(described)}; all ranks of the process group "
        "have to call save, load and the like alike"
    )


_trees: WeakSet[Tree] = WeakSet()
_loop: asyncio.AbstractEventLoop | None = None
_starting = threading.Lock()


def _running_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process, on a thread of its own."""
    global _loop  # noqa: PLW0603
    with _starting:
        if _loop is None:
            # poll keeps no state in the kernel that a forked process would share.
            loop = asyncio.SelectorEventLoop(PollSelector())
            threading.Thread(
                target=loop.run_forever, name="megackpt-control", daemon=True
            ).start()
            _loop = loop
        return _loop


_of_parents: list[asyncio.AbstractEventLoop] = []


def _forked() -> None:
    """In a forked child: close its copies, so that others notice the end of the parent."""
    global _loop, _starting  # noqa: PLW0603
    _starting = threading.Lock()
    for tree in tuple(_trees):
        for each in tree.sockets():
            with suppress(OSError):
                os.close(each.detach())
    _trees.clear()
    if _loop is not None:
        _of_parents.append(_loop)  # never collected: its end would touch the parent's
        _loop = None


os.register_at_fork(after_in_child=_forked)
