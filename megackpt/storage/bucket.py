"""A prefix of a bucket (S3, Google, Azure) as a Storage. Objects appear whole, or not at all."""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from megackpt.errors import CorruptCheckpoint, StorageError
from megackpt.storage import client as clients
from megackpt.storage.client import Client, Interrupted, Traffic
from megackpt.storage.fetching import BucketReader
from megackpt.storage.interface import (
    Batch,
    FileUpdater,
    FileWriter,
    Storage,
    unsafe_names,
)
from megackpt.storage.objects import BucketBatch, BucketWriter

_URL = re.compile(
    r"(?P<bucket>(?P<scheme>[a-z0-9]+)://[^/]+)(?:/+(?P<prefix>.*))?", re.DOTALL
)
PROBE = ".megackpt-probe-"
"""Prefix of the names of probe objects. A leftover one belongs to a process that died."""
SINGLE_WRITER = "MEGACKPT_SINGLE_WRITER"
"""Environment variable. 1 promises that no two jobs save to one place at once.

It serves stores without conditional puts.
"""
_PAGE = 1000
"""Objects that one request lists, or removes."""
_LISTED = 1 << 23
"""Most objects of a listing. A longer one would fill the memory, and is not a checkpoint's."""
_FEW = 4
"""From this number of objects on, a listing replaces one request for each."""


class Version(NamedTuple):
    """The version of an object's content, as the store names it. Opaque."""

    e_tag: str | None
    version: str | None


class BucketStorage(Storage):
    """The objects below a URL such as ``s3://bucket/run/iter_100``.

    The constructor sends no request to the store. Folders are prefixes of names: a folder exists
    while an object is in it. The environment sets the endpoint and the credentials (AWS_*,
    GOOGLE_*, AZURE_*; boto3, if installed, reads Amazon's profiles). A created object appears when
    it is closed. An object that exists already may be detected only then.
    """

    def __init__(self, url: str) -> None:
        if ":" in url.partition("://")[2].partition("/")[0]:
            raise StorageError(  # without the URL, which may hold a secret
                "a URL of a bucket has no ':' before the bucket's name ends: the environment sets "
                "the endpoint and the credentials (AWS_*, GOOGLE_*, AZURE_*)"
            )
        found = _URL.fullmatch(url.rstrip("/"))
        if (
            found is None
            or found["scheme"] not in clients.AMAZON | clients.GOOGLE | clients.AZURE
        ):
            raise StorageError(
                f"{url!r} is not a URL of a bucket: it should be s3://BUCKET/FOLDER "
                "(or gs://, az://)"
            )
        self.bucket, self._prefix = found["bucket"], found["prefix"] or ""
        if self._prefix and unsafe_names([self._prefix]):
            raise StorageError(f"{url!r} has a part that is empty, '.' or '..'")
        self.location = f"{self.bucket}/{self._prefix}".rstrip("/")
        self.client = Client(self.bucket)

    def __reduce__(self) -> tuple[type[BucketStorage], tuple[str]]:
        return type(self), (self.location,)

    @property
    def traffic(self) -> Traffic:
        """Requests and bytes of this storage so far."""
        return self.client.traffic

    def key(self, name: str) -> str:
        """Return the key of a name. CorruptCheckpoint if it could lead out of the root."""
        if unsafe_names([name]) or any(ord(c) < 32 for c in name):
            raise CorruptCheckpoint(
                f"{name!r} is not a name of a file inside a checkpoint"
            )
        return f"{self._prefix}/{name}" if self._prefix else name

    def url(self, name: str) -> str:
        return f"{self.location}/{name}" if name else self.location

    def folder(self, name: str) -> BucketStorage:
        """Return a folder of this root as a storage. It may be empty."""
        self.key(name)
        return BucketStorage(self.url(name))

    def create(self, name: str) -> FileWriter:
        self.key(name)
        return BucketWriter(self, name)

    def batch(self) -> Batch:
        return BucketBatch(self)

    def update(self, name: str) -> FileUpdater:
        self.key(name)
        raise StorageError(
            f"cannot fill {self.url(name)} at several places: an object is written once, "
            "from front to back. "
            "hint: save as torch_dist or zarr, or save to a file system and copy the files"
        )

    def put(self, name: str, data: bytes) -> None:
        url, key = self.url(name), self.key(name)
        put = partial(
            self.client.obstore.put, self.client.store, key, data, use_multipart=False
        )
        try:
            self.client.ask("write", url, put)
        except FileNotFoundError as error:
            raise clients.failure("write", url, error) from error
        self.client.traffic.count(0, written=len(data))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self.put_if_match(name, data, None)

    def put_if_match(self, name: str, data: bytes, version: Version | None) -> bool:
        """Like ``put``, but only if the object has this version. Else change nothing; return False.

        None: only if the object is absent.
        """
        if _single_writer():  # no other writer acts between these
            if self.version(name) != version:
                return False
            self.put(name, data)
            return True
        if version is None:
            return self._put_if(name, data, "create")
        return self._put_if(
            name, data, {k: v for k, v in version._asdict().items() if v is not None}
        )

    def _put_if(self, name: str, data: bytes, mode: Any) -> bool:
        """Send a conditional put.

        After a lost answer, the store refuses our own second try. Then the content decides.
        """
        url, key, refused = (
            self.url(name),
            self.key(name),
            self.client.obstore.exceptions,
        )
        doubtful = False

        def request() -> bool:
            nonlocal doubtful
            try:
                self.client.obstore.put(
                    self.client.store, key, data, mode=mode, use_multipart=False
                )
                self.client.traffic.count(0, written=len(data))
                return True
            except (refused.AlreadyExistsError, refused.PreconditionError) as error:
                self.client.traffic.count(1)
                found = self._whole(key, len(data))
                if found is None and mode == "create":  # an undecided race
                    raise Interrupted(str(error)) from error
                return doubtful and found == data
            except (refused.BaseError, OSError):
                doubtful = True
                raise

        try:
            return self.client.ask("write", url, request)
        except FileNotFoundError as error:
            if mode != "create":
                return False  # the object to replace is gone
            raise clients.failure("write", url, error) from error

    def _whole(self, key: str, size: int) -> bytes | None:
        """Return an object's content: None if it is absent, b"" if it has another size."""
        try:
            answer = self.client.obstore.get(self.client.store, key)
        except FileNotFoundError:
            return None
        return bytes(answer.bytes()) if answer.meta["size"] == size else b""

    def open(self, name: str) -> BucketReader:
        url, key = self.url(name), self.key(name)
        try:
            return self.client.ask(
                "open", url, lambda: BucketReader(self.client, key, url)
            )
        except FileNotFoundError:
            raise _absent(url) from None

    def get(self, name: str, limit: int = 1 << 32) -> bytes:
        return self.get_version(name, limit)[0]

    def contents(self, names: Sequence[str]) -> Iterator[bytes]:
        return clients.pool().map(self.get, names)

    def get_version(self, name: str, limit: int = 1 << 32) -> tuple[bytes, Version]:
        """Like ``get``, but return the version of the object as well."""
        url, key = self.url(name), self.key(name)

        def request() -> tuple[bytes, Version]:
            answer = self.client.obstore.get(self.client.store, key)
            meta = answer.meta
            if meta["size"] > limit:
                raise CorruptCheckpoint(
                    f"{url} has {meta['size']} bytes: at most {limit} are valid"
                )
            data = bytes(answer.bytes())
            self.client.traffic.count(0, read=len(data))
            if len(data) != meta["size"]:
                raise Interrupted(
                    f"it has {meta['size']} bytes, but {len(data)} arrived"
                )
            return data, Version(meta["e_tag"], meta["version"])

        try:
            return self.client.ask("read", url, request)
        except FileNotFoundError:
            raise _absent(url) from None

    def size(self, name: str) -> int | None:
        meta = self._head(name)
        return None if meta is None else int(meta["size"])

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        if len(names) < _FEW:
            return super().sizes(names)
        found = self.objects()
        return [found[name][0] if name in found else None for name in names]

    def modified(self, name: str) -> float | None:
        meta = self._head(name)
        return None if meta is None else float(meta["last_modified"].timestamp())

    def version(self, name: str) -> Version | None:
        """Return the current version of an object; None if it is absent."""
        meta = self._head(name)
        return None if meta is None else Version(meta["e_tag"], meta["version"])

    def _head(self, name: str) -> Any:
        url, key = self.url(name), self.key(name)
        try:
            return self.client.ask(
                "look at", url, lambda: self.client.obstore.head(self.client.store, key)
            )
        except FileNotFoundError:
            return None

    def objects(self, name: str = "") -> dict[str, tuple[int, float]]:
        """Return the size and time of each object below a folder, by name.

        One request lists a thousand objects.
        """
        prefix, above = self._listed(name)

        def request() -> dict[str, tuple[int, float]]:
            found: dict[str, tuple[int, float]] = {}
            for page in self._pages(prefix):
                for one in page:
                    found[one["path"][len(above) :]] = (
                        one["size"],
                        one["last_modified"].timestamp(),
                    )
                self._check_listed(len(found))
            return found

        return self.client.ask("list", self.url(name), request)

    def list(self, name: str = "") -> list[str]:
        prefix, above = self._listed(name)

        def request() -> Any:
            return self.client.obstore.list_with_delimiter(
                self.client.store, prefix or None
            )

        found = self.client.ask("list", self.url(name), request)
        paths = [
            *found["common_prefixes"],
            *(meta["path"] for meta in found["objects"]),
        ]
        self._check_listed(len(paths))
        # Some tools leave an empty object with the name of the folder itself.
        return sorted(
            {
                path[len(above) :]
                for path in paths
                if path.startswith(above) and path != above
            }
        )

    def _listed(self, name: str) -> tuple[str, str]:
        """Return a folder's key, and the prefix of the keys of its entries."""
        prefix = self.key(name) if name else self._prefix
        return prefix, f"{prefix}/" if prefix else ""

    def _pages(self, prefix: str) -> Iterator[Any]:
        pages = self.client.obstore.list(
            self.client.store, prefix or None, chunk_size=_PAGE
        )
        for number, page in enumerate(pages):
            self.client.traffic.count(1 if number else 0)  # the caller counts the first
            yield page

    def _check_listed(self, count: int) -> None:
        if count > _LISTED:
            raise CorruptCheckpoint(
                f"{self.location} holds more than {_LISTED} objects: it is not a checkpoint"
            )

    def delete(self, name: str) -> None:
        url, key = self.url(name), self.key(name)

        def request() -> None:
            for page in self._pages(key):
                self._delete([one["path"] for one in page])
            self._delete([key])

        self.client.ask("remove", url, request)

    def remove_objects(self, names: Sequence[str]) -> None:
        """Remove these objects only. An absent one is not an error."""
        for first in range(0, len(names), _PAGE):
            keys = [self.key(name) for name in names[first : first + _PAGE]]
            self.client.ask("remove", self.url(""), partial(self._delete, keys))

    def _delete(self, keys: Sequence[str]) -> None:
        self.client.traffic.count(1)
        try:
            self.client.obstore.delete(self.client.store, keys)
        except FileNotFoundError as error:
            if len(keys) > 1:  # another process removes them, too; some may remain
                raise Interrupted(str(error)) from error


_proven: set[tuple[str, str | None]] = set()
"""Buckets, with their endpoints, that have refused as they should in this process."""


def conditional_puts(storage: BucketStorage) -> bool:
    """Return whether this store honours conditional puts: only create, or only replace one version.

    Some stores ignore the condition and report success. Others do not know it (501). A few puts of
    a probe object decide, once for each bucket and process. StorageError if the probe cannot be
    put. With a single writer the answer is True, without a probe.
    """
    known = (storage.bucket, clients.endpoint())
    if known not in _proven and not _single_writer():
        name = f"{PROBE}{uuid.uuid4().hex}"
        try:
            refuses = _refuses(storage, name)
        except StorageError as error:
            with suppress(StorageError):  # the first error says more
                storage.delete(name)
            if "status code: 501" not in str(error):
                raise
            return False
        storage.delete(name)
        if not refuses:
            return False
        _proven.add(known)
    return True


def _refuses(storage: BucketStorage, name: str) -> bool:
    first = storage.put_if_absent(name, b"1")
    _, version = storage.get_version(name, limit=1)
    return (
        first
        and not storage.put_if_absent(name, b"2")
        and storage.put_if_match(name, b"3", version)
        and not storage.put_if_match(name, b"4", version)
        and storage.get(name, limit=1) == b"3"
    )


def _single_writer() -> bool:
    return os.environ.get(SINGLE_WRITER) == "1"


def _absent(url: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
