"""The order of a load, and nothing but the order: open, compare, plan, read, restore."""

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
    absolute,
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
from megackpt.loader.asking import Asked, KeyMap, Terms, Told, judge
from megackpt.loader.reading import Reading, landing_of
from megackpt.loader.sharing import Sharing, exchange, who_share
from megackpt.planning.box import Int64
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import Declarations, LoadPlan, Manifest
from megackpt.planning.sharing import Share, plan_sharing
from megackpt.planning.strict import StrictHandling, parse_strict_flag
from megackpt.staging.source import synchronize
from megackpt.staging.target import LoadTarget
from megackpt.state import ShardedStateDict
from megackpt.storage import Storage
from megackpt.strategies import Strategy, StrategyLike, asked_format, loading

logger = logging.getLogger("megackpt.loader")

ATTEMPTS = 3  # at a checkpoint that others replace while it is read


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: StrategyLike = None,
    common_strategy: Any = None,  # noqa: ARG001 - Megatron's signature; the format keeps the common state
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
    """Load what ``sharded_state_dict`` asks for, at any parallelism; collective over ``process_group``.

    Tensors land in the ``.data`` of the ShardedTensors, on their device, or in new CPU tensors where there is
    none. Only the byte ranges needed are read. All ranks compare what they ask for with what is stored before
    any tensor is touched, so a load that does not fit changes nothing.

    Args:
        sharded_strategy: the format; None = found out from the directory. Needed only where a directory without
            ``metadata.json`` could be of several formats, or for a Backend object that is not registered.
        common_strategy: not used; the format keeps the common state itself.
        validate_access_integrity: check that the main replicas of all ranks together ask for every element of
            each tensor exactly once; pass False to ask for a part of tensors on purpose.
        strict: what to do about keys asked for that are not stored (unexpected) and the reverse (missing);
            True is RAISE_ALL, False is LOG_ALL. The default, ASSUME_OK_UNEXPECTED, raises for unexpected keys, and
            logs one WARNING that names what is stored and no rank asks for; RAISE_UNEXPECTED does not log it.
        verify: check the digests of all that is read (whole blocks of 1 MiB are read); False reads the exact ranges.
        dtype_policy: "convert" stored values to the dtype asked for, or "error" where the two differ.
        key_map: key asked for -> key stored (a mapping, in which other keys need not stand; or a function).
        trusted: classes that objects and the common state may hold beyond the known harmless ones.
        timeout: how long any rank waits for the others in one step.

    Returns:
        The state dict: common state, tensors and objects in the places where they were asked for. With a RETURN_*
        strictness: ``(state_dict, missing keys, unexpected keys)``.

    Raises:
        NotACheckpoint: "directory X does not exist", or nothing complete is in it.
        MismatchError: keys, global shapes or dtypes differ. CoverageError: the ranks do not ask for everything once.
        CorruptCheckpoint, UntrustedClass: the files are damaged, or a pickle asks for an unknown class.
        RankFailure: other ranks failed or did not answer in time.
    """
    group = group_over(process_group, timeout)
    request = attempt(
        lambda: _Request(
            absolute(checkpoint_dir),
            asked_format(sharded_strategy),
            sharded_strategy,
            sharded_state_dict,
            Terms(
                parse_strict_flag(strict),
                validate_access_integrity,
                dtype_policy,
                key_map,
            ),
            Reading(verify, trusted),
        )
    )
    if group.size == 1:
        request.get()  # nobody else has to hear of a wrong argument
    with (
        group,
        gc_pause.paused(),
        events.operation("load", checkpoint_dir, group.rank, group.size),
    ):
        step = _Load(group, request)
        for _ in range(ATTEMPTS - 1):
            try:
                return step.run()
            except CheckpointReplaced:
                logger.warning(
                    "%s was replaced while it was being loaded: loading again",
                    checkpoint_dir,
                )
        return step.run()


@dataclass(frozen=True, eq=False)
class _Request:
    """What this rank asks for."""

    directory: str
    asked: Strategy | None
    strategy: StrategyLike
    state: ShardedStateDict
    terms: Terms
    reading: Reading


@dataclass(frozen=True, eq=False)
class _Load:
    """One load on one rank: the order of its steps."""

    group: Group
    request: Attempt[_Request]

    def run(self) -> Any:
        directory, manifest = self.group.broadcast("open", self.open)
        part = _Part(self, directory, manifest)
        missing, shared = self.group.reduce_broadcast(
            "compare", part.compare, part.judge
        )
        if shared:
            share = self.group.reduce_scatter(
                "share", lambda: part.wishes(shared), part.shared_out
            )
            lengths = self.group.reduce_broadcast(
                "read", lambda: part.fetch(share), _by_rank
            )
            part.exchange(share, lengths)
            total = self.group.reduce_broadcast("restore", part.restore, _total)
        else:
            total = self.group.reduce_broadcast("read", part.read, _total)
        events.current().operation.bytes = total
        if StrictHandling.requires_returning_mismatch_keys(
            self.request.get().terms.strict
        ):
            return part.state, missing, part.asked.unexpected
        return part.state

    @events.stage("open")
    def open(self) -> tuple[str, Manifest]:
        request = self.request.get()
        try:
            manifest = open_checkpoint(request.directory, request.asked).manifest
        except NotACheckpoint as error:
            if self.group.size == 1:
                raise
            raise NotACheckpoint(
                f"{error}\n(So rank 0 sees it on host {socket.gethostname()!r}: where other ranks see a checkpoint, "
                "is the directory shared between all hosts?)"
            ) from error
        events.current().operation.id = manifest.save_id
        return request.directory, manifest


class _Part:
    """One rank's part, step after step: each leaves what the next one needs."""

    root: Storage
    backend: Backend
    asked: Asked
    sharing: Sharing
    landing: LoadTarget
    state: dict[Any, Any]

    def __init__(self, load: _Load, directory: str, manifest: Manifest) -> None:
        self.load = load
        self.directory = directory
        self.manifest = manifest

    @events.stage("compare")
    def compare(self) -> tuple[Told, Sharing]:
        events.current().operation.id = self.manifest.save_id
        request = self.load.request.get()
        if request.directory != self.directory:
            raise ShardingError(
                f"the ranks of one load name different directories, all must agree: here {request.directory}, "
                f"on rank 0 {self.directory}"
            )
        # Opened as early as can be: what is read through it belongs to one checkpoint.
        root = open_same(request.directory, self.manifest.save_id, request.asked)
        self.backend = backend_of(root, self.manifest, request.asked)
        self.root = as_read_by(self.backend, root)
        self.asked = Asked.of(
            request.state, request.terms, self.manifest, self.load.group.rank
        )
        strategy = loading(request.strategy, *self.manifest.backend)
        self.sharing = Sharing.of(strategy, self.load.group.rank)
        return self.asked.told(request.terms), self.sharing

    def judge(
        self, parts: Sequence[tuple[Told, Sharing]]
    ) -> tuple[set[str], tuple[str, ...]]:
        """What is stored and nobody asks for; and which ranks read for one another."""
        terms = self.load.request.get().terms
        missing = judge(
            [told for told, _ in parts], terms, self.manifest, self.directory
        )
        return missing, who_share([sharing for _, sharing in parts], self.root)

    def wishes(self, sharing: Sequence[str]) -> tuple[Declarations, Int64]:
        domains = (self.sharing.among(sharing),)
        return replace(self.asked.wanted, domains=domains), self.asked.overlapping()

    @events.stage("share")
    def shared_out(self, parts: Sequence[tuple[Declarations, Int64]]) -> list[Share]:
        return plan_sharing(
            [wanted for wanted, _ in parts], self.manifest, [rows for _, rows in parts]
        )

    @events.stage("read")
    def read(self) -> int:
        self._fetch(plan_load(self.asked.wanted, self.manifest))
        return self.restore()

    @events.stage("read")
    def fetch(self, share: Share) -> dict[int, int]:
        """Read this rank's share of what several want. How long an object is, only who has read it can tell."""
        self._fetch(share.reads(self.manifest))
        objects = (
            row for row in share.target.tolist() if self.landing.tensors[row] is None
        )
        return {row: len(self.landing.blobs[row]) for row in objects}

    @events.stage("exchange")
    def exchange(self, share: Share, lengths: Mapping[tuple[int, int], int]) -> None:
        exchange(self.load.group, share, self.asked.wanted, self.landing, lengths)

    def restore(self) -> int:
        synchronize(self.landing.tensors)
        reading = self.load.request.get().reading
        self.state = self.asked.restored(
            reading.values(self.root, self.asked.wanted, self.landing)
        )
        return self.landing.nbytes

    def _fetch(self, plan: LoadPlan) -> None:
        self.landing = landing_of(
            self.asked.wanted, self.manifest, self.asked.tensors()
        )
        self.load.request.get().reading.fetch(
            self.root, self.backend, plan, self.landing
        )


def _by_rank(parts: Sequence[Mapping[int, int]]) -> dict[tuple[int, int], int]:
    return {
        (rank, row): length
        for rank, part in enumerate(parts)
        for row, length in part.items()
    }


def _total(landed: Sequence[int]) -> int:
    """Bytes on all ranks. There is nothing else to decide: that all came here is the outcome."""
    return sum(landed)
