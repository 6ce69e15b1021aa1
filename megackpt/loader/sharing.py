"""Rows that several ranks want: whether one of them reads for the others, and how it hands on what has landed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megackpt import events
from megackpt.backends.ranges import octets
from megackpt.distributed import Group, Stream, domain_of
from megackpt.planning.box import Box, Int64
from megackpt.planning.manifest import Declarations
from megackpt.planning.sharing import Share, Transfers
from megackpt.staging.target import LoadTarget
from megackpt.storage import Storage
from megackpt.strategies import Strategy

PIECE = 4 << 20
"""Bytes of a region that are copied at a time where its memory does not lie together."""


@dataclass(frozen=True)
class Sharing:
    """With whom one rank would share its reading: with those of the same ``domain``."""

    rank: int
    exchange: str
    domain: int

    @classmethod
    def of(cls, strategy: Strategy, rank: int) -> Sharing:
        return cls(
            rank, strategy.exchange, domain_of(strategy.load_group, "load_group")
        )

    def among(self, sharing: Sequence[str]) -> int:
        """The number of the ranks among which this one shares, if those that ask so do."""
        return self.domain if self.exchange in sharing else -1 - self.rank


def who_share(parts: Sequence[Sharing], root: Storage) -> tuple[str, ...]:
    """On the coordinator: ranks that ask how read for one another; none, if nobody would read less by it.

    "auto" does where bytes come to each rank over a network.
    """
    remote = any(part.exchange == "auto" for part in parts) and root.is_remote()
    sharing = ("always", "auto") if remote else ("always",)
    return sharing if len({part.among(sharing) for part in parts}) < len(parts) else ()


@dataclass(frozen=True, eq=False)
class Parcels:
    """What passes between this rank and others, one way. Both ends have those of one pair in the same order."""

    transfers: Transfers
    wanted: Declarations
    landing: LoadTarget
    nbytes: Int64

    @classmethod
    def of(
        cls,
        transfers: Transfers,
        wanted: Declarations,
        landing: LoadTarget,
        length: Callable[[int], int],
    ) -> Parcels:
        """``length`` tells the bytes of an object."""
        size = np.array([entry.meta.itemsize for entry in wanted.tensors], np.int64)
        nbytes = transfers.boxes.volume * size[wanted.tensor[transfers.row]]
        for i in np.flatnonzero(nbytes == 0).tolist():
            nbytes[i] = length(i)
        # What is handed on is what has landed: in the dtype asked for, which is the same at both ends.
        dtypes = [
            None if tensor is None else tensor.dtype for tensor in landing.tensors
        ]
        return cls(transfers, wanted, replace(landing, stored=dtypes), nbytes)

    def streams(
        self, way: Callable[[Int64], Iterator[memoryview]]
    ) -> dict[int, Stream]:
        """For each other rank what passes between it and this one."""
        rows = {
            p: np.flatnonzero(self.transfers.peer == p)
            for p in np.unique(self.transfers.peer).tolist()
        }
        return {
            peer: Stream(int(self.nbytes[those].sum()), way(those))
            for peer, those in rows.items()
        }

    def leaving(self, rows: Int64) -> Iterator[memoryview]:
        for i in rows.tolist():
            row = int(self.transfers.row[i])
            if self._is_object(i):
                yield memoryview(self.landing.blobs[row])
                continue
            for box in self._pieces(i):
                yield octets(np.ascontiguousarray(self.landing.read_back(row, box)))

    def coming(self, rows: Int64) -> Iterator[memoryview]:
        for i in rows.tolist():
            row = int(self.transfers.row[i])
            if self._is_object(i):
                data = bytearray(self.nbytes[i])
                yield memoryview(data)
                self.landing.blob(row, bytes(data))
            else:
                for box in self._pieces(i):
                    place = self.landing.open(row, box)
                    whole = (
                        place
                        if place.flags.c_contiguous
                        else np.empty_like(place, order="C")
                    )
                    yield octets(whole)
                    if whole is not place:
                        place[...] = whole
                    self.landing.close(row, box, place)
            events.current().advance(int(self.nbytes[i]))

    def _is_object(self, i: int) -> bool:
        return self.landing.tensors[self.transfers.row[i]] is None

    def _pieces(self, i: int) -> Iterator[Box]:
        meta = self.wanted.tensors[self.wanted.tensor[self.transfers.row[i]]].meta
        box = self.transfers.boxes.row(i, len(meta.shape))
        if self.nbytes[i] <= PIECE:
            yield box
            return
        step = PIECE // meta.itemsize
        for start in range(0, box.volume, step):
            for part in Box.whole(box.shape).runs(start, min(start + step, box.volume)):
                yield Box(
                    tuple(a + b for a, b in zip(box.offset, part.offset, strict=True)),
                    part.shape,
                )


def exchange(
    group: Group,
    share: Share,
    wanted: Declarations,
    landing: LoadTarget,
    lengths: Mapping[tuple[int, int], int],
) -> None:
    """Hand on what has landed here, and land what others have read. ``lengths``: of all objects that were read, by
    rank and row."""

    def streams() -> tuple[dict[int, Stream], dict[int, Stream]]:
        away = Parcels.of(
            share.sends,
            wanted,
            landing,
            lambda i: len(landing.blobs[int(share.sends.row[i])]),
        )
        peers = list(
            zip(
                share.receives.peer.tolist(), share.receives.there.tolist(), strict=True
            )
        )
        home = Parcels.of(share.receives, wanted, landing, lambda i: lengths[peers[i]])
        events.current().todo = int(home.nbytes.sum())
        return away.streams(away.leaving), home.streams(home.coming)

    group.exchange("exchange", streams)
