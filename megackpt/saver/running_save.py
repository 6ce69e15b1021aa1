"""One save on one rank: its events and, on rank 0, the steps of the transaction in the storage."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar, cast

from megackpt import events, gc_pause
from megackpt.async_save import Task
from megackpt.backends.base import Backend
from megackpt.checkpoint import SaveSession, Transaction
from megackpt.distributed import Attempt, Group, attempt, name_here
from megackpt.distributed.failures import DEPARTURES
from megackpt.errors import (
    CheckpointingException,
    NonfiniteValues,
    RankLost,
    ReplicaMismatch,
)
from megackpt.planning.manifest import (
    Declarations,
    Manifest,
    SavePlan,
    ShardId,
    WriteResult,
)
from megackpt.saver.audit import (
    AllReplicas,
    Blocks,
    RankDigests,
    RankReplicas,
    describe,
)
from megackpt.saver.save_request import SaveRequest
from megackpt.saver.values import merge

T = TypeVar("T")

logger = logging.getLogger("megackpt.saver")


@dataclass(frozen=True, eq=False)
class RankPart:
    """What this rank writes and compares. Only rank 0 has ``manifest`` and ``all_replicas``."""

    save_id: str
    plan: SavePlan
    manifest: Manifest | None
    replicas: RankReplicas | None = None
    all_replicas: AllReplicas | None = None
    differed: bool = False

    def between_audits(self, declared: Declarations) -> RankPart:
        """For a save that ``Strategy.audit_every`` leaves out: it compares small replicas."""
        own, every = self.replicas, self.all_replicas
        return replace(
            self,
            replicas=own and own.small(declared),
            all_replicas=every and every.small,
        )


@dataclass(frozen=True, eq=False)
class Examined:
    """What a rank has found in its tensors: digests of its replicas, and numbers of its values."""

    digests: RankDigests
    values: bytes


class RunningSave:
    """One save on one rank: its events and, on rank 0, the transaction in the storage.

    All calls of the transaction are made here. Any failure ends it.
    """

    def __init__(self, group: Group, directory: str, timeout: timedelta) -> None:
        self.group = group
        self.timeout = timeout
        self.task: Task[WriteResult] | None = None
        # Has later work on devices wait for the copy of an asynchronous save.
        self.hold: Callable[[], object] = lambda: None
        self.session = SaveSession(directory, timeout, name_here(group.rank))
        self.total = events.start(
            events.TOTAL, events.Operation("save", directory, group.rank, group.size)
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """A part of the save. An exception ends it on this rank."""
        try:
            with self.group, gc_pause.paused(), events.use(self.total):
                yield
        except BaseException as error:
            # Other ranks may still be writing if they do not know of this error.
            interrupted = isinstance(error, DEPARTURES) and self.group.size > 1
            self._end(error, interrupted or isinstance(error, RankLost))
            raise

    def begin(
        self, declared: Attempt[SaveRequest], cached: RankPart | None
    ) -> Attempt[Transaction | None]:
        """On rank 0: begin the transaction, under the id of the cached plan if there is one."""
        if not self.group.is_coordinator:
            return Attempt(None)

        @events.stage("begin")
        def work() -> Transaction:
            request = declared.get()
            save_id = uuid.uuid4().hex
            if cached:
                save_id = cached.save_id
            self.total.operation.id = save_id
            begun = self.session.begin(
                save_id,
                overwrite=request.overwrite,
                indexed=request.backend.properties.indexed,
            )
            if cached and cached.manifest is not None:
                layout = request.backend.layout(self.group.size, cached.manifest)
                self.session.announce(layout.files)
            return begun

        return attempt(work)

    def commit(
        self,
        task: Task[WriteResult],
        request: SaveRequest,
        part: RankPart,
        examined: Attempt[Examined],
    ) -> None:
        """When all ranks have written: finish and commit, on rank 0. Collective.

        The error of any rank's task is raised on all ranks. If the audit finds differences,
        another step names them, and then raises or commits.
        """
        manifests: list[Manifest] = []

        def send() -> tuple[WriteResult, bytes, bytes]:
            found = examined.get()
            return task.get(), found.digests.packed(), found.values

        def work(
            results: Sequence[tuple[WriteResult, bytes, bytes]],
        ) -> list[ShardId] | int:
            planned = cast(Manifest, part.manifest)
            written, digests, values = zip(*results, strict=True)
            manifest = planned.located(written)
            manifest = replace(manifest, values=merge(planned, values))
            manifests.append(manifest)
            if text := manifest.nonfinite():
                if request.check_values == "raise":
                    raise NonfiniteValues(
                        f"{request.directory} is not saved, it has {text}. Go back to an earlier "
                        "checkpoint, or save with check_values='note'"
                    )
                logger.warning("%s has %s", request.directory, text)
            if part.all_replicas is not None:
                differing = part.all_replicas.differing(digests)
                if differing:
                    return differing
            return self._commit(request.backend, manifest)

        def conclude(found: Sequence[Blocks]) -> int:
            text = describe(differing, found, manifests[0])
            if request.audit.raises:
                raise ReplicaMismatch(text)
            logger.warning("%s", text)
            keys = tuple(dict.fromkeys(shard.key for shard in differing))
            return self._commit(request.backend, replace(manifests[0], differing=keys))

        reply = self.group.reduce_broadcast("write", send, work)
        if isinstance(reply, list):
            differing = reply
            reply = self.group.reduce_broadcast(
                "audit", lambda: examined.get().digests.of(differing), conclude
            )
        self._finish(reply)

    def commit_collected(
        self,
        get: Callable[[], T],
        manifest_of: Callable[[list[T]], Manifest],
        backend: Backend,
    ) -> None:
        """Gather the results of ``get``; on rank 0 commit the manifest made of them. Collective."""

        def work(results: list[T]) -> int:
            return self._commit(backend, manifest_of(results))

        self._finish(self.group.reduce_broadcast("write", get, work))

    def _finish(self, nbytes: int) -> None:
        self.total.operation.bytes = nbytes
        self.session.end()  # it is committed
        events.finish(self.total)

    def drop(self) -> None:
        """End without a result: another save has taken its place. On each rank alone."""
        self.session.end()
        events.finish(self.total)

    def _commit(self, backend: Backend, manifest: Manifest) -> int:
        """Commit, on rank 0. Returns the bytes of all chunks."""
        with events.stage("commit"):
            self.session.commit(backend, manifest, self.group.confirm)
        return int(manifest.chunks.length.sum())

    def give_up(self) -> None:
        """Cancel the save on this rank, without the others, which may still be writing."""
        operation = self.total.operation
        self.group.give_up()
        error = CheckpointingException(
            f"the save {operation.id} to {operation.path} is given up"
        )
        self._end(error, others_may_write=self.group.size > 1)

    def _end(self, error: BaseException, others_may_write: bool) -> None:
        if not self.total.ended:
            hangs = self.task is not None and self.task.stuck
            self.session.end(others_may_write or hangs)
        events.finish(self.total, error)
