"""A format's table of contents, and the small files that megackpt's index names."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from megackpt import strategies
from megackpt.backends.base import CONFIG, Backend
from megackpt.checkpoint.index import INDEX
from megackpt.checkpoint.records import Committed
from megackpt.errors import (
    BackendError,
    CheckpointingException,
    CorruptCheckpoint,
    StorageError,
)
from megackpt.planning.manifest import Manifest
from megackpt.storage import Storage, digest

METADATA = ".metadata"
_TRUST_IT = f". If it is right, remove {INDEX}: loads then trust the format's own files"


def by_its_own_account(backend: Backend, storage: Storage) -> Manifest:
    """The manifest from the format's table of contents.

    Raises only errors of this package: foreign errors become BackendError.
    """
    try:
        return backend.read_manifest(storage)
    except (CheckpointingException, FileNotFoundError):
        raise
    except Exception as error:  # from the code of a plug-in
        raise BackendError(
            f"{storage.called}: the format {backend.properties.name!r} failed at reading the "
            f"checkpoint: {type(error).__name__}: {error}"
        ) from error


def small_file_problems(
    storage: Storage, small: Mapping[str, tuple[int, bytes]], backend: Backend
) -> list[str]:
    """The problems of the small files that an index names.

    If they are intact, the problem is a table of contents that another library has added.
    """
    advice = ""
    if backend.properties.name == "torch_dist" and METADATA not in small:
        advice = (
            f". Copy the {CONFIG} of another torch_dist checkpoint, they are all alike, and keep "
            f"{INDEX}: without {METADATA}, nothing else says where the data is"
        )
    problems = _problems(storage, small, advice)
    if problems or (other := table_of_another(storage, small)) is None:
        return problems
    table, _ = other
    two = (
        f"{storage.location} holds two checkpoints: {INDEX} describes one, and {table} of "
        f"another library describes the other ({_compared(storage, table)}). It is unknown "
        f"which one is meant: move away {INDEX} or {table}. The next save to this directory "
        "replaces both"
    )
    return [two]


def _problems(
    storage: Storage, small: Mapping[str, tuple[int, bytes]], advice: str = ""
) -> list[str]:
    limits = [size for size, _ in small.values()]
    # There may be very many files. Each is opened once if all are intact.
    with suppress(FileNotFoundError, CorruptCheckpoint):
        digests = list(map(digest, storage.contents([*small], limits)))
        if digests == [checksum for _, checksum in small.values()]:
            return []
    sizes = dict(zip(small, storage.sizes([*small]), strict=True))
    whole = [name for name, (size, _) in small.items() if sizes[name] == size]
    contents = storage.contents(whole, [small[name][0] for name in whole])
    digests_of = dict(zip(whole, map(digest, contents), strict=True))
    problems = []
    for name, (size, checksum) in small.items():
        path, found = f"{storage.location}/{name}", sizes[name]
        if found is None:
            missing = f"{path} is missing: the checkpoint's index names it"
            problems.append(missing + advice)
            continue
        what = "does not match its digest"
        if found != size:
            what = f"has {found} bytes instead of {size}"
        if digests_of.get(name) != checksum:
            problems.append(
                f"{path} {what}: it is damaged, or was written by another program "
                f"({_compared(storage, name)}){advice or _TRUST_IT}"
            )
    return problems


def _compared(storage: Storage, name: str) -> str:
    own, other = storage.modified(name), storage.modified(INDEX)
    if own is None or other is None:
        return "one of the two is gone"
    newer = INDEX
    if own > other:
        newer = name
    form = "%Y-%m-%d %H:%M:%S"
    own_time = time.strftime(form, time.localtime(own))
    index_time = time.strftime(form, time.localtime(other))
    return f"{newer} is newer: {name} {own_time}, {INDEX} {index_time}"


def table_of_another(
    storage: Storage, small: Mapping[str, tuple[int, bytes]]
) -> tuple[str, Backend] | None:
    """The name and format of a table of contents that another library wrote; None without one.

    The table is an additional file, or in place of a file that the index names (``small``). Stock
    DCP and Megatron save into a directory without clearing it, and leave our index in it.
    """
    if isinstance(storage, Committed) or storage.size(INDEX) is None:
        return None
    for name in (CONFIG, METADATA):
        there = storage.size(name) is not None
        if there and (name not in small or _problems(storage, {name: small[name]})):
            backend = _format_of(storage, name)
            if backend is not None:
                return name, backend
    return None


def native_format(storage: Storage) -> Backend | None:
    """The format that ``metadata.json`` names, or torch_dist if ``.metadata`` can be parsed."""
    try:
        named = strategies.read_config(storage) is not None
    except (CorruptCheckpoint, FileNotFoundError):
        return None
    table = METADATA
    if named:
        table = CONFIG
    return _format_of(storage, table)


def _format_of(storage: Storage, table: str) -> Backend | None:
    try:
        if table == CONFIG:
            config = strategies.read_config(storage)
            if config is None:
                return None
            return strategies.reader_of(
                config.sharded_backend, config.sharded_backend_version
            )
        if storage.size(METADATA) is None:
            return None
        backend = strategies.reader_of("torch_dist", 1)
        by_its_own_account(backend, storage)
    except StorageError:
        raise
    except (CheckpointingException, FileNotFoundError):
        return None
    return backend
