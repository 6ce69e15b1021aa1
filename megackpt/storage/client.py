"""Access to one bucket through obstore: endpoint, credentials, retries and errors."""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from megackpt.errors import BackendError, StorageError

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, RetryConfig, S3Store

    Store = S3Store | GCSStore | AzureStore

AMAZON = frozenset(("s3", "s3a"))
GOOGLE = frozenset(("gs",))
AZURE = frozenset(("az", "azure", "abfs", "abfss"))

PART = 8 << 20
"""Bytes of one request of a large transfer. One request sends an object of at most this size."""
TRIES = 10
"""Tries of one request before it has failed: about half a minute, with the pauses below."""
PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds before the second try, doubled for each further one, and the most. Up to half is cut."""
AT_ONCE = 16
"""Concurrent requests of one process, in addition to those of multipart uploads."""

_FOREVER = re.compile(r"status code: (4(?!08|09|25|29)\d\d|501)")
"""Answers that a retry would repeat: the request is wrong, or forbidden."""
_STATUS = re.compile(r"status code: \d{3}[\w ]*")
_ANSWER = re.compile(
    r"<Code>(?P<code>\w+)</Code>\s*<Message>(?P<message>[^<]*)</Message>"
)
"""The XML in which S3, Google and Azure describe an error."""
_NO_BUCKET = frozenset(("NoSuchBucket", "ContainerNotFound"))
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_SETTINGS = ("AWS_", "GOOGLE_", "AZURE_")

T = TypeVar("T")


class Interrupted(Exception):
    """An incomplete or inconclusive answer: send the request again."""


class Traffic:
    """Requests and bytes so far. Each try counts; retries inside obstore do not."""

    def __init__(self) -> None:
        self.requests = 0
        self.read = 0
        self.written = 0
        self._lock = Lock()

    def count(self, requests: int, read: int = 0, written: int = 0) -> None:
        with self._lock:
            self.requests += requests
            self.read += read
            self.written += written


class Client:
    """Sends a storage's requests to its bucket. ``bucket`` is a URL without a path."""

    def __init__(self, bucket: str) -> None:
        self.obstore = _obstore()
        self.traffic = Traffic()
        self.store, self.uploads = _stores(bucket, _settings())

    def ask(self, doing: str, url: str, request: Callable[[], T]) -> T:
        """Send a request, and retry it if it may succeed later. StorageError when that fails.

        Passes on FileNotFoundError, and obstore's errors about objects that exist already or have
        changed.
        """
        _refuse_forked()
        refused = self.obstore.exceptions
        for attempt in range(1, TRIES + 1):
            self.traffic.count(1)
            try:
                return request()
            except (
                FileNotFoundError,
                refused.AlreadyExistsError,
                refused.PreconditionError,
            ):
                raise
            except (refused.BaseError, OSError, ValueError, Interrupted) as error:
                if attempt == TRIES or not passing(error, refused):
                    raise failure(doing, url, error, attempt) from error
            time.sleep(
                min(PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE) * random.uniform(0.5, 1)
            )
        raise StorageError(f"cannot {doing} {url}: TRIES allows no request")


def passing(error: Exception, refused: ModuleType) -> bool:
    """Return whether the same request may succeed a little later."""
    if isinstance(error, Interrupted | OSError):
        return True
    return isinstance(error, refused.GenericError) and not _FOREVER.search(str(error))


def failure(doing: str, url: str, error: Exception, tries: int = 1) -> StorageError:
    """Return the error to raise when the object store refuses."""
    text = str(error).partition("\n\nDebug source")[0].strip()
    status, answer = _STATUS.search(text), _ANSWER.search(text)
    if answer and answer["code"] in _NO_BUCKET:
        scheme, _, path = url.partition("://")
        return StorageError(
            f"there is no bucket {scheme}://{path.partition('/')[0]}. Is its name right, and the "
            f"endpoint ({endpoint() or 'the default of ' + scheme + '://'})? "
            "megackpt creates no buckets"
        )
    if status and answer:
        text = f"{status[0]}, {answer['code']}: {answer['message']}"
    times = f" (tried {tries} times)" if tries > 1 else ""
    return StorageError(f"cannot {doing} {url}{times}: {text[:800]}")


def pool() -> ThreadPoolExecutor:
    """Return the threads for requests. A job sends requests, and waits for no other job."""
    _refuse_forked()
    return _threads()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(AT_ONCE, "megackpt-bucket")


@functools.cache
def _asking() -> int:
    """Return the process that sent the first request.

    A process that it forks has neither its threads nor obstore's.
    """
    return os.getpid()


def _refuse_forked() -> None:
    if _asking() != os.getpid():
        raise StorageError(
            f"process {os.getpid()} was forked from one that has used buckets, and "
            "cannot use them: start it by multiprocessing's 'spawn' or 'forkserver', or fork "
            "before the first use"
        )


def endpoint() -> str | None:
    """Return the endpoint of S3 that the environment sets, or None: Amazon's."""
    return next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), None)


def _obstore() -> ModuleType:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise BackendError(
            "checkpoints in buckets need the package obstore: pip install 'megackpt[objectstore]'"
        ) from error
    return obstore


def _settings() -> tuple[tuple[str, str], ...]:
    """Return the environment's settings. Refuse a password in a URL: obstore would print it."""
    settings = tuple(
        sorted((k, v) for k, v in os.environ.items() if k.startswith(_SETTINGS))
    )
    spoilt = [name for name, value in settings if _names_place(name) and "@" in value]
    if spoilt:
        raise StorageError(
            f"{spoilt[0]} has an '@', and so a user or a password, in it: take them out. "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or GOOGLE_*, AZURE_*) set the credentials"
        )
    return settings


def _names_place(setting: str) -> bool:
    return "ENDPOINT" in setting or "URL" in setting


@functools.lru_cache(maxsize=16)
def _stores(bucket: str, settings: tuple[tuple[str, str], ...]) -> tuple[Store, Store]:
    """Return two stores of the bucket with these settings: without and with obstore's retries.

    The first is for single requests, which ``Client.ask`` retries. The second is for multipart
    uploads. They are cached, because they hold open connections.
    """
    repeated: RetryConfig = {
        "max_retries": TRIES - 1,
        "backoff": {
            "init_backoff": timedelta(seconds=PAUSE),
            "max_backoff": timedelta(seconds=LONGEST_PAUSE),
            "base": 2,
        },
    }
    return _store(bucket, settings, {"max_retries": 0}), _store(
        bucket, settings, repeated
    )


def _store(
    bucket: str, settings: tuple[tuple[str, str], ...], retries: RetryConfig
) -> Store:
    scheme = bucket.partition("://")[0]
    plain = any(
        value.startswith("http://") for name, value in settings if _names_place(name)
    )
    options: dict[str, Any] = {
        # A part may be large and a link slow; a peer that is silent for a minute is dead.
        "client_options": {
            "allow_http": plain,
            "timeout": "10m",
            "read_timeout": "60s",
        },
        "retry_config": retries,
    }
    if scheme in AMAZON:
        options |= _profile(dict(settings))
    try:
        store: Any = _obstore().store.from_url(bucket, **options)
    except Exception as error:
        raise failure("open", bucket, error) from error
    return store  # type: ignore[no-any-return]


def _profile(settings: dict[str, str]) -> dict[str, Any]:
    """Return credentials from Amazon's files (profiles, single sign-on), which obstore ignores."""
    files = [os.path.expanduser(f"~/.aws/{name}") for name in ("credentials", "config")]
    files += [
        settings[name]
        for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE")
        if name in settings
    ]
    by_name = "AWS_PROFILE" in settings
    if "AWS_ACCESS_KEY_ID" in settings or not (
        by_name or any(map(os.path.exists, files))
    ):
        return {}  # those of the environment, or of the machine
    if importlib.util.find_spec("boto3") is None:
        if by_name:
            raise StorageError(
                "AWS_PROFILE is set, and the files of profiles are read by boto3: "
                "pip install boto3"
            )
        return {}
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except Exception as error:
        if by_name:
            raise failure(
                "use", f"the profile {settings['AWS_PROFILE']!r}", error
            ) from error
        return {}  # files without credentials
