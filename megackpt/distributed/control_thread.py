"""The thread that runs the event loop of all trees of this process, and its end in a fork."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from contextlib import suppress
from selectors import PollSelector
from typing import Protocol
from weakref import WeakSet


class HasSockets(Protocol):
    def sockets(self) -> list[socket.socket]: ...


trees: WeakSet[HasSockets] = WeakSet()
"""A forked child closes its copies of the sockets of these."""
_loop: asyncio.AbstractEventLoop | None = None
_starting = threading.Lock()


def running_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process, which runs on a separate thread."""
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
    """In a forked child: close its copies of sockets, so that ranks notice the parent's end."""
    global _loop, _starting  # noqa: PLW0603
    _starting = threading.Lock()
    for tree in tuple(trees):
        for each in tree.sockets():
            with suppress(OSError):
                os.close(each.detach())
    trees.clear()
    if _loop is not None:
        _of_parents.append(_loop)  # never collected: its end would touch the parent's
        _loop = None


os.register_at_fork(after_in_child=_forked)
