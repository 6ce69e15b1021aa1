"""The stages of a load: open, compare, plan, read, restore.

Where several ranks want the same rows, one of them reads the rows and sends them to its peers.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal
from weakref import finalize

import numpy as np

from megackpt import events, gc_pause, limits
from megackpt.async_save import Task
from megackpt.async_save.task import ThreadWorker
from megackpt.backends.ranges import octets
from megackpt.checkpoint import (
    Directory,
    Opened,
    absolute,
    find_storage,
)
from megackpt.distributed import (
    DEFAULT_TIMEOUT,
    Attempt,
    Group,
    GroupLike,
    Stream,
    attempt,
    domain_of,
    group_over,
    name_here,
)
from megackpt.errors import (
    CheckpointingException,
    CheckpointReplaced,
    NotACheckpoint,
    ShardingError,
    StorageError,
    join_truncated,
)
from megackpt.loader.comparison import (
    CompareRequest,
    Comparison,
    KeyMap,
    LoadRequest,
    StateOfStored,
    Transform,
    judge,
    trusted_classes,
)
from megackpt.loader.load_session import LoadSession, target_of, values_of
from megackpt.planning.box import Box, Int64
from megackpt.planning.exchange_plan import ExchangePlan, Transfers, plan_exchange
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import (
    COMMON_KEY,
    Declaration,
    Declarations,
    LoadPlan,
    Manifest,
    ShardId,
    itemsizes,
)
from megackpt.planning.strict import StrictHandling, Strictness, parse_strict_flag
from megackpt.staging.buffers import POOL
from megackpt.staging.copy import prepare
from megackpt.staging.devices import synchronize
from megackpt.staging.target import LoadTarget
from megackpt.state import ShardedStateDict
from megackpt.strategies import (
    Strategy,
    StrategyLike,
    asked_format,
    default_strategies,
    loading,
    read_config,
)

logger = logging.getLogger("megackpt.loader")

UNDEFINED = 6
"""Undefined tensors that the note of an error names."""
ATTEMPTS = 3
"""How often a load starts again if a save replaces the checkpoint while it is read."""

_total: Callable[[Sequence[int]], int] = sum


def load(
    sharded_state_dict: ShardedStateDict | StateOfStored,
    checkpoint_dir: str | Path,
    sharded_strategy: StrategyLike = None,
    common_strategy: Any = None,  # noqa: ARG001 - Megatron's signature
    validate_access_integrity: bool = True,
    strict: Strictness = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    verify: bool = True,
    dtype_policy: Literal["convert", "error"] = "convert",
    key_map: KeyMap | None = None,
    trusted: Sequence[type] = (),
    transform: Transform | None = None,
    asynchronous: bool = False,
    process_group: GroupLike = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> Any:
    """Load the state that ``sharded_state_dict`` asks for, at any parallelism.

    Collective over ``process_group``.

    Values are read into the ``.data`` of the ShardedTensors, on their device, or into new CPU
    tensors. Only the byte ranges needed are read. All ranks compare their requests with the
    stored state before any tensor is changed, so a load that does not fit changes nothing.

    Args:
        sharded_strategy: the format; None = the directory decides. Needed only where a
            directory without ``metadata.json`` could be of several formats, or for a Backend
            object that is not registered.
        common_strategy: not used; the format keeps the common state itself.
        validate_access_integrity: check that the main replicas of all ranks together ask for
            every element of each tensor exactly once. Pass False to ask for a part of tensors.
        strict: the policy for keys asked for that are not stored (unexpected), and the reverse
            (missing); True is RAISE_ALL, False is LOG_ALL. The default, ASSUME_OK_UNEXPECTED,
            raises for unexpected keys, and logs one WARNING that names stored keys which no
            rank asks for; RAISE_UNEXPECTED does not log it.
        verify: check the digests of all that is read (whole blocks of 1 MiB are read). False
            reads the exact ranges.
        dtype_policy: "convert" stored values to the dtype asked for, or raise an "error" where
            the two differ.
        key_map: key asked for -> key stored: a mapping, which may leave out keys that are
            alike, or a function.
        trusted: classes that objects and the common state may hold beyond the harmless ones.
        transform: pattern of keys asked for -> how stored tensors make such a tensor: a stored name
            or a rule (``Fuse``, ``Part``, ``Transpose``, ``Padded`` of ``megackpt.huggingface``);
            None: it keeps its values; or a function, see ``as_huggingface``. The patterns are those
            of ``megackpt.huggingface``. Keys that fit no rule are loaded under their names.
        asynchronous: return an AsyncLoadRequest when all ranks have compared and planned. A thread
            reads meanwhile. ``wait`` of the request, collective, returns the value.
        timeout: how long any rank waits in one collective step, or in one call to its storage.

    Returns:
        The state dict: common state, tensors and objects in the places where they were asked
        for. With a RETURN_* strictness: ``(state_dict, missing keys, unexpected keys)``.

    Raises:
        NotACheckpoint: "directory X does not exist", or nothing complete is in it.
        MismatchError: keys, global shapes or dtypes differ. CoverageError: the ranks do not ask
            for everything once.
        CorruptCheckpoint, UntrustedClass: the files are damaged, or a pickle needs a class that
            is not trusted.
        RankFailure: other ranks failed or did not answer in time.
    """
    own = _own_load(sharded_strategy, checkpoint_dir)
    if own is not None:
        if isinstance(sharded_state_dict, StateOfStored):
            raise ShardingError(
                "a strategy of your own loads no objects, as it does not say what is stored: "
                "declare their state"
            )
        return own(
            sharded_state_dict,
            checkpoint_dir,
            strict=parse_strict_flag(strict),
            validate=validate_access_integrity,
            verify=verify,
            trusted=trusted_classes(trusted),
            process_group=process_group,
            timeout=timeout,
            key_map=key_map,
            dtype_policy=None if dtype_policy == "convert" else dtype_policy,
            asynchronous=asynchronous,
        )
    group = group_over(process_group, timeout, f"load {checkpoint_dir}")
    request = attempt(
        lambda: LoadRequest(
            absolute(checkpoint_dir),
            sharded_state_dict,
            sharded_strategy,
            parse_strict_flag(strict),
            validate_access_integrity,
            dtype_policy,
            key_map,
            verify,
            trusted_classes(trusted),
            transform=transform,
        )
    )
    if group.size == 1:
        request.get()  # a wrong argument raises its own ValueError, not a RankFailure
    session = LoadSession(timeout, name_here(group.rank))
    operation = _LoadOperation(group, request, session, str(checkpoint_dir))
    with operation.running():
        if asynchronous:
            return AsyncLoadRequest(operation)
        return operation.run(operation.read)


def _own_load(given: StrategyLike, directory: str | Path) -> Callable[..., Any] | None:
    """What performs the load with a strategy of the caller's own, given or registered."""
    if not isinstance(given, Strategy) and default_strategies["load_sharded"]:
        config = attempt(lambda: read_config(find_storage(directory))).value
        if config is not None:
            name, version = config.sharded_backend, config.sharded_backend_version
            given = loading(given, name, version)
    if isinstance(given, Strategy):
        return given.own("load")
    return None


@dataclass(frozen=True, eq=False)
class _RankRequest:
    """What a rank sends to rank 0. ``domain`` numbers the ranks that exchange, in ``mode``."""

    compared: CompareRequest
    mode: str
    domain: int


class _LoadOperation:
    """One load on one rank: what its stages leave there."""

    request: LoadRequest
    manifest: Manifest
    opened: Opened
    compared: Comparison
    memory: LoadTarget
    state: dict[Any, Any]
    begun = False
    missing: set[str]
    shared: ExchangePlan | None
    plan: Attempt[LoadPlan]
    domains: Sequence[int] = ()  # on rank 0: ranks with equal numbers exchange

    def __init__(
        self,
        group: Group,
        request: Attempt[LoadRequest],
        session: LoadSession,
        directory: str,
    ) -> None:
        self.group = group
        self.attempt = request
        self.session = session
        self.total = events.start(
            events.TOTAL, events.Operation("load", directory, group.rank, group.size)
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """A part of the load. An exception ends the load on this rank."""
        try:
            with self.group, gc_pause.paused(), events.use(self.total):
                yield
        except BaseException as error:
            self.finish(error)
            raise

    def finish(self, error: BaseException | None = None) -> None:
        self.session.close()
        events.finish(self.total, error)

    def cancel(self, why: str) -> CheckpointingException:
        """Have the reads of this rank stop, and end the load here with the error returned."""
        error = CheckpointingException(
            f"{self.total.operation.path} is not loaded: {why}"
        )
        self.session.cancel(error)
        self.finish(error)
        return error

    def run(self, read: Callable[[], dict[int, int]]) -> Any:
        """All stages that are left, and again all if a save replaces the checkpoint.

        ``read`` calls, or waits for, the method ``read``.
        """
        for left in reversed(range(ATTEMPTS)):
            try:
                if not self.begun:
                    self.begin()
                    read = self.read
                self.total.operation.bytes = self.end(read)
                break
            except CheckpointReplaced:
                self.begun = False
                if not left:
                    raise
                logger.warning(
                    "%s was replaced while it was being loaded: loading again",
                    self.total.operation.path,
                )
        self.finish()
        chunks = self.manifest.chunks
        sizes = chunks.boxes.volume * itemsizes(self.manifest.tensors)[chunks.tensor]
        stored, total = int(sizes.sum()), self.total.operation.bytes
        if total >= stored > 0:
            # The ranks save the loaded tensors, and share replicas equally.
            POOL.expected = self.memory.nbytes * stored // total
            if POOL.is_expecting:
                prepare()
        if StrictHandling.requires_returning_mismatch_keys(self.request.strict):
            return self.state, self.missing, self.compared.unexpected
        return self.state

    def begin(self) -> None:
        """Open, compare and plan."""
        group = self.group
        directory, place, self.manifest = group.broadcast("open", self.open)
        self.missing, exchanging = group.reduce_broadcast(
            "compare", partial(self.compare, directory, place), self.judge
        )
        self.shared = None
        if exchanging:
            self.shared = group.reduce_scatter(
                "share", self.rows_to_share, self.plan_exchange
            )
        self.plan = attempt(self.prepare)
        self.begun = True

    def end(self, read: Callable[[], dict[int, int]]) -> int:
        """Read, exchange and restore. Returns the bytes of all ranks."""
        group = self.group
        try:
            if self.shared is None:
                return group.reduce_broadcast(
                    "read", partial(self.restore, read), _total
                )
            lengths = group.reduce_broadcast("read", read, list)
            with events.stage("exchange"):
                exchange(group, self.shared, self.compared.wanted, self.memory, lengths)
            return group.reduce_broadcast("restore", self.restore, _total)
        except CheckpointingException as error:
            keys = [repr(entry.key) for entry in self.compared.declared.tensors]
            error.add_note(
                "these tensors are undefined now, as they may have been read in part: "
                + join_truncated(keys, UNDEFINED, ", ")
            )
            raise

    @events.stage("open")
    def open(self) -> tuple[str, Directory, Manifest]:
        """On rank 0: the directory, where its checkpoint is, and the manifest."""
        request = self.attempt.get()
        try:
            place, opened = self.session.open(
                request.directory, asked_format(request.strategy)
            )
        except NotACheckpoint as error:
            if self.group.size == 1:
                raise
            raise NotACheckpoint(
                f"{error}\n(So rank 0 sees it on host {socket.gethostname()!r}: where other ranks "
                "see a checkpoint, is the directory shared between all hosts?)"
            ) from error
        manifest = opened.manifest
        events.current().operation.id = manifest.save_id
        if manifest.differing:
            logger.warning(
                "%s: when it was saved, ranks held different values of %s",
                request.directory,
                join_truncated(list(map(repr, manifest.differing)), 10),
            )
        return request.directory, place, manifest

    @events.stage("compare")
    def compare(self, directory: str, place: Directory) -> _RankRequest:
        """Open the checkpoint that rank 0 has opened, and compare this rank's request with it."""
        request = self.request = self.attempt.get()
        manifest = self.manifest
        events.current().operation.id = manifest.save_id
        if request.directory != directory:
            raise ShardingError(
                "the ranks of one load name different directories, all must agree: here "
                f"{request.directory}, on rank 0 {directory}"
            )
        # Opened first: all that is read through this handle belongs to one checkpoint.
        self.opened = self.session.open_same(
            place, manifest, asked_format(request.strategy)
        )
        values = None
        if isinstance(request.state, StateOfStored):
            values = self.pickles(request.state.prefixes)
        if values is not None or request.transform is not None:
            request = self.request = request.declared(manifest, values or {})
        self.compared = Comparison.of(request, manifest, self.group.rank)
        strategy = loading(request.strategy, *manifest.backend)
        domain = domain_of(strategy.load_group, "load_group")
        sent = CompareRequest.of(request, self.compared)
        return _RankRequest(sent, strategy.exchange, domain)

    def pickles(self, prefixes: tuple[str, ...]) -> dict[str, Any]:
        """The common state, and the objects whose keys begin with a prefix, by key."""
        wanted = Declarations.of(
            [
                Declaration(ShardId(key, Box.whole(meta.shape)), meta, 0, False, 0, 0)
                for key, meta in self.manifest.tensors
                if meta.is_object and (key == COMMON_KEY or key.startswith(prefixes))
            ]
        )
        values = self.session.rows(
            self.opened,
            wanted,
            verify=self.request.verify,
            trusted=self.request.trusted,
        )
        keys = [row.shard.key for row in wanted.rows()]
        return dict(zip(keys, values, strict=True))

    def judge(self, parts: Sequence[_RankRequest]) -> tuple[set[str], bool]:
        """On rank 0: the keys that no rank asks for, and whether ranks exchange.

        An exchange in the mode "auto" is for storage over a network.
        """
        sent = [part.compared for part in parts]
        missing = judge(self.request, sent, self.manifest)
        modes = {"always"}
        if any(part.mode == "auto" for part in parts):
            # The file system of a network asks its server.
            is_remote = self.opened.storage.is_remote
            if self.session.call(f"opening {self.request.directory}", is_remote):
                modes.add("auto")
        self.domains = [
            part.domain if part.mode in modes else -1 - rank
            for rank, part in enumerate(parts)
        ]
        return missing, len(set(self.domains)) < len(parts)

    def rows_to_share(self) -> tuple[Declarations, Int64]:
        """The wanted rows, and those of them that this rank must read itself."""
        return self.compared.wanted, self.compared.overlapping()

    @events.stage("share")
    def plan_exchange(
        self, parts: Sequence[tuple[Declarations, Int64]]
    ) -> list[ExchangePlan]:
        """On rank 0: who reads which rows, and sends them to whom."""
        wanted = []
        for (rows, _), domain in zip(parts, self.domains, strict=True):
            wanted.append(replace(rows, domains=(domain,)))
        return plan_exchange(wanted, self.manifest, [apart for _, apart in parts])

    def prepare(self) -> LoadPlan:
        """The reads of this rank, and the memory for all rows that it wants."""
        wanted = self.compared.wanted
        self.memory = target_of(wanted, self.manifest, self.compared.tensors())
        synchronize(self.memory.tensors)
        if self.shared is None:
            return plan_load(wanted, self.manifest)
        return self.shared.reads(self.manifest)

    @events.stage("read")
    def read(self) -> dict[int, int]:
        """Row -> bytes of each object that this rank has read: no other rank knows them."""
        plan = self.plan.get()
        self.session.read(self.opened, plan, self.memory, self.request.verify)
        for stored in self.compared.dequantised.values():
            stored.read(self.session, self.opened, self.request.verify)
        return {row: len(blob) for row, blob in self.memory.blobs.items()}

    def read_beside(self) -> dict[int, int]:
        """``read`` on a thread, during other work."""
        self.session.lower_priority()
        return self.read()

    def restore(self, read: Callable[[], object] = dict) -> int:
        """Make the state, after ``read``; return its bytes on this rank."""
        read()
        synchronize(self.memory.tensors)
        wanted = self.compared.wanted
        trusted = self.request.trusted
        values = values_of(self.opened.storage, wanted, self.memory, trusted)
        self.state = self.compared.restore(values)
        return self.memory.nbytes


class AsyncLoadRequest:
    """A load whose reads run in a thread: ``load(..., asynchronous=True)`` returns one.

    Do not use or change the tensors of the state before ``wait`` has returned. A request that is
    dropped before that stops reading.
    """

    def __init__(self, operation: _LoadOperation) -> None:
        """Open, compare and plan; collective. Then start to read."""
        with suppress(CheckpointReplaced):  # ``wait`` begins again
            operation.begin()
        context = copy_context()
        self._task = Task(lambda _: context.run(operation.read_beside), "load")
        self._operation: _LoadOperation | None = operation
        self._process = os.getpid()
        # The interpreter calls finalizers at its end, the newest first, and would abort with a
        # thread in torch.
        at_exit = finalize(operation, self._task.wait, limits.WORKER_STOP_SECONDS)
        self._task.on_end(lambda _: at_exit.detach())
        self._on_drop = finalize(self, _dropped, operation, self._process)
        if operation.begun:
            ThreadWorker().start(self._task)
        else:
            self._task.finish(Attempt({}))

    def done(self) -> bool:
        """Whether this rank has ended its reads, with an error or without. Not collective."""
        self._check_process()
        return self._task.wait(0)

    def wait(self) -> Any:
        """Wait for the reads of all ranks, and return the value of ``load``; collective.

        Ranks that read for one another exchange bytes here, and objects are unpickled here. Raises
        the errors of ``load``, and CheckpointingException for a request that has ended, or that a
        parent process made: a fork lacks the thread that reads.
        """
        operation = self._end()
        if operation is None:
            raise CheckpointingException(
                "this load has ended: wait() or cancel() was called before"
            )

        def read() -> dict[int, int]:
            self._task.wait()
            return self._task.get()

        try:
            with operation.running():
                return operation.run(read)
        except BaseException:  # a signal handler raises
            self._stop(operation)
            raise

    def cancel(self) -> None:
        """End the load on this rank; its tensors are undefined. No effect after the end.

        Not collective: ``wait`` raises RankLost on other ranks, at once. Raises StorageError if a
        read hangs in the storage: it may still write to the tensors.
        """
        operation = self._end()
        if operation is not None:
            self._stop(operation)
            operation.group.give_up()
            if self._task.stuck:
                raise StorageError(
                    f"{operation.total.operation.path}: the storage does not answer. The tensors "
                    "of this load must not be used: a read may still write to them"
                )

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise CheckpointingException(
                f"this load belongs to process {self._process}: a fork of it, process "
                f"{os.getpid()}, does not read; load there"
            )

    def _end(self) -> _LoadOperation | None:
        self._check_process()
        operation, self._operation = self._operation, None
        self._on_drop.detach()
        return operation

    def _stop(self, operation: _LoadOperation) -> None:
        operation.cancel("it was cancelled")
        ThreadWorker().stop(self._task)


def _dropped(operation: _LoadOperation, process: int) -> None:
    """The request was garbage-collected before ``wait``."""
    # A forked child also drops its copy of the request, which is still the parent's.
    if os.getpid() == process:
        error = operation.cancel("its request was dropped before wait()")
        logger.error(str(error))


COPY_SIZE = 4 << 20
"""Bytes of a region that is not contiguous in memory which are copied at a time."""


@dataclass(frozen=True, eq=False)
class TransferData:
    """The bytes of the transfers of this rank, in one direction."""

    transfers: Transfers
    wanted: Declarations
    memory: LoadTarget
    nbytes: Int64

    @classmethod
    def of(
        cls,
        transfers: Transfers,
        wanted: Declarations,
        memory: LoadTarget,
        object_length: Callable[[int], int],
    ) -> TransferData:
        """``object_length(i)`` gives the bytes of transfer i, of an object."""
        itemsize = itemsizes(wanted.tensors)[wanted.tensor[transfers.row]]
        nbytes = transfers.boxes.volume * itemsize
        for i in np.flatnonzero(nbytes == 0).tolist():
            nbytes[i] = object_length(i)
        # Ranks send values as they have read them, already converted: in the wanted dtype.
        dtypes = [t if t is None else t.dtype for t in memory.tensors]
        return cls(transfers, wanted, replace(memory, stored=dtypes), nbytes)

    def streams(
        self, blocks: Callable[[Int64], Iterator[memoryview]]
    ) -> dict[int, Stream]:
        """For each other rank one stream of ``blocks``, of all transfers with it."""
        streams = {}
        for peer in np.unique(self.transfers.peer).tolist():
            rows = np.flatnonzero(self.transfers.peer == peer)
            streams[peer] = Stream(int(self.nbytes[rows].sum()), blocks(rows))
        return streams

    def outgoing(self, rows: Int64) -> Iterator[memoryview]:
        for i in rows.tolist():
            row = int(self.transfers.row[i])
            if self._is_object(i):
                yield memoryview(self.memory.blobs[row])
                continue
            for box in self._boxes(i):
                yield octets(np.ascontiguousarray(self.memory.read_back(row, box)))

    def incoming(self, rows: Int64) -> Iterator[memoryview]:
        for i in rows.tolist():
            row = int(self.transfers.row[i])
            if self._is_object(i):
                data = bytearray(self.nbytes[i])
                yield memoryview(data)
                self.memory.blob(row, bytes(data))
            else:
                for box in self._boxes(i):
                    region = self.memory.open(row, box)
                    contiguous = region
                    if not region.flags.c_contiguous:
                        contiguous = np.empty_like(region, order="C")
                    yield octets(contiguous)
                    if contiguous is not region:
                        region[...] = contiguous
                    self.memory.close(row, box, region)
            events.current().advance(int(self.nbytes[i]))

    def _is_object(self, i: int) -> bool:
        return self.memory.tensors[self.transfers.row[i]] is None

    def _boxes(self, i: int) -> Iterator[Box]:
        """The box of a transfer, in parts of at most COPY_SIZE bytes."""
        meta = self.wanted.tensors[self.wanted.tensor[self.transfers.row[i]]].meta
        box = self.transfers.boxes.row(i, len(meta.shape))
        if self.nbytes[i] <= COPY_SIZE:
            yield box
            return
        step = COPY_SIZE // meta.itemsize
        for start in range(0, box.volume, step):
            yield from box.runs(start, min(start + step, box.volume))


def exchange(
    group: Group,
    plan: ExchangePlan,
    wanted: Declarations,
    memory: LoadTarget,
    lengths: Sequence[Mapping[int, int]],
) -> None:
    """Send the values that this rank has read for its peers, and receive values from the peers.

    ``lengths``: for each rank the bytes of every object that it has read, by its wanted row.
    """

    def sent_length(i: int) -> int:
        return len(memory.blobs[int(plan.sends.row[i])])

    def received_length(i: int) -> int:
        peer = int(plan.receives.peer[i])
        row = int(plan.receives.peer_row[i])
        return lengths[peer][row]

    def streams() -> tuple[dict[int, Stream], dict[int, Stream]]:
        sent = TransferData.of(plan.sends, wanted, memory, sent_length)
        received = TransferData.of(plan.receives, wanted, memory, received_length)
        events.current().todo = int(received.nbytes.sum())
        return sent.streams(sent.outgoing), received.streams(received.incoming)

    group.exchange("exchange", streams)
