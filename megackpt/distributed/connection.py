"""The connection of a rank to one neighbour in the tree, which may break and be made again."""

from __future__ import annotations

import asyncio
import time

from megackpt.distributed.connection_states import Action, Condition, Event, State
from megackpt.distributed.diagnosis import Neighbour
from megackpt.distributed.messages import CollectiveStep, Link


class Connection:
    """``link`` is its socket in the states OPEN and READY."""

    def __init__(self, rank: int, loop: asyncio.AbstractEventLoop) -> None:
        self.rank = rank
        self.link: Link | None = None
        self.condition = Condition()
        self.ready = loop.create_future()
        """Done in the state READY."""

    def on(self, event: Event) -> Action:
        self.condition, action = self.condition.after(event, time.monotonic())
        if self.condition.state is State.READY:
            if not self.ready.done():
                self.ready.set_result(None)
        elif self.ready.done():
            self.ready = self.ready.get_loop().create_future()
        return action

    def seen(self, step: CollectiveStep) -> Neighbour:
        """A snapshot for a collective step that waits for this neighbour."""
        if self.link is None:
            return Neighbour(self.rank, self.condition)
        answer = None
        if self.link.state is not None:
            *asked, state = self.link.state
            if asked == [step.call, step.number]:
                answer = state.missing
        return Neighbour(self.rank, self.condition, self.link.heard, answer)
