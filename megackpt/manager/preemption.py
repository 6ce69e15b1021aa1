"""Signals that announce the end of this process. One handler notes them for all managers.

The previous handler of a signal is restored when the last manager stops listening.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any
from weakref import WeakSet

_listeners: dict[int, WeakSet[PreemptionNotice]] = {}
_previous_handlers: dict[int, Any] = {}


class PreemptionNotice:
    """Whether one manager has received a signal."""

    received = False

    def listen(self, *signals: int) -> None:
        """Listen to these signals. Only in the main thread."""
        for number in signals:
            # First: the signal may come as soon as the handler is set.
            _listeners.setdefault(number, WeakSet()).add(self)
            previous = signal.signal(number, _handle)
            if previous is not _handle:
                _previous_handlers[number] = previous

    def close(self) -> None:
        """Stop listening.

        Raises ValueError if a handler has to be restored and this is not the main thread; no
        handler has changed then.
        """
        for number, listeners in _listeners.items():
            if set(listeners) == {self}:
                _restore_handler(number)
            listeners.discard(self)


def _restore_handler(number: int) -> bool:
    """Return False, and keep the handler, if other code has set a handler since."""
    if signal.getsignal(number) is not _handle:
        return False
    previous = _previous_handlers[number]
    signal.signal(number, signal.SIG_DFL if previous is None else previous)
    return True


def _handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    listeners = tuple(_listeners.get(number, ()))
    for notice in listeners:
        notice.received = True
    # Other code may have saved this handler, and set it again after the last manager was closed.
    if not listeners and _restore_handler(number):
        signal.raise_signal(number)


def _after_fork_in_child() -> None:
    """A forked process is not the trainer, and ends as it would without a manager."""
    for number in _listeners:
        _restore_handler(number)
    _listeners.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
