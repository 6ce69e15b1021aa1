"""The format of a directory: by its metadata.json, else by the formats that recognise it."""

from __future__ import annotations

import json

from megackpt.backends.base import CONFIG, Backend, read_config
from megackpt.errors import (
    BackendError,
    CorruptCheckpoint,
    NotACheckpoint,
    StorageError,
)
from megackpt.storage import Storage
from megackpt.strategies.formats import formats, made
from megackpt.strategies.policy import Strategy, reader_of


def find_backend(storage: Storage, asked: Strategy | None = None) -> Backend:
    """The format of the complete checkpoint in this directory.

    ``metadata.json`` names it. Without one, ``recognises`` of all formats is called, or of the one
    that the caller ``asked`` for.

    Raises:
        NotACheckpoint: no format recognises it.
        BackendError: several formats do, or it is not the one that was asked for.
    """
    config = read_config(storage)
    if config is not None:
        try:
            return reader_of(
                config.sharded_backend, config.sharded_backend_version, asked
            )
        except BackendError as error:
            raise BackendError(f"{storage.called}: {error}") from error
    if asked is not None:
        backend = reader_of(asked.backend, asked.version, asked)
        if backend.recognises(storage):
            return backend
        raise NotACheckpoint(
            f"{storage.called} is not a distributed checkpoint: the format {asked.backend!r} does "
            "not recognise it"
        )
    found, unasked = _recognised(storage)
    if len(found) > 1:
        names = " and as ".join(map(repr, found))
        raise BackendError(
            f"{storage.called} can be read as {names}, and has no {CONFIG} that says which: choose "
            f"by sharded_strategy={next(iter(found))!r}, or move away the files that are not the "
            "checkpoint's"
        )
    if found:
        return next(iter(found.values()))
    if _is_damaged(storage):
        raise CorruptCheckpoint(
            f"{storage.location}/{CONFIG} is damaged: it does not say which format wrote the "
            "checkpoint"
        )
    errors = ""
    if unasked:
        errors = f" (not asked: {'; '.join(unasked)})"
    raise NotACheckpoint(
        f"{storage.called} is not a distributed checkpoint: no known format is recognised in "
        f"it{errors}"
    )


def _is_damaged(storage: Storage) -> bool:
    """Is ``metadata.json`` not JSON? One with other fields belongs to another program."""
    size = storage.size(CONFIG)
    if size is None or size > 1 << 20:
        return False
    try:
        json.loads(storage.get(CONFIG))
    except (ValueError, RecursionError):
        return True
    return False


def _recognised(storage: Storage) -> tuple[dict[str, Backend], list[str]]:
    """The formats that recognise a directory, by name, and the errors of those that failed."""
    found: dict[str, Backend] = {}
    unasked = []
    for entry in formats():
        try:
            backend = made(entry.kind(), entry.name, {})
            if backend.recognises(storage):
                found.setdefault(entry.name, reader_of(entry.name, entry.version))
        except StorageError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it must not hide other formats
            unasked.append(f"{entry.name}: {error}")
    return found, unasked
