"""Writes the versions of a chain a second time, as hf-xor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
from numcodecs.zstd import compress  # type: ignore[import-untyped]
from numpy.typing import NDArray

from megackpt.backends.safetensors import INDEX, WHOLE
from megackpt.deltas.chain import Version, open_version
from megackpt.deltas.delta_format import Pieces
from megackpt.deltas.hf_xor import Stored, checksum, folder, write_file, write_index
from megackpt.distributed import DEFAULT_TIMEOUT, Group, GroupLike, group_over
from megackpt.errors import CheckpointExists
from megackpt.loader.regions import Regions
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    Declaration,
    Declarations,
    ShardId,
    TensorEntry,
    TensorMeta,
)
from megackpt.storage import root_at

_LEVEL = 1  # of zstd


class HfXor:
    """Writes versions below ``url`` as hf-xor. Each rank does this for some of the tensors.

    A rank holds its tensors of the last version in memory, and reads what changed. This may be
    the trainer's ranks, or another job.
    """

    def __init__(
        self,
        url: str,
        process_group: GroupLike = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        self._url = url
        self._group = partial(group_over, process_group, timeout)
        self._number: int | None = None
        self._held: dict[str, NDArray[Any]] = {}
        """The tensors of this rank in version ``_number``."""

    def write(self, number: int) -> None:
        """Write a version of the chain; collective. It is full unless the one before is there.

        Raises:
            CheckpointExists: the directory is there.
            BackendError: safetensors cannot hold a tensor.
            Exception: see ``open_version`` and ``megackpt.load``.
        """
        place = f"{self._url}/{folder(number)}"
        with self._group(f"write {place}") as group:
            is_full = group.broadcast("hf-xor", partial(self._begin, number))

            def write() -> dict[str, str]:
                stored = self._store(number, is_full, group)
                if not stored:
                    return {}
                root = root_at(place, create=True)
                return write_file(root, group.rank, group.size, stored)

            def commit(parts: Sequence[dict[str, str]]) -> None:
                files = {key: file for part in parts for key, file in part.items()}
                base = None if is_full else number - 1
                write_index(root_at(place, create=True), files, number, base)

            group.reduce_broadcast("hf-xor", write, commit)
            self._number = number

    def _begin(self, number: int) -> bool:
        """On rank 0: remove files without an index, of a job that died. Is the version full?"""
        root, name = root_at(self._url), folder(number)
        files = root.list(name)
        if INDEX in files or WHOLE in files:
            raise CheckpointExists(f"{self._url} has {name}, which is written once")
        for file in files:
            if file.startswith("model-"):
                root.delete(f"{name}/{file}")
        return INDEX not in root.list(folder(number - 1))

    def _store(self, number: int, is_full: bool, group: Group) -> dict[str, Stored]:
        """What this rank stores of a version."""
        version = open_version(self._url, number)
        tensors = [e for e in version.opened.manifest.tensors if not e.meta.is_object]
        # The largest first: all ranks have about the same bytes.
        tensors.sort(key=lambda entry: (-Box.whole(entry.meta.shape).volume, entry.key))
        mine = tensors[group.rank :: group.size]
        if not is_full and self._number != number - 1:
            before = open_version(self._url, number - 1)
            self._held = {entry.key: _read(before, entry) for entry in mine}
        self._number = None
        wanted = [
            Declaration(ShardId(key, Box.whole(meta.shape)), meta, 0, False, 0, 0)
            for key, meta in mine
        ]
        pieces = None
        if not is_full and version.base is not None:
            pieces = Pieces.of(version, Declarations.of(wanted), verify=True)
        stored: dict[str, Stored] = {}
        for row, entry in enumerate(mine):
            if pieces is None:
                new = _read(version, entry)
            else:
                new = self._held[entry.key].copy()
                pieces.apply(row, row + 1, [new], [Box.whole(new.shape)])
            bits = new.reshape(-1).view(np.uint8)
            one = Stored(entry.meta, bits, checksum("adler32", bits))
            if not is_full:
                xor = bits ^ self._held[entry.key].reshape(-1).view(np.uint8)
                if not xor.any():
                    continue
                frame = np.frombuffer(compress(xor, _LEVEL), np.uint8)
                meta = TensorMeta((len(frame),), "uint8")
                one = replace(one, meta=meta, data=frame)
            stored[entry.key] = one
            self._held[entry.key] = new
        return stored


def _read(version: Version, entry: TensorEntry) -> NDArray[Any]:
    """A whole tensor of a version."""
    number = version.opened.manifest.numbers()[entry.key]
    return Regions(version.opened).arrays([(number, Box.whole(entry.meta.shape))])[0]
