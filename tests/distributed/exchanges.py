"""What tests of collectives share: errors of one rank, and streams between ranks."""

from __future__ import annotations

import os
import threading

import numpy as np
import torch

from megackpt.distributed import Group, Stream


class Stubborn(Exception):
    """Cannot be pickled, and its text is not its argument."""

    def __init__(self, lock) -> None:
        super().__init__("stubborn, with a lock")
        self.lock = lock


class Shy:
    """Opened anywhere but on one rank, whose own code it is that fails: a thread, or a process."""

    def __init__(self, rank) -> None:
        self.rank = rank

    def __setstate__(self, state) -> None:
        if state["rank"] == rank_here():
            raise LookupError("not on this rank")


torch.serialization.add_safe_globals([Shy])


def rank_here():
    name = threading.current_thread().name
    return int(
        name.removeprefix("rank ") if name.startswith("rank ") else os.environ["RANK"]
    )


def raises_on(bad, error):
    def work(group: Group):
        if group.rank in bad:
            raise error
        return group.rank

    return work


def raise_(error):
    raise error


def pieces_of(data, sizes):
    """Memory of these sizes, and then of what is left, that together is ``data``."""
    bounds = np.cumsum([0, *sizes])
    return [
        data[a:b].data for a, b in zip(bounds, [*bounds[1:], len(data)], strict=True)
    ]


def stream(data, sizes=()):
    return Stream(len(data), pieces_of(data, sizes))


def message(source, to):
    """What one rank hands another: of other lengths for each pair, and nothing at all for some."""
    if (source, to) == (1, 3):
        return None
    length = 0 if (source, to) == (0, 1) else 1 + 97 * source + 31 * to
    return np.random.default_rng(10 * source + to).integers(0, 256, length, np.uint8)


def exchange(group, outgoing, incoming):
    group.exchange("exchange", lambda: (outgoing, incoming))


def exchanged(group):
    """The ranks hand one another messages, in pieces that differ at both ends, themselves as well."""
    sent = {to: message(group.rank, to) for to in range(group.size)}
    due = {source: message(source, group.rank) for source in range(group.size)}
    got = {
        source: np.zeros_like(data) for source, data in due.items() if data is not None
    }
    exchange(
        group,
        {
            to: stream(data, [min(5, len(data)), 0])
            for to, data in sent.items()
            if data is not None
        },
        {source: stream(data, [0, len(data) // 2, 0]) for source, data in got.items()},
    )
    return all((got[source] == due[source]).all() for source in got)
