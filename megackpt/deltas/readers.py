"""Readers of versions of weights: directories of safetensors, changes, and new versions.

A directory that ``materialize`` wrote has ``megackpt_weights.json``, which names its version, and
the index of a checkpoint. ``apply`` changes its files to a later version.

An update in place that is killed must neither be lost nor be read. ``megackpt.redo`` gets the new
values of all changed elements, and the new record and index. When it is durable, a mark takes the
place of the index, so that megackpt refuses the directory. Then the files change. The new index
ends the update. It can be repeated from the mark on, because the log has values, not differences.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray

from megackpt.checkpoint import INDEX, Opened, absolute, open_checkpoint, remove
from megackpt.checkpoint.index import IN_PLACE, decode_index, sealed_index
from megackpt.checkpoint.opening import shared_bytes
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
from megackpt.deltas.codec import Bits, Changes
from megackpt.deltas.delta_format import Pieces
from megackpt.deltas.pieces import words
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
from megackpt.planning.box import Box, Boxes, Int64
from megackpt.planning.manifest import (
    Declarations,
    Manifest,
    digest_rows,
    itemsizes,
)
from megackpt.planning.tensor_digest import (
    MODULUS,
    digest_of,
    flat_indices,
    in_words,
    word_dtype,
)
from megackpt.state.storable import dtype_named
from megackpt.storage import (
    TEMPORARY,
    Executor,
    FileReader,
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
_HEAD = struct.Struct("<qqiii")
"""Of a window in the log: file, start and length in bytes, bytes of a word, changes."""
_WINDOW = 8 << 20  # bytes of a file that are changed at a time
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
            if in_place:
                if shared_bytes(old, directory.manifest):
                    raise StorageError(
                        f"{path} shares files with other directories (hard links): leave out "
                        "in_place, or apply to a copy"
                    )
                _log(old, directory, since)
                _redo(old)
                return
            outer.copy_folder(name, new)
            storage = outer.folder(new)
            _update(storage, directory, since)
            if not outer.exchange(new, name):
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


class _Window(NamedTuple):
    """Changed words in a part of a file.

    ``places`` count words from ``start``, a byte of the file. ``length``: bytes of the part.
    """

    file: int
    start: int
    length: int
    places: NDArray[np.int32]
    values: Bits


class _Update:
    """The changes from a directory to the last of some versions."""

    def __init__(self, directory: Opened, since: Sequence[Version]) -> None:
        self.directory = directory
        self.since = since
        self.digests = directory.manifest.chunks.digests.copy()

    def windows(self) -> Iterator[_Window]:
        """All changes. ``digests`` are of the new weights after that."""
        # A tensor of safetensors is one chunk, with the number of the tensor.
        chunks = self.directory.manifest.chunks
        for number, bits, places in self._changed():
            start, end = chunks.block_bounds[number : number + 2].tolist()
            self.digests[start:end] = digest_rows(digest_blocks(_octets(bits).data))
            size = bits.itemsize
            step = _WINDOW // size
            bounds = np.searchsorted(places, np.arange(0, len(bits) + step, step))
            for first, (a, b) in zip(
                range(0, len(bits), step), pairwise(bounds.tolist()), strict=True
            ):
                if a < b:
                    yield _Window(
                        int(chunks.file[number]),
                        int(chunks.start[number]) + first * size,
                        min(step, len(bits) - first) * size,
                        (places[a:b] - first).astype(np.int32),
                        bits[places[a:b]],
                    )

    def _changed(self) -> Iterator[tuple[int, Bits, Int64]]:
        """The number of each tensor of the directory, its new words, and which words changed."""
        if self.since[0].base is None:
            for number, old, new in _pairs(self.directory, self.since[-1].opened):
                word = word_dtype(self.directory.manifest.tensors[number].meta.itemsize)
                bits = new.view(word)
                yield number, bits, np.flatnonzero(old.view(word) != bits)
            return
        manifest = self.directory.manifest
        kept, boxes, batches = _batches(manifest)
        tensor = np.array(kept, np.int32)
        columns = Boxes.of(boxes)
        nbytes = columns.volume * itemsizes(manifest.tensors)[tensor]
        wanted = Declarations.of_boxes(manifest.tensors, tensor, columns, nbytes)
        pieces = [Pieces.of(version, wanted, verify=True) for version in self.since]
        regions = Regions(self.directory)
        for batch in batches:
            pairs = [*zip(kept[batch], boxes[batch], strict=True)]
            arrays = regions.arrays(pairs)
            found = [words(array).reshape(-1) for array in arrays]
            places: list[list[Int64]] = [[] for _ in arrays]
            for each in pieces:
                self._apply(each, batch, found, places)
            for (number, _), bits, at in zip(pairs, found, places, strict=True):
                yield number, bits, _ascending(at)

    def _apply(
        self,
        pieces: Pieces,
        batch: slice,
        bits: Sequence[Bits],
        places: Sequence[list[Int64]],
    ) -> None:
        """Apply one version to the words of a batch of tensors. Compares digests."""
        version = pieces.version
        sums: dict[str, int] = {}
        for item, piece, found in pieces.between(batch.start, batch.stop):
            row = item.target - batch.start
            key, meta = item.entry
            whole = Box.whole(meta.shape)
            shape = in_words(whole, meta.itemsize).shape
            if isinstance(found, Changes):
                at = flat_indices(found.places, piece, shape).view(np.int64)
                old = bits[row][at]
                new = old + found.differences
            else:
                at = flat_indices(np.arange(len(found)), piece, shape).view(np.int64)
                old, new = bits[row][at], found
            bits[row][at] = new
            places[row].append(at)
            sums.setdefault(key, version.digests[key][0])
            sums[key] += digest_of(item.entry, whole, new, at, old)
        for key, total in sums.items():
            if total % MODULUS != version.digests[key][1]:
                manifest = self.directory.manifest
                file = manifest.chunk(manifest.numbers()[key]).location.file
                raise CorruptCheckpoint(
                    f"{key!r} in {self.directory.storage.called}/{file} has other weights than "
                    f"version {version.number} is based on: materialize in another directory"
                )

    def small_files(self) -> dict[str, bytes]:
        """The record and the index of the new weights, after ``windows``."""
        manifest = self.directory.manifest
        chunks = replace(manifest.chunks, digests=self.digests)
        manifest = replace(manifest, chunks=chunks, save_id=uuid4().hex, values=None)
        index = sealed_index(manifest, self.directory.small)
        return {RECORD: _record(self.since[-1]), INDEX: index}


def _log(storage: Storage, directory: Opened, since: Sequence[Version]) -> None:
    """Log all changes from a directory to the last version, and set the mark."""
    update = _Update(directory, since)
    with storage.create(_LOG) as log:
        for window in update.windows():
            *place, places, values = window
            head = _HEAD.pack(*place, values.itemsize, len(values))
            log.write([memoryview(head), _octets(places).data, _octets(values).data])
    for name, data in update.small_files().items():
        storage.put(f"{_REDO}/{name}", data)
    storage.put(INDEX, IN_PLACE)


def _redo(storage: Storage) -> None:
    """Change the files as the log says. A killed call may have done that before, in part."""
    index = storage.get(f"{_REDO}/{INDEX}")
    manifest, _ = decode_index(index, f"{storage.location}/{_REDO}/{INDEX}")
    with storage.open(_LOG) as log:
        _write(storage, manifest, _logged(log))
    for name in (RECORD, INDEX):
        storage.put(name, storage.get(f"{_REDO}/{name}"))
    storage.delete(_REDO)


def _update(storage: Storage, directory: Opened, since: Sequence[Version]) -> None:
    """Change the files in a copy of a directory."""
    update = _Update(directory, since)
    _write(storage, directory.manifest, update.windows())
    for name, data in update.small_files().items():
        storage.put(name, data)


def _logged(log: FileReader) -> Iterator[_Window]:
    at = 0

    def read(length: int) -> Octets:
        nonlocal at
        data = np.empty(length, np.uint8)
        log.read_into(at, [data.data])
        at += length
        return data

    while at < log.size:
        file, start, length, size, count = _HEAD.unpack(read(_HEAD.size).data)
        places = read(4 * count).view(np.int32)
        values = read(size * count).view(word_dtype(size))
        yield _Window(file, start, length, places, values)


def _write(storage: Storage, manifest: Manifest, windows: Iterable[_Window]) -> None:
    """Write new values into the files of a directory, durably."""
    with ExitStack() as opened:
        readers = [opened.enter_context(storage.open(name)) for name in manifest.files]
        updaters = [
            opened.enter_context(storage.update(name)) for name in manifest.files
        ]
        for file, start, length, places, values in windows:
            data = np.empty(length, np.uint8)
            readers[file].read_into(start, [data.data])
            data.view(values.dtype)[places] = values
            updaters[file].write_at(start, [data.data])


def _ascending(places: Sequence[Int64]) -> Int64:
    """The places of several pieces and versions, ascending, each of them once."""
    found = np.concatenate([np.empty(0, np.int64), *places])
    if (np.diff(found) > 0).all():
        return found
    found.sort()
    once: Int64 = found[np.diff(found, prepend=-1) > 0]
    return once


def _batches(manifest: Manifest) -> tuple[list[int], list[Box], list[slice]]:
    """The numbers of the tensors, their boxes, and parts of both with about _BATCH_BYTES."""
    tensors = manifest.tensors
    kept = [n for n, (_, meta) in enumerate(tensors) if not meta.is_object]
    boxes = [Box.whole(tensors[number].meta.shape) for number in kept]
    size = itemsizes(tensors)[kept] * [box.volume for box in boxes]
    filled = np.cumsum(size) // _BATCH_BYTES
    bounds = [0, *(np.flatnonzero(np.diff(filled)) + 1).tolist(), len(kept)]
    return kept, boxes, list(map(slice, bounds, bounds[1:]))


def _pairs(old: Opened, new: Opened) -> Iterator[tuple[int, Octets, Octets]]:
    """The number of each tensor of ``old``, and its bytes in both checkpoints."""
    tensors, numbers = old.manifest.tensors, new.manifest.numbers()
    kept, boxes, batches = _batches(old.manifest)
    for batch in batches:
        stored = [numbers[tensors[number].key] for number in kept[batch]]
        held = Regions(old).arrays([*zip(kept[batch], boxes[batch], strict=True)])
        found = Regions(new).arrays([*zip(stored, boxes[batch], strict=True)])
        for row in zip(kept[batch], held, found, strict=True):
            yield row[0], _octets(row[1]), _octets(row[2])


def _differing(old: Octets, new: Octets, size: int) -> Int64:
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
            indices = _differing(old, new, meta.itemsize)
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
        storage = LocalStorage(absolute(directory))
    except FileNotFoundError:
        return None
    with closing(storage):
        return _recorded(storage).version


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
