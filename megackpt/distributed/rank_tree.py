"""The control plane: a tree of connections between the ranks of one process group.

Messages go up merged and down split, so no rank holds more than a hundred connections among 16,384.
One thread of the process runs an event loop with all connections. It also answers the questions of
other ranks while the training's threads are at work, so a slow rank differs from a dead one.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
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
from contextlib import closing, suppress
from dataclasses import replace
from selectors import PollSelector
from typing import Any, TypeVar, cast
from weakref import WeakSet

from megackpt import limits
from megackpt.distributed.links import Links
from megackpt.distributed.messages import (
    BROKEN,
    CONFIRM,
    CONFIRMED,
    DATA,
    GATHERED,
    LINK,
    REPORT,
    SENT,
    STATE,
    CallFailed,
    Link,
    Message,
    Payload,
    Step,
    Verdict,
    join,
    split,
)
from megackpt.distributed.rendezvous import (
    Address,
    JobStore,
    connect,
    receive,
)
from megackpt.distributed.streams import Stream

T = TypeVar("T")

_RETURN_SECONDS = 5.0
"""In the first step of a call a rank has these to connect again, if its last connection was closed.
A rank that believed this one to be silent closes it, too."""


class Tree(Links):
    """The steps of this rank. Its coroutines run on the thread of the event loop."""

    def __init__(self, rank: int, size: int, store: JobStore) -> None:
        super().__init__(rank, size, store, _running_loop())
        _trees.add(self)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Called by other threads."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

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

    async def transfer(
        self,
        step: Step,
        to: int,
        address: Address | None,
        outgoing: Stream,
        source: int,
        incoming: Stream,
    ) -> None:
        """Send a stream to one rank, and receive one from another, over own connections."""
        await asyncio.gather(
            self._guard(step, to, self._give(step, address, outgoing)),
            self._guard(step, source, self._take(step, source, incoming)),
        )

    async def address(self) -> Address:
        return await self._listener.open(self.store)

    async def _give(self, step: Step, address: Address | None, stream: Stream) -> None:
        if address is None or not stream.nbytes:
            return
        token = await self.store.token()
        made = await connect(address, token, DATA, self.rank, step.call, step.number)
        with closing(made):
            for piece in stream.pieces():
                await asyncio.get_running_loop().sock_sendall(made, piece)
                self.counts["bytes"] += len(piece)
                step.began = time.monotonic()

    async def _take(self, step: Step, rank: int, stream: Stream) -> None:
        if not stream.nbytes:
            return
        key = rank, DATA, step.call, step.number
        accepted = await asyncio.shield(self._arrival(key))
        self._arrivals.pop(key, None)
        with closing(accepted):
            for room in stream.pieces():
                await receive(accepted, room)
                step.began = time.monotonic()

    async def _guard(self, step: Step, rank: int, work: Awaitable[None]) -> None:
        """Wait for an exchange of bytes, while the tree shows which ranks are at work."""
        task = asyncio.ensure_future(work)
        neighbours = {*self.children, *([] if self.parent is None else [self.parent])}
        try:
            # The step begins again with each piece.
            await self._watch(step, {task: neighbours}, step.timeout)
            task.result()
        except (OSError, EOFError) as error:
            self._report(step.call, Verdict({rank: f"{BROKEN} ({error})"}))
            await self._failed(step)
        finally:
            task.cancel()

    async def _link_to(self, step: Step, ranks: Collection[int]) -> None:
        """Wait until these neighbours are connected. Children connect by themselves."""
        seconds = max(step.timeout, step.elapsed + 2)
        if self.parent in ranks:
            seconds = 2 * step.timeout
            self._reach_parent(step)
        self._listen_for_children()
        waits = {self._arrival((r, LINK, 0, 0)): {r} for r in ranks}
        await self._watch(step, waits, seconds)

    async def _watch(
        self, step: Step, pending: Mapping[Any, set[int]], seconds: float
    ) -> None:
        """Wait until all futures are done. Each comes with the neighbours that are asked meanwhile.

        Raises CallFailed; also where this takes longer than ``seconds`` since the step began.
        """
        failure = self._failure(step.call)
        try:
            while True:
                step.awaited = set()
                waiting = []
                for future, ranks in pending.items():
                    if not future.done():
                        step.awaited |= ranks
                        waiting.append(future)
                if not step.awaited and self.parent is not None:
                    return  # also if rank 0 has given the call up afterwards
                if failure.done():
                    break
                if not step.awaited:
                    if step.call in self._reports:
                        await self._failed(step)  # the verdict follows the report
                    return
                if ended := self._ended_in(step):
                    self._report(step.call, Verdict(ended))
                elif step.elapsed > seconds:
                    self._report(step.call, self._missing(step))
                left = seconds - step.elapsed
                pause = step.pause
                if left > 0:
                    pause = min(pause, left)
                await asyncio.wait(
                    [*waiting, failure],
                    timeout=pause,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                self._ask(step)
                self._warn(step)
            raise CallFailed(failure.result())
        finally:
            step.awaited = set()

    def _ended_in(self, step: Step) -> dict[int, str]:
        """Those for which a step waits in vain. In the first one they may connect again."""
        since = time.monotonic() - _RETURN_SECONDS
        ended = {}
        for rank in step.awaited & self._ended.keys():
            word, at = self._ended[rank]
            if step.number > 1 or max(at, step.began) < since:
                ended[rank] = word
        return ended

    async def _failed(self, step: Step) -> None:
        await asyncio.wait([self._failure(step.call)])
        raise CallFailed(self._failure(step.call).result())

    async def _from_parent(self, step: Step) -> Payload:
        parent = [cast("int", self.parent)]
        # A parent may end, or destroy the process group, as soon as it has sent the message.
        if not self._arrival((parent[0], SENT, step.call, step.number)).done():
            await self._link_to(step, parent)
        # Rank 0 itself waits for the others before it answers.
        return (await self._collect(step, SENT, parent, 2 * step.timeout))[0]

    async def _send(
        self, step: Step, payloads: Mapping[int, Payload], kind: int
    ) -> None:
        async def send(rank: int, payload: Payload) -> None:
            if step.number == 1:
                step.sent[rank] = kind, payload
            link = self._links.get(rank)
            if link is not None:  # else its loss is reported
                with suppress(OSError):
                    await link.send(kind, step.call, step.number, step.label, payload)
            self.counts["messages"] += 1
            self.counts["bytes"] += len(payload)

        most = max(map(len, payloads.values()), default=0)
        if most > limits.CONTROL_MESSAGE_BYTES:
            word = (
                f"would have to send a message of {most} bytes, and ranks accept "
                f"{limits.CONTROL_MESSAGE_BYTES} at most"
            )
            self._report(step.call, Verdict({self.rank: word}))
            await self._failed(step)
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

    async def _collect(
        self, step: Step, kind: int, ranks: Iterable[int], seconds: float
    ) -> list[Payload]:
        """The payloads of these neighbours, in order."""
        self._listen_for_children()
        keys = [(rank, kind, step.call, step.number) for rank in ranks]
        arrivals = {self._arrival(key): {key[0]} for key in keys}
        await self._watch(step, arrivals, seconds)
        payloads = []
        for key, arrival in zip(keys, arrivals, strict=True):
            self._arrivals.pop(key, None)
            label, payload = arrival.result()
            if self._differs(step, key[0], label):
                await self._failed(step)
            payloads.append(payload)
        return payloads

    def _handle(self, link: Link, message: Message) -> None:
        if message.kind == CONFIRM:
            self._spawn(self._on_confirm(link, message.call, message.number))
        else:
            super()._handle(link, message)

    async def _on_confirm(self, link: Link, call: int, number: int) -> None:
        """Answer whether this rank and those below wait in the step."""
        step = self.calls.steps.get(call)
        verdict = self.calls.verdict(call)
        if verdict is not None:  # the coordinator was cut off, or asleep
            await link.send(REPORT, call, 0, "", verdict.packed())
        if verdict is not None or step is None or step.number != number:
            return
        asked = replace(step, began=time.monotonic(), awaited=set())
        with suppress(CallFailed):
            await self.confirm(asked)
            await link.send(CONFIRMED, call, number, step.label)
            self.counts["messages"] += 1


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
