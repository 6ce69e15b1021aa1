"""The format "delta": a checkpoint that stores what changed since another checkpoint.

    version.json       the place in the chain, and the digest of each tensor before and after
    changes_00000.bin  the pieces that rank 0 wrote: see docs/delta-format.md
    metadata.json      the name and version of the format

A reader reads the anchor of the chain, and adds the changes of each version after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from megackpt.backends.base import (
    Backend,
    Properties,
    ReadOnlyBackend,
    Target,
    run_in_threads,
)
from megackpt.backends.ranges import read_raw
from megackpt.checkpoint import Opened
from megackpt.deltas.chain import Version, chain_of
from megackpt.deltas.codec import Bits, Changes, Encoded, decode
from megackpt.deltas.pieces import change, words
from megackpt.errors import (
    BackendError,
    CorruptCheckpoint,
    MismatchError,
    join_truncated,
)
from megackpt.loader.regions import Landing, Region, Regions
from megackpt.planning.box import Box
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import (
    OBJECT,
    Declarations,
    LoadPlan,
    Manifest,
    ReadItem,
    TensorMeta,
    itemsizes,
)
from megackpt.planning.tensor_digest import in_words, word_dtype
from megackpt.storage import Storage

PIECE_BYTES = 16 << 20
"""Bytes of the largest piece, and of a piece of an anchor."""
_GROUP_BYTES = 64 << 20  # that are in memory at a time, in each of THREADS threads
_GROUP_ROWS = 4096


class DeltaReading(Backend):
    """The half of the format that reads."""

    properties: ClassVar[Properties] = Properties(
        "delta",
        1,
        frozenset({1}),
        max_item_bytes=PIECE_BYTES,
        encoding="native",
        is_delta=True,
    )

    _chain: Sequence[Version] = ()

    def read_manifest(self, root: Storage) -> NoReturn:
        raise BackendError(
            f"{root.called} has lost its megackpt.index: a delta cannot be read without it"
        )

    def chain(self, root: Storage, manifest: Manifest) -> Sequence[Version]:
        """The chain of the version in ``root``. It is opened once, at the first read.

        ``manifest``: of the version, or of a few tensors of it.
        """
        opened = Opened(root, self, manifest, {})
        if not self._chain or self._chain[-1].save_id != manifest.save_id:
            self._chain = chain_of(Version.of(opened))
        return [*self._chain[:-1], replace(self._chain[-1], opened=opened)]

    def read(self, root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
        is_blob = itemsizes(plan.manifest.tensors) == 0
        is_blob = is_blob[plan.manifest.chunks.tensor[plan.chunk]]
        read_raw(root, plan.take(is_blob), into, verify)
        rows = plan.take(~is_blob)
        if len(rows):
            ChainReader(self.chain(root, plan.manifest), rows, verify).read(into)


class Delta(DeltaReading, ReadOnlyBackend):
    """No options. A WeightPublisher writes the format."""

    properties: ClassVar[Properties] = replace(DeltaReading.properties, read_only=True)


class ChainReader:
    """Reads the regions of a plan of the last version of a chain."""

    def __init__(
        self, chain: Sequence[Version], plan: LoadPlan, verify: bool = True
    ) -> None:
        """Raises MismatchError if a version of the chain lacks a tensor of the plan."""
        tensors = plan.manifest.tensors
        entries = {
            tensors[number] for number in plan.manifest.chunks.tensor[plan.chunk]
        }
        for version in chain:
            manifest = version.opened.manifest
            absent = entries.difference(manifest.tensors)
            if absent:
                raise MismatchError(
                    f"{version.opened.storage.called} lacks tensors of the versions after it, or "
                    "has them with other shapes or dtypes: "
                    f"{join_truncated(sorted(repr(entry.key) for entry in absent), 5)}"
                )
        self._plan = plan
        self._verify = verify
        self._anchor = Regions(chain[0].opened, verify)
        manifest = plan.manifest
        self._tensor = manifest.chunks.tensor[plan.chunk]
        volume = plan.boxes.volume
        self._nbytes = volume * itemsizes(manifest.tensors)[self._tensor]
        wanted = Declarations.of_boxes(
            manifest.tensors, self._tensor, plan.boxes, self._nbytes
        )
        self._changes = [Pieces.of(v, wanted, verify) for v in chain[1:]]

    def read(self, into: Target) -> None:
        bounds = self._groups()

        def work(numbers: Iterator[int]) -> None:
            for number in numbers:
                self._read_group(bounds[number], bounds[number + 1], into)

        run_in_threads(len(bounds) - 1, work)

    def _groups(self) -> list[int]:
        """Bounds of groups of rows with about _GROUP_BYTES."""
        rows = np.arange(len(self._plan))
        filled = np.cumsum(self._nbytes) // _GROUP_BYTES + rows // _GROUP_ROWS
        inner = np.flatnonzero(np.diff(filled)) + 1
        return [0, *inner.tolist(), len(self._plan)]

    def _read_group(self, first: int, last: int, into: Target) -> None:
        tensors = self._plan.manifest.tensors
        numbers = self._anchor.opened.manifest.numbers()
        regions: list[Region] = []
        for row in range(first, last):
            key, meta = tensors[self._tensor[row]]
            box = self._plan.boxes.row(row, len(meta.shape))
            regions.append((numbers[key], box))
        arrays = self._anchor.arrays(regions)
        boxes = [box for _, box in regions]
        for pieces in self._changes:
            pieces.apply(first, last, arrays, boxes)
        targets = self._plan.target[first:last].tolist()
        for target, (_, box), array in zip(targets, regions, arrays, strict=True):
            filled = into.open(target, box)
            filled[...] = array
            into.close(target, box, filled)


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of one version that meet wanted boxes."""

    version: Version
    plan: LoadPlan
    verify: bool

    @classmethod
    def of(cls, version: Version, wanted: Declarations, verify: bool) -> Pieces:
        return cls(version, plan_load(wanted, version.opened.manifest), verify)

    def between(
        self, first: int, last: int
    ) -> Iterator[tuple[ReadItem, Box, Changes | Bits]]:
        """For wanted boxes [first, last), each piece: its box in words, and what it has.

        Raises CorruptCheckpoint.
        """
        begin, end = np.searchsorted(self.plan.target, (first, last)).tolist()
        plan = self.plan.take(slice(begin, end))
        blobs = Landing([], [], {})
        as_objects = replace(
            plan, manifest=self._as_objects, target=np.arange(len(plan))
        )
        read_raw(self.version.opened.storage, as_objects, blobs, self.verify)
        for number, item in enumerate(plan.rows()):
            size = item.entry.meta.itemsize
            piece = in_words(item.chunk.box, size)
            try:
                encoded = Encoded.parsed(blobs.blobs[number])
                yield item, piece, decode(encoded, word_dtype(size), piece.volume)
            except CorruptCheckpoint as error:
                raise CorruptCheckpoint(
                    f"{self.version.opened.storage.called}: {item.entry.key!r} "
                    f"{item.chunk.box} in {item.chunk.location.file}: {error}"
                ) from error

    def apply(
        self,
        first: int,
        last: int,
        arrays: Sequence[NDArray[Any]],
        boxes: Sequence[Box],
    ) -> None:
        """Turn wanted boxes [first, last) from the version before into those of this version.

        ``arrays`` and ``boxes`` have them. Raises CorruptCheckpoint.
        """
        for item, piece, found in self.between(first, last):
            array = arrays[item.target - first]
            holder = in_words(boxes[item.target - first], array.itemsize)
            change(words(array), holder, found, piece)

    @cached_property
    def _as_objects(self) -> Manifest:
        """The manifest for code that reads objects: each piece is a blob."""
        manifest = self.version.opened.manifest
        entries = [
            entry._replace(meta=TensorMeta(entry.meta.shape, OBJECT))
            for entry in manifest.tensors
        ]
        return replace(manifest, tensors=tuple(entries))
