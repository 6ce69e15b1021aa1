"""New objects of a bucket, sent whole or in parts. A batch sends many small ones at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from megackpt.errors import StorageError
from megackpt.storage.client import PART, Client, failure, pool
from megackpt.storage.interface import Batch, FileWriter

if TYPE_CHECKING:
    from megackpt.storage.bucket import BucketStorage

_DEFAULT_PART = 16 << 20
"""Bytes of a part of an object of unknown size. They limit it to about 160 GiB."""
_MOST_PARTS = 10_000
_IN_FLIGHT = 4
"""Parts of one object in flight at a time."""
_WAITING = 32
"""Objects of one batch in flight at a time."""


class BucketWriter(FileWriter):
    """A new object. It appears, whole, when it is closed; nothing is visible before."""

    def __init__(self, bucket: BucketStorage, name: str) -> None:
        self._bucket = bucket
        self._name = name
        self._url = bucket.url(name)
        self._held: bytearray | None = bytearray()
        self._upload: Any = None
        self.part = _DEFAULT_PART
        self._position = 0
        self._why = ""  # set by a failure

    def expect(self, size: int) -> None:
        self.part = max(
            PART, -(-size * 21 // (20 * _MOST_PARTS))
        )  # a twentieth more than announced

    def write(self, buffers: Sequence[memoryview]) -> None:
        if self._held is None and self._upload is None:
            raise StorageError(f"cannot write {self._url}: it is closed")
        for view in buffers:
            if not view.nbytes:
                continue
            flat = view.cast("B")
            self._position += len(flat)
            if self._held is not None and len(self._held) + len(flat) <= PART:
                self._held += flat
            else:
                self._send(flat)

    def _send(self, flat: memoryview) -> None:
        if self._position > self.part * _MOST_PARTS:
            raise StorageError(
                f"cannot write {self._url}: it would be larger than {_MOST_PARTS} parts of "
                f"{self.part} bytes"
            )
        client = self._bucket.client
        try:
            if self._held is not None:
                held, self._held = self._held, None
                self._start(client)
                self._upload.write(held)
            for first in range(0, len(flat), self.part):
                self._upload.write(flat[first : first + self.part])
        except (client.obstore.exceptions.BaseError, OSError) as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> StorageError:
        found = failure("write", self._url, error)
        self._why = f"{found}; and "
        return found

    def _start(self, client: Client) -> None:
        if self._bucket.size(self._name) is not None:
            raise _taken(self._url)
        self._upload = client.obstore.open_writer(
            client.uploads,
            self._bucket.key(self._name),
            buffer_size=self.part,
            max_concurrency=_IN_FLIGHT,
        )

    @property
    def position(self) -> int:
        return self._position

    def close(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            if not self._bucket.put_if_absent(self._name, bytes(held)):
                raise _taken(self._url)
        elif self._upload is not None:
            self._finish()

    def _finish(self) -> None:
        client = self._bucket.client
        client.traffic.count(
            2 + -(-self._position // self.part), written=self._position
        )
        try:
            self._upload.flush()
        except (client.obstore.exceptions.BaseError, OSError) as error:
            found = self._failed(error)
            self.abort()
            raise found from error
        upload, self._upload = self._upload, None
        try:
            upload.close()
        except (client.obstore.exceptions.BaseError, OSError) as error:
            # The object was absent before. If only the answer was lost, it is complete now.
            if self._bucket.size(self._name) != self._position:
                raise failure("write", self._url, error) from error

    def abort(self) -> None:
        self._held = None
        upload, self._upload = self._upload, None
        if upload is None:
            return
        client = self._bucket.client
        try:
            upload.__exit__(StorageError, None, None)
        except (client.obstore.exceptions.BaseError, OSError) as error:
            raise StorageError(
                f"{self._why}{failure('give up the upload of', self._url, error)}"
            ) from error


def _taken(url: str) -> StorageError:
    return StorageError(f"cannot create {url}: an object of that name exists")


class BucketBatch(Batch):
    """Small objects in flight, many at a time. BucketWriter sends the large ones."""

    def __init__(self, bucket: BucketStorage) -> None:
        self._bucket = bucket
        self._waiting: deque[Future[None]] = deque()

    def create(self, name: str) -> FileWriter:
        return _BatchWriter(self._bucket, name, self._waiting)

    def close(self) -> None:
        try:
            while self._waiting:
                self._waiting.popleft().result()
        finally:
            self.abort()

    def abort(self) -> None:
        while self._waiting:
            job = self._waiting.popleft()
            if not job.cancel():
                job.exception()  # wait for the end of a running request


class _BatchWriter(BucketWriter):
    def __init__(
        self, bucket: BucketStorage, name: str, waiting: deque[Future[None]]
    ) -> None:
        super().__init__(bucket, name)
        self._waiting = waiting

    def close(self) -> None:
        if self._held is None:
            super().close()
            return
        if len(self._waiting) == _WAITING:
            self._waiting.popleft().result()
        self._waiting.append(pool().submit(super().close))
