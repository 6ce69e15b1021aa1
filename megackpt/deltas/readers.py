"""Readers of versions of weights: directories of safetensors, changes, and new versions.

A directory that ``materialize`` wrote has ``megackpt_weights.json``, which names its version, and
the index of a checkpoint. ``apply`` changes its files to a later version.

An update that is killed must neither be lost nor be read. ``megackpt.redo`` gets the new values of
all changed bytes, and the new record and index. When it is durable, a mark takes the place of the
index, so that megackpt refuses the directory. Then the files change. The new index ends the update.
It can be repeated from the mark on, because the log has values, not differences.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray

from megackpt.checkpoint import INDEX, Opened, absolute, open_checkpoint, remove
from megackpt.checkpoint.index import IN_PLACE, decode_index, sealed_index
from megackpt.converter import Converted, convert
from megackpt.deltas.chain import (
    Base,
    Version,
    chain_of,
    latest,
    open_version,
    path_of,
    versions,
)
from megackpt.deltas.delta_format import Delta
from megackpt.deltas.pieces import digest_of, word_dtype
from megackpt.deltas.tensor_digest import MODULUS
from megackpt.distributed import DEFAULT_TIMEOUT
from megackpt.errors import (
    CorruptCheckpoint,
    MismatchError,
    NotACheckpoint,
    SaveInProgress,
    StorageError,
    join_truncated,
)
from megackpt.loader.load_operation import load as load_checkpoint
from megackpt.loader.regions import Regions
from megackpt.planning.box import Box, Int64
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    Manifest,
    digest_rows,
    itemsizes,
)
from megackpt.state.storable import dtype_named
from megackpt.storage import (
    TEMPORARY,
    Executor,
    LocalStorage,
    Storage,
    digest_blocks,
)
from megackpt.strategies import StrategyLike

logger = logging.getLogger("megackpt.deltas")

RECORD = "megackpt_weights.json"
"""The version whose weights a directory has."""
_FORMAT = 1
_RECORD_BYTES = 4096
_REDO = "megackpt.redo"
_LOG = f"{_REDO}/changes"
_CHANGE = np.dtype([("place", "<i8"), ("byte", "u1")])
"""A byte of a changed element: _FILE times the number of its file, plus its place in the file; its value."""
_FILE = 1 << 40
_LOGGED = _CHANGE.itemsize << 20  # bytes of the log that are read at a time
_BATCH_BYTES = 64 << 20  # of small tensors that are read together

Octets = NDArray[np.uint8]


class Patch(NamedTuple):
    """What a version changes in a tensor of the version before.

    Attributes:
        shape: of the tensor.
        indices: int64, of the changed elements in the flattened tensor, ascending. An anchor has
            all elements.
        values: the new elements, in the dtype of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    indices: torch.Tensor
    values: torch.Tensor


def materialize(
    url: str | Path,
    version: int,
    directory: str | Path,
    to: StrategyLike = "safetensors",
    *,
    beside: Mapping[str, bytes] | None = None,
    **options: Any,
) -> Converted:
    """Write the weights of a version as a directory of Hugging Face, or as a checkpoint.

    The weights and ``megackpt_weights.json``, which names the version, are committed together,
    atomically. ``apply`` brings a directory of safetensors to later versions.

        materialize("s3://bucket/weights", 12, "/models/policy")

    Args:
        url: the directory or bucket of the versions.
        directory: a new directory, or one without weights: files such as ``config.json`` stay.
        to: a format; see ``megackpt.save``.
        beside: small files, name -> content, that are committed, too.
        options: of ``megackpt.convert``.

    Raises:
        NotACheckpoint: the version, or one that it is based on, is absent. The message names both.
        MismatchError: a version is based on another save than the one that is there.
        Exception: see ``megackpt.convert``.
    """
    record = {**(beside or {}), RECORD: _record(open_version(url, version))}
    source = path_of(url, version)
    return convert(source, directory, to, beside=record, state=False, **options)


def apply(
    directory: str | Path,
    url: str | Path,
    version: int,
    in_place: bool = False,
    *,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> None:
    """Bring a directory of safetensors that ``materialize`` wrote to a later version.

    The changes since the version of the directory are read; all weights, if the version has a later
    anchor. The old weights are compared with their digests. Memory: a few times the largest tensor.

        apply("/models/policy", "s3://bucket/weights", 13)

    Args:
        in_place: change the files themselves. A reader that has opened them may see old and new
            weights. A killed call leaves the old weights, the new ones, or a directory that
            megackpt refuses, and the next ``apply`` completes. False: change a copy of the
            directory, which shares its blocks where the file system can do that, and exchange the
            two.
        timeout: how long the storage may not answer.

    Raises:
        MismatchError: the directory has a version of another chain, a later one, or other tensors.
        NotACheckpoint: a version is absent, or ``directory`` was not materialized.
        CorruptCheckpoint: a file is damaged. The message names the file and the tensor.
        SaveInProgress: another process changes the directory.
        StorageError: the storage refused, or did not answer.
    """
    path = os.path.realpath(absolute(directory))
    with closing(Executor(timeout)) as executor:
        name = f"applying version {version} to {path}"
        executor.call(name, _apply, path, url, version, in_place)


def _apply(path: str, url: str | Path, version: int, in_place: bool) -> None:
    try:
        old = storage = LocalStorage(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotACheckpoint(f"{path} is not a directory") from error
    with closing(old):
        if not old.lock() or not old.is_current():
            raise SaveInProgress(f"another process changes {path}")
        if old.size(INDEX) == len(IN_PLACE) and old.get(INDEX) == IN_PLACE:
            logger.warning("%s: completing an update that was interrupted", path)
            _redo(old)
        for name in old.list():
            if name.startswith((_REDO, TEMPORARY)):  # of a killed update
                old.delete(name)
        directory = open_checkpoint(path)
        since = _versions_since(directory, url, version)
        if not since:
            return
        above, name = os.path.split(path)
        outer, new = LocalStorage(above), f".{name}.new-weights"
        outer.delete(new)
        try:
            if not in_place:
                outer.copy_folder(name, new)
                storage = outer.folder(new)
            _change(storage, directory, since)
            _redo(storage)
            if not in_place and not outer.exchange(new, name):
                raise StorageError(
                    f"{path}: this file system cannot exchange directories: use in_place=True"
                )
        finally:
            outer.delete(new)


def _versions_since(
    directory: Opened, url: str | Path, version: int
) -> Sequence[Version]:
    """The versions after the one of a directory; from an anchor on if it is a later one."""
    where = directory.storage.called
    held = _recorded(directory.storage)
    chain = chain_of(open_version(url, version))
    saves = {found.number: found.save_id for found in chain}
    if held.version < chain[0].number:
        logger.warning(
            "%s has version %d: all weights are read, from the anchor %d on",
            where,
            held.version,
            chain[0].number,
        )
    elif saves.get(held.version) != held.save_id:
        raise MismatchError(
            f"{where} has version {held.version} of save {held.save_id}, and the chain of "
            f"{path_of(url, version)} has save {saves.get(held.version)} there: give a later "
            "version of the chain from which the directory was materialized"
        )
    stored = dict(chain[-1].opened.manifest.tensors)
    tensors = directory.manifest.tensors
    others = [key for key, meta in tensors if stored.get(key) != meta]
    if others or directory.backend.properties.name != "safetensors":
        raise MismatchError(
            f"{where} is not of safetensors, or has other tensors than version {version}: "
            f"{join_truncated(others, 5)}. Materialize the version in another directory"
        )
    return [found for found in chain if found.number > held.version]


class _Added(Delta):
    """Reads a directory, to which it adds versions."""

    def __init__(self, given: Sequence[Version]) -> None:
        self._given = given

    def chain(self, root: Storage, manifest: Manifest) -> Sequence[Version]:  # noqa: ARG002
        return self._given


def _change(storage: Storage, directory: Opened, since: Sequence[Version]) -> None:
    """Log all changes from a directory to the last version, and set the mark."""
    first, last = since[0], since[-1]
    source = last.opened
    if first.base is not None:
        given = [replace(first, opened=directory), *since]
        source = replace(directory, backend=_Added(given))
    manifest, chunks = directory.manifest, directory.manifest.chunks
    digests = chunks.digests.copy()
    with storage.create(_LOG) as log:
        # A tensor of safetensors is one chunk.
        for number, old, new in _pairs(directory, source):
            entry = manifest.tensors[number]
            size = entry.meta.itemsize
            at = _changed(old, new, size)
            if first.base is not None:
                box, word = Box.whole(entry.meta.shape), word_dtype(size)
                found = first.digests[entry.key][0]
                found -= digest_of(entry, box, old.view(word)[at], at)
                found += digest_of(entry, box, new.view(word)[at], at)
                if found % MODULUS != last.digests[entry.key][1]:
                    raise CorruptCheckpoint(
                        f"{entry.key!r} in {directory.storage.called}/"
                        f"{manifest.chunk(number).location.file} has other weights than version "
                        f"{first.number} is based on: materialize in another directory"
                    )
            start, end = chunks.block_bounds[number : number + 2].tolist()
            digests[start:end] = digest_rows(digest_blocks(new.data))
            begin = int(chunks.file[number]) * _FILE + int(chunks.start[number])
            places = begin + size * at[:, None] + np.arange(size)
            changes = np.empty(places.size, _CHANGE)
            changes["place"] = places.reshape(-1)
            changes["byte"] = new.reshape(-1, size)[at].reshape(-1)
            log.write([changes.view(np.uint8).data])
    chunks = replace(chunks, digests=digests)
    manifest = replace(manifest, chunks=chunks, save_id=uuid4().hex, values=None)
    storage.put(f"{_REDO}/{RECORD}", _record(last))
    storage.put(f"{_REDO}/{INDEX}", sealed_index(manifest, directory.small))
    storage.put(INDEX, IN_PLACE)


def _redo(storage: Storage) -> None:
    """Change the files as the log says. A killed call may have done that before, in part."""
    index = storage.get(f"{_REDO}/{INDEX}")
    manifest, _ = decode_index(index, f"{storage.location}/{_REDO}/{INDEX}")
    with ExitStack() as opened:
        log = opened.enter_context(storage.open(_LOG))
        readers = [opened.enter_context(storage.open(name)) for name in manifest.files]
        updaters = [
            opened.enter_context(storage.update(name)) for name in manifest.files
        ]
        for at in range(0, log.size, _LOGGED):
            logged = np.empty(min(_LOGGED, log.size - at), np.uint8)
            log.read_into(at, [logged.data])
            changes = logged.view(_CHANGE)
            block = changes["place"] // DIGEST_BLOCK
            for part in np.split(changes, np.flatnonzero(np.diff(block)) + 1):
                place = int(part["place"][0])
                file, start = divmod(place - place % DIGEST_BLOCK, _FILE)
                data = np.empty(min(DIGEST_BLOCK, readers[file].size - start), np.uint8)
                readers[file].read_into(start, [data.data])
                data[part["place"] % DIGEST_BLOCK] = part["byte"]
                updaters[file].write_at(start, [data.data])
    for name in (RECORD, INDEX):
        storage.put(name, storage.get(f"{_REDO}/{name}"))
    storage.delete(_REDO)


def _pairs(old: Opened, new: Opened) -> Iterator[tuple[int, Octets, Octets]]:
    """The number of each tensor of ``old``, and its bytes in both checkpoints."""
    tensors, numbers = old.manifest.tensors, new.manifest.numbers()
    kept = [n for n, (_, meta) in enumerate(tensors) if not meta.is_object]
    boxes = [Box.whole(tensors[number].meta.shape) for number in kept]
    size = itemsizes(tensors)[kept] * [box.volume for box in boxes]
    filled = np.cumsum(size) // _BATCH_BYTES
    bounds = [0, *(np.flatnonzero(np.diff(filled)) + 1).tolist(), len(kept)]
    for batch in map(slice, bounds, bounds[1:]):
        stored = [numbers[tensors[number].key] for number in kept[batch]]
        held = Regions(old).arrays([*zip(kept[batch], boxes[batch], strict=True)])
        found = Regions(new).arrays([*zip(stored, boxes[batch], strict=True)])
        for row in zip(kept[batch], held, found, strict=True):
            yield row[0], _octets(row[1]), _octets(row[2])


def _changed(old: Octets, new: Octets, size: int) -> Int64:
    """The elements of ``size`` bytes that differ, ascending."""
    word = word_dtype(size)
    words = np.flatnonzero(old.view(word) != new.view(word))
    elements = words // (size // word.itemsize)
    changed: Int64 = elements[np.diff(elements, prepend=-1) > 0]
    return changed


def _octets(array: NDArray[Any]) -> Octets:
    return array.reshape(-1).view(np.uint8)


def _record(version: Version) -> bytes:
    fields = {
        "format": _FORMAT,
        "version": version.number,
        "save_id": version.save_id,
    }
    return json.dumps(fields).encode()


def _recorded(directory: Storage) -> Base:
    """The version that a directory has."""
    where = f"{directory.location}/{RECORD}"
    try:
        record = json.loads(directory.get(RECORD, _RECORD_BYTES))
        if record["format"] != _FORMAT:
            raise ValueError(f"its format is {record['format']!r}, not {_FORMAT}")
        return Base(int(record["version"]), str(record["save_id"]))
    except FileNotFoundError as error:
        raise NotACheckpoint(
            f"{where} is missing: megackpt.deltas.materialize writes it"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{where} is damaged: {error}") from error


def patches(url: str | Path, version: int) -> Iterator[Patch]:
    """Yield what a version changes in each tensor that it changes.

    The version and the version before are read. Memory: a few times the largest tensor.

        for name, _, _, indices, values in patches("/weights", 13):
            model[name].view(-1)[indices.cuda()] = values.cuda()

    Raises:
        NotACheckpoint: the version, or one that it is based on, is absent. The message names both.
        MismatchError: a version is based on another save.
        CorruptCheckpoint: a file is damaged.
    """
    *before, found = chain_of(open_version(url, version))
    base = before[-1] if before else found
    for number, old, new in _pairs(base.opened, found.opened):
        name, meta = base.opened.manifest.tensors[number]
        if before:
            indices = _changed(old, new, meta.itemsize)
        else:
            indices = np.arange(len(new) // meta.itemsize)
        if len(indices):
            dtype = dtype_named(meta.dtype)
            values = torch.from_numpy(new.reshape(-1, meta.itemsize)[indices])
            values = values.view(dtype).flatten()
            yield Patch(name, meta.shape, dtype, torch.from_numpy(indices), values)


def load(state: Any, url: str | Path, version: int, **options: Any) -> Any:
    """Load a version at any layout: ``megackpt.load`` of its checkpoint, with its options.

    load(megackpt.sharded(model.state_dict()), "s3://bucket/weights", 12)
    """
    return load_checkpoint(state, path_of(url, version), **options)


def version_of(directory: str | Path) -> int | None:
    """The version that a materialized directory has; None without a directory.

    Raises NotACheckpoint if ``directory`` was not materialized.
    """
    try:
        return _recorded(LocalStorage(absolute(directory))).version
    except FileNotFoundError:
        return None


def latest_version(url: str | Path) -> int | None:
    """The highest number of a complete version. None if there is none."""
    found = latest(url)
    return None if found is None else found.number


def follow(
    url: str | Path,
    after: int | None = None,
    poll_seconds: float = 1.0,
    timeout: float | None = None,
) -> Iterator[int]:
    """Yield the number of each version when it is complete, in order.

    If the next version was removed, and there is a later anchor, the anchor is next. A gap without
    an anchor waits.

        for version in follow("s3://bucket/weights", after=12):
            apply("/models/policy", "s3://bucket/weights", version)

    Args:
        url: the directory or bucket of the versions. It need not exist yet.
        after: begin with the version after this one. None: with the first anchor that is there.
        poll_seconds: the pause between two looks at ``url``.
        timeout: seconds without a new version after which the iteration ends. None: never.

    Raises CorruptCheckpoint for a damaged version, StorageError if the storage refuses.
    """
    number = -1 if after is None else after
    seen = time.monotonic()
    while True:
        found = _first_from(url, number + 1)
        if found is not None:
            if found > number + 1:
                text = "%s: version %d is gone, going on with the anchor %d"
                logger.info(text, url, number + 1, found)
            number, seen = found, time.monotonic()
            yield found
        elif timeout is not None and time.monotonic() - seen >= timeout:
            return
        else:
            time.sleep(poll_seconds)


def _first_from(url: str | Path, number: int) -> int | None:
    """This version, or the first later anchor."""
    later = [listed for listed in versions(url) if listed > number]
    # Opened after the listing: all versions before a listed one were complete.
    for candidate in [number, *later]:
        with suppress(NotACheckpoint):
            if open_version(url, candidate).base is None or candidate == number:
                return candidate
    return None


def prune(url: str | Path, keep_anchors: int = 2) -> list[int]:
    """Remove all versions before an anchor. Returns their numbers.

    The last ``keep_anchors`` anchors stay, and all versions after the first of these. The newest
    version is removed first, so a killed call leaves no version without its base.

        prune("s3://bucket/weights")

    Raises CorruptCheckpoint for a damaged version, and as removals of checkpoints do.
    """
    if keep_anchors < 1:
        raise ValueError(f"keep_anchors is 1 or more, not {keep_anchors}")
    listed = versions(url)[::-1]
    anchors: list[int] = []
    for number in listed:
        if len(anchors) < keep_anchors:
            with suppress(NotACheckpoint):  # it is being saved, or its save died
                if open_version(url, number).base is None:
                    anchors.append(number)
    removed = []
    for number in listed:
        if len(anchors) == keep_anchors and number < anchors[-1]:
            with suppress(NotACheckpoint):  # a killed removal is completed
                remove(path_of(url, number))
                removed.append(number)
    return removed
