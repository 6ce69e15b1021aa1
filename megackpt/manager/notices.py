"""Notices: signals that say that this process will be ended, noted for every manager that listens.

One handler serves all of them; what was set before is put back when the last one no longer listens.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any
from weakref import WeakSet

_listening: dict[int, WeakSet[Notices]] = {}
_before: dict[int, Any] = {}


class Notices:
    """What one manager has heard."""

    heard = False

    def listen(self, *signals: int) -> None:
        for number in signals:
            _listening.setdefault(number, WeakSet()).add(
                self
            )  # first: the signal may come at once
            before = signal.signal(number, _note)
            if before is not _note:
                _before[number] = before

    def close(self) -> None:
        """Raises ValueError outside the main thread where a handler is to be put back; then all is as it was."""
        for number, listeners in _listening.items():
            if set(listeners) == {self}:
                _put_back(number)
            listeners.discard(self)


def _put_back(number: int) -> bool:
    """A handler that others have set since stays."""
    ours = signal.getsignal(number) is _note
    if ours:
        before = _before[number]
        signal.signal(number, signal.SIG_DFL if before is None else before)
    return ours


def _note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    listeners = tuple(_listening.get(number, ()))
    for notices in listeners:
        notices.heard = True
    if not listeners and _put_back(
        number
    ):  # others have set this handler again, which they had found
        signal.raise_signal(number)


def _forked() -> None:
    """A process that is forked is no trainer, and ends as it would without this one."""
    for number in _listening:
        _put_back(number)
    _listening.clear()


os.register_at_fork(after_in_child=_forked)
