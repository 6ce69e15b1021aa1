"""Ranks on one event loop whose clock is a number: the real ``Tree``, and pipes in place of sockets.

A call of the job has two steps; each is a gather and a broadcast. One rank is late: it enters a
step when the test says so. So the other ranks wait in the step while something happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megackpt.distributed import calls, connection, messages, rank_tree
from megackpt.distributed.connection_states import State
from megackpt.distributed.diagnosis import CAUSE_SECONDS, RETURN_SECONDS
from megackpt.distributed.messages import CallFailed, CollectiveStep, Verdict

TIMEOUT = 20.0
SETTLED = 0.6
"""Seconds in which the ranks have done all that an event leads to, but for what waits longer."""
AGES = 3.0
"""Seconds in which two jobs may differ that count as the same."""
HELD = 8.0
"""Seconds for which a network holds packets back."""
DAMAGED = messages._HEADER.pack(messages.STATE, 0, 1, 1, 3) + b"{{{"


BREAKS = ("cut", "half", "silent", "damage", "hold")
"""Of a link: both ends see it closed; only the child does; the system gives it up; the parent gets
a damaged message; the network holds packets back."""


class VirtualLoop(asyncio.BaseEventLoop):
    """The clock goes on when no callback is ready."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self._selector = self

    def time(self) -> float:
        return self.now

    def select(self, timeout: float | None) -> list[Any]:
        assert timeout is not None, "every rank waits, and no timer runs"
        self.now += max(timeout, 1e-6)  # a clock never stops
        return []

    def _process_events(self, events: list[Any]) -> None:
        assert not events

    def _write_to_self(self) -> None:
        pass

    async def sock_sendall(self, end: Any, data: Any) -> None:
        end.send(bytes(data))

    async def sock_recv_into(self, end: Any, room: Any) -> int:
        while not (ready := end.ready()):
            await end.wait()
        data = ready[: len(room)] if isinstance(ready, bytearray) else b""
        room[: len(data)] = data
        del end.arrived[: len(data)]
        return len(data)


class End:
    """One end of a pipe. ``error`` is what the system reports to the reader and the writer."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.other: End = self
        self.arrived = bytearray()
        self.error: Exception | None = None
        self.held = 0.0
        self.woken = asyncio.Event()

    def send(self, data: bytes) -> None:
        if self.error is not None:
            raise BrokenPipeError
        self.other.arrived += data
        self.other.woken.set()

    def ready(self) -> bytearray | bool:
        """The bytes that have arrived; True at the end; False before."""
        if self.held > self.loop.now:
            return False
        if self.arrived:
            return self.arrived
        if self.error is None:
            return False
        if isinstance(self.error, EOFError):
            return True
        raise self.error

    async def wait(self) -> None:
        if self.held > self.loop.now:
            await asyncio.sleep(self.held - self.loop.now)
        else:
            self.woken.clear()
            await self.woken.wait()

    def fail(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            self.woken.set()

    def shutdown(self, _: int) -> None:
        self.fail(EOFError())
        self.other.fail(EOFError())

    def close(self) -> None:
        self.shutdown(2)

    def __enter__(self) -> End:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Listener:
    """In place of ``rendezvous.Listener``. Its address is the object."""

    def __init__(self, on_greeting: Any) -> None:
        self.on_greeting = on_greeting
        self.sockets: list[Any] = []
        self.is_open = True

    def close(self) -> None:
        self.is_open = False


class Store:
    def __init__(self) -> None:
        self.addresses: dict[int, Listener] = {}

    def is_silent(self, _: float = 0.0) -> bool:
        return False

    async def token(self) -> bytes:
        return b"secret"

    async def publish(self, rank: int, listener: Listener) -> None:
        self.addresses[rank] = listener

    async def find(self, rank: int) -> Listener:
        while rank not in self.addresses:
            await asyncio.sleep(0.01)
        return self.addresses[rank]


class Job:
    """``size`` ranks which have made one call together, and are in the next one."""

    def __init__(self, size: int, late: int, patch: pytest.MonkeyPatch) -> None:
        self.loop = VirtualLoop()
        clock = SimpleNamespace(monotonic=self.loop.time)
        for module in (calls, connection, messages, rank_tree):
            patch.setattr(module, "time", clock)
        patch.setattr(rank_tree, "running_loop", lambda: self.loop)
        patch.setattr(rank_tree, "Listener", Listener)
        patch.setattr(rank_tree, "connect", self.connect)
        self.size, self.late = size, late
        store = Store()
        self.trees = {
            rank: rank_tree.Tree(rank, size, store)  # type: ignore[arg-type]
            for rank in range(size)
        }
        self.suspects = set[int]()
        """The ranks that a verdict may name: each has ended, or is an end of a broken link."""
        self.call = 0
        self.is_awaited = False
        """Whether the late rank is outside of the step in which the other ranks are."""
        self.gate = asyncio.Event()
        self.ended = set[int]()
        self.outcomes: dict[int, Verdict | None] = {}
        """Of the ranks that have left the call: why it failed, or None."""
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.begin(late=None)
        self.go_on(SETTLED)
        assert set(self.outcomes.values()) == {None}
        self.begin(late)

    def go_on(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def begin(self, late: int | None) -> None:
        """All ranks begin the next call."""
        self.call += 1
        self.late = -1 if late is None else late
        self.gate, self.outcomes = asyncio.Event(), {}
        self.is_awaited = False
        for rank in self.trees.keys() - self.ended:
            self.tasks[rank] = self.loop.create_task(self.calls(rank, self.call))
        self.go_on(SETTLED)

    async def calls(self, rank: int, call: int) -> None:
        tree = self.trees[rank]
        try:
            for number in (1, 2):
                if rank == self.late:
                    self.is_awaited = True
                    await self.gate.wait()
                    self.gate, self.is_awaited = asyncio.Event(), False
                now = self.loop.now
                # The last step is kept until then, as by a ``ProcessGroup``.
                step = CollectiveStep(
                    call, number, TIMEOUT, "write", "save", "c", now, now
                )
                if number == 1:
                    tree.calls.begin(step, "save c")
                tree.calls.steps[call] = step
                merged = await tree.gather(step, b"x", b"".join)
                await tree.broadcast(step, merged)
        except CallFailed as failed:
            self.outcomes[rank] = failed.verdict
        else:
            self.outcomes[rank] = None
        if self.all_have_left() and not any(self.outcomes.values()):
            # All links work, but for packets that are late.
            held = (
                {child, messages.parent_of(child)}
                for child in range(1, self.size)
                if any(end.held > self.loop.now for end in self.ends(child))
            )
            self.suspects = self.ended.union(*held)

    async def connect(
        self, address: Listener, _: bytes, kind: int, rank: int, *step: int
    ) -> End:
        if not address.is_open:
            raise ConnectionRefusedError
        near, far = End(self.loop), End(self.loop)
        near.other, far.other = far, near
        address.on_greeting(far, kind, rank, *step)
        return near

    # What may happen. A link is named by the child at its lower end.

    def ends(self, child: int) -> list[End]:
        parent = messages.parent_of(child)
        sides = (self.trees[child], parent), (self.trees[parent], child)
        found = [tree._links.get(rank) for tree, rank in sides]
        return [link.socket for link in found if link is not None]  # type: ignore[misc]

    def may_happen(self) -> Iterator[tuple[str, int]]:
        yield "wait", 0
        if self.all_have_left() or self.is_awaited:
            yield "go", 0
        for rank in self.trees.keys() - self.ended:
            yield "end", rank
        for child in range(1, self.size):
            breaks = {0: (), 1: ("cut",), 2: BREAKS}[len(self.ends(child))]
            for event in breaks:
                yield event, child

    def happens(self, event: str, child: int) -> None:
        if event == "wait":
            self.go_on(max(RETURN_SECONDS, CAUSE_SECONDS) + 1)
        elif event == "go" and self.all_have_left():
            self.begin(self.late)
        elif event == "go":
            self.gate.set()
        elif event == "end":
            self.end(child)
        else:
            self.suspects |= {child, messages.parent_of(child)}
            self.disturb(event, self.ends(child))
        self.go_on(SETTLED)

    def disturb(self, event: str, ends: list[Any]) -> None:
        if event == "half":  # only the child sees the end
            ends = ends[:1]
        for end in ends:
            if event == "hold":
                end.held = self.loop.now + HELD
            elif event == "silent":
                end.arrived.clear()
                end.fail(TimeoutError())
            elif event != "damage":
                end.fail(EOFError())
        if event == "damage" and ends[0].error is None:
            ends[0].send(DAMAGED)

    def end(self, rank: int) -> None:
        """The process ends."""
        if rank in self.ended:
            return
        self.suspects.add(rank)
        self.ended.add(rank)
        self.outcomes.pop(rank, None)
        if rank == self.late:
            self.is_awaited = False
        self.go_on(0)  # all tasks have begun
        self.tasks[rank].cancel()
        self.trees[rank]._close()
        self.go_on(0)

    def close(self) -> None:
        for rank in [*self.trees]:
            self.end(rank)
        self.go_on(SETTLED)
        self.go_on(0)  # all tasks have begun
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.go_on(0)
        self.loop.close()

    def all_have_left(self) -> bool:
        return self.outcomes.keys() >= self.trees.keys() - self.ended

    def wait_for_all(self, seconds: float) -> None:
        """Until all ranks have left the call. The late rank is late no more."""
        until = self.loop.now + seconds
        while not self.all_have_left():
            assert self.loop.now < until, "a call hangs"
            self.gate.set()
            self.go_on(SETTLED)

    def signature(self) -> Any:
        """What the next events depend on. Two jobs of one signature go on in the same way."""
        left = [(rank, str(verdict)) for rank, verdict in self.outcomes.items()]
        ranks = frozenset(self.ended), frozenset(self.suspects), frozenset(left)
        ranks = *ranks, self.is_awaited
        return ranks, *(str([*self.known_to(tree)]) for tree in self.trees.values())

    def known_to(self, tree: Any) -> Any:
        def age(since: float) -> int:
            return int(min(self.loop.now - since, 2.5 * TIMEOUT) // AGES)

        past = tree.calls._past()
        yield str(past.verdict), age(past.failed), past.worked[0] > past.call
        step = tree.calls.steps.get(self.call)
        if step is not None:
            reported = tree.calls.outcome(self.call).reported
            yield (
                step.number,
                sorted(step.awaited),
                reported,
                tree.calls.left(self.call),
            )
            if step.awaited:
                yield age(step.began)
        for each in tree._connections.values():
            state, since = each.condition
            yield state, state is State.CLOSED and age(since)
            if each.link is not None:
                yield max(0, round((each.link.socket.held - self.loop.now) / AGES))
                if step is not None and step.awaited:
                    seen = each.seen(step)
                    yield seen.answer, age(seen.last_byte)
