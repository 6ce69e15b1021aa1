"""Which replica writes (or reads) each shard: one holder of each, with balanced bytes.

Shards are assigned in an order that balances well: shards with the fewest holders come first, among
equals the largest. Each goes to its least loaded holder, among equals to the lowest rank.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from megackpt.planning.box import Int64, expand_ranges, group, runs
from megackpt.planning.manifest import Declarations, Int32, itemsizes

_MANY = 16  # shards assigned in one turn from which on a turn is faster than a loop


def assign(declared: Declarations, balance: bool = True) -> Int64:
    """The rows of ``declared`` that write: one for each shard with a main replica, ascending.

    A tensor's candidates are the ranks that hold the shard in the domain of its main replica. An
    object is written by its main replica, as its copies often differ (the state of a random
    number generator). Without ``balance`` main replicas write everything. If there are several main
    replicas (which coverage refuses), the first one counts. The result depends on the declarations
    only. Objects weigh their nominal ``nbytes``.
    """
    shards = declared.shards
    rows = shards.order
    shard = shards.number
    # The first main replica of each shard that has one, as positions in ``rows``.
    main = np.flatnonzero(declared.main[rows])
    main = main[runs(shard[main])[:-1]]
    if not balance or len(shards) == len(rows):  # or each shard has one holder
        return np.sort(rows[main])

    # The candidates: in the domain of the main replica, of an object itself alone.
    rank = declared.rank[rows]
    domains = np.array(declared.domains, np.int64)
    # Declarations of a single rank have one domain, whatever the rank's number.
    domain = domains[np.minimum(rank, len(domains) - 1)]
    wanted = np.full(len(shards), -1, np.int64)
    wanted[shard[main]] = domain[main]
    is_object = itemsizes(declared.tensors) == 0
    fits = (domain == wanted[shard]) & (wanted[shard] >= 0)
    fits &= ~is_object[declared.tensor[rows]]
    fits[main] = True
    rows = rows[fits]
    rank = rank[fits]
    shard = shard[fits]
    # A rank that declares a shard several times is one candidate.
    again = np.zeros(len(rows), np.bool_)
    again[1:] = (shard[1:] == shard[:-1]) & (rank[1:] == rank[:-1])
    return np.sort(_balanced(declared, rows[~again], runs(shard[~again])))


def _balanced(declared: Declarations, candidates: Int64, bounds: Int64) -> Int64:
    """For each shard the row of its writer.

    The candidates of shard i are rows of ``declared``: ``candidates[bounds[i] : bounds[i + 1]]``.
    """
    count = np.diff(bounds)
    first = candidates[bounds[:-1]]
    nbytes = declared.nbytes[first]
    several = np.flatnonzero(count > 1)
    if not len(several):
        return first
    rank = declared.rank[candidates]
    alone = count == 1
    loads = np.zeros(int(rank.max()) + 1, np.int64)
    np.add.at(loads, declared.rank[first[alone]], nbytes[alone])

    # Key and box, the last criteria, only make the order deterministic.
    keys = np.array([entry.key for entry in declared.tensors], object)
    alphabetical = np.argsort(np.argsort(keys, kind="stable"))
    held = first[several]
    offsets = declared.boxes.offset[held].T[::-1]
    key = alphabetical[declared.tensor[held]]
    order = np.lexsort([*offsets, key, -nbytes[several], count[several]])
    order = several[order]
    chosen = bounds[:-1].copy()
    for begin, end in pairwise(runs(count[order]).tolist()):  # equally many candidates
        shards = order[begin:end]
        members = rank[bounds[shards][:, None] + np.arange(count[shards[0]])]
        chosen[shards] += _assign_each(members, nbytes[shards], loads)
    return candidates[chosen]


def _assign_each(members: Int32, nbytes: Int64, loads: Int64) -> Int64:
    """Which of its ``members`` (n, k) gets each shard; updates ``loads``."""
    winner = np.empty(len(members), np.int64)
    _, first, number = np.unique(members[:, 0], return_index=True, return_inverse=True)
    sets = members[first]
    apart = len(np.unique(sets)) == sets.size and bool((members == sets[number]).all())
    if not apart or len(number) < _MANY * np.bincount(number).max():
        for i, mine in enumerate(members):
            best = loads[mine].argmin()
            loads[mine[best]] += nbytes[i]
            winner[i] = best
        return winner
    # Disjoint sets of ranks do not depend on one another's assignments: the first shard of each
    # set is assigned at once, then the second, ...
    by_set = group(number)
    _, turn = expand_ranges(np.zeros_like(by_set.first), np.diff(by_set.bounds))
    turns = group(turn)
    for i in range(len(turns)):
        shards = by_set.order[turns.rows(i)]
        candidates = members[shards]
        best = loads[candidates].argmin(axis=1)
        loads[candidates[np.arange(len(shards)), best]] += nbytes[shards]
        winner[shards] = best
    return winner
