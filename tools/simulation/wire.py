"""The cost of a save and a load on the wire: connections, rounds, and the bytes that each rank sends and receives.

Ranks are connected as ``children_of`` says. Sizes are those of packed messages; each message has a head of
some hundred bytes (kind, stage, path) in addition. tests/tools/test_simulate.py compares this with the counters
of real ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from megackpt.distributed.messages import children_of, join
from megackpt.distributed.wire_format import COMPRESSED_BYTES, compress, pack
from megackpt.loader.comparison import CompareRequest
from megackpt.loader.load_operation import _RankRequest as LoadRequest
from megackpt.planning.box import Int64
from megackpt.planning.manifest import (
    DIGEST_SIZE,
    Declarations,
    Digests,
    Manifest,
    SavePlan,
    WriteResult,
)
from megackpt.saver.save_operation import _RankReply, _RankRequest as SaveRequest

VOTE = 7 * 8
"""Bytes: each rank votes with seven numbers."""
CONFIRMATIONS = 2
"""How many times rank 0 asks, before a commit, whether all ranks still wait."""
DIRECTORY = "/checkpoints/iter_0001000"
SAVE_ID = "0" * 32
_EMPTY = len(join([]))
_EACH = len(join([b""])) - _EMPTY


@dataclass(frozen=True, eq=False)
class SaveMessages:
    """Bytes of the messages that each rank sends to rank 0 (requests, results), and gets from it (replies)."""

    requests: Int64
    replies: Int64
    results: Int64


class Wire:
    """The tree of a job, and what its ranks have sent and received in the steps so far."""

    def __init__(self, ranks: int) -> None:
        self.parent = np.full(ranks, -1)
        self.end = np.full(ranks, ranks)  # a subtree is the ranks from its root to here
        level = np.zeros(ranks, np.int64)
        for rank in range(ranks):
            for child, span in children_of(rank, ranks).items():
                self.parent[child] = rank
                self.end[child] = min(child + span, ranks)
                level[child] = level[rank] + 1
        self.levels = int(level.max())
        self.children = np.bincount(self.parent[1:], minlength=ranks)
        self.connections = self.children + (self.parent >= 0)
        self.rounds = 0
        self.messages, self.sent, self.received = np.zeros((3, ranks), np.int64)

    def vote(self) -> None:
        self._up(np.full(len(self.parent), VOTE))
        self.broadcast(VOTE)

    def gather(self, sizes: Int64) -> None:
        self._up(self._joined(sizes))

    def scatter(self, sizes: Int64) -> None:
        self._down(self._joined(sizes))

    def broadcast(self, size: int) -> None:
        self._down(np.full(len(self.parent), size))

    def confirm(self) -> None:
        self.broadcast(0)
        self._up(np.zeros(len(self.parent), np.int64))

    def _joined(self, sizes: Int64) -> Int64:
        """The messages of each subtree in one."""
        before = np.append(0, np.cumsum(sizes))
        first = np.arange(len(sizes))
        joined: Int64 = before[self.end] - before[first] + _EACH * (self.end - first)
        return joined + _EMPTY

    def _up(self, sizes: Int64) -> None:
        """Each rank but rank 0 sends one message to its parent."""
        self.rounds += self.levels
        self.messages[1:] += 1
        self.sent[1:] += sizes[1:]
        np.add.at(self.received, self.parent[1:], sizes[1:])

    def _down(self, sizes: Int64) -> None:
        """Each rank but rank 0 gets one message from its parent."""
        self.rounds += self.levels
        self.messages += self.children
        self.received[1:] += sizes[1:]
        np.add.at(self.sent, self.parent[1:], sizes[1:])


def first_save(messages: SaveMessages, written: int) -> Wire:
    wire = Wire(len(messages.requests))
    wire.vote()
    wire.gather(messages.requests)
    wire.scatter(messages.replies)
    _commit(wire, messages, written)
    return wire


def next_save(messages: SaveMessages, written: int) -> Wire:
    """With the plan of the first one."""
    wire = Wire(len(messages.requests))
    wire.vote()
    _commit(wire, messages, written)
    return wire


def _commit(wire: Wire, messages: SaveMessages, written: int) -> None:
    wire.gather(messages.results)
    for _ in range(CONFIRMATIONS):
        wire.confirm()
    wire.broadcast(_size(written))


def load(parts: Sequence[Declarations], gathered: Int64, opened: int) -> Wire:
    """Each rank reads the bytes that it needs.

    ``gathered``: bytes of the declarations; ``opened``: see ``opened_size``.
    """
    wire = Wire(len(parts))
    wire.broadcast(opened)
    request = LoadRequest(CompareRequest(parts[0], ()), "never", 0)
    wire.gather(gathered + _size(request) - _size(parts[0]))
    wire.broadcast(_size((set(), False)))
    read = [int(part.nbytes.sum()) for part in parts]
    wire.gather(_sizes(read))
    wire.broadcast(_size(sum(read)))
    return wire


def opened_size(manifest: Manifest, blocks: int) -> int:
    """What rank 0 sends to all. The manifest has no digests; ``blocks``: how many there are."""
    chunks = replace(manifest.chunks, digests=_digests(blocks))
    size = _size((DIRECTORY, DIRECTORY, replace(manifest, chunks=chunks)))
    if size <= COMPRESSED_BYTES:
        return size
    plain = pack((DIRECTORY, DIRECTORY, manifest))
    return len(compress(plain)) + blocks * DIGEST_SIZE  # digests do not shrink


def messages_of(
    part: Declarations,
    plan: SavePlan,
    gathered: Int64,
    scattered: Int64,
    results: Sequence[WriteResult],
    blocks: Int64,
) -> SaveMessages:
    """Sizes of the messages with the declarations and plans of these sizes.

    ``part`` and ``plan`` belong to one rank: the rest of the messages is equal for all ranks. The results have
    no digests; ``blocks``: how many each rank computes.
    """
    request = SaveRequest(DIRECTORY, "torch_dist 1", part, blake2b(b"").digest(), {})
    reply = _RankReply(SAVE_ID, plan, None)
    complete = [
        replace(result, digests=_digests(count))
        for result, count in zip(results, blocks.tolist(), strict=True)
    ]
    return SaveMessages(
        gathered + _size(request) - _size(part),
        scattered + _size(reply) - _size(plan),
        _sizes([(result, b"", b"") for result in complete]),
    )


def _digests(blocks: int) -> Digests:
    return np.frombuffer(bytes(blocks * DIGEST_SIZE), np.uint8).reshape(-1, DIGEST_SIZE)


def _sizes(values: Sequence[object]) -> Int64:
    return np.array([_size(value) for value in values], np.int64)


def _size(value: object) -> int:
    return len(pack(value))
