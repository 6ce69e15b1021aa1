"""Notices: signals that say that this process will be ended, noted for every manager that listens.

One handler serves all of them; what was set before is put back when the last one no longer listens.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

_listening: dict[int, set[Notices]] = {}
_before: dict[int, Any] = {}


class Notices:
    """What one manager has heard."""

    heard = False

    def listen(self, *signals: int) -> None:
        for number in signals:
            before = signal.signal(number, _note)
            if before is not _note:
                _before[number] = before
            _listening.setdefault(number, set()).add(self)

    def close(self) -> None:
        """Raises ValueError outside the main thread where a handler is to be put back; then all is as it was."""
        for number, listeners in _listening.items():
            # A handler that others have set since stays.
            if listeners == {self} and signal.getsignal(number) is _note:
                before = _before[number]
                signal.signal(number, signal.SIG_DFL if before is None else before)
            listeners.discard(self)


def _note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    for notices in tuple(_listening[number]):
        notices.heard = True
