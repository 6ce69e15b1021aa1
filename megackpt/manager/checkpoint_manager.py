"""The manager of a run's checkpoints: saves, restores, and removes old ones.

All ranks call it. Rank 0 reads and changes the directory, and broadcasts the result to all ranks.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from copy import copy
from datetime import timedelta
from functools import partial
from inspect import signature
from types import TracebackType
from typing import Any, Literal, Never, Self

from megackpt.async_save import AsyncCallsQueue, AsyncRequest
from megackpt.checkpoint import absolute
from megackpt.checkpoint.run_directory import (
    NamingStyle,
    Restored,
    SaveStatus,
    Step,
    list_run,
    naming_of,
    step_number,
)
from megackpt.distributed import (
    DEFAULT_TIMEOUT,
    Attempt,
    Group,
    GroupLike,
    attempt,
    coordinates,
    group_over,
)
from megackpt.errors import CheckpointingException, NotACheckpoint, RankLost
from megackpt.loader.comparison import KeyMap, Transform
from megackpt.manager.decisions import SaveDecisions
from megackpt.manager.keep_rules import KeepRules
from megackpt.manager.local.checkpoints import LocalCheckpoints
from megackpt.manager.local.drain import DrainStatus, drain_settings
from megackpt.manager.local.drain_records import Record
from megackpt.manager.local.tier import LocalTier
from megackpt.manager.restorer import Found, Restorer, find_best, find_latest
from megackpt.manager.retention import Retention
from megackpt.manager.stateful import (
    Savable,
    StatefulObjects,
    refuse_undeclared,
    report_kept,
    with_digests,
)
from megackpt.manager.storage_space import StorageSpace
from megackpt.option_names import refuse_options
from megackpt.planning.strict import StrictHandling, Strictness
from megackpt.saver import save
from megackpt.saver.deferred_save import DeferredPart, plan_deferred
from megackpt.saver.replicas_in_memory import compare_replicas
from megackpt.state import ShardedStateDict
from megackpt.storage import Advance, Executor
from megackpt.strategies import Strategy, StrategyLike, as_strategy, resolve

logger = logging.getLogger("megackpt.manager")

_WORKERS = {False: None, True: "thread", "thread": "thread", "process": "process"}


class CheckpointManager(SaveDecisions):
    """The checkpoints of one run, below one directory or URL. All ranks create, call and close it.

    Args:
        root: the directory of the run; each step is a directory in it.
        strategy: the format and the policy of the saves, as ``sharded_strategy`` of
            ``megackpt.save``: ``Strategy(audit="full", audit_every=10)`` compares the replicas of
            the first save after each start, and of every tenth one after it.
        keep_last: number of the newest steps that stay (None: all). Older ones are removed when
            a newer one is complete.
        keep_every: steps that this number divides stay as well.
        keep_best: this number of steps stay as well: the steps with the best ``best_metric``
            among the ``metrics`` given to ``save``.
        best_mode: the best is the lowest ("min") or the highest ("max").
        keep_for: steps younger than this stay as well.
        keep_fn: steps for which it is true stay as well. Rank 0 calls it, for a step to be saved
            and, in a thread, for older steps.
        save_interval: ``should_save`` is true for steps that this number divides,
        save_every_minutes: and if this number of minutes has passed since the last save began,
        should_save_fn: and for steps for which it is true; rank 0 calls it.
        asynchronous: write while training continues, in a "thread" (True) or a "process".
        naming: the names of step directories: "megatron" (``iter_0000100``, with Megatron's
            tracker file), "torchtitan", "transformers", "deepspeed" or "plain". Steps of all
            styles are found when restoring.
        process_group: a torch process group of the ranks that save (None: the default one, or
            this process alone).
        timeout: how long a rank waits for other ranks in one operation.
        on_error: "raise" the error of a failed save on all ranks, or "warn": log it as an ERROR on
            rank 0, keep the older steps, and return as if there had been no save. RankLost, and
            errors of a call itself (ValueError), are raised always.
        max_failures: with "warn", this number of failed saves in a row raises the last error.
        local: save on the hosts as well, more often (see LocalTier); ``restore`` prefers these.
        staging_bytes: make staging memory ready for the first asynchronous save; see
            ``AsyncCallsQueue``.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        strategy: StrategyLike = "torch_dist",
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        best_metric: str = "metric",
        best_mode: Literal["min", "max"] = "min",
        keep_for: timedelta | None = None,
        keep_fn: Callable[[int], bool] | None = None,
        save_interval: int | None = None,
        save_every_minutes: float | None = None,
        should_save_fn: Callable[[int], bool] | None = None,
        asynchronous: bool | Literal["thread", "process"] = False,
        naming: NamingStyle = "megatron",
        process_group: GroupLike = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        on_error: Literal["raise", "warn"] = "raise",
        max_failures: int = 3,
        local: LocalTier | None = None,
        staging_bytes: int | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            refuse_options(CheckpointManager, unknown)
        if asynchronous not in _WORKERS:
            raise ValueError(
                f"asynchronous is False, True, 'thread' or 'process', not {asynchronous!r}"
            )
        every = None if local is None else local.every
        super().__init__(save_interval, save_every_minutes, every, should_save_fn)
        self.root = absolute(root)
        self._naming = naming_of(naming)
        rules = KeepRules(
            keep_last,
            keep_every,
            keep_best,
            best_metric,
            best_mode,
            keep_for,
            keep_fn,
        )
        self._retention = Retention(self.root, self._naming, rules)
        self._strategy = rules.refuse_unindexed(strategy)
        self._space = StorageSpace(self._retention, strategy, process_group, timeout)
        self._worker = _WORKERS[asynchronous]
        self._process_group = process_group
        self._timeout = timeout
        queue = partial(
            AsyncCallsQueue,
            process_group=process_group,
            timeout=timeout,
            on_error=on_error,
            max_failures=max_failures,
            staging_bytes=0,
        )
        if self._worker is None:
            staging_bytes = staging_bytes or 0
        self._queue = queue(self._worker == "process", staging_bytes=staging_bytes)
        self._local = None
        self._drain = None
        if local is not None:
            if local.drain:
                self._drain = drain_settings(
                    self.root, local, naming, rules, strategy, timeout
                )
            self._local = LocalCheckpoints(
                local,
                self.root,
                strategy,
                process_group,
                timeout,
                queue(),
                self._drain,
            )
        self._restorer = Restorer(self._retention, process_group, timeout, self._local)
        self._finalized_steps: list[int] = []
        # Steps that are being saved, including failed saves; the same on all ranks.
        self._in_flight: set[int] = set()
        # The step to restore is not removed while the saves before it are committed.
        self._removes = True
        self._reuses = getattr(strategy, "reuse_unchanged", False)
        # Where the last step is that was restored or saved.
        self._step_before: str | None = None

    @property
    def failed_saves(self) -> int:
        """The number of saves that failed, local ones included; the same on all ranks."""
        failed = self._queue.failures.failed
        if self._local is not None:
            failed += self._local.failed_saves
        return failed

    @property
    def durable_step(self) -> int | None:
        """The newest step that was drained into the storage; None if there is none.

        From the agent of this host, which knows it a moment after the commit. This does not touch
        the storage. None without ``LocalTier(drain=True)``.
        """
        return self.drain_status.durable_step

    @property
    def drain_status(self) -> DrainStatus:
        """What the agent of this host says: what waits, since when, and why. See docs/tiers.md."""
        return self._local.status() if self._local else DrainStatus()

    def path(self, step: int) -> str:
        """The path or URL of the checkpoint of a step."""
        return self._retention.path(self._naming.name(step))

    def save(
        self,
        step: int,
        sharded_state_dict: ShardedStateDict | None = None,
        *,
        asynchronous: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        metric: float | None = None,
        validate_access_integrity: bool = True,
        preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
        content_metadata: Mapping[str, Any] | None = None,
        overwrite: bool = True,
        allow_large_common_state: bool = False,
        wait_staged: bool = True,
        **objects: Savable,
    ) -> AsyncRequest | None:
        """Save a step; collective. Returns the request of an asynchronous save in the storage.

        ``save(step, model=model, optimizer=optimizer, extra={"epoch": 3})`` saves objects, by
        names of your choice, in place of a declared state or together with it: modules (plain, DDP,
        FSDP2), their optimizers, all that has ``state_dict`` and ``load_state_dict``, and dicts,
        whose names must not look like misspelled options (TypeError).

        An asynchronous save returns as soon as the tensors may be changed; ``poll`` commits it.
        If an asynchronous save of this step is running, it is finalized first and then replaced.

        Args:
            step: 0 or more.
            asynchronous: for this step, instead of the manager's setting; the kind of worker is
                always the manager's.
            metrics: numbers by name, such as ``{"loss": 1.2}``, for ``keep_best`` and
                ``Step.metrics``; rank 0's count. NaN is not compared.
            metric: short for ``metrics={"metric": ...}``.
            sharded_state_dict, overwrite and further options: see ``megackpt.save``, which also
                documents the errors.
        """
        step = step_number(step)
        numbers = self._retention.rules.check_metrics(metrics, metric)
        if asynchronous is not None and type(asynchronous) is not bool:
            raise ValueError(
                f"asynchronous is True, False or None for one step, not {asynchronous!r}: the kind "
                "of worker is the manager's"
            )
        if sharded_state_dict is None and not objects:
            raise ValueError("nothing to save: give objects by name, or a state dict")
        if asynchronous is None:
            asynchronous = self._worker is not None
        # Retention logs an error of the function; here it is raised.
        self._ask("keep_fn", self._retention.rules.keep_fn, step)
        stateful = StatefulObjects(objects, self._process_group, _OPTIONS)
        state = stateful.declare(sharded_state_dict)
        given = preprocess_common_before_consistancy_check
        comparable = partial(with_digests, state, stateful.plain, given)
        stored: dict[str, Any] = {"content_metadata": content_metadata}
        stored["allow_large_common_state"] = allow_large_common_state
        options: dict[str, Any] = {
            **stored,
            "process_group": self._process_group,
            "timeout": self._timeout,
            "validate_access_integrity": validate_access_integrity,
            "preprocess_common_before_consistancy_check": comparable,
        }
        path = self.path(step)
        local = Attempt[None](None)
        if self._local is not None:
            write = partial(self._local.save, step, state, asynchronous, **stored)
            if self._drain is not None:
                plan = partial(plan_deferred, state, path, self._strategy, **options)
                self._save_to_drain(step, plan, write, overwrite, numbers)
                return None
            # An error on the hosts is raised after the save in the storage.
            local = attempt(write)
            # Who saves the step again, without asking, wants it in the storage.
            is_only_local, self._only_local = self._only_local == step, None
            if is_only_local or isinstance(local.error, RankLost):
                local.get()
                return None
        if step in self._in_flight:
            self._queue.maybe_finalize_async_calls(blocking=True)
        self._last_save_began = time.monotonic()
        is_coordinator = coordinates(self._process_group)
        committed = partial(self._on_commit, step, is_coordinator, numbers)
        try:
            if self._local is not None:
                self._local.before_storage(step)
            self._space.check(step, state, self._queue.failures.failed)
            request = save(
                state,
                path,
                self._reusing(stateful) if self._reuses else self._strategy,
                async_sharded_save=asynchronous,
                overwrite=overwrite,
                wait_staged=wait_staged,
                **options,
            )
        except CheckpointingException as error:
            if not self._tolerates(error, step):
                raise
            local.get()
            return None
        if request is None:
            self._queue.failures.succeeded()
            committed()
        else:
            request.add_finalize_fn(committed)
            request.add_finalize_fn(partial(self._finalized_steps.append, step))
            self._in_flight.add(step)
            self._queue.schedule_async_request(request)
        local.get()
        return request

    def _save_to_drain(
        self,
        step: int,
        plan: Callable[[], DeferredPart],
        write: Callable[..., None],
        overwrite: bool,
        metrics: dict[str, float],
    ) -> None:
        """Save a step on the hosts, to be drained if it is due."""
        is_only_local, self._only_local = self._only_local == step, None
        if is_only_local:
            write()
            return
        self._last_save_began = time.monotonic()
        try:
            part = plan()
        except CheckpointingException as error:
            path, is_coordinator = self.path(step), coordinates(self._process_group)
            if not self._queue.failures.tolerates(error, path, is_coordinator):
                raise
            return
        self._queue.failures.succeeded()
        options = dict(vars(resolve(self._strategy).make_writer()))
        name = self._naming.name(step)
        write(due=Record(name, time.time(), overwrite, metrics, options, *part))

    def save_if_due(
        self,
        step: int,
        sharded_state_dict: ShardedStateDict | None = None,
        *,
        last: bool = False,
        **options: Any,
    ) -> SaveStatus:
        """``poll``, and ``save`` the step if ``should_save`` is true; collective.

        Call it once per training step. After a signal (``on_signal``) it saves the step, waits
        until all saves are complete, and says ``should_stop``.

        Args:
            last: as for ``should_save``.
            sharded_state_dict, options: as for ``save``, with objects by name.
        """
        self.poll()
        is_due = self.should_save(step, last=last)
        failed = self.failed_saves
        if is_due:
            self.save(step, sharded_state_dict, **options)
        if self._is_preempted:
            self.finalize()
        return SaveStatus(is_due and self.failed_saves == failed, self._is_preempted)

    def poll(self) -> list[int]:
        """Commit the asynchronous saves that all ranks have written, and return their steps.

        Call it once per training step. Collective: one small vote while a save is running. Raises
        the error of a failed save on all ranks (see ``on_error``); training may continue.
        """
        return self._finalize(blocking=False)

    def finalize(self) -> list[int]:
        """As ``poll``, but waits until no save is running."""
        return self._finalize(blocking=True)

    def steps(self) -> tuple[Step, ...]:
        """All steps, complete or not, in order. Not collective.

        A step that this manager is saving is not among them until it is complete.
        """
        name = f"listing the steps in {self.root}"
        try:
            with closing(Executor(self._timeout)) as executor:
                found = executor.call(name, list_run, self.root).steps
        except NotACheckpoint:
            return ()
        saving = self._in_flight
        return tuple(s for s in found if s.complete or s.step not in saving)

    def __repr__(self) -> str:
        running = self._queue.get_num_unfinalized_calls()
        return f"<CheckpointManager of {self.root}: {running} saves in flight>"

    def _repr_html_(self) -> str:
        # A first save does not need this module.
        from megackpt.manager.notebook import steps_table

        return steps_table(repr(self), self.steps())

    def latest(
        self, *, verify: bool = False, own: bool = False, finite: bool = False
    ) -> Step | None:
        """The newest step that is complete and undamaged; collective. Skipped steps are logged.

        By default the index, the small files and the sizes of all large files are checked; with
        ``verify``, rank 0 reads everything. With ``own``, only steps of this manager's naming. With
        ``finite``, none whose save has noted NaN or infinite values (``check_values``).
        """

        def find(advance: Advance) -> Found:
            read = advance if verify else None
            known = self._retention.damage.get
            return find_latest(self._retention, known, read, own, finite)

        return self._restorer.on_coordinator(find)[0]

    def best_step(self) -> int | None:
        """The undamaged step with the best metric; collective. Of equal ones the newest counts.

        ``best_metric`` and ``best_mode`` of the manager say which metric that is. Files are checked
        as by ``latest``. None if no complete step has this metric.
        """
        return self._restorer.on_coordinator(partial(find_best, self._retention))

    def prune(self, newest: int) -> None:
        """Remove older steps, as after a save of ``newest``. On rank 0; failures are logged."""
        self._retention.start(newest, self._timeout)
        self._retention.wait(self._timeout, quiet=True)

    def restore(
        self,
        sharded_state_dict: ShardedStateDict | None = None,
        step: int | Literal["latest", "best"] | None = None,
        *,
        validate_access_integrity: bool = True,
        strict: Strictness = StrictHandling.ASSUME_OK_UNEXPECTED,
        verify: bool = True,
        dtype_policy: Literal["convert", "error"] = "convert",
        key_map: KeyMap | None = None,
        trusted: Sequence[type] = (),
        transform: Transform | None = None,
        finite: bool = False,
        only: Collection[str] | None = None,
        partial: bool = False,
        audit: bool = False,
        **objects: Savable,
    ) -> Restored | None:
        """Load a step, or the newest good one; collective.

        ``restore(model=model, optimizer=optimizer, extra={})`` restores the objects that ``save``
        was given by the same names. ``state`` has the states of the objects and the dicts. A dict
        comes back with all values that were saved in it. An object that asks for no tensors is
        given all of its stored tensors: tensors that are not asked for are whole, on the CPU of
        each rank.

        The manager's asynchronous saves are finalized first. The error of one that failed is
        raised; another call continues after it.

        If the newest step turns out to be damaged while it is read, the one before is loaded,
        with a warning. It must hold all requested keys, whatever ``strict`` says, as the tensors
        may have values of the damaged step already; with a strictness of RETURN_* no other step
        is loaded. After an error the tensors may hold anything.

        Args:
            step: a number, "latest" (or None) for the newest step, "best" for ``best_step()``.
            finite: choose the newest step without noted NaN or infinite values, like ``latest``.
                The option has no effect with ``step``.
            transform: see ``megackpt.load``. Steps on the hosts are passed over.
            only: the names of the objects to restore, of those given: "model", or several.
                ``strict`` is RAISE_UNEXPECTED then: other stored keys are not warned of.
            partial: fill the stored tensors; the remaining tensors keep their values. An INFO line
                counts both. ``strict`` has no effect, and no older step replaces a damaged one.
            audit: compare the values of the shards that several ranks hold afterwards, with the
                ``audit_exclude`` and ``on_mismatch`` of the manager's strategy.
            sharded_state_dict, strict and further options: see ``megackpt.load``.

        Returns:
            None if the run has no complete checkpoint yet.

        Raises:
            NotACheckpoint: ``step`` does not exist, or is "best" and no step has a metric.
            CorruptCheckpoint: ``step`` is damaged, or without ``step`` all are, or ``root`` is a
                checkpoint itself.
            StorageError: ``root`` is not a directory.
            MismatchError: the checkpoint does not fit the state, or after damage the one before
                does not hold all keys.
            ReplicaMismatch: ``audit`` has found different values of one shard.
        """
        if only is not None:
            names = {only} if isinstance(only, str) else {*only}
            if not names <= objects.keys():
                raise ValueError(
                    f"only={only!r} names an object that is not given: give it, too, as in "
                    'restore(model=net, only="model")'
                )
            objects = {name: objects[name] for name in objects if name in names}
            strict = StrictHandling.RAISE_UNEXPECTED
        if partial:
            strict = StrictHandling.RETURN_UNEXPECTED
        options = {
            "validate_access_integrity": validate_access_integrity,
            "strict": strict,
            "verify": verify,
            "dtype_policy": dtype_policy,
            "key_map": key_map,
            "trusted": trusted,
            "transform": transform,
        }
        self._removes = False
        try:
            self._queue.maybe_finalize_async_calls(blocking=True)
        finally:
            self._removes = True
        if step == "best":
            step = self.best_step()
            if step is None:
                name = self._retention.rules.best_metric
                raise NotACheckpoint(
                    f"no complete step in {self.root} has the metric {name!r} (best_metric): give "
                    f"it to save(step, ..., metrics={{{name!r}: ...}})"
                )
        if isinstance(step, str):
            if step != "latest":
                raise ValueError(
                    f"step is an int, 'latest', 'best' or None, not {step!r}"
                )
            step = None
        stateful = StatefulObjects(objects, self._process_group, _OPTIONS)
        declared = stateful.declare_to_load(sharded_state_dict, key_map)
        found = self._restorer.restore(declared, step, options, finite)
        if found is not None:
            if found.source == "storage":
                self._step_before = self.path(found.step)
            # With a strictness of RETURN_* the state is the first of three.
            whole = found.state
            state = whole[0] if isinstance(whole, tuple) else whole
            refuse_undeclared(sharded_state_dict, state)
            with self._group() as group:
                stateful.load(state, group)
                if partial:
                    report_kept(group, state, whole[2])
                    found = found._replace(state=state)
                if audit:
                    held = stateful.declare(sharded_state_dict)
                    compare_replicas(held, self.path(found.step), self._strategy, group)
        return found

    def close(self, abort: bool = False) -> None:
        """Commit running saves (collective), or with ``abort`` drop them (not collective).

        At the end of a ``with`` block that raised, the saves of several ranks are dropped, as other
        ranks may not come: an ERROR in the log. The saves of one process are committed.

        Then wait for the removal of older steps. StorageError if the storage does not answer.
        """
        local = Attempt[None](None)
        try:
            if self._local is not None:
                local = attempt(partial(self._local.close, abort))
            # Whatever has happened on the hosts, the saves in the storage are committed.
            self._queue.close(abort)
            local.get()
        except BaseException:
            abort = True  # this error counts
            raise
        finally:
            self._finalized_steps.clear()
            self._in_flight.clear()
            try:
                self._retention.wait(self._timeout, quiet=abort)
            finally:
                self._preemption.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        is_success = isinstance(error, SystemExit) and error.code in (None, 0)
        abort = error is not None and not is_success
        if abort and self._queue.get_num_unfinalized_calls():
            self._queue.end(error)
        self.close(abort)

    def _reusing(self, stateful: StatefulObjects) -> Strategy:
        """The strategy of one save: with the frozen parameters, and the step before.

        A copy: strategies of the caller's own have other constructors.
        """
        strategy = copy(as_strategy(self._strategy))
        vars(strategy).update(
            frozen={*strategy.frozen, *stateful.frozen_keys()},
            reuse_from=strategy.reuse_from or self._step_before,
        )
        return strategy

    def _group(self) -> Group:
        return group_over(self._process_group, self._timeout)

    def _finalize(self, blocking: bool) -> list[int]:
        if self._local is not None:
            self._local.poll(blocking)
        # If this raises, the next call returns the steps that were committed before the error.
        try:
            self._queue.maybe_finalize_async_calls(blocking)
        finally:
            newest = max(self._in_flight, default=0)
            self._space.report(newest, self._queue.failures.failed)
        steps = list(self._finalized_steps)
        self._finalized_steps.clear()
        return steps

    def _tolerates(self, error: CheckpointingException, step: int) -> bool:
        """Whether training continues after this error of a save."""
        is_coordinator, path = coordinates(self._process_group), self.path(step)
        is_tolerated = self._queue.failures.tolerates(error, path, is_coordinator)
        self._space.report(step, self._queue.failures.failed)
        return is_tolerated

    def _on_commit(
        self, step: int, is_coordinator: bool, metrics: dict[str, float]
    ) -> None:
        """Called on all ranks when a step is complete."""
        self._in_flight.discard(step)
        self._step_before = self.path(step)
        if not is_coordinator:
            return

        track = partial(self._retention.note_complete, step, metrics)
        try:
            self._restorer.on_storage("track", track)
        except (CheckpointingException, OSError) as error:
            text = (
                "step %d is complete, but its tracker is not written (or metrics): %s"
            )
            logger.warning(text, step, error)
            # The step that the old tracker names must stay.
            return
        if self._removes:
            self._retention.start(step, self._timeout)
        if self._worker is None:
            self._retention.wait(self._timeout, quiet=True)


_OPTIONS = {
    *signature(CheckpointManager.save).parameters,
    *signature(CheckpointManager.restore).parameters,
}
"""Names that no object has: it could be saved, and not be restored."""
