"""A prefix of a bucket (S3, Google, Azure) as a Storage. Objects appear whole, or not at all."""

from __future__ import annotations

import errno
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from megackpt import limits
from megackpt.errors import CorruptCheckpoint, StorageError
from megackpt.storage import client
from megackpt.storage.interface import (
    Batch,
    FileUpdater,
    FileWriter,
    Storage,
    is_url,
    unsafe_names,
)
from megackpt.storage.local import LocalStorage
from megackpt.storage.objects import BucketBatch, BucketReader, BucketWriter

_URL = re.compile(
    r"(?P<bucket>(?P<scheme>[a-z0-9]+)://[^/]+)(?:/+(?P<prefix>.*))?", re.DOTALL
)
PROBE = ".megackpt-probe-"
"""Prefix of the names of probe objects. A leftover one belongs to a process that died."""
_NAMES = re.compile(r".*(?: - |(?=status code))")
"""What precedes the cause in an error: it differs between objects, and a cause is said once."""
SINGLE_WRITER = "MEGACKPT_SINGLE_WRITER"
"""Environment variable. 1 promises that no two jobs save to one place at once.

It serves stores without conditional puts.
"""
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

    in_order = True
    replaced: Version | None = None
    """The version of an object that ``create`` replaces."""

    def __init__(self, url: str, moved: Callable[[], object] = int) -> None:
        self.moved = moved
        if ":" in url.partition("://")[2].partition("/")[0]:
            raise StorageError(  # without the URL, which may hold a secret
                "a URL of a bucket has no ':' before the bucket's name ends: the environment sets "
                "the endpoint and the credentials (AWS_*, GOOGLE_*, AZURE_*)"
            )
        found = _URL.fullmatch(url.rstrip("/"))
        known = client.AMAZON | client.GOOGLE | client.AZURE
        if found is None or found["scheme"] not in known:
            raise StorageError(
                f"{url!r} is not a URL of a bucket: it should be s3://BUCKET/FOLDER "
                "(or gs://, az://). For a model of the Hugging Face Hub give the directory that "
                "huggingface_hub.snapshot_download(NAME) returns"
            )
        self.bucket, self._prefix = found["bucket"], found["prefix"] or ""
        if self._prefix and unsafe_names([self._prefix]):
            raise StorageError(f"{url!r} has a part that is empty, '.' or '..'")
        self.location = f"{self.bucket}/{self._prefix}".rstrip("/")
        self.obstore, self.store = client.load_obstore(), client.connect(self.bucket)

    def __reduce__(self) -> tuple[type[BucketStorage], tuple[str]]:
        return type(self), (self.location,)

    def key(self, name: str) -> str:
        """Return the key of a name. CorruptCheckpoint if it could lead out of the root."""
        if unsafe_names([name]) or any(ord(c) < 32 for c in name):
            raise CorruptCheckpoint(
                f"{name!r} is not a name of a file inside a checkpoint"
            )
        if not self._prefix:
            return name
        return f"{self._prefix}/{name}"

    def url(self, name: str) -> str:
        if not name:
            return self.location
        return f"{self.location}/{name}"

    def folder(self, name: str, moved: Callable[[], object] = int) -> BucketStorage:
        """Return a folder of this root as a storage. It may be empty."""
        self.key(name)
        return BucketStorage(self.url(name), moved)

    def create(self, name: str) -> FileWriter:
        self.key(name)
        return BucketWriter(self, name)

    def batch(self) -> Batch:
        return BucketBatch(self)

    def update(self, name: str) -> FileUpdater:
        self.key(name)
        return BucketWriter(self, name)

    def put(self, name: str, data: bytes) -> None:
        with self._request("write", name) as key:
            self.obstore.put(self.store, key, data, use_multipart=False)

    def copy(self, source: Storage, name: str, to: str, nbytes: int) -> str:
        """Copy an object within the store: see ``Batch.link``.

        A copy that has failed may exist, or may appear later, with the same bytes. It is removed.
        """
        if not isinstance(source, BucketStorage) or source.bucket != self.bucket:
            return f"the step before is not in {self.bucket}"
        refused = f"a copy within {self.bucket} failed: "
        try:
            size = source.size(name)
            if size is None or size < nbytes:
                return "a file of the step before is missing or truncated"
            with self._request("copy to", to) as key:
                self.obstore.copy(self.store, source.key(name), key)
            if self._is_copied(to, size):
                return ""
            refused += "the object has another size"
        except (
            StorageError,
            FileNotFoundError,
            self.obstore.exceptions.BaseError,
        ) as error:
            text = str(client.failure("copy", name, error)).splitlines()[0]
            refused += _NAMES.sub("", text)
        self.remove_objects([to])
        return refused

    def _is_copied(self, name: str, size: int) -> bool:
        """Return whether a copy has all bytes. Stores may ignore the source of a copy.

        Azure may answer before the copy is complete. The object is empty until then.
        """
        is_waited = self.bucket.partition("://")[0] in client.AZURE
        until = time.monotonic() + limits.COPY_SECONDS
        pause = client.PAUSE
        while self.size(name) != size:
            if not is_waited or time.monotonic() > until:
                return False
            self.moved()
            time.sleep(pause)
            pause = min(2 * pause, client.LONGEST_PAUSE)
        self.moved()
        return True

    def put_if_match(self, name: str, data: bytes, version: Version | None) -> bool:
        """Like ``put``, but only if the object has this version. None: only if it is absent.

        Else the object stays, and the result is False. But if the object has the same content, the
        result is True: an earlier try of this put may have succeeded, and its answer been lost.
        """
        if _single_writer():  # no other writer acts between these
            if self.version(name) != version:
                return False
            self.put(name, data)
            return True
        mode: Any = "create"
        if version is not None:
            mode = {k: v for k, v in version._asdict().items() if v is not None}
        refused = self.obstore.exceptions
        with self._request("write", name) as key:
            try:
                self._put_if(key, data, mode)
                return True
            except FileNotFoundError:
                if version is None:
                    raise
            except (refused.AlreadyExistsError, refused.PreconditionError):
                with suppress(FileNotFoundError):
                    answer = self.obstore.get(self.store, key)
                    same_size = answer.meta["size"] == len(data)
                    return same_size and bytes(answer.bytes()) == data
        return False  # the object to replace is gone

    def _put_if(self, key: str, data: bytes, mode: Any) -> None:
        """Send a conditional put. After a broken connection, send it again, at most three times.

        obstore does not, because the outcome is unknown. If it succeeded, the next put is refused.
        """
        for number in range(4):
            try:
                self.obstore.put(self.store, key, data, mode=mode, use_multipart=False)
                return
            except self.obstore.exceptions.GenericError as error:
                is_answer = "status code" in str(error)
                if is_answer or number == 3:
                    raise
            time.sleep(client.PAUSE * 4**number)

    def open(self, name: str) -> BucketReader:
        try:
            return BucketReader(self, name)
        except FileNotFoundError:
            raise _absent(self.url(name)) from None

    def get(self, name: str, limit: int = 1 << 32) -> bytes:
        return self.get_version(name, limit)[0]

    def contents(self, names: Sequence[str], limits: Sequence[int]) -> Iterator[bytes]:
        return client.pool().map(self.get, names, limits)

    @client.repeated
    def get_version(self, name: str, limit: int = 1 << 32) -> tuple[bytes, Version]:
        """Like ``get``, but return the version of the object as well."""
        try:
            with self._request("read", name) as key:
                answer = self.obstore.get(self.store, key)
                meta = answer.meta
                if meta["size"] > limit:
                    raise CorruptCheckpoint(
                        f"{self.url(name)} has {meta['size']} bytes: at most {limit} are valid"
                    )
                data = bytes(answer.bytes())
        except FileNotFoundError:
            raise _absent(self.url(name)) from None
        if len(data) != meta["size"]:
            raise client.TruncatedAnswer(
                f"cannot read {self.url(name)}: {len(data)} of {meta['size']} bytes arrived"
            )
        return data, Version(meta["e_tag"], meta["version"])

    def refetch(self) -> bool:
        return True

    def size(self, name: str) -> int | None:
        meta = self._head(name)
        if meta is None:
            return None
        return int(meta["size"])

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        if len(names) < _FEW:
            return super().sizes(names)
        sizes = {name: size for name, (size, _) in self.objects().items()}
        return [sizes.get(name) for name in names]

    def modified(self, name: str) -> float | None:
        meta = self._head(name)
        if meta is None:
            return None
        return float(meta["last_modified"].timestamp())

    def version(self, name: str) -> Version | None:
        """Return the current version of an object; None if it is absent."""
        meta = self._head(name)
        if meta is None:
            return None
        return Version(meta["e_tag"], meta["version"])

    def _head(self, name: str) -> Any:
        with suppress(FileNotFoundError), self._request("look at", name) as key:
            return self.obstore.head(self.store, key)
        return None

    @contextmanager
    def _request(self, doing: str, name: str) -> Iterator[str]:
        """Send requests about an object, whose key this yields. See ``client.request``."""
        key = self.key(name)
        with client.request(doing, self.url(name)):
            yield key

    @client.repeated
    def objects(self, name: str = "") -> dict[str, tuple[int, float]]:
        """Return the size and time of each object below a folder, by name.

        One request lists a thousand objects.
        """
        prefix, above = self._listed(name)
        found: dict[str, tuple[int, float]] = {}
        with client.request("list", self.url(name)):
            for page in self.obstore.list(self.store, prefix or None, chunk_size=1000):
                for one in page:
                    seconds = one["last_modified"].timestamp()
                    found[one["path"][len(above) :]] = one["size"], seconds
                if len(found) > _LISTED:
                    raise CorruptCheckpoint(
                        f"{self.location} holds more than {_LISTED} objects: it is not a "
                        "checkpoint"
                    )
        return found

    @client.repeated
    def list(self, name: str = "") -> list[str]:
        prefix, above = self._listed(name)
        with client.request("list", self.url(name)):
            found = self.obstore.list_with_delimiter(self.store, prefix or None)
        paths = [*found["common_prefixes"], *(one["path"] for one in found["objects"])]
        # Some tools leave an empty object with the name of the folder itself.
        names = {path[len(above) :] for path in paths if path.startswith(above)}
        return sorted(names - {""})

    def _listed(self, name: str) -> tuple[str, str]:
        """Return a folder's key, and the prefix of the keys of its entries."""
        prefix = self._prefix
        if name:
            prefix = self.key(name)
        return prefix, f"{prefix}/".lstrip("/")

    def delete(self, name: str) -> None:
        key = self.key(name)
        # Two calls: Google's store ends a removal of several objects at an absent object.
        self._delete([f"{key}/{below}" for below in self.objects(name)])
        self._delete([key])

    def remove_objects(self, names: Sequence[str]) -> None:
        """Remove these objects only. An absent one is not an error."""
        self._delete([self.key(name) for name in names])

    def _delete(self, keys: Sequence[str]) -> None:
        with client.request("remove", self.location):
            try:
                self.obstore.delete(self.store, keys)
            except FileNotFoundError:  # the store stops at an absent object
                for key in keys:
                    with suppress(FileNotFoundError):
                        self.obstore.delete(self.store, key)


class SingleObject(BucketStorage):
    """One object, to which every name leads.

    ``overwrite``: a write replaces the present version of the object; else it must be absent.
    """

    def __init__(self, url: str, overwrite: bool) -> None:
        super().__init__(url)
        if overwrite:
            self.replaced = self.version("")

    def key(self, name: str) -> str:  # noqa: ARG002
        return self._prefix

    def url(self, name: str) -> str:  # noqa: ARG002
        return self.location


_proven: set[tuple[str, str | None]] = set()
"""Buckets, with their endpoints, that have refused as they should in this process."""


def conditional_puts(storage: BucketStorage) -> bool:
    """Return whether this store honours conditional puts: only create, or only replace one version.

    Some stores ignore the condition and report success. Some do not know it (501). A few puts of
    a probe object decide, once for each bucket and process. StorageError if the probe cannot be
    put. With a single writer the answer is True, without a probe.
    """
    known = (storage.bucket, client.endpoint())
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
    first = storage.put_if_match(name, b"1", None)
    _, version = storage.get_version(name, limit=1)
    return (
        first
        and not storage.put_if_match(name, b"2", None)
        and storage.put_if_match(name, b"3", version)
        and not storage.put_if_match(name, b"4", version)
        and storage.get(name, limit=1) == b"3"
    )


def _single_writer() -> bool:
    return os.environ.get(SINGLE_WRITER) == "1"


def _absent(url: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)


def root_at(place: str | os.PathLike[str], create: bool = False) -> Storage:
    """Return the storage of a directory or a bucket. ``create`` makes an absent directory."""
    if is_url(place):
        return BucketStorage(str(place))
    return LocalStorage(place, create)
