"""The local checkpoints of one run: saves, restores, and the directory of the run on each host."""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

from megackpt.async_save import AsyncCallsQueue
from megackpt.distributed import GroupLike, group_over
from megackpt.errors import StorageError
from megackpt.manager.local.pieces import HostPieces, LocalSave
from megackpt.manager.local.restore import LocalRestore
from megackpt.manager.local.saves import LocalSaves
from megackpt.manager.local.tier import LocalTier
from megackpt.state import ShardedStateDict
from megackpt.storage import digest, root_at
from megackpt.strategies import CheckValues, Strategy, StrategyLike

_RUN_FILE = ".megackpt-run"
"""In the directory of the run: its id. Who removes the run, and starts again, has another one."""

_How = Literal["read", "create", "renew"]


class LocalCheckpoints:
    """The local checkpoints of the run at ``root``. All ranks create and call it.

    Args:
        tier: the settings.
        root: the directory or URL of the run.
        strategy: of the saves in the storage. The local ones are in the format torch_dist.
        queue: of the local saves alone.
    """

    def __init__(
        self,
        tier: LocalTier,
        root: str,
        strategy: StrategyLike,
        process_group: GroupLike,
        timeout: timedelta,
        queue: AsyncCallsQueue,
    ) -> None:
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

    @property
    def failed_saves(self) -> int:
        """The number of local saves that failed."""
        return self._queue.failures.failed

    def save(
        self, step: int, state: ShardedStateDict, asynchronous: bool, **options: Any
    ) -> None:
        """Save a step on the hosts, if it is one of theirs. Collective.

        ``options``: those of ``megackpt.save`` that change what is stored.
        """
        if step % self._tier.every == 0:
            self._get_saves().save(step, state, asynchronous, options)

    def begin_restore(self) -> LocalRestore | None:
        """A restore from the hosts; None if the run has no local steps yet. Collective.

        A save that is running is finalized first. Raises its error if it has failed.
        """
        self.poll(blocking=True)
        pieces = self._pieces("read")
        if pieces is None:
            return None
        host, group = self._tier.hostname, self._process_group
        return LocalRestore(pieces, host, group, self._timeout)

    def restored(self, restore: LocalRestore, is_newest: bool) -> None:
        """The run continues from the save that was loaded, or from the storage. Collective."""
        keep = [] if restore.loaded is None else [restore.loaded]
        # Later steps, and those of other runs at this step, are not continued.
        self._keep_only(restore, keep, renew=not (keep and is_newest))

    def _keep_only(
        self, restore: LocalRestore, keep: list[LocalSave], renew: bool
    ) -> None:
        """Remove all other local steps; with ``renew`` also those of hosts that are away now.

        These are not found when they come back: the run gets another id.
        """
        renewed = self._pieces("renew") if renew else None
        restore.clear(keep, renewed)
        if keep or self._saves is not None:
            self._get_saves().restored(keep, renewed)

    def poll(self, blocking: bool = False) -> None:
        """Finalize a local save that all ranks have ended. Collective while one is running."""
        if self._saves is not None:
            self._saves.poll(blocking)

    def close(self, abort: bool = False) -> None:
        """Finalize the running save (collective), or drop it (not collective)."""
        if self._saves is not None:
            self._saves.close(abort)

    def _get_saves(self) -> LocalSaves:
        if self._saves is None:
            pieces = self._pieces("create")
            if pieces is None:
                raise StorageError(f"{self._root}: {_RUN_FILE} was removed meanwhile")
            self._saves = LocalSaves(
                self._tier,
                pieces,
                self._strategy,
                self._process_group,
                self._timeout,
                self._queue,
            )
        return self._saves

    def _pieces(self, how: _How) -> HostPieces | None:
        """The directory of this run on this host; None if the run has no local steps yet."""

        def find() -> tuple[str, str]:
            return digest(self._root.encode()).hex()[:16], _run_id(self._root, how)

        with group_over(self._process_group, self._timeout) as group:
            root, run = group.broadcast("find", find)
        if not run:
            return None
        return HostPieces(os.path.abspath(self._tier.path), root, run)


def _run_id(root: str, how: _How) -> str:
    """The id of the run in its directory. "read": "" if there is none; "renew": another one."""
    with suppress(FileNotFoundError):
        text = root_at(root).get(_RUN_FILE, 64).decode("ascii", "replace")
        if re.fullmatch("[0-9a-f]{16}", text) and how != "renew":
            return text
    if how == "read":
        return ""
    run = secrets.token_hex(8)
    root_at(root, create=True).put(_RUN_FILE, run.encode())
    return run
