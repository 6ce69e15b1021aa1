"""Progress as plain lines, for logs and where no bar can be drawn."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO


class ProgressLines:
    """Writes a line every ``pause`` seconds, and one at the end of what took longer.

    Writes nothing without a ``stream`` (a process may have no stderr), or after it refused a line:
    no operation fails because of its progress.
    """

    def __init__(
        self,
        stream: TextIO | None,
        pause: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._pause = pause
        self._clock = clock
        self._started = self._written = clock()
        self._first: int | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._stream is None:
            return
        now = self._clock()
        if self._first is None:
            self._first = done
        last = done >= total and self._written > self._started
        if now - self._written < self._pause and not last:
            return
        self._written = now
        rate = (done - self._first) / max(now - self._started, 1e-9)
        line = f"{100 * done // max(total, 1):3d}%  "
        line += (
            f"{done / 2**20:.0f} of {total / 2**20:.0f} MiB, {rate / 2**20:.0f} MiB/s"
        )
        if rate and done < total:
            line += f", {(total - done) / rate:.0f} s left"
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # full, or closed
            self._stream = None
