"""The control plane: a tree of connections between the ranks of one process group.

Messages go up merged and down split, so no rank holds more than a hundred connections among 16,384.
One thread of the process runs an event loop with all connections. It also answers the questions of
other ranks while the training's threads are at work, so a slow rank differs from a dead one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
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
from typing import Any, TypeVar, cast

from megackpt import limits
from megackpt.distributed.calls import Calls, failures_in
from megackpt.distributed.connection import Connection
from megackpt.distributed.connection_states import (
    AFTER_LOSS,
    Action,
    Event,
    Recovery,
    State,
)
from megackpt.distributed.control_thread import running_loop, trees
from megackpt.distributed.diagnosis import Waiting, ended, missing
from megackpt.distributed.messages import (
    ASK,
    CONFIRM,
    CONFIRMED,
    DATA,
    FAILED,
    GATHERED,
    HELLO,
    LINK,
    REPORT,
    SENT,
    STATE,
    CallFailed,
    CollectiveStep,
    Link,
    Message,
    Payload,
    Reason,
    Verdict,
    children_of,
    describe_calls,
    join,
    parent_of,
    split,
)
from megackpt.distributed.rendezvous import (
    STORE_SILENT,
    Address,
    JobStore,
    Listener,
    StoreLost,
    connect,
    receive,
)
from megackpt.distributed.streams import Stream
from megackpt.errors import name_ranks
from megackpt.waiting import warn, warn_after

T = TypeVar("T")

logger = logging.getLogger("megackpt.distributed")

_DELIVERY = 0.02
"""Seconds until collective steps that wait have taken the last messages of a lost connection."""
_GRACE = 0.2  # seconds in which rank 0 collects reports of one failure
_REPORT_SECONDS = 1.0
"""A rank that leaves a call waits for so long until the parent is connected, and has the report."""
_VERDICT_SECONDS = 3.0  # after these a rank does not wait for rank 0's verdict
_CROSSED_SECONDS = 2.0
"""Two ranks that wait for each other in different calls for so long report it. A rank that was
stopped may say so once, before it has read the message that it waits for."""
_MOST_ARRIVALS = 1 << 14
"""Messages and connections that are awaited, or came before their steps."""


class Tree:
    """The connections of this rank, and its collective steps. Coroutines run on the event loop."""

    def __init__(self, rank: int, size: int, store: JobStore) -> None:
        self.rank, self.size, self.store = rank, size, store
        self._loop = running_loop()
        self.parent = parent_of(rank) if rank else None
        self.children = children_of(rank, size)
        self.calls = Calls(self._loop)
        self.counts = {"messages": 0, "bytes": 0}
        """What this rank has sent."""
        neighbours = [*self.children, *([] if self.parent is None else [self.parent])]
        self._connections = {each: Connection(each, self._loop) for each in neighbours}
        self._arrivals: dict[tuple[int, int, int, int], asyncio.Future[Any]] = {}
        self._listener = Listener(self._on_greeting)
        self._has_address = False
        self._address: Address | None = None  # of the parent, where it was last
        self._tasks: set[asyncio.Task[Any]] = set()
        trees.add(self)

    # Called by other threads.

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._close)

    def sockets(self) -> list[socket.socket]:
        """All open sockets of this rank."""
        links = [link.socket for link in self._links.values()]
        return links + self._listener.sockets

    @property
    def _links(self) -> dict[int, Link]:
        """The open links, by neighbour."""
        found = [connection.link for connection in self._connections.values()]
        return {link.rank: link for link in found if link is not None}

    # The steps.

    async def gather(
        self,
        step: CollectiveStep,
        own: Payload,
        merge: Callable[[list[Payload]], bytes],
    ) -> bytes | None:
        """On rank 0 the merged payloads of all ranks; None elsewhere.

        ``merge`` takes this rank's own payload first, then the payloads of its children in order.
        """
        arrived = await self._collect(step, GATHERED, self.children, step.timeout)
        merged = merge([own, *arrived])
        if self.parent is None:
            self.calls.worked(step.call)
            return merged
        step.gave = True
        await self._send(step, {self.parent: merged}, GATHERED)
        return None

    async def scatter(
        self, step: CollectiveStep, parts: Sequence[Payload] | None
    ) -> Payload:
        """The part for this rank of the parts that rank 0 gives."""
        if parts is None:
            parts = split(await self._from_parent(step))
        shares = {
            child: join(parts[child - self.rank :][:span])
            for child, span in self.children.items()
        }
        await self._send(step, shares, SENT)
        return parts[0]

    async def broadcast(self, step: CollectiveStep, payload: Payload | None) -> Payload:
        if payload is None:
            payload = await self._from_parent(step)
        await self._send(step, dict.fromkeys(self.children, payload), SENT)
        return payload

    async def confirm(self, step: CollectiveStep) -> None:
        """Raise CallFailed unless all ranks still wait in this collective step."""
        await self._send(step, dict.fromkeys(self.children, b""), CONFIRM)
        seconds = step.elapsed + step.timeout
        await self._collect(step, CONFIRMED, self.children, seconds)

    async def fail(self, call: int, verdict: Verdict) -> None:
        """Let a call fail on all ranks, and wait until the report or the verdict is on its way."""
        step = self.calls.steps.get(call)
        if self.parent is not None and step is not None:
            # The first call may fail before a collective step has needed the parent.
            self._on(self.parent, Event.NEEDED, step)
            ready = self._connections[self.parent].ready
            await asyncio.wait([ready], timeout=_REPORT_SECONDS)
        self._report(call, verdict)
        if self.parent is None:
            await self._settle(call)
            return
        link = self._connections[self.parent].link
        if link is not None:  # to be behind the report
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(_REPORT_SECONDS):
                    await link.send(STATE, call, 0, "", Verdict({}).packed())

    async def transfer(
        self,
        step: CollectiveStep,
        to: int,
        address: Address | None,
        outgoing: Stream,
        source: int,
        incoming: Stream,
    ) -> None:
        """Send a stream to one rank, and receive one from another, over separate connections."""
        await asyncio.gather(
            self._guard(step, to, self._give(step, address, outgoing)),
            self._guard(step, source, self._take(step, source, incoming)),
        )

    async def address(self) -> Address:
        return await self._listener.open(self.store)

    async def _give(
        self, step: CollectiveStep, address: Address | None, stream: Stream
    ) -> None:
        if address is None or not stream.nbytes:
            return
        token = await self.store.token()
        made = await connect(address, token, DATA, self.rank, step.call, step.number)
        with closing(made):
            for piece in stream.pieces():
                await asyncio.get_running_loop().sock_sendall(made, piece)
                self.counts["bytes"] += len(piece)
                step.began = time.monotonic()

    async def _take(self, step: CollectiveStep, rank: int, stream: Stream) -> None:
        if not stream.nbytes:
            return
        key = rank, DATA, step.call, step.number
        accepted = await asyncio.shield(self._arrival(key))
        self._arrivals.pop(key, None)
        with closing(accepted):
            for room in stream.pieces():
                await receive(accepted, room)
                step.began = time.monotonic()

    async def _guard(
        self, step: CollectiveStep, rank: int, work: Awaitable[None]
    ) -> None:
        """Wait for an exchange of bytes, while the tree shows which ranks are at work."""
        task = asyncio.ensure_future(work)
        try:
            # The collective step begins again with each piece.
            await self._watch(step, {task: {*self._connections}}, step.timeout)
            task.result()
        except (OSError, EOFError) as error:
            self._report(step.call, Verdict({rank: f"{Reason.BROKEN} ({error})"}))
            await self._failed(step)
        finally:
            task.cancel()

    async def _link_to(self, step: CollectiveStep, ranks: Collection[int]) -> None:
        """Wait until these neighbours are connected. Children connect by themselves."""
        seconds = max(step.timeout, step.elapsed + 2)
        if self.parent is not None and self.parent in ranks:
            seconds = 2 * step.timeout
            self._on(self.parent, Event.NEEDED, step)
        self._listen_for_children()
        waits = {self._connections[rank].ready: {rank} for rank in ranks}
        await self._watch(step, waits, seconds)

    async def _watch(
        self, step: CollectiveStep, pending: Mapping[Any, set[int]], seconds: float
    ) -> None:
        """Wait until all futures are done. Each comes with the neighbours that are asked meanwhile.

        Raises CallFailed; also if this takes ``seconds`` since the collective step began.
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
                    if self.calls.outcome(step.call).reported is not None:
                        await self._failed(step)  # the verdict follows the report
                    return
                if in_vain := ended(self._waiting(step)):
                    self._report(step.call, Verdict(in_vain))
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

    async def _failed(self, step: CollectiveStep) -> None:
        await asyncio.wait([self._failure(step.call)])
        raise CallFailed(self._failure(step.call).result())

    async def _from_parent(self, step: CollectiveStep) -> Payload:
        parent = [cast("int", self.parent)]
        # A parent may end, or destroy the process group, as soon as it has sent the message.
        if not self._arrival((parent[0], SENT, step.call, step.number)).done():
            await self._link_to(step, parent)
        # Rank 0 itself waits for the others before it answers.
        (answer,) = await self._collect(step, SENT, parent, 2 * step.timeout)
        if step.gave:
            self.calls.worked(step.call)
        return answer

    async def _send(
        self, step: CollectiveStep, payloads: Mapping[int, Payload], kind: int
    ) -> None:
        async def send(rank: int, payload: Payload) -> None:
            if step.number == 1:
                step.sent[rank] = kind, payload
            link = self._connections[rank].link
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
        self, step: CollectiveStep, kind: int, ranks: Iterable[int], seconds: float
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

    # Which ranks are missing.

    def _ask(self, step: CollectiveStep) -> None:
        """Ask the neighbours for which this rank has waited for some time."""
        now = time.monotonic()
        if now - step.asked < step.pause:
            return
        step.asked = now
        for rank in step.awaited:
            link = self._connections[rank].link
            if link is None:
                continue
            state, since = self._connections[rank].condition
            if state is State.OPEN and now - since > limits.GREETING_SECONDS:
                self._connect_afresh(link)
            elif rank not in step.questions:
                step.questions[rank] = now
                self._spawn(link.send(ASK, step.call, step.number, step.label))

    def _state(self, asking: int, call: int, number: int, label: str) -> Verdict:
        """The answer to a neighbour that waits in a collective step: what this rank waits for."""
        step = self.calls.steps.get(call)
        if left := self.calls.left(call):
            # Its last message, if there was one, is on the way before this answer.
            return Verdict({self.rank: left})
        if step is not None and step.number == number:
            if self._differs(step, asking, label) or not step.awaited:
                return Verdict({self.rank: Reason.SLOW})
            return self._missing(step, asking)
        if step is not None and step.number > number:
            return Verdict({})
        for other in self.calls.current():
            if other.call != call and other.awaited:
                if asking in other.awaited:
                    return Verdict({self.rank: Reason.SLOW}, other.label)
                found = self._missing(other, asking).missing
                return Verdict(found or {self.rank: Reason.SLOW})
        return Verdict({self.rank: Reason.SLOW})

    def _missing(self, step: CollectiveStep, asking: int | None = None) -> Verdict:
        """The ranks for which this one waits in a collective step, as its neighbours know."""
        found = missing(self._waiting(step), asking)
        if Reason.ABSENT in found.values() and self.store.is_silent(step.timeout):
            return Verdict({}, STORE_SILENT)
        return Verdict(found)

    def _waiting(self, step: CollectiveStep) -> Waiting:
        neighbours = (self._connections[rank].seen(step) for rank in step.awaited)
        return Waiting(
            self.rank,
            step.number <= 1,
            step.began,
            step.pause,
            time.monotonic(),
            tuple(neighbours),
        )

    def _differs(self, step: CollectiveStep, rank: int, label: str) -> bool:
        """Whether a neighbour is in another collective step, which is reported."""
        operation, stage = label.split("\n", 2)[:2]
        if (operation, stage) == (step.operation, step.stage):
            return False
        self._report_crossing(step, rank, label, None)
        return True

    def _report_crossing(
        self, step: CollectiveStep, rank: int, label: str, name: str | None
    ) -> None:
        calls = {self.rank: step.label, rank: label}
        self._report(step.call, Verdict({}, describe_calls(calls), name))

    def _warn(self, step: CollectiveStep) -> None:
        after = warn_after()
        if step.warned or not step.awaited or step.elapsed < after:
            return
        if after > 0:
            step.warned = True
            found = self._missing(step)
            whom = found.text
            if found.missing:
                whom = name_ranks(found.missing)
            warn(self.rank, step.stage, whom, step.operation, step.path, step.timeout)

    # Failures: reported to rank 0, which sends one verdict to all.

    def _failure(self, call: int) -> asyncio.Future[Verdict]:
        failure = self.calls.outcome(call).verdict
        for forgotten in self.calls.forgotten():
            self._forget(forgotten)
        return failure

    def _report(self, call: int, verdict: Verdict) -> None:
        self._failure(call)
        first = self.calls.outcome(call).reported is None
        merged = self.calls.report(call, verdict)
        if merged is None:
            return
        seconds = _GRACE
        link = None
        if self.parent is not None:
            link = self._connections[self.parent].link
        if link is not None:
            self._spawn(link.send(REPORT, call, 0, "", merged.packed()))
            seconds = _VERDICT_SECONDS
        if first:
            self._loop.call_later(seconds, lambda: self._spawn(self._settle(call)))

    async def _settle(self, call: int) -> None:
        await self._spread(call, self.calls.outcome(call).reported or Verdict({}))

    async def _spread(self, call: int, verdict: Verdict) -> None:
        """Send the verdict down before this rank knows it: it may end the process at once."""
        if self._failure(call).done():
            return
        packed = verdict.packed()
        sends = []
        for rank, link in self._links.items():
            if rank != self.parent:
                send = link.send(FAILED, call, 0, "", packed)
                sends.append(asyncio.ensure_future(send))
        if sends:
            _, late = await asyncio.wait(sends, timeout=1.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*sends, return_exceptions=True)
        waiting = [step.call for step in self.calls.current() if step.awaited]
        if all(other == call or self._failure(other).done() for other in waiting):
            # TCP repeats what was lost only after long pauses, so the next call connects afresh.
            for rank, word in verdict.missing.items():
                lost = self._links.get(rank)
                if lost is not None and Reason.of(word) is Reason.SILENT:
                    self._connect_afresh(lost)
        self.calls.fail(call, verdict)
        self._forget(call, except_kind=SENT)

    def _forget(self, call: int, except_kind: int | None = None) -> None:
        for key in tuple(self._arrivals):
            if key[2] == call and key[1] != except_kind:
                _close_unused(self._arrivals.pop(key))

    # Connections.

    def _listen_for_children(self) -> None:
        async def publish() -> None:
            try:
                await self.store.publish(self.rank, self._listener)
            except BaseException:  # such as too many open files
                self._has_address = False  # the next collective step tries it again
                raise

        if self.children and not self._has_address:
            self._has_address = True
            self._spawn(publish())

    def _on(self, rank: int, event: Event, *given: Any) -> None:
        """An event happens to a connection."""
        connection = self._connections[rank]
        action = connection.on(event)
        if action is not Action.NOTHING:
            _ACTIONS[action](self, connection, *given)

    def _connect(self, connection: Connection, step: CollectiveStep) -> None:
        self._spawn(self._connect_to_parent(connection, step))

    async def _connect_to_parent(
        self, connection: Connection, step: CollectiveStep
    ) -> None:
        parent = connection.rank
        patience = limits.CONNECT_SECONDS
        if connection.condition.state is State.RETURNING:
            patience = 0.0
        why = Verdict({parent: Reason.ABSENT})
        try:
            async with asyncio.timeout(max(0.0, 2 * step.timeout - step.elapsed)):
                token = await self.store.token()
                while connection.link is None:
                    # The store's client may be silent long after a cut.
                    known_address, self._address = self._address, None
                    address = known_address or await self.store.find(parent)
                    try:
                        made = await connect(address, token, LINK, self.rank, 0, 0)
                    except OSError as error:
                        why = Verdict({parent: f"{Reason.ENDED} ({error})"})
                        if step.elapsed > patience:
                            raise
                        await asyncio.sleep(_GRACE)
                    else:
                        self._address = address
                        self._on(parent, Event.OPENED, made)
        except StoreLost as error:
            why = Verdict({}, str(error))
        except OSError:  # and TimeoutError
            if self.store.is_silent(step.timeout):
                why = Verdict({}, STORE_SILENT)
        finally:
            if connection.link is None:
                self._on(parent, Event.REFUSED, step, why)

    def _report_unreachable(
        self, _: Connection, step: CollectiveStep, why: Verdict
    ) -> None:
        self._report(step.call, why)

    def _on_greeting(
        self, accepted: socket.socket, kind: int, rank: int, call: int, number: int
    ) -> None:
        if kind == LINK and rank in self.children:
            self._on(rank, Event.OPENED, accepted)
        elif (
            kind == DATA
            and self.calls.verdict(call) is None
            and not self._arrival((rank, DATA, call, number)).done()
        ):
            self._arrival((rank, DATA, call, number)).set_result(accepted)
        else:
            accepted.close()

    def _connect_afresh(self, link: Link) -> None:
        """Close the link of a silent neighbour. The next collective step makes another."""
        link.shut()
        self._on(link.rank, *_loss(TimeoutError("it connects afresh")))

    def _replace(self, connection: Connection, made: socket.socket) -> None:
        """Only the other end has seen the link break."""
        cast("Link", connection.link).shut()
        self._lose_steps(connection.rank, Reason.BROKEN)
        self._greet(connection, made)

    def _greet(self, connection: Connection, made: socket.socket) -> None:
        link = connection.link = Link(connection.rank, made)
        for step in self.calls.current():
            step.questions.pop(link.rank, None)
        self._spawn(link.send(HELLO, 0, 0, "", self.calls.failed()))
        self._spawn(self._read(link))

    async def _greeted(self, link: Link, failed: list[tuple[int, Verdict]]) -> None:
        """A neighbour's first message: the failed calls. Both number the next call after these."""
        for call, verdict in failed:
            await self._spread(call, verdict)
        if self._connections[link.rank].link is link:
            self._on(link.rank, Event.GREETED)

    def _resume(self, connection: Connection) -> None:
        link = cast("Link", connection.link)
        for step in self.calls.current():
            if step.number == 1 and link.rank in step.sent:
                kind, sent = step.sent[link.rank]
                self._spawn(link.send(kind, step.call, 1, step.label, sent))

    async def _read(self, link: Link) -> None:
        try:
            with link.socket:
                while True:
                    self._handle(link, await link.receive())
        except Exception as error:  # noqa: BLE001 - damaged bytes, or no memory for them
            if not isinstance(error, (OSError, EOFError)):
                logger.warning(
                    "a message of rank %d cannot be read: %r", link.rank, error
                )
            if self._connections[link.rank].link is link:
                self._on(link.rank, *_loss(error))

    def _lose(self, connection: Connection, word: str) -> None:
        connection.link = None
        self._lose_steps(connection.rank, word)

    def _lose_steps(self, rank: int, word: str) -> None:
        """Let the collective steps that wait for this neighbour fail, or go on."""
        lost = []
        which = "parent" if rank == self.parent else "child"
        for step in self.calls.current():
            if rank not in step.awaited:
                continue
            recovery = AFTER_LOSS["first" if step.number <= 1 else "later", which]
            if recovery is Recovery.FAIL:
                lost.append(step)
            elif recovery is Recovery.CONNECT:
                self._loop.call_soon(self._on, rank, Event.NEEDED, step)
        # After its last messages have reached the collective steps that wait for them. Any that
        # begin meanwhile connect afresh.
        self._loop.call_later(_DELIVERY, self._report_lost, lost, rank, word)

    def _report_lost(
        self, steps: Sequence[CollectiveStep], rank: int, word: str
    ) -> None:
        # Connected again; the messages in between may be lost.
        if self._connections[rank].link is not None:
            word = Reason.BROKEN
        for step in steps:
            if rank in step.awaited:
                self._report(step.call, Verdict({rank: word}))

    def _arrival(self, key: tuple[int, int, int, int]) -> asyncio.Future[Any]:
        if key not in self._arrivals:
            if len(self._arrivals) >= _MOST_ARRIVALS:
                raise ConnectionError("too many messages are for no step of this rank")
            self._arrivals[key] = self._loop.create_future()
        return self._arrivals[key]

    def _handle(self, link: Link, message: Message) -> None:
        kind, call, number, label, payload = message
        if kind == ASK:
            state = self._state(link.rank, call, number, label)
            self._spawn(link.send(STATE, call, number, "", state.packed()))
        elif kind == STATE:
            self._on_state(link, call, number, Verdict.unpacked(payload, self.size))
        elif kind == REPORT:
            verdict = Verdict.unpacked(payload, self.size)
            # Of a broken connection the coordinator, and the ranks above, name the other end.
            if verdict.missing.get(self.rank) == Reason.BROKEN:
                verdict.missing[link.rank] = verdict.missing.pop(self.rank)
            self._report(call, verdict)
        elif kind == FAILED:
            self._spawn(self._spread(call, Verdict.unpacked(payload, self.size)))
        elif kind == CONFIRM:
            self._spawn(self._on_confirm(link, call, number))
        elif kind == HELLO:
            self._spawn(self._greeted(link, failures_in(payload, self.size)))
        elif self.calls.awaits(call, number):
            arrival = self._arrival((link.rank, kind, call, number))
            if not arrival.done():
                arrival.set_result((label, payload))

    def _on_state(self, link: Link, call: int, number: int, state: Verdict) -> None:
        link.state = call, number, state
        step, rank = self.calls.steps.get(call), link.rank
        if step is None or step.number != number:
            return
        asked = step.questions.pop(rank, 0.0)
        if state.missing.get(rank) in (Reason.GAVE_UP, Reason.REFUSED):
            # After its last messages have reached the step.
            self._loop.call_later(_DELIVERY, self._report_left, step, rank, state)
        if not state.text or rank not in step.awaited:
            step.crossed.pop(rank, None)
        elif asked - step.crossed.setdefault(rank, time.monotonic()) > _CROSSED_SECONDS:
            # In a call of another number: the other rank may have left this one out.
            self._report_crossing(step, rank, state.text, "")

    def _report_left(self, step: CollectiveStep, rank: int, state: Verdict) -> None:
        if rank in step.awaited:
            self._report(step.call, state)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        async def contained() -> None:
            try:
                # The reader of the connection reports these errors.
                with suppress(OSError, EOFError):
                    await work
            except Exception:
                logger.exception("the control connections of rank %d", self.rank)

        task = self._loop.create_task(contained())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before it begins leaves its work.
        task.add_done_callback(lambda _: work.close())

    def _close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        self._listener.close()
        for each in self.sockets():
            each.close()
        for arrival in self._arrivals.values():
            _close_unused(arrival)


_ACTIONS: dict[Action, Callable[..., None]] = {
    Action.CONNECT: Tree._connect,
    Action.GREET: Tree._greet,
    Action.REPLACE: Tree._replace,
    Action.RESUME: Tree._resume,
    Action.LOSE: Tree._lose,
    Action.REPORT: Tree._report_unreachable,
}


def _loss(error: Exception) -> tuple[Event, str]:
    """The event that the error of a link is, and the word for its rank."""
    if isinstance(error, (EOFError, ConnectionError)):
        return Event.ENDED, Reason.ENDED
    if isinstance(error, OSError):  # a host that is silent; it may connect again
        return Event.SILENT, f"{Reason.SILENT} ({error})"
    return Event.DAMAGED, f"{Reason.BROKEN} ({error!r})"


def _close_unused(arrival: asyncio.Future[Any]) -> None:
    """Close a connection that no collective step has taken."""
    if arrival.done() and isinstance(arrival.result(), socket.socket):
        arrival.result().close()
