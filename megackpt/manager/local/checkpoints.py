"""The local checkpoints of one run: saves, restores, and the directory of the run on each host."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from megackpt.async_save import AsyncCallsQueue
from megackpt.distributed import GroupLike, group_over
from megackpt.manager.local.agent import ensure_agent
from megackpt.manager.local.drain import DrainSettings, DrainStatus, read_status
from megackpt.manager.local.drain_records import Record
from megackpt.manager.local.lineage import Line, Lines, read_lines
from megackpt.manager.local.pieces import HostPieces, LocalSave, Piece
from megackpt.manager.local.restore import LocalRestore
from megackpt.manager.local.saves import LocalSaves
from megackpt.manager.local.tier import LocalTier
from megackpt.state import ShardedStateDict
from megackpt.storage import Executor, digest
from megackpt.strategies import CheckValues, Strategy, StrategyLike

T = TypeVar("T")


class LocalCheckpoints:
    """The local checkpoints of the run at ``root``. All ranks create and call it.

    Args:
        tier: the settings.
        root: the directory or URL of the run.
        strategy: of the saves in the storage. The local ones are in the format torch_dist.
        queue: of the local saves alone.
        drain: what an agent has to know, if steps that are due in the storage are drained.
    """

    def __init__(
        self,
        tier: LocalTier,
        root: str,
        strategy: StrategyLike,
        process_group: GroupLike,
        timeout: timedelta,
        queue: AsyncCallsQueue,
        drain: DrainSettings | None,
    ) -> None:
        self._drain = drain
        self._tier = tier
        self._root = root
        check_values: CheckValues = "off"
        if isinstance(strategy, Strategy):
            check_values = strategy.check_values
        self._strategy = Strategy(
            options={"torch_metadata": False}, check_values=check_values
        )
        self._process_group = process_group
        self._timeout = timeout
        self._queue = queue
        self._saves: LocalSaves | None = None
        name = digest(root.encode()).hex()[:16]
        self._pieces = HostPieces(os.path.abspath(tier.path), name, timeout)
        # The step from which the run continues, and the local save if it is one.
        self._restored = sys.maxsize
        self._loaded: LocalSave | None = None
        self._line: Line | None = None

    @property
    def failed_saves(self) -> int:
        """The number of local saves that failed."""
        return self._queue.failures.failed

    def status(self) -> DrainStatus:
        """What the agent of this host says. Not collective."""
        if self._drain is None:
            return DrainStatus()
        status = read_status(self._pieces.location)
        if self._line is not None and self._line.has_left(
            status.durable, status.durable_step
        ):
            status = replace(status, durable_step=None, durable="")
        return status

    def save(
        self,
        step: int,
        state: ShardedStateDict,
        asynchronous: bool,
        due: Record | None = None,
        **options: Any,
    ) -> None:
        """Save a step on the hosts, if ``LocalTier.every`` divides its number. Collective.

        ``due``: save it in any case, to be drained. ``options``: the options of ``megackpt.save``
        that change the stored content.
        """
        if due is not None or step % self._tier.every == 0:
            line = self._begin_line(step)
            if self._saves is None:
                self._saves = LocalSaves(
                    self._tier,
                    self._pieces,
                    self._strategy,
                    self._process_group,
                    self._timeout,
                    self._queue,
                    self._drain,
                )
            if not line.is_begun:
                self._saves.begin(self._found(line))
                line.is_begun = True
            self._saves.save(step, state, asynchronous, options, line, due)

    def before_storage(self, step: int) -> None:
        """A save of this step in the storage begins. Collective.

        As soon as it is complete, the local steps that it does not continue are given up.
        """
        line = self._begin_line(step)
        if line.former and not line.is_promised:
            self._on_storage(partial(line.promise, step))
        line.is_promised = True

    def begin_restore(self) -> LocalRestore:
        """A read-only restore from the hosts. Collective.

        A save that is running is finalized first. Raises the error of the save if it has failed.
        """
        self.poll(blocking=True)
        host, group = self._tier.hostname, self._process_group
        if self._drain is not None:
            with group_over(group, self._timeout) as ranks:
                ranks.reduce_broadcast("agents", self._start_agent, len)
        return LocalRestore(self._pieces, host, group, self._timeout, self._lines())

    def _start_agent(self) -> None:
        if self._drain is not None and self._pieces.held():
            self._drain.write(self._pieces.location)
            ensure_agent(self._pieces.location)

    def restored(self, step: int, loaded: LocalSave | None) -> None:
        """The run continues from this step (-1: it begins). ``loaded``: the local save of it."""
        self._restored, self._loaded, self._line = step, loaded, None

    def _begin_line(self, step: int) -> Line:
        """The line of a save of this step."""
        if self._line is None:
            # Who saves a step again, or an earlier one, has gone back without a restore.
            last = min(self._restored, step - 1)
            self._line = Line(self._root, self._lines(), last)
        return self._line

    def _found(self, line: Line) -> list[LocalSave]:
        """The saves on the hosts that count, in order; the one that was loaded is the last."""

        def find(answers: Sequence[list[Piece]]) -> list[LocalSave]:
            held = {piece.save for pieces in answers for piece in pieces}
            counting = [save for save in held if save.counts(line.former)]
            return sorted(counting, key=lambda save: (save == self._loaded, save))

        with group_over(self._process_group, self._timeout) as group:
            return group.reduce_broadcast("local pieces", self._pieces.held, find)

    def _lines(self) -> Lines:
        return self._on_storage(partial(read_lines, self._root))

    def _on_storage(self, work: Callable[[], T]) -> T:
        """The result of rank 0, on all ranks. StorageError if its storage does not answer."""
        name = f"which local steps count, in {self._root} (rank 0)"
        group = group_over(self._process_group, self._timeout)
        with group, closing(Executor(self._timeout)) as executor:
            return group.broadcast("local steps", lambda: executor.call(name, work))

    def poll(self, blocking: bool = False) -> None:
        """Finalize a local save that all ranks have ended. Collective while one is running."""
        if self._saves is not None:
            self._saves.poll(blocking)

    def close(self, abort: bool = False) -> None:
        """Finalize the running save (collective), or drop it (not collective)."""
        if self._saves is not None:
            self._saves.close(abort)
