"""Which replica writes (or reads) each shard: one holder of each, with balanced bytes.

Shards are assigned in an order that balances well: those with the fewest holders first, among
these the largest first, each to its least loaded holder, of equals to the lower rank.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from megackpt.planning.box import Int64, runs
from megackpt.planning.manifest import Bool, Declarations, Int32

_MANY = 16  # shards assigned in one turn from which on a turn is faster than a loop


def assign(declared: Declarations, balance: bool = True) -> Int64:
    """The rows of ``declared`` that write: one for each shard with a main replica, ascending.

    A tensor's candidates are the ranks that hold the shard in the domain of its main replica. An
    object is written by its main replica, as its copies often differ (the state of a random
    number generator). Without ``balance`` main replicas write everything. Of several main
    replicas (which coverage refuses) the first one counts. The result depends on the
    declarations only. Objects weigh their nominal ``nbytes``.
    """
    shards = declared.shards
    rows, shard = shards.order, shards.number
    main = declared.main[rows]
    first = np.flatnonzero(main)
    first = first[runs(shard[first])[:-1]]
    if not balance or len(shards) == len(rows):  # or each shard has one holder
        return np.sort(rows[first])
    is_object = np.array([entry.meta.is_object for entry in declared.tensors], np.bool_)
    may_differ = is_object[declared.tensor[rows]]
    may_differ[first] = False
    holders, bounds = _candidates(declared, rows, shard, first, may_differ)
    return np.sort(holders[_balanced(declared, holders, bounds)])


def _candidates(
    declared: Declarations, rows: Int64, shard: Int64, first: Int64, may_differ: Bool
) -> tuple[Int64, Int64]:
    """For each shard with a main replica the rows that may write it, and the shards' bounds.

    One row a rank, without those that ``may_differ`` from their main replica, the row in
    ``first``.
    """
    rank = declared.rank[rows]
    domains = np.array(declared.domains, np.int64)
    # Declarations of a single rank have one domain, whatever the rank's number.
    domain = domains[np.minimum(rank, len(domains) - 1)]
    wanted = np.full(int(shard.max(initial=-1)) + 1, -1, np.int64)
    wanted[shard[first]] = domain[first]
    fits = domain == wanted[shard]
    fits[(wanted[shard] < 0) | may_differ] = False
    rows, rank, shard = rows[fits], rank[fits], shard[fits]
    again = np.zeros(len(rows), np.bool_)
    again[1:] = (shard[1:] == shard[:-1]) & (rank[1:] == rank[:-1])
    return rows[~again], runs(shard[~again])


def _balanced(declared: Declarations, holders: Int64, bounds: Int64) -> Int64:
    """For each shard the position in ``holders`` of its writer."""
    count = np.diff(bounds)
    chosen = bounds[:-1].copy()
    rank = declared.rank[holders]
    nbytes = declared.nbytes[holders[bounds[:-1]]]
    several = np.flatnonzero(count > 1)
    if not len(several):
        return chosen
    alone = count == 1
    loads = np.bincount(rank[chosen[alone]], nbytes[alone], int(rank.max()) + 1).astype(
        np.int64
    )
    order = several[
        _precedence(declared, holders[chosen[several]], count[several], nbytes[several])
    ]
    limits = runs(count[order])
    for begin, end in pairwise(limits.tolist()):  # those with equally many holders
        shards = order[begin:end]
        members = rank[bounds[shards][:, None] + np.arange(count[shards[0]])]
        chosen[shards] += _assign_each(members, nbytes[shards], loads)
    return chosen


def _assign_each(members: Int32, nbytes: Int64, loads: Int64) -> Int64:
    """Which of its ``members`` (n, k) gets each shard; updates ``loads``."""
    winner = np.empty(len(members), np.int64)
    _, first, group = np.unique(members[:, 0], return_index=True, return_inverse=True)
    sets = members[first]
    apart = len(np.unique(sets)) == sets.size and bool((members == sets[group]).all())
    if not apart or len(group) < _MANY * np.bincount(group).max():
        for i, mine in enumerate(members):
            best = loads[mine].argmin()
            loads[mine[best]] += nbytes[i]
            winner[i] = best
        return winner
    # Disjoint sets of ranks do not depend on one another's assignments: the first shard of each
    # set is assigned at once, then the second, ...
    order = np.argsort(group, kind="stable")
    limits = runs(group[order])
    turn = np.arange(len(order)) - np.repeat(limits[:-1], np.diff(limits))
    order = order[np.argsort(turn, kind="stable")]
    for begin, end in pairwise(runs(np.sort(turn)).tolist()):
        shards = order[begin:end]
        candidates = members[shards]
        best = loads[candidates].argmin(axis=1)
        loads[candidates[np.arange(len(shards)), best]] += nbytes[shards]
        winner[shards] = best
    return winner


def _precedence(
    declared: Declarations, rows: Int64, count: Int64, nbytes: Int64
) -> Int64:
    """The order of assignment. Key and box, the last criteria, only make it deterministic."""
    alphabetical = np.empty(len(declared.tensors), np.int64)
    keys = [entry.key for entry in declared.tensors]
    by_key = sorted(range(len(keys)), key=keys.__getitem__)
    alphabetical[by_key] = np.arange(len(by_key))
    offsets = declared.boxes.offset[rows].T[::-1]
    return np.lexsort([*offsets, alphabetical[declared.tensor[rows]], -nbytes, count])
