"""The audit of a save: do all ranks that hold a shard hold the same values?

Each rank hashes its replicas in blocks before ``save`` returns, and sends one digest a replica
with its result. Rank 0 compares them before it commits. If some differ, all ranks send the
digests of these blocks, so that the error names block and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np
import torch

from megackpt.errors import name_ranks
from megackpt.planning.box import Groups, group
from megackpt.planning.manifest import (
    DIGEST_SIZE,
    Chunks,
    Declarations,
    Int32,
    ShardId,
    TensorEntry,
    TensorMeta,
)
from megackpt.staging.source import byte_view, is_plain_memory, pieces
from megackpt.storage import digest

BLOCK = 1 << 20
"""Bytes of a replica that are hashed and compared as one."""
TURNS = 16
"""In mode "sample", each save compares every 16th block; the next save begins at another one."""
_ALWAYS = 1 << 20
"""Bytes. The smallest replicas of a rank, up to this sum, are compared in every save."""
_NAMED = 20  # shards, in a message
_PARTITIONS = 3  # ways in which ranks differ, for each of these
OF_A_SAVE = (
    "Ranks hold different values of the same shard: replicas have diverged, data is damaged, or "
    "different tensors have one key. Strategy(audit_exclude=[...]) leaves out keys whose replicas "
    "may differ, and on_mismatch='warn' saves anyway."
)
_STATISTICS = ("running_mean", "running_var")
_ABOUT_STATISTICS = (
    "Of the shards below, {} hold running statistics of BatchNorm. DistributedDataParallel does "
    "not keep these equal: each rank has those of its own batches. torch.nn.SyncBatchNorm does. "
    "audit_exclude=['*running_mean', '*running_var'] leaves them out."
)


Hashed = tuple[list[int], list[bytes]]
"""Numbers and digests of the blocks of one replica that are compared."""
Blocks = dict[int, list[Hashed]]
"""By position in a list of shards, the replicas of a rank, usually one."""


@dataclass(frozen=True)
class AuditPolicy:
    """What to compare; see ``Strategy.audit``."""

    amount: str = "off"
    every: int = 1
    exclude: tuple[str, ...] = ()
    raises: bool = True


@dataclass(frozen=True, eq=False)
class RankReplicas:
    """The rows of a rank's declarations that other ranks hold, too.

    Rows of at most ``always`` bytes are compared in every save: in full also in a sample, and also
    between the saves that ``policy.every`` names. The policy comes from rank 0.
    """

    rows: Int32
    always: int
    policy: AuditPolicy

    def due(self, turn: int) -> bool:
        """Whether this save is one that is compared."""
        return turn % self.policy.every == 0

    def small(self, declared: Declarations) -> RankReplicas:
        """The rows that are compared in every save. ``declared``: the declarations of this rank."""
        return replace(self, rows=self.rows[declared.nbytes[self.rows] <= self.always])


@dataclass(frozen=True, eq=False)
class AllReplicas:
    """On rank 0: the replicated shards, and for each the entries of all ranks' digests."""

    shards: Declarations
    entries: Groups
    always: int

    @cached_property
    def small(self) -> AllReplicas:
        """The shards of ``RankReplicas.small``."""
        is_small = self.shards.nbytes <= self.always
        entries = self.entries.order[is_small[self.entries.number]]
        is_sent = np.zeros(len(self.entries.order), np.bool_)
        is_sent[entries] = True
        place = np.cumsum(is_sent, dtype=np.int64) - 1
        counts = np.diff(self.entries.bounds)[is_small]
        bounds = np.append(0, np.cumsum(counts, dtype=np.int64))
        shards = self.shards.take(np.flatnonzero(is_small))
        return AllReplicas(shards, Groups(place[entries], bounds), self.always)

    def differing(self, digests: Sequence[bytes]) -> list[ShardId]:
        """The shards whose replicas differ.

        ``digests``: the digests of each rank, in rank order.
        """
        values = np.frombuffer(b"".join(digests), "u8").reshape(-1, 2)
        order = self.entries.order
        number = self.entries.number
        first = values[self.entries.first][number]
        differs = (values[order] != first).any(axis=1)
        return [self.shards.row(i).shard for i in np.unique(number[differs]).tolist()]


def find_replicas(
    parts: Sequence[Declarations], policy: AuditPolicy
) -> tuple[list[RankReplicas], AllReplicas]:
    """The tensors' shards that several ranks declare, for each rank and for rank 0.

    Keys that match a pattern of ``policy.exclude`` (as file names do) are left out.
    """
    declared = Declarations.merge(parts)
    compared = [
        not entry.meta.is_object
        and not any(fnmatchcase(entry.key, p) for p in policy.exclude)
        for entry in declared.tensors
    ]
    shards = declared.shards
    keep = (np.diff(shards.bounds) > 1)[shards.number]
    keep &= np.array(compared, np.bool_)[declared.tensor[shards.order]]
    keep &= declared.nbytes[shards.order] > 0
    shard = np.full(len(declared), -1, np.int64)
    shard[shards.order[keep]] = shards.number[keep]
    rows = np.flatnonzero(shard >= 0)
    entries = group(shard[rows])
    counts = [len(part) for part in parts]
    holder = np.repeat(np.arange(len(parts)), counts)[rows]
    local = (rows - np.cumsum([0, *counts])[holder]).astype(np.int32)
    bounds = np.searchsorted(holder, np.arange(len(parts) + 1)).tolist()
    # The size up to which the replicas of each rank are ``_ALWAYS`` bytes together.
    always = 2**62
    for first, last in pairwise(bounds):
        sizes = np.sort(declared.nbytes[rows[first:last]])
        beyond = np.flatnonzero(np.cumsum(sizes) > _ALWAYS)
        if len(beyond):
            always = min(always, int(sizes[beyond[0]]) - 1)
    own = [
        RankReplicas(local[bounds[rank] : bounds[rank + 1]], always, policy)
        for rank in range(len(parts))
    ]
    return own, AllReplicas(declared.take(rows[entries.first]), entries, always)


@dataclass(frozen=True, eq=False)
class RankDigests:
    """The hashes of a rank: for each of these declarations its blocks' numbers and digests."""

    declared: Declarations
    blocks: list[Hashed]

    def packed(self) -> bytes:
        """One digest a replica."""
        joined = []
        for _, digests in self.blocks:
            if len(digests) == 1:
                joined.append(digests[0])
            else:
                joined.append(digest(b"".join(digests)))
        return b"".join(joined)

    def of(self, shards: Sequence[ShardId]) -> Blocks:
        """The blocks of each of these shards that this rank has, of all its declarations."""
        numbers = {shard: i for i, shard in enumerate(shards)}
        found: Blocks = {}
        for row, blocks in zip(self.declared.rows(), self.blocks, strict=True):
            if row.shard in numbers:
                found.setdefault(numbers[row.shard], []).append(blocks)
        return found


def hash_replicas(
    replicas: RankReplicas,
    declared: Declarations,
    held: Sequence[Any],
    turn: int,
) -> RankDigests:
    """Hash this rank's replicas. ``turn`` numbers the saves, in the same way on all ranks.

    A replica that is not longer than a digest is its digest, so that an error can show its values.
    """
    is_sample = replicas.policy.amount == "sample"
    turn //= replicas.policy.every
    own = declared.take(replicas.rows)
    hashed = []
    for row, tensor_number in zip(
        replicas.rows.tolist(), own.tensor.tolist(), strict=True
    ):
        tensor = held[row]
        step = 1
        first = 0
        if is_sample and tensor.nbytes > replicas.always:
            # Replicas of one key start with the same block, and replicas of different keys do not.
            step = TURNS
            first = (turn + crc32(own.tensors[tensor_number].key.encode())) % TURNS
        numbers = []
        digests = []
        for number, block in _blocks(tensor.detach(), first, step):
            numbers.append(number)
            if tensor.nbytes <= DIGEST_SIZE:
                digests.append(bytes(block).ljust(DIGEST_SIZE, b"\0"))
            else:
                digests.append(digest(block))
        hashed.append((numbers, digests))
    return RankDigests(own, hashed)


def _blocks(
    tensor: torch.Tensor, first: int, step: int
) -> Iterator[tuple[int, memoryview]]:
    """Every ``step``-th block of a tensor's elements in C order, and its number."""
    if is_plain_memory(tensor):
        view = byte_view(tensor)
        for number in range(first, math.ceil(len(view) / BLOCK), step):
            yield number, view[number * BLOCK : (number + 1) * BLOCK]
        return
    number = 0
    for piece in pieces(tensor):
        view = piece.cast("B")
        for start in range(0, len(view), BLOCK):
            if number >= first and (number - first) % step == 0:
                yield number, view[start : start + BLOCK]
            number += 1


def describe(
    advice: str,
    shards: Sequence[ShardId],
    found: Sequence[Blocks],
    tensors: Sequence[TensorEntry],
    stored: Chunks | None = None,
) -> str:
    """Which ranks differ in which blocks. ``found``: for each rank ``RankDigests.of(shards)``.

    ``stored``: the chunks of ``tensors`` that are saved, None without a save.
    """
    lines = [advice]
    if statistics := sum(shard.key.endswith(_STATISTICS) for shard in shards):
        lines.append(_ABOUT_STATISTICS.format(statistics))
    lines.append("The shards:")
    numbers = {entry.key: number for number, entry in enumerate(tensors)}
    for i, shard in enumerate(shards[:_NAMED]):
        number = numbers[shard.key]
        writers = None if stored is None else _writers(shard, number, stored)
        replicas = [
            (rank, hashed)
            for rank, blocks in enumerate(found)
            for hashed in blocks.get(i, ())
        ]
        difference = _difference(shard, replicas, tensors[number].meta, writers)
        lines.append(f"  {shard}: {difference}")
    if len(shards) > _NAMED:
        lines.append(f"  and {len(shards) - _NAMED} more shards")
    return "\n".join(lines)


def _difference(
    shard: ShardId,
    replicas: Sequence[tuple[int, Hashed]],
    meta: TensorMeta,
    writers: list[int] | None,
) -> str:
    """Which ranks differ in which blocks of a shard, and which of them have written it."""
    of_block: dict[int, dict[bytes, list[int]]] = {}  # block -> digest -> ranks
    for rank, hashed in replicas:
        for block, value in zip(*hashed, strict=True):
            of_block.setdefault(block, {}).setdefault(value, []).append(rank)
    nbytes = shard.box.volume * meta.itemsize
    # Different ranks may differ in different blocks.
    blocks_of: dict[tuple[str, str], list[int]] = {}
    for block, ranks in of_block.items():
        if len(ranks) > 1:
            sides = _sides(ranks, writers, nbytes, meta.dtype)
            blocks_of.setdefault(sides, []).append(block)
    texts = []
    for (between, stored), blocks in list(blocks_of.items())[:_PARTITIONS]:
        text = between
        if nbytes > DIGEST_SIZE:
            text += f", block {blocks[0]}"
            text += f" (from byte {blocks[0] * BLOCK:,} of the shard on)"
        if len(blocks) > 1:
            text += f" and {len(blocks) - 1} more"
        texts.append(text + stored)
    if len(blocks_of) > _PARTITIONS:
        texts.append("and other blocks, in which other ranks differ")
    return "\n    ".join(texts)


def _sides(
    ranks: Mapping[bytes, list[int]],
    writers: list[int] | None,
    nbytes: int,
    dtype: str,
) -> tuple[str, str]:
    """The ranks of each digest, with the value if it is short; and whose value is stored."""
    groups = sorted(ranks.items(), key=lambda group: (-len(group[1]), group[1]))
    sides = []
    for value, those in groups:
        side = name_ranks(those)
        if nbytes <= DIGEST_SIZE:
            side += _shown(value[:nbytes], dtype)
        sides.append(side)
    stored = ""
    if writers is not None:
        stored = f"; stored is that of {name_ranks(writers)}"
    _, largest = groups[0]
    if 2 * len(largest) <= sum(map(len, ranks.values())):
        return " against ".join(sides) + ", no majority", stored
    sides[0] += " (majority)"
    if writers is None:
        return " against ".join(sides), ""
    if {*writers} <= {*largest}:
        return " against ".join(sides), f"{stored} (majority)"
    return " against ".join(sides), f"{stored} (not the majority's)"


def _shown(value: bytes, dtype: str) -> str:
    """The elements of a replica, in brackets; empty for float8, float4 and complex numbers."""
    kind = getattr(torch, dtype)
    if kind.is_complex or (kind.is_floating_point and kind.itemsize == 1):
        return ""
    elements = torch.frombuffer(bytearray(value), dtype=kind).tolist()
    return f" [{', '.join(map(str, elements))}]"


def _writers(shard: ShardId, tensor: int, chunks: Chunks) -> list[int]:
    """The ranks that write a shard of the tensor with this number."""
    rows = np.flatnonzero(chunks.tensor == tensor)
    ndim = len(shard.box.shape)
    offset = chunks.boxes.offset[rows, :ndim]
    begin = np.array(shard.box.offset)
    inside = (offset >= begin) & (offset < begin + np.array(shard.box.shape))
    return sorted({*chunks.writer[rows[inside.all(axis=1)]].tolist()})
