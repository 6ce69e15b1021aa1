"""One save on one rank: its ranks, its events, the bounded calls to its storage, and its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

from megackpt import events, gc_pause
from megackpt.async_save import Task
from megackpt.backends.base import Backend
from megackpt.checkpoint.marker import logger
from megackpt.checkpoint.transaction import Transaction, begin
from megackpt.distributed import Group, SingleGroup
from megackpt.distributed.failures import DEPARTURES
from megackpt.errors import CheckpointingException, RankLost
from megackpt.planning.manifest import Manifest
from megackpt.storage import Executor

P = ParamSpec("P")
T = TypeVar("T")


class SaveSession:
    """One save on one rank. On rank 0 it has the transaction.

    Each call to the storage is bounded: StorageError if the storage does not answer. The thread of
    a call that was given up may hang on. When the storage answers, the call ends, and this thread
    aborts the transaction. Until then this process does not touch the storage any more.

    There are two ways to use a session. With a group, each part of a save runs in ``running``,
    which ends the save if the part raises (``megackpt.save``, custom strategies). Without a group,
    the caller calls ``end``, and makes the events of its own operation. This is for parts that
    come from different threads or processes (torch DCP), and for errors that keep the files
    (``convert``).

    Args:
        timeout: how long the storage may not answer in one call. None: for ever.
        who: the saver, for errors, such as "rank 0, host 'a'".
        group: the ranks of the save. The session then is an operation in the events.
    """

    def __init__(
        self,
        directory: str,
        timeout: timedelta | None,
        who: str,
        group: Group | None = None,
    ) -> None:
        self.transaction: Transaction | None = None
        """Begun, and neither committed nor aborted."""
        self.directory = directory
        self.timeout = timeout
        self.who = who
        self.group = group or SingleGroup()
        self.total = events.start(
            events.TOTAL,
            events.Operation(
                "save" if group else "", directory, self.group.rank, self.group.size
            ),
        )
        self._executor = Executor(timeout)
        self._writing: Task[Any] | None = None
        self.alive = self._executor.alive
        self.check = self._executor.progress.check

    @contextmanager
    def running(self) -> Iterator[None]:
        """A part of the save. An exception ends the save on this rank."""
        try:
            with self.group, gc_pause.paused(), events.use(self.total):
                yield
        except BaseException as error:
            # Other ranks may still be writing if they do not know of this error.
            interrupted = isinstance(error, DEPARTURES) and self.group.size > 1
            self._fail(error, interrupted or isinstance(error, RankLost))
            raise

    def begin(
        self,
        save_id: str,
        *,
        overwrite: bool = True,
        resume: bool = False,
        indexed: bool = True,
    ) -> Transaction:
        """See ``checkpoint.begin``."""

        def work() -> Transaction:
            # Set here: after this call was given up, only ``end`` knows the transaction.
            self.transaction = self.begun = begin(
                self.directory,
                save_id=save_id,
                overwrite=overwrite,
                resume=resume,
                indexed=indexed,
                moved=self.alive,
            )
            return self.begun

        return self.call("begin", work)

    def announce(self, names: Iterable[str]) -> None:
        """See ``Transaction.announce``."""
        self.call("begin", self.begun.announce, names)

    def wait_for(self, task: Task[Any]) -> None:
        """The files stay if the save fails while this task hangs in the storage."""
        self._writing = task

    def commit(
        self,
        backend: Backend,
        manifest: Manifest,
        confirm: Callable[[], None] | None = None,
        reread: bool = False,
    ) -> int:
        """Commit, on rank 0: see ``Transaction.commit``. Returns the bytes of all chunks.

        ``confirm`` asks all ranks whether they still wait, and has a bound for that. By default it
        asks the ranks of ``group``. ``Transaction.commit`` calls it twice.
        """
        ask = confirm or self.group.confirm

        def confirm_here() -> None:
            self.alive()  # raises if this commit was given up
            with self._executor.waiting_for_ranks():
                ask()

        commit = self.begun.commit
        # A caller without a group makes the events. Conversions of equal checkpoints are equal.
        is_operation = bool(self.total.operation.name)
        if is_operation:
            seconds = time.perf_counter() - self.total.started_at
            manifest = replace(manifest, milliseconds=1 + int(1000 * seconds))
        with events.stage("commit") if is_operation else nullcontext():
            self.call("commit", commit, backend, manifest, reread, confirm_here)
        self.transaction = None
        return int(manifest.chunks.length.sum())

    def call(
        self, stage: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Do a part of a stage in the storage. Errors name the stage."""
        name = f"{stage} of the save to {self.directory} ({self.who})"
        return self._executor.call(name, work, *args, **kwargs)

    def finish(self, nbytes: int) -> None:
        """End after the commit. ``nbytes``: the bytes of all chunks."""
        self.total.operation.bytes = nbytes
        self.end()
        events.finish(self.total)

    def withdraw(self) -> None:
        """End without a commit and without an error: the engine saves in place of this session."""
        self.end()
        events.finish(self.total)

    def give_up(self) -> None:
        """Cancel the save on this rank, without the other ranks, which may still be writing."""
        operation = self.total.operation
        self.group.give_up()
        error = CheckpointingException(
            f"the save {operation.id} to {operation.path} is given up"
        )
        self._fail(error, others_may_write=self.group.size > 1)

    def _fail(self, error: BaseException, others_may_write: bool) -> None:
        if not self.total.ended:
            hangs = self._writing is not None and self._writing.stuck
            self.end(others_may_write or hangs)
        events.finish(self.total, error)

    def end(self, keep: bool = False) -> None:
        """Abort the transaction unless it is committed. An error of the storage is logged.

        ``keep``: the files stay, because other ranks may still write them, or because a later call
        resumes the save. The next save with another id removes them.
        """

        def finish() -> None:
            if self.transaction is not None and keep:
                self.transaction.abandon()
            elif self.transaction is not None:
                self.transaction.abort()

        if self._executor.gave_up is not None:
            self._executor.afterwards(finish)
        elif self.transaction is not None:
            try:
                self.call("end", finish)
            except CheckpointingException as error:
                logger.warning("%s", error)
        self._executor.close()
