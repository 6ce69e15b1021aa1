"""Running: the checkpoints of a run while it trains, saved, restored and thinned out; nothing but the order of it.

On all ranks alike. Rank 0 looks at the directory, writes the tracker and removes; the others hear what it found.
"""

from __future__ import annotations

import logging
import operator
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from megackpt.checkpoint import absolute
from megackpt.errors import (
    CheckpointingException,
    CorruptCheckpoint,
    NotACheckpoint,
    RankFailure,
    RankLost,
    UntrustedClass,
)
from megackpt.loader import load
from megackpt.manager.finding import NAMINGS, TRACKERS, Naming, Step, list_run
from megackpt.manager.retention import Retention, damage_of
from megackpt.runtime.async_calls import AsyncCallsQueue
from megackpt.runtime.collectives import DEFAULT_TIMEOUT, Group, group_over
from megackpt.runtime.storage import root_at
from megackpt.saver import save
from megackpt.sharded import ShardedStateDict
from megackpt.strategies import StrategyLike

logger = logging.getLogger("megackpt.manager")

T = TypeVar("T")

_ATTEMPTS = 3  # at a run of which all that was seen is removed meanwhile
_WORKERS = {False: None, True: "thread", "thread": "thread", "process": "process"}


class Restored(NamedTuple):
    """What a run goes on from. ``skipped``: newer steps that are incomplete or damaged, each with its ``reason``."""

    step: int
    state: Any
    skipped: tuple[Step, ...]


class CheckpointManager:
    """The checkpoints of one run, below one directory or URL. Made, called and closed on all ranks alike.

    Args:
        root: a directory for each step is made in it.
        strategy: the format of what is saved: what ``save`` takes as ``sharded_strategy``.
        keep_last: how many of the newest steps stay (None: all). The others are removed once a newer one is complete.
        keep_every: steps whose number this divides stay as well, for ever.
        asynchronous: write while training goes on, in a "thread" (True) or a "process".
        naming: how directories of steps are called: "megatron" (``iter_0000100``, with the tracker file that Megatron
            reads), "torchtitan", "transformers", "deepspeed" or "plain". All styles are found when restoring.
        process_group: a torch process group of the ranks that save (None: the default one, or this process alone).
        timeout: how long any rank waits for the others in one step.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        strategy: StrategyLike = "torch_dist",
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        asynchronous: bool | str = False,
        naming: str = "megatron",
        process_group: Any = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        if asynchronous not in _WORKERS:
            raise ValueError(f"asynchronous is False, True, 'thread' or 'process', not {asynchronous!r}")
        self.root = absolute(root)
        self._naming = _naming(naming)
        self._retention = Retention(self.root, self._naming, keep_last, keep_every)
        self._strategy = strategy
        self._worker = _WORKERS[asynchronous]
        self._process_group, self._timeout = process_group, timeout
        self._queue = AsyncCallsQueue(self._worker == "process", process_group=process_group, timeout=timeout)
        self._later: ThreadPoolExecutor | None = None
        self._done: list[int] = []
        self._newest = -1
        self._noticed = self._preempted = False
        self._replaced: dict[int, Any] = {}

    def path(self, step: int) -> str:
        """Where the checkpoint of a step is, or would be."""
        return self._retention.path(self._naming.name(step))

    def save(
        self,
        step: int,
        sharded_state_dict: ShardedStateDict,
        *,
        asynchronous: bool | None = None,
        **options: Any,
    ) -> None:
        """Save a step; collective. ``options`` are those of ``megackpt.save``, which see also for what is raised.

        An asynchronous save returns as soon as the tensors may be changed; ``poll`` commits it. ``asynchronous``: for
        this step, other than the manager's.
        """
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"a step is 0 or more, not {step}")
        later = self._worker is not None if asynchronous is None else asynchronous
        with self._group() as group:
            committed = partial(self._committed, step, group.is_coordinator)
        request = save(
            sharded_state_dict,
            self.path(step),
            self._strategy,
            async_sharded_save=later,
            process_group=self._process_group,
            timeout=self._timeout,
            **options,
        )
        if request is None:
            committed()
        else:
            request.add_finalize_fn(committed)
            request.add_finalize_fn(partial(self._done.append, step))
            self._queue.schedule_async_request(request)

    def poll(self) -> list[int]:
        """Commit the asynchronous saves that all ranks have written, and return their steps; call it once a step.

        Collective: one small vote while something is under way. Raises, on all ranks, what went wrong with a save; that
        one is over, and training may go on.
        """
        return self._finalized(blocking=False)

    def finalize(self) -> list[int]:
        """As ``poll``, but wait until nothing is under way."""
        return self._finalized(blocking=True)

    def steps(self) -> tuple[Step, ...]:
        """What there is, complete or not, in the order of steps. Not collective."""
        return _steps(self.root, weigh=True)

    def latest(self, *, verify: bool = False) -> Step | None:
        """The newest step that is complete and undamaged; collective. What is skipped is told by warnings.

        Undamaged is what its index, its small files and the sizes of all others show; ``verify``: rank 0 reads it all.
        """
        return self._found((), verify)[0]

    def restore(
        self, sharded_state_dict: ShardedStateDict, step: int | None = None, **options: Any
    ) -> Restored | None:
        """Load a step, or the latest good one; collective. None: the run has no complete checkpoint yet.

        Where the newest proves damaged when it is read, the one before is loaded, with a warning. ``options`` are those
        of ``megackpt.load``; what does not fit the checkpoint raises as there.

        Raises NotACheckpoint if a ``step`` that is asked for is not there; CorruptCheckpoint if it is damaged or,
        without ``step``, if all are.
        """
        self._newest = -1  # the run may have been set back
        if step is not None:
            path = self._on_coordinator(lambda: self._path_of(operator.index(step)))
            return Restored(step, self._loaded(sharded_state_dict, path, options), ())
        damaged: list[Step] = []
        while True:
            found, skipped = self._found(tuple(s.name for s in damaged), False)
            if found is None or found.step is None:
                _refuse_to_begin_anew(self.root, (*damaged, *skipped))
                return None
            path = self._retention.path(found.name)
            try:
                state = self._loaded(sharded_state_dict, path, options)
            except (CorruptCheckpoint, NotACheckpoint, RankFailure) as error:
                if isinstance(error, (UntrustedClass, RankLost)):
                    raise
                # Ranks may have failed each in its own way at what is gone; the same on all, so all look again.
                if isinstance(error, RankFailure) and not self._on_coordinator(partial(damage_of, path)):
                    raise
                logger.warning("%s is damaged, going back to the one before: %s", found.name, error)
                damaged.append(replace(found, reason=str(error)))
                continue
            return Restored(found.step, state, (*damaged, *skipped))

    def on_signal(self, *signals: int) -> None:
        """Take these signals for a notice that this process will be ended. Only in the main thread.

        The handler notes it and does nothing else; ``preempted`` tells. ``close`` puts back what was set before.
        """
        for number in signals:
            before = signal.signal(number, self._notice)
            self._replaced.setdefault(number, before)

    def preempted(self) -> bool:
        """Has any rank had such a notice? Collective: one small vote, so call it once a step, or every so many."""
        if not self._preempted:
            with self._group() as group:
                self._preempted = group.lowest([-int(self._noticed)])[0] < 0
        return self._preempted

    def close(self, abort: bool = False) -> None:
        """Commit what is under way (collective), or give it up (``abort``: not collective), and end the workers."""
        try:
            self._queue.close(abort)
        finally:
            if self._later is not None:
                self._later.shutdown()
                self._later = None
            while self._replaced:
                number, before = self._replaced.popitem()
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(abort=error is not None)  # other ranks may not come

    def _group(self) -> Group:
        return group_over(self._process_group, self._timeout)

    def _notice(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._noticed = True

    def _finalized(self, blocking: bool) -> list[int]:
        self._done.clear()
        self._queue.maybe_finalize_async_calls(blocking)
        return list(self._done)

    def _committed(self, step: int, coordinator: bool) -> None:
        """On all ranks, when a step is complete."""
        self._newest = max(step, self._newest)
        if not coordinator:
            return
        if self._naming.style == "megatron":
            try:
                root_at(self.root).put(TRACKERS[0], str(self._newest).encode())
            except (CheckpointingException, OSError) as error:
                logger.warning("step %d is complete, but its tracker is not written: %s", step, error)
                return  # what the old one names must stay
        if self._worker is None:
            self._retention.tidy(self._newest)
        else:
            self._later = self._later or ThreadPoolExecutor(1, "megackpt-retention")
            self._later.submit(lambda: self._retention.tidy(max(step, self._newest)))

    def _found(self, without: tuple[str, ...], verify: bool) -> tuple[Step | None, tuple[Step, ...]]:
        return self._on_coordinator(lambda: _newest_good(self._retention, without, verify))

    def _on_coordinator(self, look: Callable[[], T]) -> T:
        with self._group() as group:
            return group.broadcast("find", look)

    def _path_of(self, step: int) -> str:
        """On rank 0: where this step is, in whatever style."""
        named = [s.name for s in _steps(self.root) if s.step == step and s.complete is not False]
        return self._retention.path(named[0]) if named else self.path(step)

    def _loaded(self, state: ShardedStateDict, path: str, options: dict[str, Any]) -> Any:
        return load(state, path, process_group=self._process_group, timeout=self._timeout, **options)


def _naming(style: str) -> Naming:
    known = {naming.style: naming for naming in NAMINGS if naming.written}
    if style not in known:
        raise ValueError(f"naming is one of {', '.join(map(repr, known))}, not {style!r}")
    return known[style]


def _steps(root: str, *, weigh: bool = False) -> tuple[Step, ...]:
    try:
        return list_run(root, weigh=weigh).steps
    except NotACheckpoint:
        return ()


def _newest_good(
    retention: Retention, without: tuple[str, ...], verify: bool
) -> tuple[Step | None, tuple[Step, ...]]:
    """The newest step that can be loaded, as far as a look tells, and newer ones that cannot."""
    found: Step | None = None
    skipped: tuple[Step, ...] = ()
    for _ in range(_ATTEMPTS):
        found, skipped = _looked_for(retention, without, verify)
        if found is not None or all(step.complete is False for step in skipped):
            break
        # What was complete a moment ago may have been removed, because there is a newer one.
    for step in skipped:
        logger.warning("%s is skipped: %s", retention.path(step.name), step.reason)
    return found, skipped


def _looked_for(
    retention: Retention, without: tuple[str, ...], verify: bool
) -> tuple[Step | None, tuple[Step, ...]]:
    skipped: list[Step] = []
    for step in reversed(_steps(retention.root)):
        if step.step is None or step.name in without:
            continue
        problem = damage_of(retention.path(step.name), whole=verify) if step.complete else step.reason
        if not problem:
            return step, tuple(skipped)
        skipped.append(replace(step, reason=problem))
    return None, tuple(skipped)


def _refuse_to_begin_anew(root: str, skipped: tuple[Step, ...]) -> None:
    """What a first save left when it died is nothing to go on from; what once was complete is."""
    told = [f"{step.name}: {step.reason}" for step in skipped if step.complete is not False]
    if told:
        raise CorruptCheckpoint(
            f"none of the checkpoints in {root} can be loaded. To begin anew, move them away.\n  "
            + "\n  ".join(told)
        )
