"""Rows that several ranks want: one rank reads them and sends them to its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megackpt import events
from megackpt.backends.ranges import octets
from megackpt.distributed import Group, Stream
from megackpt.planning.box import Box, Int64
from megackpt.planning.exchange_plan import ExchangePlan, Transfers
from megackpt.planning.manifest import Declarations, itemsizes
from megackpt.staging.target import LoadTarget

COPY_SIZE = 4 << 20
"""Bytes of a region that is not contiguous in memory which are copied at a time."""


@dataclass(frozen=True, eq=False)
class TransferData:
    """The bytes of the transfers of this rank, in one direction."""

    transfers: Transfers
    wanted: Declarations
    memory: LoadTarget
    nbytes: Int64

    @classmethod
    def of(
        cls,
        transfers: Transfers,
        wanted: Declarations,
        memory: LoadTarget,
        object_length: Callable[[int], int],
    ) -> TransferData:
        """``object_length(i)`` gives the bytes of transfer i, of an object."""
        itemsize = itemsizes(wanted.tensors)[wanted.tensor[transfers.row]]
        nbytes = transfers.boxes.volume * itemsize
        for i in np.flatnonzero(nbytes == 0).tolist():
            nbytes[i] = object_length(i)
        # Ranks send values as they have read them, already converted: in the wanted dtype.
        dtypes = [t if t is None else t.dtype for t in memory.tensors]
        return cls(transfers, wanted, replace(memory, stored=dtypes), nbytes)

    def streams(
        self, blocks: Callable[[Int64], Iterator[memoryview]]
    ) -> dict[int, Stream]:
        """For each other rank one stream of ``blocks``, of all transfers with it."""
        streams = {}
        for peer in np.unique(self.transfers.peer).tolist():
            rows = np.flatnonzero(self.transfers.peer == peer)
            streams[peer] = Stream(int(self.nbytes[rows].sum()), blocks(rows))
        return streams

    def outgoing(self, rows: Int64) -> Iterator[memoryview]:
        for i in rows.tolist():
            row = int(self.transfers.row[i])
            if self._is_object(i):
                yield memoryview(self.memory.blobs[row])
                continue
            for box in self._boxes(i):
                yield octets(np.ascontiguousarray(self.memory.read_back(row, box)))

    def incoming(self, rows: Int64) -> Iterator[memoryview]:
        for i in rows.tolist():
            row = int(self.transfers.row[i])
            if self._is_object(i):
                data = bytearray(self.nbytes[i])
                yield memoryview(data)
                self.memory.blob(row, bytes(data))
            else:
                for box in self._boxes(i):
                    region = self.memory.open(row, box)
                    contiguous = region
                    if not region.flags.c_contiguous:
                        contiguous = np.empty_like(region, order="C")
                    yield octets(contiguous)
                    if contiguous is not region:
                        region[...] = contiguous
                    self.memory.close(row, box, region)
            events.current().advance(int(self.nbytes[i]))

    def _is_object(self, i: int) -> bool:
        return self.memory.tensors[self.transfers.row[i]] is None

    def _boxes(self, i: int) -> Iterator[Box]:
        """The box of a transfer, in parts of at most COPY_SIZE bytes."""
        meta = self.wanted.tensors[self.wanted.tensor[self.transfers.row[i]]].meta
        box = self.transfers.boxes.row(i, len(meta.shape))
        if self.nbytes[i] <= COPY_SIZE:
            yield box
            return
        step = COPY_SIZE // meta.itemsize
        for start in range(0, box.volume, step):
            yield from box.runs(start, min(start + step, box.volume))


def exchange(
    group: Group,
    plan: ExchangePlan,
    wanted: Declarations,
    memory: LoadTarget,
    lengths: Sequence[Mapping[int, int]],
) -> None:
    """Send the values that this rank has read for its peers, and receive values from the peers.

    ``lengths``: for each rank the bytes of every object that it has read, by its wanted row.
    """

    def sent_length(i: int) -> int:
        return len(memory.blobs[int(plan.sends.row[i])])

    def received_length(i: int) -> int:
        peer = int(plan.receives.peer[i])
        row = int(plan.receives.peer_row[i])
        return lengths[peer][row]

    def streams() -> tuple[dict[int, Stream], dict[int, Stream]]:
        sent = TransferData.of(plan.sends, wanted, memory, sent_length)
        received = TransferData.of(plan.receives, wanted, memory, received_length)
        events.current().todo = int(received.nbytes.sum())
        return sent.streams(sent.outgoing), received.streams(received.incoming)

    group.exchange("exchange", streams)
