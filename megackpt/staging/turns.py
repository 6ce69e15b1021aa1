"""Rows that do not fit under the cap: handed over piece by piece until the rest fits, which is copied then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megackpt.errors import BackendError
from megackpt.staging.copying import copy_rows, padded
from megackpt.staging.memory import Lease
from megackpt.staging.source import Staged, copy_out, piece_of


class Turns:
    """A Source of tensors that may be changed once ``settle`` has returned; each row can be had once.

    Nobody waits for ever. The lock is held to copy, never to wait. Writers take nothing but this lock: a piece's
    memory is their own and needs no room under the cap. Whoever settles waits for room, which writers alone make,
    those of earlier saves as they end and this one's with each piece that it takes: ``need`` goes down to nothing.
    If they end early, ``close`` makes it nothing at once.
    """

    def __init__(
        self, staged: Staged, blobs: Mapping[int, bytes], moved: Callable[[], None]
    ) -> None:
        self._staged = staged
        self._blobs = blobs
        self._moved = moved
        self._handed = np.zeros_like(staged.lengths)  # of each row's bytes
        self._need = int(padded(staged.lengths).sum())
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        self._starts: NDArray[np.int64] | None = (
            None  # in the arena: of what was left of each row
        )
        self._closed = False

    def need(self) -> int:
        """Bytes that what is left of all rows takes."""
        return self._need

    @property
    def settled(self) -> bool:
        """Has this nothing to do with the tensors any more?"""
        return self._closed or self._starts is not None

    def blocks(self, row: int) -> Iterator[memoryview]:
        if row in self._blobs:
            yield memoryview(self._blobs[row])
            return
        start, length = 0, int(self._staged.lengths[row])
        buffer = piece_of(length)
        while True:
            with self._lock:
                piece = self._rest(row, start)
                if piece is None:
                    stop = min(start + len(buffer), length)
                    piece = buffer[: stop - start]
                    copy_out(self._staged.tensor(row), start, stop, piece)
                    self._took(row, stop)
            self._moved()
            start += len(piece)
            yield piece.data
            if start == length:
                return

    def settle(self, lease: Lease) -> None:
        """Copy all that is left into an arena, which has room for it."""
        with self._lock:
            if self._closed:
                lease.release()
                return
            self._lease = lease
            lengths, handed = self._staged.lengths, self._handed
            room = padded(lengths - handed)
            starts = np.cumsum(room) - room
            mine = [
                row for row in np.flatnonzero(room).tolist() if row not in self._blobs
            ]
            copy_rows(
                self._staged,
                [row for row in mine if not handed[row]],
                starts,
                lease.arena,
            )
            for row in mine:
                if handed[row]:
                    into = lease.arena.memory[starts[row] :]
                    copy_out(
                        self._staged.tensor(row),
                        int(handed[row]),
                        int(lengths[row]),
                        into,
                    )
            lease.arena.ready()
            self._starts = starts
            self._let_go()

    def close(self) -> None:
        """The writing has ended, or its tensors are to be changed now: nothing more is handed over."""
        with self._lock:
            self._closed = True
            self._let_go()
            lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
        self._moved()

    def _let_go(self) -> None:
        """Of the tensors: they may be freed long before all is written."""
        self._need = 0
        self._staged = replace(self._staged, held=())

    def _rest(self, row: int, start: int) -> NDArray[np.uint8] | None:
        """The row from this byte on, where it was copied; None while it is to be had from the tensor."""
        if self._closed:
            raise BackendError(
                f"{self._staged.plan.row(row).shard} is not to be had any more: this save was given up"
            )
        if self._starts is None or self._lease is None:
            return None
        handed, left = int(self._handed[row]), int(self._staged.lengths[row]) - start
        if start < handed:
            raise BackendError(
                f"{self._staged.plan.row(row).shard} was asked for twice: its bytes were handed over before the rest "
                "was copied, and are not kept (the format must take each row once)"
            )
        first = int(self._starts[row]) + start - handed
        return self._lease.arena.memory[first : first + left]

    def _took(self, row: int, stop: int) -> None:
        if stop > self._handed[row]:
            before, after = padded(
                self._staged.lengths[row] - np.array((self._handed[row], stop))
            )
            self._need -= int(before - after)
            self._handed[row] = stop
