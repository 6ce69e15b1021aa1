"""Finds and loads the step from which a run continues. Rank 0 reads the directory of the run."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from megackpt.async_save import Work
from megackpt.checkpoint import INDEX, find_storage
from megackpt.checkpoint.marker import PREFIX
from megackpt.checkpoint.run_directory import (
    Restored,
    Run,
    RunDirectory,
    Step,
    list_run,
    read_metrics,
    step_number,
)
from megackpt.distributed import Group, GroupLike, group_over
from megackpt.errors import (
    BackendError,
    CheckpointReplaced,
    CorruptCheckpoint,
    NotACheckpoint,
    RankFailure,
    RankLost,
    RefusedObject,
    ShardingError,
    StorageError,
    UntrustedClass,
)
from megackpt.loader.load_operation import load
from megackpt.manager.local.checkpoints import LocalCheckpoints
from megackpt.manager.local.restore import LocalRestore
from megackpt.manager.retention import Retention, find_damage, find_problems
from megackpt.planning.strict import StrictHandling, Strictness, parse_strict_flag
from megackpt.state import ShardedStateDict
from megackpt.storage import Advance, Executor, root_at

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
        # A rank's local file lacks regions that a transform may ask for.
        if self._local is not None and options["transform"] is None:
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
            self._retention.damage[step] = str(error)
            raise


def _requiring_all_keys(options: dict[str, Any]) -> dict[str, Any]:
    """For tensors that may have values of a damaged step already."""
    strict = parse_strict_flag(options["strict"])
    if StrictHandling.requires_all_keys(strict):
        return options
    return options | {"strict": StrictHandling.RAISE_UNEXPECTED}


ATTEMPTS = 3
"""Attempts at a run in which other jobs remove and replace steps at the same time."""

Found = tuple[Step | None, tuple[Step, ...]]
"""The step, and the newer ones that were skipped."""


def newest_first(
    retention: Retention, lowest: int = 0, highest: float = math.inf
) -> Iterator[Step]:
    """The steps of a run; each is examined when the iterator reaches it.

    If several checkpoints have one number, formats that megackpt only reads come last, and
    the one with the manager's naming comes first of the others. A step that only a tracker
    names is included, as incomplete.
    """
    root = retention.root
    try:
        run = RunDirectory(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        if isinstance(error, NotADirectoryError) or os.path.islink(root):
            raise StorageError(
                f"{root} is not a directory: is its file system mounted?"
            ) from error
        return
    for number, names in run.names_by_step().items():
        if not lowest <= number <= highest:
            continue
        steps = []
        for name in names:
            steps += [replace(step, step=number) for step in run.examine(name)]
        lost = [
            f"{tracker.name} names step {tracker.says!r}: there is no such step"
            for tracker in run.trackers
            if tracker.number == number
        ]
        if lost and not steps:
            name = retention.naming.name(number)
            steps = [Step(name, "", number, False, "; ".join(lost))]
        steps.sort(key=lambda s: (s.read_only, not retention.is_own_name(s.name)))
        yield from steps


def find_latest(
    retention: Retention,
    damage: Callable[[Step], str | None],
    advance: Advance | None = None,
    own: bool = False,
    finite: bool = False,
) -> Found:
    """The newest good step.

    Args:
        damage: returns the damage that an earlier check has found; such a step is skipped.
        advance: check all data, instead of sizes, and report the bytes.
        own: consider only names that the manager gives.
        finite: skip steps whose save has noted values that are NaN or infinite.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            found, skipped = _search(retention, damage, advance, own, finite)
        except CheckpointReplaced:
            continue
        # A step that was complete a moment ago may have been removed because of a newer one.
        if found or all(step.complete is False for step in skipped):
            return found, skipped
    return _search(retention, damage, advance, own, finite)


def find_best(retention: Retention, _: Advance) -> int | None:
    """The undamaged step with the best metric."""
    try:
        metrics = read_metrics(root_at(retention.root))
    except FileNotFoundError:
        return None  # a new run
    for number in retention.rules.by_metric(metrics):
        for step in newest_first(retention, number, number):
            if step.complete and not find_damage(retention.path(step.name)):
                return number
    return None


def _search(
    retention: Retention,
    damage: Callable[[Step], str | None],
    advance: Advance | None,
    own: bool,
    finite: bool,
) -> Found:
    skipped: list[Step] = []
    for step in newest_first(retention):
        if own and not retention.is_own_name(step.name):
            continue
        if step.complete is False and step.style == "plain" != retention.naming.style:
            # A directory whose name is a number, for another purpose.
            continue
        problem = damage(step)
        if not problem:
            path = retention.path(step.name)
            problem = step.reason
            nonfinite = ""
            if step.complete is not False:
                try:
                    # StorageError is raised: going back to an older step would be final.
                    found, nonfinite = find_problems(path, advance)
                    problem = found and (step.reason or found)
                except BackendError:
                    if retention.is_own_name(step.name):
                        raise
            if problem and step.complete is not False:
                retention.damage[step] = problem
            if finite:
                problem = problem or nonfinite
            if not problem:
                return step, tuple(skipped)
            logger.warning("%s is skipped: %s", path, problem)
        skipped.append(replace(step, reason=problem))
    return None, tuple(skipped)


def find_step(retention: Retention, step: int) -> Step:
    """The step of this number, in any style. Warns if there are later complete ones."""
    steps = newest_first(retention, step, step)
    found = [other for other in steps if other.complete is not False]
    if not found:
        return Step(retention.naming.name(step), "", step, False, "")
    # Checkpoints of supported formats come first.
    found.sort(key=lambda s: s.complete is None)
    for later in newest_first(retention, step + 1):
        if later.complete:
            logger.warning(
                "%s holds step %d, which is after step %d: it stays, and restore() without a "
                "step will find it; if the run is set back, remove the later steps",
                retention.root,
                later.step,
                step,
            )
            break
    return found[0]


def check_damage(error: Exception, find: Callable[[], str], strict: Strictness) -> None:
    """Raise the error of a load, unless it is damage and an older step may be loaded.

    ``find`` returns the damage that rank 0 sees: a step that it sees undamaged, but another rank
    does not see, is not damaged.
    """
    if isinstance(error, (UntrustedClass, RefusedObject, RankLost)):
        raise error
    if not isinstance(error, CorruptCheckpoint) and not find():
        raise error
    if StrictHandling.requires_returning_mismatch_keys(parse_strict_flag(strict)):
        error.add_note(
            "with strict=RETURN_* no older step is loaded: ask for one by step="
        )
        raise error


def is_new_run(root: str, skipped: tuple[Step, ...]) -> bool:
    """Whether the run has only leftovers of dead saves. False: a step was completed meanwhile.

    Raises CorruptCheckpoint if a step is, or once was, complete: starting again would lose it.
    """
    # Without a style: a tracker names a step that is gone.
    lost = [
        f"{step.name}: {step.reason}"
        for step in skipped
        if step.complete is not False or not step.style or _was_complete(root, step)
    ]
    # Listed after that: a step that was completed meanwhile would look like a damaged one.
    try:
        run = list_run(root)
    except NotACheckpoint:
        run = Run(root, None, (), ())
    complete = {step.name for step in run.steps if step.complete}
    if any(step.name in complete for step in skipped if step.complete is False):
        return False
    tables = {INDEX, "metadata.json", ".metadata"}
    if run.itself and tables & set(find_storage(root).list()):
        lost.append(f"{root} is a checkpoint itself: is the directory above it meant?")
    if lost:
        raise CorruptCheckpoint(
            f"none of the checkpoints in {root} can be loaded as the latest step. To start the "
            "run again, move them away.\n  " + "\n  ".join(lost)
        )
    for step in (*run.steps, *filter(None, [run.itself])):
        if step.step is None and step.complete:
            text = "the run in %s starts again: the name of the %s checkpoint %s has no step"
            logger.warning(text, root, step.format, step.name)
    logger.info("no checkpoint in %s: the run begins", root)
    return True


def _was_complete(root: str, step: Step) -> bool:
    """Whether an incomplete step shows that it once was complete."""
    try:
        entries = root_at(f"{root.rstrip('/')}/{step.name}").list()
    except (NotADirectoryError, FileNotFoundError):
        return False
    # The leftovers of a dead save have the marker of the save.
    if any(entry.startswith(PREFIX) for entry in entries):
        return False
    return any(entry == INDEX or entry.endswith(".distcp") for entry in entries)
