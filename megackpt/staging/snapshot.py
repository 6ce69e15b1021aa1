"""What a rank is to write as it is now: copied to the host at once, or in turns with the writing if it is large."""

from __future__ import annotations

import numpy as np

from megackpt.staging.copying import copy_rows, padded
from megackpt.staging.memory import IDLE_PATIENCE, PATIENCE, POOL, Copy, default_cap
from megackpt.staging.source import Staged, settle
from megackpt.staging.turns import Turns


class Snapshot:
    """The data of one rank's save plan, in host memory under a cap.

    ``complete``: all of it is copied, the tensors may be changed, and ``source`` can travel to another process. Else
    there is no room for all of it: a thread of this process must begin to write ``source``, which takes pieces out of
    the tensors, and they may be changed when ``settle`` has returned. Whoever sees the writing end, well or not,
    calls ``release``: no thread that waits in ``of`` or ``settle``, for they may wait for just that.
    """

    def __init__(self, source: Copy | Turns, cap: int, patience: float) -> None:
        self.source = source
        self.complete = isinstance(source, Copy)
        self._cap = cap
        self._patience = patience

    @classmethod
    def of(
        cls, staged: Staged, cap: int | None = None, patience: float = PATIENCE
    ) -> Snapshot:
        """Copy all rows of the plan, objects' blobs too; waits while earlier copies take the room.

        ``cap``: the bytes that all snapshots of this process may take (None: ``default_cap``). StorageError when no
        room has been made for ``patience`` seconds, or none will be: no worker was given the earlier ones.
        """
        cap = default_cap() if cap is None else cap
        plan = staged.plan
        is_object = np.array(
            [entry.meta.is_object for entry in plan.tensors], np.bool_
        )[plan.tensor]
        values = (
            (row, staged.value(row)) for row in np.flatnonzero(is_object).tolist()
        )
        blobs = {row: value for row, value in values if isinstance(value, bytes)}
        lengths = staged.lengths.copy()
        lengths[list(blobs)] = [len(blob) for blob in blobs.values()]
        room = padded(lengths)
        if (total := int(room.sum())) > cap:
            settle(staged.held)
            return cls(Turns(staged, blobs, POOL.changed), cap, patience)
        lease = POOL.lease(lambda: total, cap, patience, IDLE_PATIENCE)
        try:
            starts = np.cumsum(room) - room
            copy_rows(staged, np.flatnonzero(~is_object).tolist(), starts, lease.arena)
            for row, blob in blobs.items():
                lease.arena.memory[starts[row] :][: len(blob)] = np.frombuffer(
                    blob, np.uint8
                )
        except BaseException:
            lease.release()
            raise
        lease.arena.idle = True
        return cls(Copy(plan, lease.arena, starts, lengths, lease), cap, patience)

    def settle(self) -> None:
        """Wait until what was not handed over yet fits under the cap, and copy it: the tensors may be changed now.

        Returns also when ``release`` is called. What it raises (StorageError when writers have taken nothing for
        ``patience`` seconds) stops the writing, too.
        """
        if not isinstance(self.source, Turns) or self.source.settled:
            return
        try:
            self.source.settle(POOL.lease(self.source.need, self._cap, self._patience))
        except BaseException:
            self.source.close()
            raise

    def release(self) -> None:
        """The writing has ended: the memory is for others. Once is enough, and never does no harm.

        If nobody calls it, the memory is given back when nobody refers to this and its source any more.
        """
        self.source.close()
