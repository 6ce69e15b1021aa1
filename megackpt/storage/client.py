"""Connections to buckets through obstore: endpoint, credentials, retries and errors."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from megackpt import events
from megackpt.errors import BackendError, StorageError

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

    Store = S3Store | GCSStore | AzureStore

P = ParamSpec("P")
T = TypeVar("T")

AMAZON = frozenset(("s3", "s3a"))
GOOGLE = frozenset(("gs",))
AZURE = frozenset(("az", "azure", "abfs", "abfss"))

PART = 8 << 20
"""Bytes of one request of a large transfer. One request sends an object of at most this size."""
RETRIES = 9
"""Times that obstore repeats a request, within three minutes: after errors 5xx and 429, and, where
the request has no condition, after a broken connection or a truncated body."""
PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds before the first repetition, about doubled for each further one, and the most."""
AT_ONCE = 16
"""Concurrent requests of one process, in addition to requests of multipart uploads."""

_STATUS = re.compile(r"status code: \d{3}[\w ]*")
_ANSWER = re.compile(
    r"<Code>(?P<code>\w+)</Code>\s*<Message>(?P<message>[^<]*)</Message>"
)
"""The XML in which S3, Google and Azure describe an error."""
_TRUNCATED = re.compile(" body|Requested .*, got")
_NO_BUCKET = frozenset(("NoSuchBucket", "ContainerNotFound"))
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_SETTINGS = ("AWS_", "GOOGLE_", "AZURE_")


@contextmanager
def request(doing: str, url: str) -> Iterator[None]:
    """Send requests to a store in this block. Raise StorageError if the store refuses them.

    Passes on FileNotFoundError of reads, and obstore's errors about objects that exist already or
    have changed.
    """
    refuse_forked()
    refused = load_obstore().exceptions
    try:
        yield
    except FileNotFoundError as error:
        if doing == "write" or any(code in str(error) for code in _NO_BUCKET):
            raise failure(doing, url, error) from error
        raise
    except (refused.AlreadyExistsError, refused.PreconditionError):
        raise
    except (refused.BaseError, OSError, ValueError) as error:
        raise failure(doing, url, error) from error


class TruncatedAnswer(StorageError):
    """A store has sent less than it announced, or than was requested."""


def repeated(call: Callable[P, T]) -> Callable[P, T]:
    """Make a function that reads repeat its requests once if an answer was truncated."""

    @functools.wraps(call)
    def twice(*args: P.args, **named: P.kwargs) -> T:
        try:
            return call(*args, **named)
        except TruncatedAnswer:
            events.count_retry()
            return call(*args, **named)

    return twice


def failure(doing: str, url: str, error: Exception) -> StorageError:
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
    kind = TruncatedAnswer if _TRUNCATED.search(text) and not status else StorageError
    return kind(f"cannot {doing} {url}: {text[:800]}")


def pool() -> ThreadPoolExecutor:
    """Return the threads for requests. A job sends requests, and waits for no other job."""
    refuse_forked()
    return _threads()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(AT_ONCE, "megackpt-bucket")


@functools.cache
def _first_process() -> int:
    """Return the process that sent the first request."""
    return os.getpid()


def refuse_forked() -> None:
    """Raise StorageError in a forked process: it has neither our threads nor obstore's."""
    if _first_process() != os.getpid():
        raise StorageError(
            f"process {os.getpid()} was forked from one that has used buckets, and "
            "cannot use them: start it by multiprocessing's 'spawn' or 'forkserver', or fork "
            "before the first use"
        )


def endpoint() -> str | None:
    """Return the endpoint of S3 that the environment sets, or None: Amazon's."""
    return next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), None)


@functools.cache
def load_obstore() -> ModuleType:
    """Return the package obstore. It is imported on first use."""
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise BackendError(
            "checkpoints in buckets need the package obstore: pip install obstore"
        ) from error
    return obstore


def connect(bucket: str) -> Store:
    """Return the store of a bucket, a URL without a path, by the environment's settings.

    Raises StorageError for a password in a URL: obstore would print it.
    """
    settings = tuple(
        sorted((k, v) for k, v in os.environ.items() if k.startswith(_SETTINGS))
    )
    for name, value in settings:
        if _names_place(name) and "@" in value:
            raise StorageError(
                f"{name} has an '@', and so a user or a password, in it: take them out. "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or GOOGLE_*, AZURE_*) set the "
                "credentials"
            )
    return _connect(bucket, settings)


def _names_place(setting: str) -> bool:
    return "ENDPOINT" in setting or "URL" in setting


@functools.lru_cache(maxsize=16)  # a store holds open connections
def _connect(bucket: str, settings: tuple[tuple[str, str], ...]) -> Store:
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
        "retry_config": {
            "max_retries": RETRIES,
            "backoff": {
                "init_backoff": timedelta(seconds=PAUSE),
                "max_backoff": timedelta(seconds=LONGEST_PAUSE),
                "base": 2,
            },
        },
    }
    if scheme in AMAZON:
        options |= _profile(dict(settings))
    try:
        store: Any = load_obstore().store.from_url(bucket, **options)
    except Exception as error:
        raise failure("open", bucket, error) from error
    return store  # type: ignore[no-any-return]


def _profile(settings: dict[str, str]) -> dict[str, Any]:
    """Return credentials from Amazon's files (profiles, single sign-on), which obstore ignores."""
    if "AWS_ACCESS_KEY_ID" in settings:
        return {}
    by_name = "AWS_PROFILE" in settings
    files = (
        settings.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        settings.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    if not by_name and not any(os.path.exists(os.path.expanduser(f)) for f in files):
        return {}  # obstore asks the machine
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
