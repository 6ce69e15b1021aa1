"""Running: the checkpoints of a run while it trains, saved, restored and thinned out; nothing but the order of it.

On all ranks alike. Rank 0 looks at the directory, writes the tracker and removes; the others hear what it found.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from megackpt.async_save import AsyncCallsQueue
from megackpt.checkpoint import absolute
from megackpt.distributed import DEFAULT_TIMEOUT, Group, group_over
from megackpt.errors import (
    CheckpointingException,
    CheckpointReplaced,
    CorruptCheckpoint,
    NotACheckpoint,
    RankFailure,
    RankLost,
    RefusedObject,
    ShardingError,
    UntrustedClass,
)
from megackpt.loader import load
from megackpt.manager.choosing import ATTEMPTS, begins_anew, newest_first, newest_good
from megackpt.manager.finding import NAMINGS, TRACKERS, Naming, Step, list_run
from megackpt.manager.notices import Notices
from megackpt.manager.retention import Retention, damage_of
from megackpt.planning.strict import StrictHandling, parse_strict_flag
from megackpt.saver import save
from megackpt.state import ShardedStateDict
from megackpt.storage import root_at
from megackpt.strategies import StrategyLike

logger = logging.getLogger("megackpt.manager")

T = TypeVar("T")

_OWN = {
    "checkpoint_dir",
    "sharded_strategy",
    "async_sharded_save",
    "process_group",
    "timeout",
}
_GOING_BACK = "%s is damaged, going back to the one before: %s; that one must hold all keys asked for"
_WORKERS = {False: None, True: "thread", "thread": "thread", "process": "process"}


class Restored(NamedTuple):
    """What a run goes on from. ``skipped``: newer steps that are incomplete or damaged, each with its ``reason``."""

    step: int
    state: Any  # what ``megackpt.load`` returns: with a strictness of RETURN_* a tuple of three
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
            raise ValueError(
                f"asynchronous is False, True, 'thread' or 'process', not {asynchronous!r}"
            )
        self.root = absolute(root)
        self._naming = _naming(naming)
        self._retention = Retention(self.root, self._naming, keep_last, keep_every)
        self._strategy = strategy
        self._worker = _WORKERS[asynchronous]
        self._process_group, self._timeout = process_group, timeout
        self._queue = AsyncCallsQueue(
            self._worker == "process", process_group=process_group, timeout=timeout
        )
        self._later: ThreadPoolExecutor | None = None
        self._done: list[int] = []
        self._under_way: set[int] = (
            set()
        )  # steps, those of failed saves included; on all ranks the same
        self._saves = 0
        self._begun: dict[
            int, int
        ] = {}  # steps whose saves were begun after that of the newest: numbers of the calls
        self._newest = (
            0,
            -1,
        )  # where the run is: the number of that call to save, and its step
        self._notices = Notices()
        self._preempted = False

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
        this step, True or False in place of what the manager does; its kind of worker stays. Where this very step is
        under way already, that is waited for, as by ``finalize``, and then replaced.
        """
        step = _number(step)
        if asynchronous is not None and type(asynchronous) is not bool:
            raise ValueError(
                f"asynchronous is True, False or None for one step, not {asynchronous!r}: the kind of worker is the "
                "manager's"
            )
        _refuse_own(options)
        later = self._worker is not None if asynchronous is None else asynchronous
        if step in self._under_way:
            self._queue.maybe_finalize_async_calls(blocking=True)
        self._saves += 1
        self._begun[step] = self._saves
        with self._group() as group:
            committed = partial(
                self._committed, (self._saves, step), group.is_coordinator
            )
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
            self._under_way.add(step)
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
        try:
            return list_run(self.root).steps
        except NotACheckpoint:
            return ()

    def latest(self, *, verify: bool = False) -> Step | None:
        """The newest step that is complete and undamaged; collective. What is skipped is told by warnings.

        Undamaged is what its index, its small files and the sizes of all others show; ``verify``: rank 0 reads it all.
        """
        return self._on_coordinator(
            lambda: newest_good(self._retention, self._retention.known, verify)
        )[0]

    def restore(
        self,
        sharded_state_dict: ShardedStateDict,
        step: int | None = None,
        **options: Any,
    ) -> Restored | None:
        """Load a step, or the latest good one; collective. None: the run has no complete checkpoint yet.

        Where the newest proves damaged when it is read, the one before is loaded, with a warning. That one has to hold
        all keys asked for, whatever ``strict`` says, as the damaged one's values may be in the tensors already; with a
        strictness of RETURN_* none is loaded in its place. ``options`` are those of ``megackpt.load``; what does not
        fit the checkpoint raises as there. After an error the tensors may hold anything.

        Raises NotACheckpoint if a ``step`` that is asked for is not there; CorruptCheckpoint if it is damaged or,
        without ``step``, if all are, or if ``root`` is a checkpoint itself; StorageError if ``root`` is no directory;
        MismatchError if the one before does not hold all keys.
        """
        _refuse_own(options)
        if (wanted := self._agreed(step)) is not None:
            there = self._on_coordinator(lambda: self._step_of(wanted))
            return self._taken(
                wanted, self._loaded(sharded_state_dict, there, options), ()
            )
        tried: dict[
            str, str
        ] = {}  # by this call; what earlier ones found damaged is tried again
        replaced = 0
        look = partial(newest_good, self._retention, lambda step: tried.get(step.name))
        while True:
            found, skipped = self._on_coordinator(look)
            if found is None or found.step is None:
                if self._on_coordinator(partial(begins_anew, self.root, skipped)):
                    return None
                continue
            path = self._retention.path(found.name)
            try:
                state = self._loaded(
                    sharded_state_dict,
                    found,
                    _for_all_keys(options) if tried else options,
                )
            except CheckpointReplaced:
                replaced += 1  # by a whole one
                if replaced == ATTEMPTS:
                    raise
                continue
            except (CorruptCheckpoint, NotACheckpoint, RankFailure) as error:
                if isinstance(error, (UntrustedClass, RefusedObject, RankLost)):
                    raise
                # What is gone is so for rank 0, too; else it cannot be seen from another host, which is no damage.
                if not isinstance(
                    error, CorruptCheckpoint
                ) and not self._on_coordinator(partial(damage_of, path)):
                    raise
                if StrictHandling.requires_returning_mismatch_keys(
                    _strictness(options)
                ):
                    error.add_note(
                        "with strict=RETURN_* no older step is loaded: ask for one by step="
                    )
                    raise
                logger.warning(_GOING_BACK, found.name, error)
                tried[found.name] = str(error)
                continue
            return self._taken(found.step, state, skipped)

    def on_signal(self, *signals: int) -> None:
        """Take these signals for a notice that this process will be ended. Only in the main thread.

        The handler notes it, for all managers that listen, and does nothing else; ``preempted`` tells. ``close``, in
        the main thread, too, puts back what was set before.
        """
        self._notices.listen(*signals)

    def preempted(self) -> bool:
        """Has any rank had such a notice? Collective: one small vote, so call it once a step, or every so many."""
        if not self._preempted:
            with self._group() as group:
                self._preempted = group.lowest([-int(self._notices.heard)])[0] < 0
        return self._preempted

    def close(self, abort: bool = False) -> None:
        """Commit what is under way (collective), or give it up (``abort``: not collective), and end the workers."""
        try:
            self._queue.close(abort)
        finally:
            if self._later is not None:
                self._later.shutdown()
                self._later = None
            self._done.clear()
            self._under_way.clear()
            self._notices.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        clean = error is None or (
            isinstance(error, SystemExit) and error.code in (None, 0)
        )
        if not clean and self._queue.get_num_unfinalized_calls():
            logger.warning(
                "given up, as other ranks may not come: %s", self._queue.status()
            )
        self.close(abort=not clean)

    def _group(self) -> Group:
        return group_over(self._process_group, self._timeout)

    def _finalized(self, blocking: bool) -> list[int]:
        # What is done when this raises is told by the next call.
        self._queue.maybe_finalize_async_calls(blocking)
        done, self._done[:] = list(self._done), ()
        return done

    def _taken(self, step: int, state: Any, skipped: tuple[Step, ...]) -> Restored:
        self._newest = (
            self._saves,
            step,
        )  # the run goes on from here, whatever is under way still
        return Restored(step, state, skipped)

    def _committed(self, which: tuple[int, int], coordinator: bool) -> None:
        """On all ranks, when a step is complete. The run is where it was saved, or restored, last: not the highest."""
        number, step = which
        self._under_way.discard(step)
        overtaken = number <= self._newest[0]
        if not overtaken:
            self._newest = which
            self._begun = {s: call for s, call in self._begun.items() if call > number}
        if not coordinator:
            return
        if self._naming.style == "megatron" and not overtaken:
            try:
                root_at(self.root).put(TRACKERS[0], str(step).encode())
            except (CheckpointingException, OSError) as error:
                logger.warning(
                    "step %d is complete, but its tracker is not written: %s",
                    step,
                    error,
                )
                return  # what the old one names must stay
        if self._worker is None:
            self._retention.tidy(self._position)
        else:
            self._later = self._later or ThreadPoolExecutor(1, "megackpt-retention")
            self._later.submit(self._retention.tidy, self._position)

    def _position(self) -> tuple[int, set[int]]:
        """The step that the run is at, and the steps whose saves it has begun since. Called by any thread."""
        begun = self._begun  # first: what is committed between these two lines is in it
        number, step = self._newest
        return step, {s for s, call in begun.copy().items() if call > number}

    def _agreed(self, step: int | None) -> int | None:
        """The step that all ranks ask for."""
        wanted = None if step is None else _number(step)
        with self._group() as group:
            if not group.all_agree(-1 if wanted is None else wanted):
                raise ShardingError(
                    f"the ranks restore different steps, all must agree: here {wanted}"
                )
        return wanted

    def _on_coordinator(self, look: Callable[[], T]) -> T:
        with self._group() as group:
            return group.broadcast("find", look)

    def _step_of(self, step: int) -> Step:
        """On rank 0: what this step is, in whatever style, once what this manager removes is gone."""
        if self._later is not None:
            self._later.submit(str).result()  # when those before it are done
        named = [
            s for s in newest_first(self._retention, step) if s.complete is not False
        ]
        named.sort(key=lambda s: s.complete is None)
        return named[0] if named else Step(self._naming.name(step), "", step, False, "")

    def _loaded(
        self, state: ShardedStateDict, step: Step, options: dict[str, Any]
    ) -> Any:
        path = self._retention.path(step.name)
        try:
            return load(
                state,
                path,
                process_group=self._process_group,
                timeout=self._timeout,
                **options,
            )
        except CorruptCheckpoint as error:
            if not isinstance(
                error, (UntrustedClass, RefusedObject, CheckpointReplaced)
            ):
                self._retention.note(step, str(error))
            raise


def _naming(style: str) -> Naming:
    known = {naming.style: naming for naming in NAMINGS if naming.written}
    if style not in known:
        raise ValueError(
            f"naming is one of {', '.join(map(repr, known))}, not {style!r}"
        )
    return known[style]


def _number(step: int) -> int:
    number = int(operator.index(step))
    if number < 0:
        raise ValueError(f"a step is 0 or more, not {number}")
    return number


def _refuse_own(options: dict[str, Any]) -> None:
    if own := sorted(_OWN & options.keys()):
        raise ValueError(
            f"{', '.join(own)} cannot be given for one step: the manager's own is used for all"
        )


def _strictness(options: dict[str, Any]) -> StrictHandling:
    return parse_strict_flag(options.get("strict", StrictHandling.ASSUME_OK_UNEXPECTED))


def _for_all_keys(options: dict[str, Any]) -> dict[str, Any]:
    """The same, but that no key asked for may be left as it is: a damaged checkpoint may have filled its tensors."""
    raising = (
        StrictHandling.RAISE_ALL,
        StrictHandling.RAISE_UNEXPECTED,
        StrictHandling.ASSUME_OK_UNEXPECTED,
    )
    return (
        options
        if _strictness(options) in raising
        else options | {"strict": StrictHandling.RAISE_UNEXPECTED}
    )
