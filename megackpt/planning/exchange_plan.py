"""Which rank reads each region that several ranks want, and to which ranks it sends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megackpt.planning.box import (
    Boxes,
    Groups,
    Int64,
    cut,
    expand_ranges,
    group_equal,
    runs,
)
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    ITEMSIZE,
    Declarations,
    LoadPlan,
    Manifest,
    itemsizes,
    joined,
)

READ_UNIT = 16 << 20
"""Bytes of a larger chunk that one rank reads. Another rank that wants it reads the next unit."""
SMALL_READS = 1 << 20
"""Regions that the same ranks want are divided among these in stretches of at least these bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """Regions that pass between this rank and its peers, in the same order at both ends.

    ``peer`` is the rank that sends or receives. It is this rank itself if two of its rows want one
    region. ``row`` and ``peer_row`` are rows of the declarations of this rank and of the peer.
    """

    peer: Int64
    boxes: Boxes
    row: Int64
    peer_row: Int64

    def __len__(self) -> int:
        return len(self.peer)


@dataclass(frozen=True, slots=True, eq=False)
class ExchangePlan:
    """One rank's part. ``chunk``, ``boxes`` and ``target`` are the LoadPlan of its reads."""

    chunk: Int64
    boxes: Boxes
    target: Int64
    sends: Transfers
    receives: Transfers

    def reads(self, manifest: Manifest) -> LoadPlan:
        return LoadPlan(manifest, self.chunk, self.boxes, self.target)


def plan_exchange(
    parts: Sequence[Declarations], manifest: Manifest, apart: Sequence[Int64] = ()
) -> list[ExchangePlan]:
    """The plan of each rank for the load in which rank i wants ``parts[i]``.

    Ranks of one domain exchange regions that several of them want in one dtype: they send the
    values after conversion. Within a domain the reads are balanced by bytes. A rank reads itself
    the regions that no other rank wants, and the rows ``apart[i]`` of ``parts[i]``. Raises like
    ``plan_load``.
    """
    wanted = Declarations.merge(parts)
    counts = np.array([len(part) for part in parts], np.int64)
    starts = np.cumsum(counts) - counts
    holder = np.repeat(np.arange(len(parts)), counts)
    plan = _in_read_units(plan_load(wanted, manifest))
    alone = joined(list(map(np.add, starts, apart)), np.int64)
    owner = _owners(plan, wanted, holder, alone)
    row, boxes = _cut_at_overlaps(owner, plan.boxes)
    plan = replace(plan.take(row), boxes=boxes)
    rank = holder[plan.target]
    source = _sources(plan, rank, group_equal(owner[row], boxes))

    is_read = source == np.arange(len(source))
    received = np.flatnonzero(~is_read)
    sent = source[received]  # row by row: ``received`` gets what ``sent`` reads
    read_by = _by_rank(np.flatnonzero(is_read), rank, len(parts))
    places = np.arange(len(received))
    sent_by = _by_rank(places, rank[sent], len(parts))
    received_by = _by_rank(places, rank[received], len(parts))
    local = plan.target - starts[rank]

    def transfers(own: Int64, peers: Int64) -> Transfers:
        return Transfers(rank[peers], boxes.take(own), local[own], local[peers])

    plans = []
    for mine, sends, receives in zip(read_by, sent_by, received_by, strict=True):
        plans.append(
            ExchangePlan(
                plan.chunk[mine],
                boxes.take(mine),
                local[mine],
                transfers(sent[sends], received[sends]),
                transfers(received[receives], sent[receives]),
            )
        )
    return plans


def _by_rank(rows: Int64, rank: Int64, ranks: int) -> list[Int64]:
    """For each rank its ``rows``, in their order."""
    order = np.argsort(rank[rows], kind="stable")
    bounds = np.searchsorted(rank[rows][order], np.arange(1, ranks))
    return np.split(rows[order], bounds)


def _owners(plan: LoadPlan, wanted: Declarations, holder: Int64, alone: Int64) -> Int64:
    """A number for each row of the plan: one rank can read a region for all rows of one number.

    Each of the wanted rows ``alone`` has a different number.
    """
    dtypes = list(ITEMSIZE)
    kinds = [dtypes.index(entry.meta.dtype) for entry in wanted.tensors]
    kind = np.array(kinds, np.int64)[wanted.tensor[plan.target]]
    domains = np.array(wanted.domains, np.int64)
    domain = np.unique(domains, return_inverse=True)[1][holder]
    domain[alone] = len(domains) + alone
    # Equal numbers: of one domain, in one chunk, wanted in one dtype.
    number = domain[plan.target]
    number = number * len(plan.manifest.chunks) + plan.chunk
    number = number * len(dtypes) + kind
    owner: Int64 = np.unique(number, return_inverse=True)[1].astype(np.int64)
    return owner


def _in_read_units(plan: LoadPlan) -> LoadPlan:
    """Regions of large chunks, cut along their outermost axis into units of READ_UNIT bytes.

    Cuts are where digest blocks end, so that no block is read twice.
    """
    manifest = plan.manifest
    if manifest.encoding != "raw":  # the backend can only decode whole chunks
        return plan
    chunks = manifest.chunks
    itemsize = itemsizes(manifest.tensors)[chunks.tensor[plan.chunk]]
    holder = chunks.boxes.take(plan.chunk).widened(plan.boxes.width)
    rows = np.arange(len(plan))
    outermost = (holder.shape > 1).argmax(axis=1)
    extent = holder.shape[rows, outermost]
    # Bytes at one place along this axis. At least 1, because objects have an itemsize of 0.
    inner = np.maximum(1, holder.volume * itemsize // extent)
    align = DIGEST_BLOCK // np.gcd(inner, DIGEST_BLOCK)
    unit = -(-READ_UNIT // (inner * align)) * align
    pieces = holder.shape.copy()
    pieces[rows, outermost] = np.minimum(extent, unit)
    row, boxes = cut(plan.boxes, pieces, holder.offset)
    return replace(plan.take(row), boxes=boxes)


def _cut_at_overlaps(owner: Int64, boxes: Boxes) -> tuple[Int64, Boxes]:
    """Pieces of the boxes, and for each piece the row of its box.

    Two pieces of one owner are equal or disjoint.
    """
    row = np.arange(len(boxes))
    for axis in range(boxes.width):
        ends = np.concatenate([boxes.offset[:, axis], boxes.stop[:, axis]])
        values, number = np.unique(ends, return_inverse=True)
        # One number for an owner and a place on the axis, so that one sort serves all owners.
        place = np.tile(owner[row], 2) * len(values) + number
        edges, number = np.unique(place, return_inverse=True)
        first, last = np.split(number, 2)
        # Each box becomes pieces between one edge of its owner and the next.
        parent, edge = expand_ranges(first, last - first)
        start = values[edges[edge] % len(values)]
        stop = values[edges[edge + 1] % len(values)]
        boxes = boxes.take(parent)
        boxes.offset[:, axis] = start
        boxes.shape[:, axis] = stop - start
        row = row[parent]
    return row, boxes


def _sources(plan: LoadPlan, rank: Int64, regions: Groups) -> Int64:
    """For each row of the plan the row that is read instead of it.

    One row of each region is read. The regions that the same ranks want are divided among these,
    in the order of the files, in stretches of equally many bytes.
    """
    chunks = plan.manifest.chunks
    first = regions.first
    chunk = plan.chunk[first]
    count = np.diff(regions.bounds)
    itemsize = itemsizes(plan.manifest.tensors)[chunks.tensor[chunk]]
    nbytes = plan.boxes.take(first).volume * itemsize
    nbytes = np.where(itemsize > 0, nbytes, chunks.length[chunk])

    # A hash of the set of ranks that want each region.
    mixed = rank[regions.order].astype(np.uint64) + np.uint64(1)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    ranks = np.add.reduceat(mixed, regions.bounds[:-1])
    offsets = plan.boxes.offset[first].T[::-1]
    order = np.lexsort((*offsets, chunks.start[chunk], chunks.file[chunk], ranks))
    alike = Groups(order, runs(ranks[order]))  # regions of one set of ranks

    # From here on by order: the bytes of the set, and the bytes before each region in it.
    number = alike.number
    nbytes = nbytes[order]
    count = count[order]
    total = np.add.reduceat(nbytes, alike.bounds[:-1])[number]
    before = np.cumsum(nbytes) - nbytes
    before -= before[alike.bounds[:-1]][number]
    readers = np.minimum(count, -(-total // SMALL_READS))
    turn = before * readers // np.maximum(1, total)
    # Sets begin with different ranks, because small ones have a single reader.
    chosen = np.empty_like(first)
    chosen[order] = (turn + number) % count
    read = regions.order[regions.bounds[:-1] + chosen]
    source = np.empty(len(plan), np.int64)
    source[regions.order] = read[regions.number]
    return source
