"""The states of a connection to a neighbour in the tree: a table of state and event to action.

========== =====================================================================
state      meaning
========== =====================================================================
ABSENT     there is no socket: none was made, or the last one broke
CONNECTING this rank connects to its parent, which may be starting
RETURNING  this rank connects to its parent, which has closed the last socket
OPEN       there is a socket; the first message (``HELLO``) has not come
READY      the first message has come: both ends know the same failed calls
CLOSED     the neighbour has closed the last socket: it has ended, or it returns
========== =====================================================================

``TABLE`` decides what happens to the connection, ``AFTER_LOSS`` what happens to a collective step
that waits for it. So both tables together say which collective steps survive a cut. ``Tree`` has
one method for each action except NOTHING.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class State(enum.Enum):
    ABSENT = "absent"
    CONNECTING = "connecting"
    RETURNING = "returning"
    OPEN = "open"
    READY = "ready"
    CLOSED = "closed"


class Event(enum.Enum):
    NEEDED = "a collective step needs the parent"
    OPENED = "a socket is connected"
    GREETED = "the first message comes"
    ENDED = "the other end closes the socket"
    SILENT = "the other host is silent"
    DAMAGED = "a message cannot be read"
    REFUSED = "the parent cannot be reached"


class Action(enum.Enum):
    NOTHING = "do nothing"
    CONNECT = "connect to the parent"
    GREET = "send the failed calls, and read"
    REPLACE = "fail the later collective steps that wait, and greet"
    RESUME = "repeat the messages of first collective steps, and go on"
    LOSE = "let the collective steps that wait survive or fail"
    REPORT = "fail the collective step"


ABSENT, CONNECTING, RETURNING, OPEN, READY, CLOSED = State
NEEDED, OPENED, GREETED, ENDED, SILENT, DAMAGED, REFUSED = Event
NOTHING, CONNECT, GREET, REPLACE, RESUME, LOSE, REPORT = Action

TABLE: dict[tuple[State, Event], tuple[State, Action]] = {
    (ABSENT, NEEDED): (CONNECTING, CONNECT),
    (ABSENT, OPENED): (OPEN, GREET),
    (CONNECTING, NEEDED): (CONNECTING, NOTHING),
    (CONNECTING, OPENED): (OPEN, GREET),
    (CONNECTING, REFUSED): (ABSENT, REPORT),
    (RETURNING, NEEDED): (RETURNING, NOTHING),
    (RETURNING, OPENED): (OPEN, GREET),
    (RETURNING, REFUSED): (ABSENT, REPORT),
    (OPEN, NEEDED): (OPEN, NOTHING),
    (OPEN, OPENED): (OPEN, REPLACE),
    (OPEN, GREETED): (READY, RESUME),
    (OPEN, ENDED): (CLOSED, LOSE),
    (OPEN, SILENT): (ABSENT, LOSE),
    (OPEN, DAMAGED): (ABSENT, LOSE),
    (READY, NEEDED): (READY, NOTHING),
    (READY, OPENED): (OPEN, REPLACE),
    (READY, GREETED): (READY, RESUME),
    (READY, ENDED): (CLOSED, LOSE),
    (READY, SILENT): (ABSENT, LOSE),
    (READY, DAMAGED): (ABSENT, LOSE),
    (CLOSED, NEEDED): (RETURNING, CONNECT),
    (CLOSED, OPENED): (OPEN, GREET),
}
"""No other event comes in these states. A socket that was replaced makes no event."""


class Recovery(enum.Enum):
    CONNECT = "connect again, and repeat the message"
    AWAIT = "wait until the child has connected again"
    FAIL = "fail"


AFTER_LOSS = {
    ("first", "parent"): Recovery.CONNECT,
    ("first", "child"): Recovery.AWAIT,
    ("later", "parent"): Recovery.FAIL,
    ("later", "child"): Recovery.FAIL,
}
"""What a collective step does whose neighbour is lost while it waits: by number, and neighbour."""


class Condition(NamedTuple):
    """The state of a connection, and when it came into this state."""

    state: State = State.ABSENT
    since: float = 0.0

    def after(self, event: Event, now: float) -> tuple[Condition, Action]:
        state, action = TABLE[self.state, event]
        if state is self.state:
            return self, action
        return Condition(state, now), action
