"""Which replica writes (or reads) each shard: one holder of each, so that the bytes are balanced.

The order of decisions is what makes the balance good: shards with the fewest holders first (those with one
leave no choice), among these the largest first, and each to its least loaded holder, ties to the lower rank.
"""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np

from megackpt.planning.box import Groups, Int64
from megackpt.planning.manifest import Declarations


def assign(declared: Declarations, balance: bool = True, shards: Groups | None = None) -> Int64:
    """The row of ``declared`` that writes each shard that has a main replica: one row a shard, ascending.

    A shard's candidates are the ranks that hold it in the domain of its main replica's rank. Without
    ``balance`` the main replica's own rank writes. Where several main replicas are declared (which coverage
    refuses) the first one counts. Deterministic: it depends on the declarations only. Objects weigh their
    nominal ``nbytes``. ``shards`` is ``declared.shards()`` where the caller has it already.
    """
    shards = declared.shards() if shards is None else shards
    rows, shard = shards.order, shards.number
    main = declared.main[rows]
    first = np.flatnonzero(main)
    first = first[np.unique(shard[first], return_index=True)[1]]
    if not balance:
        return np.sort(rows[first])
    holders, bounds = _candidates(declared, rows, shard, first)
    return np.sort(holders[_balanced(declared, holders, bounds)])


def _candidates(declared: Declarations, rows: Int64, shard: Int64, first: Int64) -> tuple[Int64, Int64]:
    """For each shard with a main replica the rows that may write it, one a rank, and the shards' bounds."""
    rank = declared.rank[rows]
    domains = np.array(declared.domains, np.int64)
    # Declarations of a single rank have one domain, whatever the rank's number.
    domain = domains[rank] if len(domains) > 1 else np.zeros(len(rank), np.int64)
    wanted = np.full(int(shard[-1]) + 1 if len(shard) else 0, -1, np.int64)
    wanted[shard[first]] = domain[first]
    fits = domain == wanted[shard]
    fits[wanted[shard] < 0] = False
    fits = np.flatnonzero(fits)
    again = (shard[fits][1:] == shard[fits][:-1]) & (rank[fits][1:] == rank[fits][:-1])
    fits = fits[np.concatenate([[True], ~again])] if len(fits) else fits
    starts = np.flatnonzero(np.concatenate([[True], np.diff(shard[fits]) != 0])) if len(fits) else fits
    return rows[fits], np.append(starts, len(fits)).astype(np.int64)


def _balanced(declared: Declarations, holders: Int64, bounds: Int64) -> Int64:
    """For each shard the position in ``holders`` of the one that writes it."""
    count = np.diff(bounds)
    chosen = bounds[:-1].copy()
    rank = declared.rank[holders]
    nbytes = declared.nbytes[holders[bounds[:-1]]]
    several = np.flatnonzero(count > 1)
    if not len(several):
        return chosen
    alone = count == 1
    load = np.bincount(rank[chosen[alone]], weights=nbytes[alone], minlength=int(rank.max()) + 1)
    loads: list[int] = load.astype(np.int64).tolist()
    order = several[_precedence(declared, holders[chosen[several]], count[several], nbytes[several])]
    heaps: dict[bytes, list[tuple[int, int, int]]] = {}
    winners: list[int] = []
    for start, stop, size in zip(
        bounds[order].tolist(), bounds[order + 1].tolist(), nbytes[order].tolist(), strict=True
    ):
        members = rank[start:stop]
        name = members.tobytes()
        heap = heaps.get(name)
        if heap is None:
            heap = [(loads[r], r, i) for i, r in enumerate(members.tolist())]
            heapify(heap)
            heaps[name] = heap
        load_then, winner, place = heap[0]
        # Loads only grow: an entry that another set of holders made stale sinks to where it belongs.
        while load_then != loads[winner]:
            heapreplace(heap, (loads[winner], winner, place))
            load_then, winner, place = heap[0]
        loads[winner] = load_then + size
        heapreplace(heap, (load_then + size, winner, place))
        winners.append(start + place)
    chosen[order] = winners
    return chosen


def _precedence(declared: Declarations, rows: Int64, count: Int64, nbytes: Int64) -> Int64:
    """The order in which shards are given away; the last criteria, key and box, only make it definite."""
    alphabetical = np.empty(len(declared.tensors), np.int64)
    by_key = sorted(range(len(declared.tensors)), key=declared.tensors.__getitem__)
    alphabetical[by_key] = np.arange(len(by_key))
    offsets = declared.boxes.offset[rows].T[::-1]
    return np.lexsort([*offsets, alphabetical[declared.tensor[rows]], -nbytes, count])
