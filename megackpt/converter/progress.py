"""How far a conversion is, as plain lines: for logs, and wherever no bar can be drawn."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO


class Lines:
    """A ``progress`` for ``convert``: a line every ``pause`` seconds, and one at the end of what took longer.

    Without a ``stream`` (a process may have no stderr), and once it cannot be written to, nothing is written: no
    conversion fails of that.
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
        self._began = self._told = clock()
        self._first: int | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._stream is None:
            return
        now = self._clock()
        self._first = done if self._first is None else self._first
        late = now - self._told >= self._pause
        last = done >= total and self._told > self._began
        if not late and not last:
            return
        self._told = now
        rate = (done - self._first) / max(now - self._began, 1e-9)
        left = f", {(total - done) / rate:.0f} s left" if rate and done < total else ""
        share = 100 * done // max(total, 1)
        line = f"{share:3d}%  {done / 2**20:.0f} of {total / 2**20:.0f} MiB, {rate / 2**20:.0f} MiB/s{left}\n"
        try:
            self._stream.write(line)
            self._stream.flush()
        except (OSError, ValueError):  # full, or closed
            self._stream = None
