"""Whether the storage of a run has space for the next save, before any byte of it is written."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from functools import partial

import torch

from megackpt.adapters.megatron import from_megatron
from megackpt.checkpoint.run_directory import list_run
from megackpt.distributed import GroupLike, attempt, coordinates, group_over
from megackpt.errors import CheckpointingException, StorageError, join_truncated
from megackpt.events import format_size
from megackpt.manager.keep_rules import KeepRules
from megackpt.manager.retention import Retention
from megackpt.planning.manifest import is_main_replica, is_unnumbered
from megackpt.state import ShardedBase, ShardedStateDict
from megackpt.storage import TEMPORARY, Advance, Executor, LocalStorage, is_url
from megackpt.strategies import StrategyLike, resolve
from megackpt.tree import walk

logger = logging.getLogger("megackpt.manager")

_PROBE = bytes(4096)
_PATIENCE = timedelta(seconds=10)
"""For the questions that only a message needs: a storage that hangs must not hold rank 0 alone."""


class StorageSpace:
    """Checks the directory of a run before its first save, once a day, and after a failed save.

    One rank of each host asks for the free space, and writes and removes a small file. Object
    stores have no such limit.

    Args:
        retention: of the run.
        strategy: of the saves. If a save may need less space than the tensors have, because it
            compresses or reuses files, only the small file is written.
    """

    def __init__(
        self,
        retention: Retention,
        strategy: StrategyLike,
        process_group: GroupLike,
        timeout: timedelta,
    ) -> None:
        self._retention = retention
        self._root = retention.root
        self._is_raw = attempt(partial(_writes_all, strategy)).value is True
        self._process_group = process_group
        self._timeout = timeout
        self._patience = min(timeout, _PATIENCE)
        self._checked_on: date | None = None
        self._failed = self._reported = 0
        self._needed = 0

    def check(self, step: int, state: ShardedStateDict, failed: int) -> None:
        """Check the space for a save, if a check is due; collective.

        Args:
            failed: how many saves have failed so far, the same on all ranks.

        Raises:
            StorageError: on all ranks. The message names the hosts, the missing bytes, and the
                bytes that a removal of older steps would free.
        """
        if is_url(self._root):
            return
        today = datetime.now(UTC).date()
        is_known = self._checked_on is not None and failed == self._failed
        with group_over(self._process_group, self._timeout) as group:
            if is_known and not group.broadcast(
                "space", lambda: today != self._checked_on
            ):
                return
            self._checked_on, self._failed = today, failed

            def measure() -> tuple[str, int]:
                return socket.gethostname(), _bytes_to_write(state, group.rank)

            def divide(answers: Sequence[tuple[str, int]]) -> list[tuple[int, bool]]:
                hosts, sizes = zip(*answers, strict=True)
                return [
                    (sum(sizes), hosts.index(host) == rank)
                    for rank, host in enumerate(hosts)
                ]

            self._needed, is_first = group.reduce_scatter("space", measure, divide)

            def probe() -> str:
                return self._problem(self._timeout) if is_first else ""

            def judge(answers: Sequence[str]) -> None:
                if problems := [answer for answer in answers if answer]:
                    raise StorageError(
                        f"step {step} is not saved: {join_truncated(problems, 8)}. "
                        f"{self._removable(step)}"
                    )

            self._reported = failed + 1  # if this raises, its error says everything
            group.reduce_broadcast("space", probe, judge)
            self._reported = failed

    def report(self, step: int, failed: int) -> None:
        """If a save has failed after its check, rank 0 logs the missing space, if any is missing.

        Args:
            step: the newest step that is being saved.
            failed: as for ``check``.
        """
        if failed <= self._reported or is_url(self._root):
            return
        self._reported = failed
        if coordinates(self._process_group) and (
            problem := self._problem(self._patience)
        ):
            logger.warning("%s. %s", problem, self._removable(step))

    def _problem(self, timeout: timedelta) -> str:
        """Why this host cannot write the needed bytes; empty if it can, as far as is known."""

        def work(advance: Advance) -> str:
            folder = self._root
            while not os.path.isdir(folder):
                folder = os.path.dirname(folder)
            space = os.statvfs(folder)
            # Some file systems, such as those of FUSE, do not say how large they are.
            if space.f_blocks and self._is_raw:
                blocks = space.f_bavail if os.geteuid() else space.f_bfree
                missing = self._needed - blocks * space.f_frsize
                if missing > 0:
                    return (
                        f"{self._root} on host {socket.gethostname()!r} has "
                        f"{format_size(blocks * space.f_frsize)} free, and the tensors have "
                        f"{format_size(self._needed)}: {format_size(missing)} are missing"
                    )
            if folder == self._root:
                advance(0)
                with closing(LocalStorage(folder)) as storage:
                    name = f"{TEMPORARY}space-{os.getpid()}"
                    storage.put(name, _PROBE)
                    storage.delete(name)
            return ""

        name = f"writing a small file to {self._root}, before a save"
        try:
            with closing(Executor(timeout)) as executor:
                return executor.call(name, work, executor.progress.advance)
        except (StorageError, OSError) as error:
            return f"host {socket.gethostname()!r} cannot write: {error}"

    def _removable(self, step: int) -> str:
        """What ``megackpt prune`` would free before this step."""
        rules = self._retention.rules
        if rules.keep_last is None:
            rules = KeepRules(keep_last=1)
        rehearsal = Retention(self._root, self._retention.naming, rules, True)

        def work(advance: Advance) -> tuple[int, list[str]]:
            names = rehearsal.prune(step, advance)
            steps = [
                found for found in list_run(self._root).steps if found.name in names
            ]
            return sum(found.bytes for found in steps), names

        try:
            with closing(Executor(self._patience)) as executor:
                nbytes, names = executor.call(
                    f"looking for older steps in {self._root}",
                    work,
                    executor.progress.advance,
                )
        except (CheckpointingException, OSError) as error:
            return f"What a removal of older steps would free is not known: {error}"
        if not names:
            return "No older step can be removed: free some space, or raise the quota"
        return (
            f"megackpt prune {self._root} --keep-last {rules.keep_last} would free "
            f"{format_size(nbytes)}: {join_truncated(names, 5)}"
        )


def _writes_all(strategy: StrategyLike) -> bool:
    """Whether a save writes all bytes of the tensors. A wrong strategy is refused by the save."""
    resolved = resolve(strategy)
    is_raw = resolved.make_backend().properties.encoding == "raw"
    return is_raw and not resolved.reuse_unchanged


def _bytes_to_write(state: ShardedStateDict, rank: int) -> int:
    """Bytes of the plain tensors whose main replicas are on this rank: a save writes these.

    Replicas without numbers count on rank 0 only. A tensor that wraps others may need less.
    """
    total = 0
    for _, leaf in walk(state):
        shard = from_megatron(leaf)
        if not isinstance(shard, ShardedBase):
            continue
        is_written = is_main_replica(shard.replica_id)
        if rank == 0:
            is_written |= is_unnumbered(shard.replica_id)
        data = shard.data
        is_plain = type(data) in (torch.Tensor, torch.nn.Parameter)
        # A save refuses sparse tensors, which have no size in bytes.
        if is_written and is_plain and data.layout is torch.strided:
            total += data.nbytes
    return total
