"""The steps of a load: open, compare, plan, read, restore."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from megackpt import events, gc_pause
from megackpt.backends.base import Backend
from megackpt.checkpoint import (
    as_read_by,
    backend_of,
    open_checkpoint,
    open_same,
)
from megackpt.distributed import (
    DEFAULT_TIMEOUT,
    Attempt,
    Group,
    attempt,
    group_over,
)
from megackpt.errors import CheckpointReplaced, NotACheckpoint, ShardingError
from megackpt.loader.comparison import Comparison, check_coverage, find_missing
from megackpt.loader.exchange import ExchangePolicy, exchange, modes_in_use
from megackpt.loader.request import KeyMap, LoadRequest
from megackpt.loader.row_reader import read, target_of, values_of
from megackpt.planning import strict as strictness
from megackpt.planning.box import Int64
from megackpt.planning.exchange_plan import ExchangePlan, plan_exchange
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import Declarations, LoadPlan, Manifest
from megackpt.planning.strict import StrictHandling
from megackpt.staging.source import synchronize
from megackpt.staging.target import LoadTarget
from megackpt.state import ShardedStateDict
from megackpt.storage import Storage
from megackpt.strategies import StrategyLike, loading

logger = logging.getLogger("megackpt.loader")

ATTEMPTS = 3
"""How often a load starts again if a save replaces the checkpoint while it is read."""


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: StrategyLike = None,
    common_strategy: Any = None,  # noqa: ARG001 - Megatron's signature
    validate_access_integrity: bool = True,
    strict: StrictHandling | str | bool = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    verify: bool = True,
    dtype_policy: str = "convert",
    key_map: KeyMap | None = None,
    trusted: Sequence[type] = (),
    process_group: Any = None,
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
        timeout: how long any rank waits for the others in one step.

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
    group = group_over(process_group, timeout)
    request = attempt(
        lambda: LoadRequest.of(
            sharded_state_dict,
            checkpoint_dir,
            sharded_strategy,
            strict=strict,
            validate=validate_access_integrity,
            dtype_policy=dtype_policy,
            key_map=key_map,
            verify=verify,
            trusted=trusted,
        )
    )
    if group.size == 1:
        request.get()  # a wrong argument raises its own ValueError, not a RankFailure
    with (
        group,
        gc_pause.paused(),
        events.operation("load", checkpoint_dir, group.rank, group.size),
    ):
        for _ in range(ATTEMPTS - 1):
            try:
                return _load(group, request)
            except CheckpointReplaced:
                logger.warning(
                    "%s was replaced while it was being loaded: loading again",
                    checkpoint_dir,
                )
        return _load(group, request)


@dataclass(frozen=True, eq=False)
class _RankRequest:
    """What a rank sends to rank 0 for the comparison of all requests.

    ``declared`` is None where nothing is validated; ``names`` are empty unless the strictness
    needs them.
    """

    declared: Declarations | None
    names: frozenset[str]
    exchange: ExchangePolicy


@dataclass(frozen=True, eq=False)
class _Source:
    """The open checkpoint on one rank, and this rank's request compared with it."""

    root: Storage
    backend: Backend
    manifest: Manifest
    compared: Comparison
    exchange: ExchangePolicy


def _load(group: Group, request: Attempt[LoadRequest]) -> Any:
    # What a step leaves on this rank, while its reply to rank 0 travels.
    sources: list[_Source] = []
    memories: list[LoadTarget] = []
    states: list[dict[Any, Any]] = []

    def compare() -> _RankRequest:
        sources.append(_compare(request.get(), directory, manifest, group.rank))
        return _rank_request(request.get(), sources[0])

    def read_plan(plan: LoadPlan) -> LoadTarget:
        memories.append(_read(request.get(), sources[0], plan))
        return memories[0]

    def restore() -> int:
        states.append(_restore(request.get(), sources[0], memories[0]))
        return memories[0].nbytes

    @events.stage("read")
    def read_all() -> int:
        wanted = sources[0].compared.wanted
        read_plan(plan_load(wanted, manifest))
        return restore()

    @events.stage("read")
    def read_share() -> dict[int, int]:
        return _object_lengths(plan, read_plan(plan.reads(manifest)))

    directory, manifest = group.broadcast("open", lambda: _open(group, request.get()))
    missing, modes = group.reduce_broadcast(
        "compare", compare, lambda parts: _judge(request.get(), sources[0], parts)
    )
    if not modes:
        total = group.reduce_broadcast("read", read_all, _total)
    else:
        plan = group.reduce_scatter(
            "share",
            lambda: _exchange_request(sources[0], modes),
            lambda parts: _plan_exchange(parts, manifest),
        )
        lengths = group.reduce_broadcast("read", read_share, _by_rank)
        with events.stage("exchange"):
            wanted = sources[0].compared.wanted
            exchange(group, plan, wanted, memories[0], lengths)
        total = group.reduce_broadcast("restore", restore, _total)
    events.current().operation.bytes = total
    if StrictHandling.requires_returning_mismatch_keys(request.get().strict):
        return states[0], missing, sources[0].compared.unexpected
    return states[0]


@events.stage("open")
def _open(group: Group, request: LoadRequest) -> tuple[str, Manifest]:
    """On rank 0: the directory, and the manifest of the checkpoint in it."""
    try:
        manifest = open_checkpoint(request.directory, request.format).manifest
    except NotACheckpoint as error:
        if group.size == 1:
            raise
        raise NotACheckpoint(
            f"{error}\n(So rank 0 sees it on host {socket.gethostname()!r}: where other ranks "
            "see a checkpoint, is the directory shared between all hosts?)"
        ) from error
    events.current().operation.id = manifest.save_id
    return request.directory, manifest


@events.stage("compare")
def _compare(
    request: LoadRequest, directory: str, manifest: Manifest, rank: int
) -> _Source:
    """Open the checkpoint that rank 0 has opened, and compare this rank's request with it."""
    events.current().operation.id = manifest.save_id
    if request.directory != directory:
        raise ShardingError(
            "the ranks of one load name different directories, all must agree: here "
            f"{request.directory}, on rank 0 {directory}"
        )
    # Opened first: all that is read through this handle belongs to one checkpoint.
    root = open_same(request.directory, manifest.save_id, request.format)
    backend = backend_of(root, manifest, request.format)
    root = as_read_by(backend, root)
    compared = Comparison.of(request, manifest, rank)
    strategy = loading(request.strategy, *manifest.backend)
    policy = ExchangePolicy.of(strategy, rank)
    return _Source(root, backend, manifest, compared, policy)


def _rank_request(request: LoadRequest, source: _Source) -> _RankRequest:
    declared = source.compared.declared
    names: set[str] = set()
    if StrictHandling.requires_global_app_metadata(request.strict):
        names = strictness.requested(declared)
    sent = declared if request.validate else None
    return _RankRequest(sent, frozenset(names), source.exchange)


def _judge(
    request: LoadRequest, source: _Source, parts: Sequence[_RankRequest]
) -> tuple[set[str], tuple[str, ...]]:
    """On rank 0: the keys that no rank asks for, and the modes in which ranks exchange.

    Nothing is gathered for this alone: missing keys are found only where the strictness makes
    ranks send their names.
    """
    manifest = source.manifest
    if request.validate:
        declared = [part.declared for part in parts if part.declared is not None]
        check_coverage(declared, manifest, request)
    missing: set[str] = set()
    if StrictHandling.requires_global_app_metadata(request.strict):
        names = [part.names for part in parts]
        missing = find_missing(names, manifest, request.strict)
    return missing, modes_in_use([part.exchange for part in parts], source.root)


def _exchange_request(
    source: _Source, modes: Sequence[str]
) -> tuple[Declarations, Int64]:
    """The wanted rows, and those of them that this rank must read itself."""
    domains = (source.exchange.domain_in(modes),)
    wanted = replace(source.compared.wanted, domains=domains)
    return wanted, source.compared.overlapping()


@events.stage("share")
def _plan_exchange(
    parts: Sequence[tuple[Declarations, Int64]], manifest: Manifest
) -> list[ExchangePlan]:
    """On rank 0: who reads which rows, and sends them to whom."""
    wanted = [rows for rows, _ in parts]
    return plan_exchange(wanted, manifest, [apart for _, apart in parts])


def _read(request: LoadRequest, source: _Source, plan: LoadPlan) -> LoadTarget:
    compared = source.compared
    memory = target_of(compared.wanted, source.manifest, compared.tensors())
    read(source.root, source.backend, plan, memory, request.verify)
    return memory


def _object_lengths(plan: ExchangePlan, memory: LoadTarget) -> dict[int, int]:
    """The bytes of each object that this rank has read: no other rank knows them."""
    lengths = {}
    for row in plan.target.tolist():
        if memory.tensors[row] is None:
            lengths[row] = len(memory.blobs[row])
    return lengths


def _by_rank(parts: Sequence[Mapping[int, int]]) -> dict[tuple[int, int], int]:
    lengths = {}
    for rank, part in enumerate(parts):
        for row, length in part.items():
            lengths[rank, row] = length
    return lengths


def _total(nbytes: Sequence[int]) -> int:
    return sum(nbytes)


def _restore(
    request: LoadRequest, source: _Source, memory: LoadTarget
) -> dict[Any, Any]:
    synchronize(memory.tensors)
    compared = source.compared
    values = values_of(source.root, compared.wanted, memory, request.trusted)
    return compared.restore(values)
