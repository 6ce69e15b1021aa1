"""Loads the step from which a run continues. All ranks call it; rank 0 reads the directory."""

from __future__ import annotations

import logging
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from megackpt.async_save import Work
from megackpt.distributed import Group, GroupLike, group_over
from megackpt.errors import (
    CheckpointReplaced,
    CorruptCheckpoint,
    NotACheckpoint,
    RankFailure,
    RefusedObject,
    ShardingError,
    UntrustedClass,
)
from megackpt.loader.load_operation import load
from megackpt.manager.latest_step import (
    ATTEMPTS,
    Found,
    check_damage,
    find_latest,
    find_step,
    is_new_run,
)
from megackpt.manager.local.checkpoints import LocalCheckpoints
from megackpt.manager.local.restore import LocalRestore
from megackpt.manager.retention import Retention, find_damage
from megackpt.manager.run_directory import Restored, Step, step_number
from megackpt.planning.strict import StrictHandling, parse_strict_flag
from megackpt.state import ShardedStateDict
from megackpt.storage import Advance, Executor

logger = logging.getLogger("megackpt.manager")

T = TypeVar("T")


class Restorer:
    """Restores steps of one run.

    Args:
        retention: of the run; it knows the damage that was found before.
        process_group: of the ranks that save, with the meaning it has for the manager.
        timeout: how long a rank waits for other ranks in one operation.
        local: the run's checkpoints on the hosts, if there are any.
    """

    def __init__(
        self,
        retention: Retention,
        process_group: GroupLike,
        timeout: timedelta,
        local: LocalCheckpoints | None = None,
    ) -> None:
        self._retention = retention
        self._process_group = process_group
        self._timeout = timeout
        self._local = local

    def restore(
        self,
        state_dict: ShardedStateDict,
        step: int | None,
        options: dict[str, Any],
        finite: bool,
    ) -> Restored | None:
        """See ``CheckpointManager.restore``. ``options``: the options of ``megackpt.load``."""
        wanted = None
        if step is not None:
            wanted = step_number(step)
        with self._group() as group:
            if not group.all_agree(-1 if wanted is None else wanted):
                raise ShardingError(
                    f"the ranks restore different steps, all must agree: here {wanted}"
                )
        hosts = None
        if self._local is not None:
            hosts = self._local.begin_restore()
        if wanted is None:
            restored = self._newest(state_dict, options, finite, hosts)
        else:
            restored, options = self._load_local(
                hosts, state_dict, wanted, wanted, options, finite
            )
            if restored is None:
                found = self.on_coordinator(lambda _: self._find_step(wanted))
                state = self._load(state_dict, found, options)
                restored = Restored(wanted, state, ())
        if self._local is not None and hosts is not None:
            step = -1 if restored is None else restored.step
            self._local.restored(step, hosts.loaded)
        return restored

    def _newest(
        self,
        state_dict: ShardedStateDict,
        options: dict[str, Any],
        finite: bool,
        hosts: LocalRestore | None,
    ) -> Restored | None:
        # Damage that was found by earlier calls does not count: reading may have failed once.
        damaged: dict[str, str] = {}
        replaced = 0

        def find(_: Advance) -> Found:
            retention = self._retention
            return find_latest(retention, lambda s: damaged.get(s.name), finite=finite)

        while True:
            latest, skipped = self.on_coordinator(find)
            lowest = -1
            if latest is not None and latest.step is not None:
                lowest = latest.step
            local, options = self._load_local(
                hosts, state_dict, lowest, None, options, finite
            )
            if local is not None:
                return local._replace(skipped=skipped)
            if latest is None or latest.step is None:
                if not self.on_coordinator(partial(self._is_new, skipped)):
                    continue
                if hosts is not None and hosts.changed:
                    raise CorruptCheckpoint(
                        f"no local step of {self._retention.root} can be loaded (the log says "
                        "why), there is none in the storage, and tensors have been changed"
                    )
                return None
            try:
                state = self._load(state_dict, latest, options)
            except CheckpointReplaced:
                replaced += 1
                if replaced == ATTEMPTS:
                    raise
                continue
            except (CorruptCheckpoint, NotACheckpoint, RankFailure) as error:
                seen = partial(self._damage_seen, latest)
                check_damage(error, seen, options["strict"])
                text = "%s is damaged, going back to the one before: %s; that one must hold all "
                logger.warning(text + "keys asked for", latest.name, error)
                damaged[latest.name] = str(error)
                options = _requiring_all_keys(options)
                continue
            return Restored(latest.step, state, skipped)

    def _load_local(
        self,
        hosts: LocalRestore | None,
        state_dict: ShardedStateDict,
        lowest: int,
        highest: int | None,
        options: dict[str, Any],
        finite: bool,
    ) -> tuple[Restored | None, dict[str, Any]]:
        """Load the newest good step from the hosts. The options of a later load come with it."""
        while hosts is not None and (save := hosts.choose(lowest, highest, finite)):
            try:
                state = hosts.load(save, state_dict, options)
                return Restored(save.step, state, (), "local"), options
            except (CorruptCheckpoint, NotACheckpoint) as error:
                check_damage(error, error.__str__, options["strict"])
                hosts.skip(save, str(error))
                options = _requiring_all_keys(options)
        return None, options

    def _is_new(self, skipped: tuple[Step, ...], _: Advance) -> bool:
        return is_new_run(self._retention.root, skipped)

    def on_coordinator(self, work: Work[T]) -> T:
        """The result of rank 0, on all ranks. StorageError if its storage does not answer."""
        with self._group() as group:
            return group.broadcast("find", lambda: self.on_storage("find", work))

    def on_storage(self, doing: str, work: Work[T]) -> T:
        """The result of ``work`` on rank 0. StorageError if its storage does not answer."""
        name = f"{doing} steps in {self._retention.root} (rank 0)"
        with closing(Executor(self._timeout)) as executor:
            return executor.call(name, work, executor.progress.advance)

    def _group(self) -> Group:
        return group_over(self._process_group, self._timeout)

    def _damage_seen(self, step: Step) -> str:
        path = self._retention.path(step.name)
        return self.on_coordinator(lambda _: find_damage(path))

    def _find_step(self, step: int) -> Step:
        self._retention.wait(self._timeout)
        return find_step(self._retention, step)

    def _load(
        self, state: ShardedStateDict, step: Step, options: dict[str, Any]
    ) -> Any:
        try:
            return load(
                state,
                self._retention.path(step.name),
                process_group=self._process_group,
                timeout=self._timeout,
                **options,
            )
        except (UntrustedClass, RefusedObject, CheckpointReplaced):
            raise
        except CorruptCheckpoint as error:
            self._retention.note_damage(step, str(error))
            raise


def _requiring_all_keys(options: dict[str, Any]) -> dict[str, Any]:
    """For tensors that may have values of a damaged step already."""
    strict = parse_strict_flag(options["strict"])
    if StrictHandling.requires_all_keys(strict):
        return options
    return options | {"strict": StrictHandling.RAISE_UNEXPECTED}
