"""What several ranks want + what is stored -> who reads each byte, once, and to whom it is handed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megackpt.planning.box import Boxes, Groups, Int64, cut, group_equal, runs
from megackpt.planning.dedup import assign
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import DIGEST_BLOCK, Declarations, LoadPlan, Manifest

SLAB = 16 << 20
"""Bytes of a larger chunk that one rank reads: others that want it read the next ones, and all end together."""

TOGETHER = 1 << 20
"""Bytes of small neighbours in a file that one rank reads: they are fetched by one call."""


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """Regions on their way between this rank and others. Both ends have those of one pair in the same order."""

    peer: Int64  # the rank at the other end: of a second row that wants the same, this one itself
    boxes: Boxes
    row: Int64  # of what this rank wants
    there: Int64  # of what the peer wants

    def __len__(self) -> int:
        return len(self.peer)


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One rank's part: ``chunk``, ``boxes``, ``target`` are the LoadPlan of what it reads, all of which it wants."""

    chunk: Int64
    boxes: Boxes
    target: Int64
    sends: Transfers
    receives: Transfers

    def reads(self, manifest: Manifest) -> LoadPlan:
        return LoadPlan(manifest, self.chunk, self.boxes, self.target)


def plan_sharing(
    parts: Sequence[Declarations], manifest: Manifest, apart: Sequence[Int64] = ()
) -> list[Share]:
    """For each rank its Share of the load in which rank i wants ``parts[i]``.

    Ranks of one domain hand one another what several of them want, if they want it in the same dtype: what is
    handed on is what has landed. Within a domain the reading is balanced by bytes; what one rank alone wants, it
    reads itself, as it does the rows ``apart[i]`` of ``parts[i]``. Raises as ``plan_load``.
    """
    wanted = Declarations.merge(parts)
    starts = np.cumsum([0, *map(len, parts)])
    holder = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    plan = _in_slabs(plan_load(wanted, manifest))
    alone = np.concatenate([np.zeros(0, np.int64), *map(np.add, starts, apart)])
    owner = _owners(plan, wanted, holder, alone)
    row, boxes = _cut_apart(owner, plan.boxes)
    chunk, target = plan.chunk[row], plan.target[row]
    rank = holder[target]
    regions = group_equal(owner[row], boxes)
    source = _sources(
        replace(plan, chunk=chunk, boxes=boxes, target=target),
        rank,
        len(parts),
        regions,
    )
    local = target - starts[rank]
    itself = source == np.arange(len(source))
    read, handed = np.flatnonzero(itself), np.flatnonzero(~itself)
    giver = source[handed]
    shares = []
    for reads, sends, receives in zip(
        *(_by_rank(rank[rows], len(parts)) for rows in (read, giver, handed)),
        strict=True,
    ):
        mine, given, got = read[reads], giver[sends], handed[receives]
        taken, from_ = handed[sends], giver[receives]
        away = Transfers(rank[taken], boxes.take(given), local[given], local[taken])
        home = Transfers(rank[from_], boxes.take(got), local[got], local[from_])
        shares.append(Share(chunk[mine], boxes.take(mine), local[mine], away, home))
    return shares


def _by_rank(rank: Int64, ranks: int) -> list[Int64]:
    """For each rank the places at which it stands in the column, ascending."""
    order = np.argsort(rank, kind="stable")
    return np.split(order, np.searchsorted(rank[order], np.arange(1, ranks)))


def _owners(plan: LoadPlan, wanted: Declarations, holder: Int64, alone: Int64) -> Int64:
    """For each row of the plan a number: equal where one rank could read for the other, which nobody does for the
    wanted rows ``alone``."""
    kinds: dict[str, int] = {}
    kind = np.array(
        [kinds.setdefault(e.meta.dtype, len(kinds)) for e in wanted.tensors], np.int64
    )
    domain = np.unique(np.array(wanted.domains, np.int64), return_inverse=True)[1][
        holder
    ]
    domain[alone] = len(wanted.domains) + alone
    column = domain[plan.target] * len(plan.manifest.chunks) + plan.chunk
    column = column * len(kinds) + kind[wanted.tensor[plan.target]]
    owner: Int64 = np.unique(column, return_inverse=True)[1].astype(np.int64)
    return owner


def _in_slabs(plan: LoadPlan) -> LoadPlan:
    """Regions of large chunks cut across the outermost axis, where digest blocks end: no block is read twice."""
    if plan.manifest.encoding != "raw":  # what a format decodes it decodes whole
        return plan
    chunks = plan.manifest.chunks
    size = np.array([entry.meta.itemsize for entry in plan.manifest.tensors], np.int64)
    holder = chunks.boxes.take(plan.chunk).widened(plan.boxes.width)
    rows, axis = np.arange(len(plan)), (holder.shape > 1).argmax(axis=1)
    pieces = holder.shape.copy()
    inner = holder.volume * size[chunks.tensor[plan.chunk]] // pieces[rows, axis]
    inner = np.maximum(inner, 1)  # of objects nothing is known
    align = DIGEST_BLOCK // np.gcd(inner, DIGEST_BLOCK)
    pieces[rows, axis] = np.minimum(
        pieces[rows, axis], -(-SLAB // (inner * align)) * align
    )
    row, boxes = cut(plan.boxes, pieces, holder.offset)
    return replace(plan, chunk=plan.chunk[row], boxes=boxes, target=plan.target[row])


def _cut_apart(owner: Int64, boxes: Boxes) -> tuple[Int64, Boxes]:
    """Boxes in pieces of which any two of one owner are the same or have nothing in common, and each one's row."""
    row = np.arange(len(boxes))
    for axis in range(boxes.width):
        ends = np.concatenate([boxes.offset[:, axis], boxes.stop[:, axis]])
        places, number = np.unique(ends, return_inverse=True)
        begin, end = (owner[row] * len(places) + half for half in np.split(number, 2))
        edges = np.unique(np.concatenate([begin, end]))
        first = np.searchsorted(edges, begin)
        count = np.searchsorted(edges, end) - first
        again = np.repeat(np.arange(len(row)), count)
        edge = (
            first[again]
            + np.arange(len(again))
            - np.repeat(np.cumsum(count) - count, count)
        )
        offset, shape = boxes.offset[again], boxes.shape[again]
        offset[:, axis] = places[edges[edge] % len(places)]
        shape[:, axis] = places[edges[edge + 1] % len(places)] - offset[:, axis]
        row, boxes = row[again], Boxes(offset, shape)
    return row, boxes


def _sources(plan: LoadPlan, rank: Int64, ranks: int, regions: Groups) -> Int64:
    """For each row of the plan the one that is read in its stead: of each region one, balanced by bytes."""
    chunks, tensors = plan.manifest.chunks, plan.manifest.tensors
    size = np.array([entry.meta.itemsize for entry in tensors], np.int64)[
        chunks.tensor[plan.chunk]
    ]
    nbytes = np.where(size, plan.boxes.volume * size, chunks.length[plan.chunk])
    region = np.empty(len(plan), np.int64)
    region[regions.order] = regions.number
    together = _together(plan, rank, regions, nbytes[regions.first])
    bundle = together[region]
    bundles = np.argsort(bundle, kind="stable")
    declared = Declarations.of_boxes(
        tensors,
        chunks.tensor[plan.chunk],
        plan.boxes,
        np.bincount(together, nbytes[regions.first]).astype(np.int64)[bundle],
        rank.astype(np.int32),
        (0,) * ranks,
    )
    # What is read is the same whoever reads it, objects too.
    chosen = assign(
        declared, shards=Groups(bundles, runs(bundle[bundles])), any_object=True
    )
    reader = np.empty(len(chosen), np.int64)
    reader[bundle[chosen]] = rank[chosen]
    fits = np.flatnonzero(rank == reader[bundle])[::-1]
    source = (
        regions.first
    )  # never needed, unless ranks that differ look alike to ``_together``
    source[region[fits]] = fits
    return source[region]


def _together(plan: LoadPlan, rank: Int64, regions: Groups, nbytes: Int64) -> Int64:
    """For each region the number of its bundle: neighbours in a file, wanted by the same ranks, are read by one."""
    first = regions.first
    chunk, offset = plan.chunk[first], plan.boxes.offset[first]
    mixed = (rank[regions.order].astype(np.uint64) + np.uint64(1)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    who = (
        np.add.reduceat(mixed ^ mixed >> np.uint64(29), regions.bounds[:-1])
        if len(first)
        else first
    )
    file = plan.manifest.chunks.file[chunk]
    order = np.lexsort((*offset.T[::-1], plan.manifest.chunks.start[chunk], file))
    filled = (np.cumsum(nbytes[order]) - nbytes[order]) // TOGETHER
    new = [
        np.diff(column, prepend=column[:1]) != 0
        for column in (file[order], who[order], filled)
    ]
    bundle = np.empty(len(first), np.int64)
    bundle[order] = np.cumsum(np.logical_or.reduce(new))
    return bundle
