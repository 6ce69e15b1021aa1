"""The weights that a rank wrote in the last version, and the backends that write the next one.

A backend encodes each row of its plan against the snapshot, which takes the row at once. After a
save that fails, the snapshot is of no version: the next save reads the last version instead.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from megackpt.backends.base import (
    CONFIG,
    THREADS,
    Finished,
    Layout,
    Properties,
    Source,
    WrittenRow,
    config_file,
    write_result,
)
from megackpt.backends.torch_dist import TorchDist
from megackpt.deltas.chain import VERSION_FILE, Version, version_file
from megackpt.deltas.codec import Bits, Encoded, encode, update
from megackpt.deltas.delta_format import PIECE_BYTES, DeltaReading
from megackpt.errors import CorruptCheckpoint, MismatchError, join_truncated
from megackpt.loader.regions import Regions
from megackpt.planning.manifest import (
    Location,
    Manifest,
    SavePlan,
    ShardId,
    TensorEntry,
    WriteItem,
    WriteResult,
)
from megackpt.planning.tensor_digest import MODULUS, digest_of, word_dtype
from megackpt.storage import Storage, digest_blocks


@dataclass
class _Row:
    """The words of a row of the plan, and its part of the tensor's digest.

    ``digest``: in the last version. ``after``: in the version that is being saved.
    """

    bits: Bits
    digest: int
    after: int


class Snapshot:
    """The rows that this rank wrote in the last version.

    ``base`` opens this version; None: there is no version yet. Rank 0 has its ``save_id``.
    """

    def __init__(self) -> None:
        self.base: Callable[[], Version] | None = None
        self.save_id = ""
        self.is_committed = False
        """Whether this rank has seen the commit of the rows. Other ranks may have seen it alone."""
        self.pending_id = ""
        self._rows: dict[ShardId, _Row] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that are held."""
        return sum(row.bits.nbytes for row in self._rows.values())

    def forget(self) -> None:
        """The last version is not of this publisher: ``fill`` reads it."""
        self._rows.clear()

    def fill(self, plan: SavePlan) -> None:
        """Read the rows that are not held from the base, and forget rows of other plans."""
        items = [item for item in plan.rows() if not item.meta.is_object]
        self._rows = {
            item.shard: self._rows[item.shard]
            for item in items
            if item.shard in self._rows
        }
        absent = [item for item in items if item.shard not in self._rows]
        if self.base is None or not absent:
            return
        base = self.base()
        opened = base.opened
        numbers = opened.manifest.numbers()
        for item in absent:
            number = numbers.get(item.shard.key)
            if number is None or opened.manifest.tensors[number].meta != item.meta:
                raise MismatchError(_other_table(base, [repr(item.shard.key)]))
        regions = [(numbers[item.shard.key], item.shard.box) for item in absent]
        for item, array in zip(absent, Regions(opened).arrays(regions), strict=True):
            bits = array.reshape(-1).view(word_dtype(item.meta.itemsize))
            digest = _digest(item, bits)
            self._rows[item.shard] = _Row(bits, digest, digest)

    def compare(self, item: WriteItem, bits: Bits) -> Encoded | None:
        """Encode the words of a row, and take them. None in the first version."""
        row = self._rows.get(item.shard)
        if row is None:
            digest = _digest(item, bits)
            self._rows[item.shard] = _Row(bits.copy(), digest, digest)
            return None
        places, old, new = update(row.bits, bits)
        entry = TensorEntry(item.shard.key, item.meta)
        change = digest_of(entry, item.shard.box, new, places, old)
        row.after = (row.digest + change) % MODULUS
        return encode(bits, places, new - old)

    def sums(self) -> dict[str, tuple[int, int]]:
        """For each tensor, this rank's part of its digest before and after the pending version."""
        sums: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for shard, row in self._rows.items():
            before, after = sums[shard.key]
            sums[shard.key] = before + row.digest, after + row.after
        return sums

    def commit(self) -> None:
        """The pending version is committed."""
        for row in self._rows.values():
            row.digest = row.after
        self.save_id = self.pending_id
        self.is_committed = True


def _digest(item: WriteItem, bits: Bits) -> int:
    return digest_of(TensorEntry(item.shard.key, item.meta), item.shard.box, bits)


@contextmanager
def _words(item: WriteItem, blocks: Iterator[memoryview]) -> Iterator[Bits]:
    """The words of a row. If the source has them in one block, they are its memory, no copy.

    At the end the source checks that the memory was not freed meanwhile.
    """
    data: bytes | memoryview = next(blocks, b"")
    if len(data) < item.nbytes:
        data = b"".join([bytes(data), *map(bytes, blocks)])
    yield np.frombuffer(data, word_dtype(item.meta.itemsize))
    for _ in blocks:
        pass


def _other_table(base: Version, keys: list[str]) -> str:
    return (
        f"the tensors of {base.opened.storage.called} have other names, shapes or dtypes than the "
        f"state: {join_truncated(keys, 5)}. A chain has the same tensors in all versions: publish "
        "to another directory"
    )


@dataclass(frozen=True, eq=False)
class _Publication:
    """What the two backends share. ``number``: of the version that is saved."""

    snapshot: Snapshot = field(default_factory=Snapshot)
    number: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Versions with equal declarations have equal plans."""
        return type(self), ()

    def noted(self, result: WriteResult) -> WriteResult:
        """The result, with the digests of this rank for ``version``."""
        return replace(result, note=json.dumps(self.snapshot.sums()).encode())

    def version(self, manifest: Manifest, is_anchor: bool) -> dict[str, bytes]:
        """On rank 0: ``version.json``. Raises MismatchError, CorruptCheckpoint for a wrong base."""
        tensors = [entry for entry in manifest.tensors if not entry.meta.is_object]
        digests = {entry.key: (0, 0) for entry in tensors}
        for note in manifest.notes:
            for key, (before, after) in json.loads(note).items():
                a, b = digests[key]
                digests[key] = (a + before) % MODULUS, (b + after) % MODULUS
        self.snapshot.pending_id = manifest.save_id
        base = None if self.snapshot.base is None else self.snapshot.base()
        if base is None:
            digests = {key: (after, after) for key, (_, after) in digests.items()}
        else:
            held = [e for e in base.opened.manifest.tensors if not e.meta.is_object]
            others = {entry.key for entry in {*held} ^ {*tensors}}
            if others:
                raise MismatchError(_other_table(base, sorted(map(repr, others))))
            wrong = [
                key for key, (before, _) in digests.items()
                if before != base.digests[key][1]
            ]  # fmt: skip
            if wrong:
                raise CorruptCheckpoint(
                    f"version {base.number}, in {base.opened.storage.called}, has other digests "
                    f"than the weights that the ranks hold of {join_truncated(wrong, 5)}: memory "
                    "or a file is damaged. Publish to another directory"
                )
        nbytes = int(manifest.chunks.length.sum())
        content = version_file(self.number, base, is_anchor, nbytes, digests)
        return {VERSION_FILE: content}


class DeltaWriter(_Publication, DeltaReading):
    """Writes what changed since the base."""

    def layout(self, ranks: int, manifest: Manifest) -> Layout:  # noqa: ARG002
        names = [_file_name(rank) for rank in range(ranks)]
        return Layout([*names, VERSION_FILE, CONFIG])

    def write(self, root: Storage, plan: SavePlan, data: Source) -> WriteResult:
        self.snapshot.fill(plan)
        written: dict[int, WrittenRow] = {}

        def pack(row: int) -> bytes:
            if plan.tensors[plan.tensor[row]].meta.is_object:
                return b"".join(data.blocks(row))
            item = plan.row(row)
            with _words(item, data.blocks(row)) as bits:
                encoded = self.snapshot.compare(item, bits)
            return b"" if encoded is None else encoded.packed()

        if len(plan):
            name = _file_name(plan.rank)
            with (
                ThreadPoolExecutor(THREADS, "megackpt-encode") as pool,
                root.create(name) as writer,
            ):
                for row, packed in enumerate(pool.map(pack, range(len(plan)))):
                    place = Location(name, writer.position, len(packed))
                    writer.write([memoryview(packed)])
                    written[row] = place, digest_blocks(memoryview(packed))
        return self.noted(write_result(plan, written))

    def finish(self, root: Storage, manifest: Manifest) -> Finished:  # noqa: ARG002
        files = self.version(manifest, is_anchor=False)
        return Finished(manifest, {**files, **config_file(self.properties)})


def _file_name(rank: int) -> str:
    return f"changes_{rank:05d}.bin"


class AnchorWriter(_Publication, TorchDist):
    """Writes all weights, as ordinary torch_dist, and notes the changes."""

    # The rows of a delta and of an anchor are the same.
    properties: ClassVar[Properties] = replace(
        TorchDist.properties, max_item_bytes=PIECE_BYTES
    )

    def layout(self, ranks: int, manifest: Manifest) -> Layout:
        return Layout([*super().layout(ranks, manifest).files, VERSION_FILE])

    def write(self, root: Storage, plan: SavePlan, data: Source) -> WriteResult:
        self.snapshot.fill(plan)
        return self.noted(super().write(root, plan, _Compared(self, plan, data)))

    def finish(self, root: Storage, manifest: Manifest) -> Finished:
        finished = super().finish(root, manifest)
        files = self.version(manifest, is_anchor=True)
        return replace(finished, files={**files, **finished.files})


@dataclass(frozen=True, eq=False)
class _Compared(Source):
    """The data of a plan, each row of which is compared before it is written."""

    writer: AnchorWriter
    plan: SavePlan
    data: Source

    def blocks(self, row: int) -> Iterator[memoryview]:
        if self.plan.tensors[self.plan.tensor[row]].meta.is_object:
            yield from self.data.blocks(row)
            return
        item = self.plan.row(row)
        with _words(item, self.data.blocks(row)) as bits:
            self.writer.snapshot.compare(item, bits)
            yield bits.view(np.uint8).data
