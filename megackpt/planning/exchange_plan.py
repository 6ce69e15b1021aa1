"""Which rank reads each region that several ranks want, and to which ranks it sends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megackpt.planning.box import Boxes, Groups, Int64, cut, group_equal, runs
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import DIGEST_BLOCK, Declarations, LoadPlan, Manifest

READ_UNIT = 16 << 20
"""Bytes of a larger chunk that one rank reads. Others that want the chunk read the next ones."""
SMALL_READS = 1 << 20
"""Regions that the same ranks want are divided among these in stretches of at least these bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """Regions that pass between this rank and others, in the same order at both ends.

    ``peer`` is the rank at the other end. It is this rank itself where two of its rows want
    one region. ``row`` and ``peer_row`` are rows of what this rank and the peer want.
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
    values after conversion. Within a domain the reads are balanced by bytes. A rank reads
    itself what no other rank wants, and the rows ``apart[i]`` of ``parts[i]``. Raises as
    ``plan_load``.
    """
    wanted = Declarations.merge(parts)
    starts = np.cumsum([0, *map(len, parts)])
    holder = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    plan = _in_read_units(plan_load(wanted, manifest))
    alone = np.concatenate([np.zeros(0, np.int64), *map(np.add, starts, apart)])
    owner = _owners(plan, wanted, holder, alone)
    row, boxes = _cut_at_overlaps(owner, plan.boxes)
    chunk, target = plan.chunk[row], plan.target[row]
    rank = holder[target]
    source = _sources(
        replace(plan, chunk=chunk, boxes=boxes, target=target),
        rank,
        group_equal(owner[row], boxes),
    )
    local = target - starts[rank]
    is_read = source == np.arange(len(source))
    received = np.flatnonzero(~is_read)
    sent = source[received]  # row by row: ``received`` gets what ``sent`` reads
    read_by = _by_rank(np.flatnonzero(is_read), rank, len(parts))
    places = np.arange(len(received))
    sent_by = _by_rank(places, rank[sent], len(parts))
    received_by = _by_rank(places, rank[received], len(parts))

    def transfers(own: Int64, peers: Int64) -> Transfers:
        return Transfers(rank[peers], boxes.take(own), local[own], local[peers])

    plans = []
    for mine, sends, receives in zip(read_by, sent_by, received_by, strict=True):
        plans.append(
            ExchangePlan(
                chunk[mine],
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
    """A number for each row of the plan, equal where one rank could read for the other.

    The wanted rows ``alone`` have numbers of their own.
    """
    kinds: dict[str, int] = {}
    dtypes = [entry.meta.dtype for entry in wanted.tensors]
    kind = np.array([kinds.setdefault(d, len(kinds)) for d in dtypes], np.int64)
    domains = np.array(wanted.domains, np.int64)
    domain = np.unique(domains, return_inverse=True)[1][holder]
    domain[alone] = len(wanted.domains) + alone
    column = domain[plan.target] * len(plan.manifest.chunks) + plan.chunk
    column = column * len(kinds) + kind[wanted.tensor[plan.target]]
    owner: Int64 = np.unique(column, return_inverse=True)[1].astype(np.int64)
    return owner


def _in_read_units(plan: LoadPlan) -> LoadPlan:
    """Regions of large chunks, cut along their outermost axis into units of READ_UNIT bytes.

    Cuts are where digest blocks end, so that no block is read twice.
    """
    if plan.manifest.encoding != "raw":  # the backend can only decode whole chunks
        return plan
    chunks = plan.manifest.chunks
    size = _itemsizes(plan.manifest)
    holder = chunks.boxes.take(plan.chunk).widened(plan.boxes.width)
    rows, axis = np.arange(len(plan)), (holder.shape > 1).argmax(axis=1)
    pieces = holder.shape.copy()
    inner = holder.volume * size[chunks.tensor[plan.chunk]] // pieces[rows, axis]
    inner = np.maximum(inner, 1)  # objects have an itemsize of 0
    align = DIGEST_BLOCK // np.gcd(inner, DIGEST_BLOCK)
    unit = -(-READ_UNIT // (inner * align)) * align
    pieces[rows, axis] = np.minimum(pieces[rows, axis], unit)
    row, boxes = cut(plan.boxes, pieces, holder.offset)
    return replace(plan, chunk=plan.chunk[row], boxes=boxes, target=plan.target[row])


def _itemsizes(manifest: Manifest) -> Int64:
    return np.array([entry.meta.itemsize for entry in manifest.tensors], np.int64)


def _cut_at_overlaps(owner: Int64, boxes: Boxes) -> tuple[Int64, Boxes]:
    """Pieces of the boxes, and for each piece the row of its box.

    Two pieces of one owner are equal or disjoint.
    """
    row = np.arange(len(boxes))
    for axis in range(boxes.width):
        ends = np.concatenate([boxes.offset[:, axis], boxes.stop[:, axis]])
        values, number = np.unique(ends, return_inverse=True)
        begin, end = (owner[row] * len(values) + half for half in np.split(number, 2))
        edges = np.unique(np.concatenate([begin, end]))
        first = np.searchsorted(edges, begin)
        count = np.searchsorted(edges, end) - first
        # Each box becomes ``count`` pieces, between one edge of its owner and the next.
        parent = np.repeat(np.arange(len(row)), count)
        before = np.repeat(np.cumsum(count) - count, count)
        edge = first[parent] + np.arange(len(parent)) - before
        offset, shape = boxes.offset[parent], boxes.shape[parent]
        offset[:, axis] = values[edges[edge] % len(values)]
        shape[:, axis] = values[edges[edge + 1] % len(values)] - offset[:, axis]
        row, boxes = row[parent], Boxes(offset, shape)
    return row, boxes


def _sources(plan: LoadPlan, rank: Int64, regions: Groups) -> Int64:
    """For each row of the plan the row that is read instead of it.

    One row of each region is read. The regions that the same ranks want are divided among these,
    in the order of the files, in stretches of equally many bytes.
    """
    chunks, first = plan.manifest.chunks, regions.first
    chunk, count = plan.chunk[first], np.diff(regions.bounds)
    size = _itemsizes(plan.manifest)[chunks.tensor[chunk]]
    nbytes = np.where(size, plan.boxes.take(first).volume * size, chunks.length[chunk])
    # A hash of the set of ranks that want each region.
    mixed = rank[regions.order].astype(np.uint64) + np.uint64(1)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    ranks = np.add.reduceat(mixed, regions.bounds[:-1])
    offsets = plan.boxes.offset[first].T[::-1]
    order = np.lexsort((*offsets, chunks.start[chunk], chunks.file[chunk], ranks))
    bounds = runs(ranks[order])
    number = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    before = np.append(0, np.cumsum(nbytes[order]))
    begin, end = before[bounds[:-1]][number], before[bounds[1:]][number]
    readers = np.minimum(count[order], -(-(end - begin) // SMALL_READS))
    turn = (before[:-1] - begin) * readers // np.maximum(1, end - begin)
    chosen = np.empty_like(first)
    chosen[order] = (turn + number) % count[order]
    source = np.empty(len(plan), np.int64)
    source[regions.order] = np.repeat(
        regions.order[regions.bounds[:-1] + chosen], count
    )
    return source
