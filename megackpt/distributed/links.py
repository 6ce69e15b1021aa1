"""The connections of one rank in the tree: which ranks are missing, and which calls have failed."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections import OrderedDict
from collections.abc import Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast
from weakref import WeakValueDictionary

from megackpt import limits
from megackpt.distributed.messages import (
    ABSENT,
    ASK,
    BROKEN,
    CONSEQUENCES,
    DATA,
    ENDED,
    FAILED,
    LINK,
    REPORT,
    SENT,
    SILENT,
    SLOW,
    STATE,
    CallFailed,
    Link,
    Message,
    Step,
    Verdict,
    children_of,
    describe_calls,
    parent_of,
)
from megackpt.distributed.rendezvous import (
    STORE_SILENT,
    JobStore,
    Listener,
    StoreLost,
    connect,
)
from megackpt.distributed.waiting import warn, warn_after
from megackpt.errors import name_ranks

logger = logging.getLogger("megackpt.distributed")

_DELIVERY = 0.02
"""Seconds until the steps that wait have taken the last messages of a connection that is lost."""
_GRACE = 0.2  # seconds in which rank 0 collects reports of one failure
_VERDICT_SECONDS = 3.0  # after these a rank does not wait for rank 0's verdict
_RETURN_SECONDS = 5.0
"""In the first step of a call a rank has these to connect again, if its last connection was closed.
A rank that believed this one to be silent closes it, too."""
_CROSSED_SECONDS = 2.0
"""Two ranks that wait for each other in different calls report it after these."""
_CAUSE_SECONDS = 5.0
_NAMED = 64  # ranks that one answer names
_REMEMBERED = 64  # failed calls
_MOST_ARRIVALS = 1 << 14
"""Messages and connections that are awaited, or came before their steps."""


class Links:
    """The connections of this rank. Its coroutines run on the thread of the event loop.

    A *call* is one save or load, including its asynchronous completion, with the same number on all
    ranks. Its steps are numbered, too, so messages of several calls do not mix.
    """

    def __init__(
        self, rank: int, size: int, store: JobStore, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.rank, self.size, self.store = rank, size, store
        self.parent = parent_of(rank) if rank else None
        self.children = children_of(rank, size)
        self.steps: WeakValueDictionary[int, Step] = WeakValueDictionary()
        self.counts = {"messages": 0, "bytes": 0}
        """What this rank has sent."""
        self._links: dict[int, Link] = {}
        self._arrivals: dict[tuple[int, int, int, int], asyncio.Future[Any]] = {}
        self._failures: OrderedDict[int, asyncio.Future[Verdict]] = OrderedDict()
        self._reports: dict[int, Verdict] = {}
        self._ended: dict[int, str] = {}
        self._cause, self._failed_at = Verdict({}), -math.inf
        self._listener = Listener(self._on_greeting)
        self._has_address = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._connecting = False
        self._loop = loop

    # Called by other threads.

    def verdict(self, call: int) -> Verdict | None:
        """Why this call has failed, if it has."""
        failure = self._failures.get(call)
        if failure is None or not failure.done():
            return None
        return failure.result()

    def last_failure(self) -> int:
        """The highest number of a call that has failed, or 0."""
        last = 0
        for call, failure in tuple(self._failures.items()):
            if failure.done():
                last = max(last, call)
        return last

    def close(self) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._close)

    def sockets(self) -> list[socket.socket]:
        """All open sockets of this rank."""
        links = [link.socket for link in self._links.values()]
        return links + self._listener.sockets

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
                ended = {r: self._ended[r] for r in step.awaited if r in self._ended}
                if ended and (step.number > 1 or step.elapsed > _RETURN_SECONDS):
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
        """The answer to a neighbour that waits for this rank in a step: the rank it waits for."""
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
        now = time.monotonic()
        for rank in step.awaited - {asking}:
            link = self._links.get(rank)
            if link is None:
                missing[rank] = self._ended.get(rank, ABSENT)
            elif now - max(link.heard, step.began) > 3 * step.pause + 0.2:
                missing[rank] = SILENT
            elif link.state is not None and link.state[:2] == (step.call, step.number):
                missing |= link.state[2].missing
            else:
                missing[rank] = SLOW
            if len(missing) > _NAMED:
                break
        if ABSENT in missing.values() and self.store.is_silent(step.timeout):
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
        self._report(step.call, Verdict({}, describe_calls(calls)))
        return True

    def _warn(self, step: Step) -> None:
        after = warn_after()
        if step.warned or not step.awaited or step.elapsed < after:
            return
        if after > 0:
            step.warned = True
            missing = self._missing(step)
            whom = missing.text
            if missing.missing:
                whom = name_ranks(missing.missing)
            warn(self.rank, step.stage, whom, step.operation, step.path, step.timeout)

    # Failures: reported to rank 0, which sends one verdict to all.

    def _failure(self, call: int) -> asyncio.Future[Verdict]:
        if call not in self._failures:
            self._failures[call] = self._loop.create_future()
            while len(self._failures) > _REMEMBERED:
                oldest = next(iter(self._failures))
                if self.steps.get(oldest):
                    break  # a step of it still waits
                del self._failures[oldest]
                self._forget(oldest)
        return self._failures[call]

    def _report(self, call: int, verdict: Verdict) -> None:
        if self._failure(call).done():
            return
        words = verdict.missing.values()
        if words and all(word.startswith(CONSEQUENCES) for word in words):
            # Ranks that have raised for an earlier failure may end, or give up other calls.
            causes = self._cause.missing.values()
            lately = time.monotonic() - self._failed_at < _CAUSE_SECONDS
            if any(cause.startswith(ENDED) for cause in causes) or (
                lately and not all(cause.startswith(CONSEQUENCES) for cause in causes)
            ):
                verdict = self._cause
        first = call not in self._reports
        known = self._reports.setdefault(call, Verdict({}))
        merged = Verdict(verdict.missing | known.missing, known.text or verdict.text)
        if merged == known and not first:
            return
        self._reports[call] = merged
        seconds = _GRACE
        if self.parent is not None and self.parent in self._links:
            link = self._links[self.parent]
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
        sends = []
        for child in self.children:
            if child in self._links:
                send = self._links[child].send(FAILED, call, 0, "", packed)
                sends.append(asyncio.ensure_future(send))
        if sends:
            _, late = await asyncio.wait(sends, timeout=1.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*sends, return_exceptions=True)
        waiting = [step.call for step in tuple(self.steps.values()) if step.awaited]
        if all(other == call or self._failure(other).done() for other in waiting):
            # TCP repeats what was lost only after long pauses, so the next call connects afresh.
            for rank, word in verdict.missing.items():
                link = self._links.get(rank)
                if link is not None and word.startswith(SILENT):
                    link.shut()
                    self._lose(link, TimeoutError("it connects afresh"))
        if verdict.missing:
            self._cause, self._failed_at = verdict, time.monotonic()
        if not self._failure(call).done():
            self._failure(call).set_result(verdict)
        self._reports.pop(call, None)
        self._forget(call, except_kind=SENT)

    def _forget(self, call: int, except_kind: int | None = None) -> None:
        for key in tuple(self._arrivals):
            if key[2] == call and key[1] != except_kind:
                del self._arrivals[key]

    # Connections.

    def _listen_for_children(self) -> None:
        if self.children and not self._has_address:
            self._has_address = True
            self._spawn(self.store.publish(self.rank, self._listener))

    async def _connect(self, step: Step, known: str) -> None:
        """Connect to the parent; where that fails, the call fails. ``known``: how it has ended."""
        parent = cast("int", self.parent)
        patience = limits.CONNECT_SECONDS
        if known:
            patience = 0.0
        why = Verdict({parent: ABSENT})
        try:
            async with asyncio.timeout(max(0.0, 2 * step.timeout - step.elapsed)):
                token = await self.store.token()
                while parent not in self._links:
                    address = await self.store.find(parent)
                    try:
                        made = await connect(address, token, LINK, self.rank, 0, 0)
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
            if self.store.is_silent(step.timeout):
                why = Verdict({}, STORE_SILENT)
            self._report(step.call, why)
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
        elif (
            kind == DATA
            and self.verdict(call) is None
            and not self._arrival((rank, DATA, call, number)).done()
        ):
            self._arrival((rank, DATA, call, number)).set_result(accepted)
        else:
            accepted.close()

    def _add_link(self, rank: int, connection: socket.socket) -> Link:
        if rank in self._links:
            self._links[rank].shut()
            # Only the other end has seen it break. It connects when it sends its first message.
            for step in tuple(self.steps.values()):
                if rank in step.awaited:
                    pause = _DELIVERY if step.number > 1 else _RETURN_SECONDS
                    args = [step], rank, BROKEN
                    self._loop.call_later(pause, self._report_lost, *args)
        link = self._links[rank] = Link(rank, connection)
        self._ended.pop(rank, None)
        arrival = self._arrival((rank, LINK, 0, 0))
        if not arrival.done():
            arrival.set_result(None)
        self._spawn(self._read(link))
        return link

    async def _read(self, link: Link) -> None:
        try:
            while True:
                self._handle(link, await link.receive())
        except Exception as error:  # noqa: BLE001 - damaged bytes, or no memory for them
            if not isinstance(error, (OSError, EOFError)):
                logger.warning(
                    "a message of rank %d cannot be read: %r", link.rank, error
                )
            link.socket.close()
            if self._links.get(link.rank) is link:
                self._lose(link, error)

    def _lose(self, link: Link, error: Exception) -> None:
        del self._links[link.rank]
        self._arrivals.pop((link.rank, LINK, 0, 0), None)
        word = ENDED
        if isinstance(error, (EOFError, ConnectionError)):
            self._ended[link.rank] = word
        elif isinstance(error, OSError):  # a host that is silent; it may connect again
            word = f"{SILENT} ({error})"
        else:
            word = f"{BROKEN} ({error!r})"
        # After its last messages have reached the steps that wait for them. Steps that begin
        # meanwhile connect afresh.
        steps = [s for s in tuple(self.steps.values()) if link.rank in s.awaited]
        self._loop.call_later(_DELIVERY, self._report_lost, steps, link.rank, word)

    def _report_lost(self, steps: Sequence[Step], rank: int, word: str) -> None:
        if rank in self._links:  # connected again; the messages in between may be lost
            word = BROKEN
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
            if verdict.missing.get(self.rank) == BROKEN:
                verdict.missing[link.rank] = verdict.missing.pop(self.rank)
            self._report(call, verdict)
        elif kind == FAILED:
            self._spawn(self._spread(call, Verdict.unpacked(payload, self.size)))
        elif self.verdict(call) is None:
            arrival = self._arrival((link.rank, kind, call, number))
            if not arrival.done():
                arrival.set_result((label, payload))

    def _on_state(self, link: Link, call: int, number: int, state: Verdict) -> None:
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
            self._report(call, Verdict({}, describe_calls(calls)))

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

    def _close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        self._listener.close()
        for each in self.sockets():
            each.close()
