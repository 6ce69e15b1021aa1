"""When a run saves, and whether it ends soon: decisions that all ranks of a manager share.

One handler notes the signals that announce the end of this process for all managers. The previous
handler of a signal is restored when the last manager stops listening.
"""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FrameType
from typing import Any
from weakref import WeakSet

from megackpt.distributed import Group


class SaveDecisions(ABC):
    """The decisions of a manager.

    Args:
        save_interval: steps that this number divides are saved.
        save_every_minutes: a step is saved if this time has passed since the last save began.
        local_interval: steps that this number divides are saved on the hosts.
        should_save_fn: rank 0 calls it with a step; the step is saved if the result is true.
    """

    def __init__(
        self,
        save_interval: int | None,
        save_every_minutes: float | None,
        local_interval: int | None = None,
        should_save_fn: Callable[[int], bool] | None = None,
    ) -> None:
        is_number = type(save_interval) is int and save_interval > 0
        if save_interval is not None and not is_number:
            raise ValueError(
                f"save_interval is a number of steps or None, not {save_interval!r}"
            )
        if save_every_minutes is not None and not save_every_minutes > 0:
            raise ValueError(
                f"save_every_minutes is more than 0, or None, not {save_every_minutes!r}"
            )
        self._interval = save_interval
        self._minutes = save_every_minutes
        self._local_interval = local_interval
        self._should_save_fn = should_save_fn
        self._only_local: int | None = None  # a step that is not due in the storage
        self._last_save_began = time.monotonic()
        self._preemption = PreemptionNotice()
        self._listens = False
        self._is_preempted = False

    @abstractmethod
    def _group(self) -> Group: ...

    def on_signal(self, *signals: int) -> None:
        """Note these signals as a notice that this process will be ended. Only in the main thread.

        The handler has no further effect; ``preempted`` returns the result. ``close``, also in the
        main thread, restores the previous handlers.
        """
        self._preemption.listen(*signals)
        self._listens = True

    def preempted(self) -> bool:
        """Whether any rank has received a signal. Collective: one small vote.

        Call it once per training step, or once in several steps, and before ``should_save``. A
        signal that came between the two would otherwise end the run without a save.
        """
        self._vote()
        return self._is_preempted

    def should_save(self, step: int, *, last: bool = False) -> bool:
        """Whether to save this step; the same on all ranks. ``last``: it is the last of the run.

        Also true after a signal (``on_signal``): save, and end. Call ``preempted`` first, and
        end if that was true, after this save. Collective with ``should_save_fn``,
        ``save_every_minutes`` and after ``on_signal``, as the ranks' clocks and signals differ.

        It is true as well for the steps of a local tier; ``save`` writes these steps only to the
        hosts.
        """
        is_late = False
        if self._listens or self._minutes is not None:
            is_late = self._vote()
        is_due = self._interval is not None and step % self._interval == 0
        is_due = last or is_due or is_late or self._is_preempted
        is_due |= self._ask("should_save_fn", self._should_save_fn, step)
        is_local = self._local_interval is not None and step % self._local_interval == 0
        self._only_local = step if is_local and not is_due else None
        return is_due or is_local

    def _ask(
        self, name: str, function: Callable[[int], bool] | None, step: int
    ) -> bool:
        """The answer of a function of the caller on rank 0. All ranks raise its exception."""
        if function is None:
            return False
        with self._group() as group:
            return group.broadcast(name, lambda: bool(function(step)))

    def _vote(self) -> bool:
        """Agree on ``_is_preempted``, and on whether any rank finds a save late."""
        if self._is_preempted:
            return True
        is_late = False
        if self._minutes is not None:
            is_late = time.monotonic() - self._last_save_began >= self._minutes * 60
        with self._group() as group:
            votes = group.lowest([-int(self._preemption.received), -int(is_late)])
        self._is_preempted = votes[0] < 0
        return votes[1] < 0


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
