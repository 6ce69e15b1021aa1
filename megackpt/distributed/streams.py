"""Streams of bytes between two ranks, sent through small windows of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from megackpt.distributed.failures import DEPARTURES

Swap = Callable[[memoryview, memoryview], Callable[[], None]]
"""Starts to send one window and to receive another; the result waits for both. Empty ones are not sent."""

WINDOW = 4 << 20
"""Bytes of one message. A rank holds at most four such windows."""


class Stream:
    """``nbytes`` bytes in pieces of memory. The next piece is taken from the iterator when one is used up.

    Both ends know ``nbytes``, and may cut it into different pieces. An error of the iterator is kept in
    ``error``: the transfer continues with undefined bytes, so that the other rank does not wait.
    """

    def __init__(self, nbytes: int, pieces: Iterable[memoryview]) -> None:
        self.nbytes = nbytes
        self.error: BaseException | None = None
        self._pieces = iter(pieces)
        self._piece = memoryview(b"")

    def fill(self, window: memoryview) -> None:
        """Put the next bytes of the stream into all of this window."""
        self._move(window, leaving=True)

    def take(self, window: memoryview) -> None:
        """These are the next bytes of the stream."""
        self._move(window, leaving=False)

    def _move(self, window: memoryview, leaving: bool) -> None:
        if self.error is not None:
            return
        try:
            for piece, part in self._along(window):
                if leaving:
                    part[:] = piece
                else:
                    piece[:] = part
        except DEPARTURES:
            raise
        except BaseException as error:  # noqa: BLE001 - the next step raises it on all ranks
            self.error = error

    def _along(self, window: memoryview) -> Iterator[tuple[memoryview, memoryview]]:
        """Pairs of the stream's memory and the window's. A used piece is released at once."""
        while True:
            while not len(self._piece):
                following = next(self._pieces, None)
                if following is None:
                    if len(window):
                        raise ValueError(
                            f"a stream of {self.nbytes} bytes ends {len(window)} too early"
                        )
                    return
                self._piece = following
            if not len(window):
                return
            count = min(len(self._piece), len(window))
            yield self._piece[:count], window[:count]
            self._piece, window = self._piece[count:], window[count:]


def hand_over(outgoing: Stream, incoming: Stream, swap: Swap) -> None:
    """Transfer two streams: while one pair of windows is sent, the previous one is emptied and the next filled."""
    longest = max(outgoing.nbytes, incoming.nbytes)
    windows = [
        memoryview(bytearray(min(WINDOW, longest)))
        for _ in range(4 if longest > WINDOW else 2)
    ]
    arrived, wait = memoryview(b""), _nothing
    for number, start in enumerate(range(0, longest, WINDOW)):
        leaving, coming = windows[number % 2 * 2 :][:2]
        leaving, coming = (
            leaving[: max(0, outgoing.nbytes - start)],
            coming[: max(0, incoming.nbytes - start)],
        )
        outgoing.fill(leaving)
        begun = swap(leaving, coming)
        wait()
        incoming.take(arrived)
        arrived, wait = coming, begun
    wait()
    incoming.take(arrived)


def within(leaving: memoryview, coming: memoryview) -> Callable[[], None]:
    """The Swap of a rank with itself."""
    coming[:] = leaving
    return _nothing


def _nothing() -> None:
    """Nothing to wait for."""
