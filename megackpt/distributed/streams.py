"""Streams of bytes between two ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megackpt.distributed.failures import DEPARTURES

_FILLING = 1 << 20


class Stream:
    """``nbytes`` bytes in pieces of memory. The next piece is taken from the iterator when one is
    used up.

    Both ends know ``nbytes``, and may cut it into different pieces. An error of the iterator is
    kept in ``error``: the transfer continues with undefined bytes, so that its peer does not wait.
    """

    def __init__(self, nbytes: int, pieces: Iterable[memoryview]) -> None:
        self.nbytes = nbytes
        self.error: BaseException | None = None
        self._pieces = pieces

    def pieces(self) -> Iterator[memoryview]:
        """Memory of ``nbytes`` bytes, to be read or filled. Exhaust it to use the last piece."""
        left = self.nbytes
        try:
            for piece in self._pieces:
                yield piece[:left]
                left -= len(piece)
            if left > 0:
                raise ValueError(
                    f"a stream of {self.nbytes} bytes ends {left} too early"
                )
        except DEPARTURES:
            raise
        except BaseException as error:  # noqa: BLE001 - raised on all ranks by the next message
            self.error = error
        while left > 0:
            yield memoryview(bytearray(min(left, _FILLING)))
            left -= _FILLING


def copy(pieces: Iterator[memoryview], into: Iterator[memoryview]) -> None:
    """Copy bytes to memory that is cut differently."""
    leaving = memoryview(b"")
    for room in into:
        filled = 0
        while filled < len(room):
            if not leaving:
                leaving = next(pieces)
                continue
            count = min(len(leaving), len(room) - filled)
            room[filled : filled + count] = leaving[:count]
            leaving, filled = leaving[count:], filled + count
    for _ in pieces:  # empty ones
        continue
