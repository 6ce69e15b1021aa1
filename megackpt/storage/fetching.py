"""Reads of an object of a bucket. Few large, checked requests serve many small reads."""

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
"""Bytes that opening fetches: all of a small object, the head of a large one."""
_GAP = 1 << 20
"""Unwanted bytes, at most, fetched between expected spans. They take about a request's time."""
_AHEAD, _KEPT = 4, 6
"""Parts in flight while one is read, and parts held at most."""


class BucketReader(FileReader):
    """An object as of its opening. A read raises CheckpointReplaced if it was replaced since.

    Construct it within ``Client.ask``: it raises FileNotFoundError, and errors that need a retry.
    """

    def __init__(self, client: Client, key: str, url: str) -> None:
        self._client = client
        self._key = key
        self._url = url
        self._parts: list[tuple[int, int]] = []
        self._coming: dict[int, Future[memoryview]] = {}  # in order of last use
        self._lock = Lock()
        self._head = memoryview(b"")
        meta = self._glance()
        self.size = int(meta["size"])
        self._tag = meta["e_tag"]

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
                f"{self._url} ends at byte {self.size}: {missing} bytes "
                f"from byte {stop - missing} on are missing"
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
            wait(jobs)  # no write after the caller has its memory back
        for job in jobs:
            job.result()

    def _expected(self, start: int, stop: int) -> range:
        """Return the expected parts that hold these bytes; empty unless they hold all."""
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
        """Return a part, present or in flight. Request the parts after it."""
        with self._lock:
            for n in range(number, min(number + _AHEAD, len(self._parts))):
                if n not in self._coming:
                    self._coming[n] = pool().submit(self._fetch, *self._parts[n])
            part = self._coming[number] = self._coming.pop(number)
            self._forget(_KEPT)
            return part

    def _forget(self, kept: int) -> None:
        """Drop the oldest parts. They are not cancelled: another thread may wait for one."""
        while len(self._coming) > kept:
            del self._coming[next(iter(self._coming))]

    def _fill(self, start: int, views: list[memoryview]) -> None:
        _scatter(self._fetch(start, start + sum(map(len, views))), views)

    def _fetch(self, start: int, stop: int) -> memoryview:
        """Fetch these bytes: one request, and more only after a short answer."""
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
                f"requested bytes {start} to {stop}, received {len(data)} from byte {first} on"
            )
        return data

    def close(self) -> None:
        with self._lock:
            while self._coming:
                self._coming.popitem()[1].cancel()


def _joined(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Merge sorted spans that overlap or nearly touch."""
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
    """Divide the memory at the boundaries of requests."""
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
    """Copy the data into the views, one after the other. Return the rest of the views."""
    done = 0
    for number, view in enumerate(views):
        part = data[done : done + len(view)]
        view[: len(part)] = part
        done += len(part)
        if done == len(data):
            return [view[len(part) :], *views[number + 1 :]]
    return []
