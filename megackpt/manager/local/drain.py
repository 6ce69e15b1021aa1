"""Copies local saves that are due in the storage from this host into the storage.

The drain of a save has a work area in the directory of the run, ``.megackpt-drain/STEP_ID``::

    begun            since when there is one
    lease-HOST       put again while the host writes
    rank_R.ATTEMPT   a folder with the files of rank R, by one attempt of one host
    rank_R           the mark: which attempt counts, and where its chunks are
    given-up         why the save will not be drained

It belongs to the run and the local save, and to no process. Any host that finds the marks of all
ranks commits, by a session as every save.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import cast

from megackpt.backends.base import Source
from megackpt.backends.torch_dist import TorchDist
from megackpt.checkpoint import INDEX, SaveSession, decode_index
from megackpt.checkpoint.index import read_head
from megackpt.checkpoint.run_directory import naming_of
from megackpt.checkpoint.transaction import CountedSource
from megackpt.distributed import SingleGroup, name_here
from megackpt.errors import (
    BackendError,
    CheckpointExists,
    CheckpointingException,
    CorruptCheckpoint,
    SaveInProgress,
    StorageError,
    name_ranks,
)
from megackpt.limits import LEASE_SECONDS
from megackpt.manager.keep_rules import KeepRules
from megackpt.manager.local.drain_records import (
    RECORD,
    Mark,
    Record,
    encode,
    read_value,
)
from megackpt.manager.local.lineage import Lines, read_lines
from megackpt.manager.local.pieces import (
    AGENT,
    READY,
    HostPieces,
    LocalSave,
    Piece,
    parse_save,
)
from megackpt.manager.local.tier import LocalTier
from megackpt.manager.retention import Retention
from megackpt.planning.manifest import Manifest, ShardId
from megackpt.storage import LocalStorage, digest, is_url, read_digested
from megackpt.strategies import StrategyLike, resolve

logger = logging.getLogger("megackpt.manager")

AREA = ".megackpt-drain"

_SETTINGS = f"{AGENT}/settings"
_STATUS = f"{AGENT}/status"
_DURABLE = "durable"
_BUFFER = 1 << 20
"""Bytes that are read at a time: a multiple of the blocks that have digests."""
_OWN_ID = 8
"""Characters of a session's id that differ between the sessions for one local save."""


@dataclass(frozen=True)
class DrainSettings:
    """What an agent has to know of the run.

    ``timeout`` is in seconds.
    """

    root: str
    host: str
    naming: str
    keep: KeepRules
    timeout: float
    bytes_per_second: float | None

    def write(self, location: str) -> None:
        """``location``: the directory of the run on this host."""
        LocalStorage(location, create=True).put(_SETTINGS, encode(self))


def drain_settings(
    root: str,
    tier: LocalTier,
    naming: str,
    rules: KeepRules,
    strategy: StrategyLike,
    timeout: timedelta,
) -> DrainSettings:
    """The settings of a run. BackendError or ValueError for what an agent cannot do."""
    resolved = resolve(strategy)
    is_torch_dist = type(resolved.make_writer()) is TorchDist
    if is_url(root) or not is_torch_dist or resolved.own("save") is not None:
        raise BackendError(
            f"LocalTier(drain=True) writes checkpoints of the format 'torch_dist' into a file "
            f"system, not {resolved.backend!r} into {root}: leave drain out, or use these"
        )
    if (
        resolved.audit != "off"
        or resolved.check_values == "note"
        or resolved.reuse_unchanged
    ):
        raise BackendError(
            "LocalTier(drain=True) compares no replicas (audit), notes no values "
            "(check_values='note') and links no files (reuse_unchanged): leave drain or these out"
        )
    if rules.keep_fn is not None:
        raise ValueError(
            "keep_fn is a function of this process, and with LocalTier(drain=True) another "
            "process removes older steps: use keep_every, keep_best or keep_for"
        )
    seconds, rate = timeout.total_seconds(), tier.drain_bytes_per_second
    return DrainSettings(root, tier.hostname, naming, rules, seconds, rate)


@dataclass
class DrainStatus:
    """What the agent of a host has done and what is left.

    Attributes:
        durable_step: the newest save of the run that was drained; ``durable`` is its id.
        waiting: the steps on this host that are to be drained, in order.
        oldest: when the first of them was saved, in seconds since 1970.
        reason: why the drain is late; "" if nothing failed.
        moved: when the agent last made progress, in seconds since 1970.
        pid: the process id of the agent.
    """

    durable_step: int | None = None
    durable: str = ""
    waiting: list[int] = field(default_factory=list)
    oldest: float = 0.0
    reason: str = ""
    moved: float = 0.0
    pid: int = 0

    @property
    def lag_steps(self) -> int:
        """From the durable step to the last one that waits; 0 if none waits."""
        return self.waiting[-1] - (self.durable_step or 0) if self.waiting else 0

    @property
    def lag_seconds(self) -> float:
        """Since the first step that waits was saved; 0 if none waits."""
        return time.time() - self.oldest if self.waiting else 0.0


def read_status(location: str) -> DrainStatus:
    """What the agent of this host says; an empty status if there was none."""
    try:
        status: DrainStatus = read_value(LocalStorage(location), _STATUS)
    except (FileNotFoundError, NotADirectoryError):
        return DrainStatus()
    except CorruptCheckpoint as error:
        return DrainStatus(reason=str(error))
    silent = time.time() - status.moved
    if status.waiting and silent > LEASE_SECONDS:
        status.reason = (
            f"the agent has made no progress for {silent:.0f} s; {status.reason}"
        )
    return status


class HostDrain:
    """Drains the saves of one run that are on this host.

    Args:
        location: the directory of the run on this host.
    """

    def __init__(self, location: str) -> None:
        self._storage = LocalStorage(location)
        self._location = location
        self._configure(read_value(self._storage, _SETTINGS))
        self.status = replace(read_status(location), reason="", pid=os.getpid())
        self._seen: list[Piece] = []
        self._damaged: set[Piece] = set()
        self._lock = threading.Lock()
        self._may_write_at = 0.0

    def _configure(self, settings: DrainSettings) -> None:
        self._settings = settings
        self._timeout = timedelta(seconds=settings.timeout)
        self._pieces = HostPieces(*os.path.split(self._location), self._timeout)
        naming = naming_of(settings.naming)
        self._retention = Retention(settings.root, naming, settings.keep)

    def work(self) -> bool:
        """Do what can be done now. Returns whether saves still wait.

        Raises StorageError if the storage refuses.
        """
        # Each manager writes them: a later job may have other ones.
        settings = read_value(self._storage, _SETTINGS)
        if settings != self._settings:
            self._configure(settings)
        self._seen = self._pieces.held()
        held: dict[LocalSave, list[Piece]] = {}
        for piece in self._seen:
            if READY in self._storage.list(piece.save.folder):
                held.setdefault(piece.save, []).append(piece)
        self.status.waiting = []
        if held:
            self._drain_all(held)
        self.status.moved = time.time()
        self.write_status()
        return bool(self.status.waiting)

    def _drain_all(self, held: Mapping[LocalSave, Sequence[Piece]]) -> None:
        """Drain the saves that wait, the oldest first, up to the first that is durable then."""
        root = self._settings.root
        lines = read_lines(root)
        if not lines:
            raise StorageError(
                f"{root} does not say which local steps count: is its file system mounted?"
            )
        area = LocalStorage(f"{root}/{AREA}", create=True)
        self._clear(area, lines)
        waiting = [save for save in held if self._waits(area, save, lines)]
        waiting.sort(key=lambda save: save.id)
        self.status.waiting = [save.step for save in waiting]
        self.write_status()
        for save in waiting:
            if self._drain(area, save, held[save]):
                self._retention.apply(save.step, self._advance)
                return

    def write_status(self) -> None:
        """Tell the trainer."""
        self._storage.put(_STATUS, encode(self.status))

    def has_news(self) -> bool:
        """Whether pieces have come since the last ``work``."""
        return self._pieces.held() != self._seen

    def fail(self, error: object) -> None:
        """Say why the drain is late."""
        if str(error) != self.status.reason:
            logger.warning("%s", error)
        self.status.reason = str(error)
        self.write_status()

    def _waits(self, area: LocalStorage, save: LocalSave, lines: Lines) -> bool:
        """Whether a save is to be drained."""
        is_open = "given-up" not in area.list(save.folder) and save.counts(lines)
        return is_open and save.id > self.status.durable

    def _clear(self, area: LocalStorage, lines: Lines) -> None:
        """Note which save is durable, and remove the work areas that no host needs."""
        self.status.durable_step, self.status.durable = None, ""
        if area.size(_DURABLE) is not None:
            self.status.durable_step, self.status.durable = read_value(area, _DURABLE)
        for save in filter(None, map(parse_save, area.list())):
            if save.id <= self.status.durable or not save.counts(lines):
                area.delete(save.folder)

    def _drain(
        self, area: LocalStorage, save: LocalSave, pieces: Sequence[Piece]
    ) -> bool:
        """Write what this host has of a save, and commit if all ranks are written.

        Returns whether the save is durable, or given up.
        """
        area.make_folder(save.folder)
        folder = area.folder(save.folder)
        if folder.size("begun") is None:
            folder.put("begun", b"")
        notes = None
        for piece in pieces:
            if piece in self._damaged:
                continue
            try:
                notes = read_value(self._storage, f"{piece.name}/{RECORD}")
            except (CorruptCheckpoint, FileNotFoundError) as error:
                self._set_aside(piece, error)
                continue
            is_mine = notes.host == self._settings.host
            if folder.size(_mark(piece.rank)) is None and (
                is_mine or self._is_silent(folder, notes.host)
            ):
                self._write(folder, piece, notes)
        if notes is None:
            return False
        if self.status.waiting[0] == save.step:
            self.status.oldest = notes.saved
        names = folder.list()
        left = [rank for rank in range(save.size) if _mark(rank) not in names]
        if left:
            text = f"step {save.step} waits for other hosts to write {name_ranks(left)}"
            self.status.reason = self.status.reason or text
            return False
        try:
            self._commit(area, folder, save, notes)
        except CheckpointExists as error:
            self.fail(error)
            folder.put("given-up", str(error).encode())
        return True

    def _is_silent(self, folder: LocalStorage, host: str) -> bool:
        """Whether the lease of a host has run out, by the clock of the storage."""
        since = folder.modified("begun") or 0.0
        since = max(since, folder.modified(f"lease-{_short(host)}") or 0.0)
        return folder.now() - since > LEASE_SECONDS

    def _write(self, folder: LocalStorage, piece: Piece, record: Record) -> None:
        """Write the data of one rank, and its mark."""
        host = _short(self._settings.host)
        mine = f"{_mark(piece.rank)}.{host}-"
        # What this host has begun before it died.
        for name in folder.list():
            if name.startswith(mine):
                folder.delete(name)
        attempt = mine + secrets.token_hex(4)
        folder.make_folder(attempt)
        renewed = -LEASE_SECONDS

        def advance(count: int) -> None:
            nonlocal renewed
            self._advance(count)
            with self._lock:
                if time.monotonic() - renewed > LEASE_SECONDS / 4:
                    renewed = time.monotonic()
                    self.write_status()
                    folder.put(f"lease-{host}", b"")

        target = folder.folder(attempt, partial(advance, 0))
        # Training continues, and needs the page cache for its own files.
        target.direct = True
        stored = LocalStorage(self._pieces.path(piece))
        try:
            counted = CountedSource(_PieceSource(stored, record), advance)
            written = TorchDist(**record.options).write(target, record.plan, counted)
        except (CorruptCheckpoint, FileNotFoundError) as error:
            self._set_aside(piece, error)
            return
        mark = Mark(attempt, written, record.manifest)
        folder.put(_mark(piece.rank), encode(mark))
        self.status.reason = ""

    def _set_aside(self, piece: Piece, problem: object) -> None:
        """A piece is damaged. Another host may have a copy of it."""
        self._damaged.add(piece)
        self.fail(f"{self._pieces.path(piece)} cannot be drained: {problem}")

    def _commit(
        self, area: LocalStorage, folder: LocalStorage, save: LocalSave, notes: Record
    ) -> None:
        """Make the save a checkpoint, unless it is one.

        Raises CheckpointExists if another checkpoint stays in its place.
        """
        marks: list[Mark] = []
        for name in map(_mark, range(save.size)):
            try:
                marks.append(read_value(folder, name))
            except CorruptCheckpoint:
                folder.delete(name)  # the rank is written again
                raise
        if not self._is_committed(save, notes):
            backend = TorchDist(**notes.options)
            target = f"{self._settings.root}/{notes.name}"
            session = SaveSession(target, self._timeout, name_here(0), SingleGroup())
            with session.running():
                save_id = secrets.token_hex(_OWN_ID // 2) + save.id[_OWN_ID:]
                session.total.operation.id = save_id
                session.begin(save_id, overwrite=notes.overwrite)
                session.call("link", _link, session.begun.path, folder, marks)
                planned = cast(Manifest, marks[0].manifest)
                manifest = planned.located([mark.written for mark in marks])
                session.announce(backend.layout(save.size, manifest).files)
                confirm = partial(self._confirm, area, save)
                session.finish(session.commit(backend, manifest, confirm))
        # An agent that was paused must not say that the run is at an earlier step.
        if area.size(_DURABLE) is None or read_value(area, _DURABLE)[1] < save.id:
            self._note(area, save, notes)
        self._clear(area, read_lines(self._settings.root))
        self.status.waiting.remove(save.step)
        self.status.reason = ""

    def _note(self, area: LocalStorage, save: LocalSave, notes: Record) -> None:
        """Say that a save is durable: to readers of the tracker, and to all agents."""
        try:
            self._retention.note_complete(save.step, notes.metrics, self._advance)
        except (CheckpointingException, OSError) as error:
            text = "step %d is durable, but its tracker is not written (or metrics): %s"
            logger.warning(text, save.step, error)
        area.put(_DURABLE, encode((save.step, save.id)))

    def _is_committed(self, save: LocalSave, notes: Record) -> bool:
        """Whether the checkpoint in place is this save. CheckpointExists if it is a later one."""
        try:
            there = LocalStorage(f"{self._settings.root}/{notes.name}")
            head = read_head(there)
        except (FileNotFoundError, NotADirectoryError, CorruptCheckpoint):
            return False
        if head is None:
            return False
        if head.save_id[_OWN_ID:] == save.id[_OWN_ID:]:
            return True
        is_drained = head.save_id[_OWN_ID:] == self.status.durable[_OWN_ID:]
        if not is_drained and (there.modified(INDEX) or 0.0) > notes.saved:
            raise CheckpointExists(
                f"{there.location} was saved after the local step {save.step}, and stays"
            )
        return False

    def _confirm(self, area: LocalStorage, save: LocalSave) -> None:
        """Right before the commit. Raises SaveInProgress unless the save still counts."""
        lines = read_lines(self._settings.root)
        self._clear(area, lines)
        if save.id <= self.status.durable or not save.counts(lines):
            raise SaveInProgress(
                f"step {save.step} is not drained: a later save counts"
            )

    def _advance(self, count: int) -> None:
        """Count bytes, and wait as long as ``bytes_per_second`` says."""
        self.status.moved = time.time()
        rate = self._settings.bytes_per_second
        if count and rate:
            with self._lock:
                now = time.monotonic()
                self._may_write_at = max(self._may_write_at, now) + count / rate
                pause = self._may_write_at - now
            time.sleep(pause)


class _PieceSource(Source):
    """The data of a record: objects from the record, tensors from the piece, with its digests."""

    def __init__(self, piece: LocalStorage, record: Record) -> None:
        self._piece = piece
        self._record = record
        self._stored, _ = decode_index(piece.get(INDEX), f"{piece.location}/{INDEX}")
        self._place: dict[ShardId, int] = {}
        for row, tensor in enumerate(self._stored.chunks.tensor.tolist()):
            key = self._stored.tensors[tensor].key
            self._place[ShardId(key, self._stored.chunk(row).box)] = row

    def blocks(self, row: int) -> Iterator[memoryview]:
        if row in self._record.objects:
            yield memoryview(self._record.objects[row])
            return
        shard = self._record.plan.row(row).shard
        if shard not in self._place:
            raise CorruptCheckpoint(f"{self._piece.location} does not hold {shard}")
        chunk = self._stored.chunk(self._place[shard])
        place, digests = chunk.location, chunk.digests.tobytes()
        buffer = memoryview(bytearray(min(place.length, _BUFFER)))
        with self._piece.open(place.file) as reader:
            for done in range(0, place.length, _BUFFER):
                part = buffer[: place.length - done]
                found = read_digested(reader, place.start + done, part)
                if not digests.startswith(found):
                    raise CorruptCheckpoint(f"{shard} is damaged")
                digests = digests[len(found) :]
                yield part


def _link(staging: str, folder: LocalStorage, marks: Sequence[Mark]) -> None:
    for mark in marks:
        written = folder.folder(mark.attempt)
        LocalStorage(staging).link_files(written, mark.written.files)


def _mark(rank: int) -> str:
    return f"rank_{rank}"


def _short(host: str) -> str:
    """A host in the names of files."""
    return digest(host.encode()).hex()[:16]
