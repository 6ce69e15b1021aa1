"""Saves that writers of this process have begun and not finished: torch tells a writer nothing of one that failed."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from weakref import WeakSet

from megackpt.checkpoint import Place
from megackpt.errors import SaveInProgress

_JOIN = 1.0  # seconds for a thread to end whose work has ended


@dataclass(eq=False)
class Begun:
    """One of them. ``thread``: that of torch's call; None for a save in three stages, which its writer's reset ends."""

    place: Place
    directory: str
    thread: threading.Thread | None
    over: bool = False

    def __post_init__(self) -> None:
        _unfinished.add(self)

    @property
    def is_here(self) -> bool:
        """May this thread say that it is over? A thread that begins another save has ended the one before."""
        return self.over or self.thread in (None, threading.current_thread())

    def finished(self) -> None:
        _unfinished.discard(self)

    def clear(self) -> None:
        """Remove what it has left."""
        self.finished()
        self.place.abort()

    def check_over(self, own: bool) -> None:
        """Raises SaveInProgress unless it is known to be over. ``own``: the writer that began it begins another one."""
        if self.thread is None and not self.over:
            raise SaveInProgress(
                f"a save in three stages to {self.directory} is not finalized in this process: finalize it, or "
                "reset() its writer"
            )
        if self.thread is None or self.is_here:
            return
        over = own  # the main thread does not end when its call does
        if self.thread is not threading.main_thread():
            self.thread.join(_JOIN)
            over = not self.thread.is_alive()
        if not over:
            raise SaveInProgress(
                f"another thread of this process ({self.thread.name}) is saving to {self.directory}; if that has "
                "failed: reset() its writer in that thread"
            )


_unfinished: WeakSet[Begun] = WeakSet()


def clear_ended(directory: str, own: Begun | None) -> None:
    """Clear away what saves to this directory, and the writer's own, have left. SaveInProgress if one is not over."""
    for begun in list(_unfinished):
        if begun is own or begun.directory == directory:
            begun.check_over(begun is own)
            begun.clear()
