"""Reading an object of a bucket: few large requests for many small wishes, each answer compared with its question."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from threading import Lock
from typing import Any

from megackpt.errors import CheckpointReplaced, CorruptCheckpoint
from megackpt.storage.client import PART, Client, Interrupted, pool
from megackpt.storage.interface import FileReader

_GLANCE = 64 << 10
"""Bytes that opening fetches along: a small object is then known, and of a large one the head."""
_GAP = 1 << 20
"""Between spans that are expected, up to so many unwanted bytes are fetched along: what a request costs in time."""
_AHEAD, _KEPT = 4, 6
"""Parts that are under way while one is read, and those that are held."""


class BucketReader(FileReader):
    """An object as it was when it was opened: if it is replaced meanwhile, reading says so.

    To be made by ``Client.ask``: raises FileNotFoundError, and what may be tried again.
    """

    def __init__(self, client: Client, key: str, url: str) -> None:
        self._client = client
        self._key = key
        self._url = url
        self._parts: list[tuple[int, int]] = []
        self._coming: dict[int, Future[memoryview]] = {}  # the one used last at the end
        self._lock = Lock()
        self._head = memoryview(b"")
        told = self._glance()
        self.size = int(told["size"])
        self._tag = told["e_tag"]

    def _glance(self) -> Any:
        obstore, store = self._client.obstore, self._client.store
        try:
            answer = obstore.get(store, self._key, options={"range": (0, _GLANCE)})
        except obstore.exceptions.GenericError as error:
            if "status code: 416" not in str(error):
                raise
            self._client.traffic.count(1)
            return obstore.head(store, self._key)  # an empty object has no range
        head = memoryview(answer.bytes())
        self._client.traffic.count(0, read=len(head))
        if answer.range[0] == 0:
            self._head = head
        return answer.meta

    def expect(self, spans: Iterable[tuple[int, int]]) -> None:
        parts: list[tuple[int, int]] = []
        for start, stop in _joined(
            sorted((start, min(stop, self.size)) for start, stop in spans)
        ):
            parts += [
                (first, min(first + PART, stop)) for first in range(start, stop, PART)
            ]
        with self._lock:
            self._forget(0)
            self._parts = parts

    def read_into(self, start: int, buffers: Sequence[memoryview]) -> None:
        views = [b.cast("B") for b in buffers if b.nbytes]
        stop = start + sum(map(len, views))
        if stop > self.size:
            missing = stop - max(start, self.size)
            raise CorruptCheckpoint(
                f"{self._url} ends at byte {self.size}: {missing} bytes from byte {stop - missing} on are missing"
            )
        if stop <= len(self._head):
            _scatter(self._head[start:stop], views)
            return
        if expected := self._expected(start, stop):
            for number in expected:
                first, last = self._parts[number]
                data = self._part(number).result()
                views = _scatter(
                    data[max(start - first, 0) : min(stop, last) - first], views
                )
            return
        mine, *others = _split(start, views)
        jobs = [pool().submit(self._fill, *part) for part in others]
        try:
            self._fill(*mine)
        finally:
            wait(jobs)  # nobody writes into memory that was given back
        for job in jobs:
            job.result()

    def _expected(self, start: int, stop: int) -> range:
        """The parts that these bytes are in, if all of them are."""
        first = number = bisect_right(self._parts, (start, self.size + 1)) - 1
        while (
            0 <= number < len(self._parts)
            and self._parts[number][0] <= start < self._parts[number][1]
        ):
            start = self._parts[number][1]
            number += 1
            if start >= stop:
                return range(first, number)
        return range(0)

    def _part(self, number: int) -> Future[memoryview]:
        """A part that is here or coming; and send for those after it."""
        with self._lock:
            for n in range(number, min(number + _AHEAD, len(self._parts))):
                if n not in self._coming:
                    self._coming[n] = pool().submit(self._fetch, *self._parts[n])
            part = self._coming[number] = self._coming.pop(number)
            self._forget(_KEPT)
            return part

    def _forget(self, kept: int) -> None:
        """Not cancelled: another thread may be waiting for it."""
        while len(self._coming) > kept:
            del self._coming[next(iter(self._coming))]

    def _fill(self, start: int, views: list[memoryview]) -> None:
        _scatter(self._fetch(start, start + sum(map(len, views))), views)

    def _fetch(self, start: int, stop: int) -> memoryview:
        """These bytes, by one request if all of them come."""
        whole: list[memoryview] = []
        while start < stop:
            whole.append(
                self._client.ask("read", self._url, partial(self._request, start, stop))
            )
            start += len(whole[-1])
        return whole[0] if len(whole) == 1 else memoryview(b"".join(whole))

    def _request(self, start: int, stop: int) -> memoryview:
        options: dict[str, Any] = {"range": (start, stop)}
        if self._tag is not None:
            options["if_match"] = self._tag
        obstore = self._client.obstore
        try:
            answer = obstore.get(self._client.store, self._key, options=options)
            first, data = answer.range[0], memoryview(answer.bytes())
        except (FileNotFoundError, obstore.exceptions.PreconditionError) as error:
            raise CheckpointReplaced(
                f"{self._url} was replaced or removed while it was being read; read it again"
            ) from error
        self._client.traffic.count(0, read=len(data))
        if first != start or not 0 < len(data) <= stop - start:
            raise Interrupted(
                f"bytes {start} to {stop} were asked for, {len(data)} from byte {first} on came"
            )
        return data

    def close(self) -> None:
        with self._lock:
            while self._coming:
                self._coming.popitem()[1].cancel()


def _joined(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Sorted spans, those that overlap or nearly touch as one."""
    begin, end = 0, -1
    for start, stop in spans:
        if end < 0 or start > end + _GAP:
            yield begin, end
            begin = start
        end = max(end, stop)
    yield begin, end


def _split(
    start: int, views: list[memoryview]
) -> Iterator[tuple[int, list[memoryview]]]:
    """The same memory, cut where requests are."""
    part: list[memoryview] = []
    room = PART
    for view in views:
        while len(view) > room:
            part.append(view[:room])
            yield start, part
            view, part, start, room = view[room:], [], start + PART, PART
        part.append(view)
        room -= len(view)
    yield start, part


def _scatter(data: memoryview, views: list[memoryview]) -> list[memoryview]:
    """Put the data into the views, one after the other; what remains of them."""
    done = 0
    for number, view in enumerate(views):
        part = data[done : done + len(view)]
        view[: len(part)] = part
        done += len(part)
        if done == len(data):
            return [view[len(part) :], *views[number + 1 :]]
    return []
