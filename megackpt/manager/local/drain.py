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

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

from megackpt.backends.base import Source
from megackpt.backends.torch_dist import TorchDist
from megackpt.checkpoint import INDEX, SaveSession
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
from megackpt.manager.local.drain_records import RECORD, SaveNotes, Sheet, plan_of
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
from megackpt.planning.manifest import Manifest, digest_rows, join_manifests
from megackpt.storage import FileReader, LocalStorage, digest, is_url
from megackpt.strategies import StrategyLike, resolve

logger = logging.getLogger("megackpt.manager")

AREA = ".megackpt-drain"
MOST_WAITING = 2
"""Saves that are drained in order. Of more, the newest and those that are begun are drained."""

_SETTINGS = f"{AGENT}/settings.json"
_STATUS = f"{AGENT}/status.json"
_DURABLE = "durable"
_BUFFER = (
    4 << 20
)  # bytes that are read at a time; a multiple of the blocks that have digests
_OWN_ID = 8
"""Characters of a session's id that differ between the sessions for one local save."""


@dataclass(frozen=True)
class DrainSettings:
    """What an agent has to know of the run.

    ``keep`` has the fields of KeepRules, ``keep_for`` in seconds. ``timeout`` is in seconds.
    """

    root: str
    host: str
    naming: str
    keep: dict[str, Any]
    timeout: float
    bytes_per_second: float | None = None

    def write(self, location: str) -> None:
        """``location``: the directory of the run on this host."""
        data = json.dumps(asdict(self)).encode()
        LocalStorage(location, create=True).put(_SETTINGS, data)


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
    if resolved.audit != "off":
        raise BackendError(
            "LocalTier(drain=True) compares no replicas: leave drain or the audit out"
        )
    if rules.keep_fn is not None:
        raise ValueError(
            "keep_fn is a function of this process, and with LocalTier(drain=True) another "
            "process removes older steps: use keep_every, keep_best or keep_for"
        )
    keep = {each.name: getattr(rules, each.name) for each in fields(rules)}
    if rules.keep_for is not None:
        keep["keep_for"] = rules.keep_for.total_seconds()
    rate = tier.drain_bytes_per_second
    return DrainSettings(
        root, tier.hostname, naming, keep, timeout.total_seconds(), rate
    )


@dataclass
class DrainStatus:
    """What the agent of a host has done and what is left, for the trainer.

    Attributes:
        durable_step: the newest save of the run that was drained; ``durable`` is its id.
        waiting: the steps that are to be drained, in order.
        oldest: when the first of them was saved, in seconds since 1970.
        skipped: ids of saves that will not be drained.
        reason: why the drain is late; "" if nothing failed.
        moved: when the agent last made progress, in seconds since 1970.
        pid: the process id of the agent.
    """

    durable_step: int | None = None
    durable: str = ""
    waiting: list[int] = field(default_factory=list)
    oldest: float = 0.0
    skipped: list[str] = field(default_factory=list)
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
    """What the agent of this host says; an empty status if there was none.

    Raises StorageError if the host refuses to read it.
    """
    try:
        return DrainStatus(**json.loads(LocalStorage(location).get(_STATUS)))
    except (FileNotFoundError, NotADirectoryError):
        return DrainStatus()
    except (ValueError, TypeError, CorruptCheckpoint) as error:
        return DrainStatus(reason=f"{location}/{_STATUS} is damaged: {error}")


class HostDrain:
    """Drains the saves of one run that are on this host.

    Args:
        location: the directory of the run on this host.
    """

    def __init__(self, location: str) -> None:
        self._storage = LocalStorage(location)
        given = json.loads(self._storage.get(_SETTINGS))
        self._settings = settings = DrainSettings(**given)
        self._timeout = timedelta(seconds=settings.timeout)
        self._pieces = HostPieces(*os.path.split(location), self._timeout)
        keep_for = settings.keep["keep_for"]
        if keep_for is not None:
            keep_for = timedelta(seconds=keep_for)
        rules = KeepRules(**{**settings.keep, "keep_for": keep_for})
        naming = naming_of(settings.naming)
        self._retention = Retention(settings.root, naming, rules)
        self.status = read_status(location)
        self.status.reason = ""
        self.status.pid = os.getpid()
        self._told = self.status
        self._damaged: set[Piece] = set()
        self._sheets: dict[Piece, Sheet] = {}
        self._lock = threading.Lock()
        self._may_write_at = 0.0

    def work(self) -> bool:
        """Do what can be done now. Returns whether saves still wait.

        Raises StorageError if the storage refuses.
        """
        root = self._settings.root
        held = self._held()
        lines: Lines = {}
        if held:
            lines = read_lines(root)
            if not lines:
                raise StorageError(
                    f"{root} does not say which local steps count: is its file system mounted?"
                )
        area = LocalStorage(f"{root}/{AREA}", create=bool(held))
        self._clear(area, lines)
        waiting = self._waiting(area, held, lines)
        for save in waiting:
            if self._drain(area, save, held[save]):
                self._clear(area, lines)
                self._waiting(area, held, lines)
                self.write_status()
                self._retention.apply(save.step, self._advance)
                return True
        self.status.moved = time.time()
        self.write_status()
        return bool(waiting)

    def write_status(self) -> None:
        """Tell the trainer, if something has changed."""
        told = replace(self.status, moved=0.0)
        if told != self._told:
            self._storage.put(_STATUS, json.dumps(asdict(self.status)).encode())
            self._told = told

    def _held(self) -> dict[LocalSave, dict[int, Sheet]]:
        """The records on this host, by save and rank."""
        found: dict[LocalSave, dict[int, Sheet]] = {}
        pieces = self._pieces.held()
        self._sheets = {p: s for p, s in self._sheets.items() if p in pieces}
        for piece in pieces:
            if piece not in self._sheets:
                name = f"{piece.name}/{RECORD}"
                if self._storage.size(name) is None:
                    continue
                where = f"{self._pieces.location}/{name}"
                try:
                    self._sheets[piece] = Sheet.decode(self._storage.get(name), where)
                except CorruptCheckpoint as error:
                    self.fail(error)
                    continue
            found.setdefault(piece.save, {})[piece.rank] = self._sheets[piece]
        return found

    def _waiting(
        self,
        area: LocalStorage,
        held: Mapping[LocalSave, Mapping[int, Sheet]],
        lines: Lines,
    ) -> list[LocalSave]:
        """The saves to drain, in order. The status says what is skipped."""
        status = self.status
        begun = area.list()
        latest: dict[int, LocalSave] = {}
        passed = []
        for save in sorted(held, key=lambda save: save.id):
            is_known = save.folder in begun
            if not is_known and self._storage.size(f"{save.folder}/{READY}") is None:
                continue
            is_open = save.counts(lines) and save.id > status.durable
            if not is_open or area.size(f"{save.folder}/given-up") is not None:
                passed.append(save)
                continue
            if save.step in latest:
                passed.append(latest[save.step])
            latest[save.step] = save
        waiting = sorted(latest.values(), key=lambda save: save.id)
        if len(waiting) > MOST_WAITING:
            passed += [s for s in waiting[:-1] if s.folder not in begun]
            waiting = [save for save in waiting if save not in passed]
        for save in passed:
            if save.id > status.durable and save.id not in status.skipped:
                logger.warning("step %d is not drained: it is passed over", save.step)
        status.skipped = [save.id for save in passed]
        status.waiting = [save.step for save in waiting]
        status.oldest = 0.0
        if waiting:
            status.oldest = next(iter(held[waiting[0]].values())).notes.saved
        return waiting

    def _clear(self, area: LocalStorage, lines: Lines) -> None:
        """Note which save is durable, and remove the work areas that no host needs."""
        if area.size(_DURABLE) is not None:
            step, self.status.durable = json.loads(area.get(_DURABLE))
            self.status.durable_step = int(step)
        for name in area.list():
            save = parse_save(name)
            if save is None:
                continue
            is_over = save.id <= self.status.durable
            if is_over or (lines and not save.counts(lines)):
                area.delete(name)

    def _drain(
        self, area: LocalStorage, save: LocalSave, sheets: Mapping[int, Sheet]
    ) -> bool:
        """Write what this host has of a save, and commit if all ranks are written.

        Returns whether the save is durable, or given up.
        """
        area.make_folder(save.folder)
        folder = area.folder(save.folder)
        if folder.size("begun") is None:
            folder.put("begun", b"")
        # The ranks of this host first.
        own = self._settings.host
        for rank in sorted(sheets, key=lambda rank: sheets[rank].notes.host != own):
            piece = Piece(save, rank)
            host = sheets[rank].notes.host
            if folder.size(f"rank_{rank}") is not None or piece in self._damaged:
                continue
            if host == own or self._is_silent(folder, host):
                self._write(folder, piece, sheets[rank])
        open_ranks = [
            rank for rank in range(save.size) if folder.size(f"rank_{rank}") is None
        ]
        if open_ranks:
            ranks = name_ranks(open_ranks)
            text = f"step {save.step} waits for other hosts to write {ranks}"
            self.status.reason = self.status.reason or text
            return False
        try:
            self._commit(area, folder, save)
        except CheckpointExists as error:
            self.fail(error)
            folder.put("given-up", str(error).encode())
        return True

    def _is_silent(self, folder: LocalStorage, host: str) -> bool:
        """Whether the lease of a host has run out, by the clock of the storage."""
        since = folder.modified("begun") or 0.0
        since = max(since, folder.modified(_lease(host)) or 0.0)
        return folder.now() - since > LEASE_SECONDS

    def _write(self, folder: LocalStorage, piece: Piece, sheet: Sheet) -> None:
        """Write the data of one rank, and its mark."""
        lease = _lease(self._settings.host)
        mine = f"rank_{piece.rank}.{lease.removeprefix('lease-')}-"
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
                    folder.put(lease, b"")

        target = folder.folder(attempt, partial(advance, 0))
        # Training continues, and needs the page cache for its own files.
        target.direct = True
        planned = sheet.planned
        backend = TorchDist(**sheet.notes.options)
        try:
            source = _PieceSource(LocalStorage(self._pieces.path(piece)), planned)
            counted = CountedSource(source, advance)
            result = backend.write(target, plan_of(sheet), counted)
        except (CorruptCheckpoint, FileNotFoundError, NotADirectoryError) as error:
            self._set_aside(piece, error)
            return
        if (result.digests != planned.chunks.digests).any():
            self._set_aside(piece, "its bytes have other digests than it had")
            return
        unwritten = replace(planned.chunks, digests=digest_rows(b""))
        written = replace(planned, chunks=unwritten).located([result])
        mark = sheet.written(written, attempt)
        folder.put(f"rank_{piece.rank}", mark.encode())
        self.status.reason = ""

    def _set_aside(self, piece: Piece, problem: object) -> None:
        """A piece is damaged. Another host may have a copy of it."""
        self._damaged.add(piece)
        self.fail(f"{self._pieces.path(piece)} cannot be drained: {problem}")

    def _commit(
        self, area: LocalStorage, folder: LocalStorage, save: LocalSave
    ) -> None:
        """Make the save a checkpoint, unless it is one.

        Raises CheckpointExists if another checkpoint stays in its place.
        """
        marks = []
        for rank in range(save.size):
            name = f"rank_{rank}"
            try:
                mark = Sheet.decode(folder.get(name), f"{folder.location}/{name}")
            except CorruptCheckpoint:
                folder.delete(name)  # the rank is written again
                raise
            marks.append(mark)
        notes = marks[0].notes
        if not self._is_committed(notes):
            manifest = join_manifests([mark.manifest for mark in marks])
            backend = TorchDist(**notes.options)
            target = f"{self._settings.root}/{notes.name}"
            session = SaveSession(target, self._timeout, name_here(0), SingleGroup())
            with session.running():
                save_id = secrets.token_hex(_OWN_ID // 2) + save.id[_OWN_ID:]
                session.total.operation.id = save_id
                session.begin(save_id, overwrite=notes.overwrite)
                session.announce(backend.layout(save.size, manifest).files)
                session.call("link", self._link, session, folder, marks)
                confirm = partial(self._confirm, area, save)
                session.finish(session.commit(backend, manifest, confirm))
        try:
            self._retention.note_complete(save.step, notes.metrics, self._advance)
        except (CheckpointingException, OSError) as error:
            text = "step %d is durable, but its tracker is not written (or metrics): %s"
            logger.warning(text, save.step, error)
        area.put(_DURABLE, json.dumps([save.step, save.id]).encode())
        self.status.reason = ""
        self.status.moved = time.time()

    def _is_committed(self, notes: SaveNotes) -> bool:
        """Whether the checkpoint in place is this save. CheckpointExists if it is a later one."""
        try:
            there = LocalStorage(f"{self._settings.root}/{notes.name}")
            head = read_head(there)
        except (FileNotFoundError, NotADirectoryError, CorruptCheckpoint):
            return False
        if head is None:
            return False
        if head.save_id[_OWN_ID:] == notes.save[_OWN_ID:]:
            return True
        if (there.modified(INDEX) or 0.0) > notes.saved:
            raise CheckpointExists(
                f"{there.location} was saved after the local step {notes.step}, and stays"
            )
        return False

    def _link(
        self, session: SaveSession, folder: LocalStorage, marks: Sequence[Sheet]
    ) -> None:
        staging = LocalStorage(session.begun.path)
        for mark in marks:
            written = folder.folder(mark.notes.attempt)
            staging.link_files(written, mark.manifest.files)

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

    def has_work(self) -> bool:
        """Whether this host has saves that are neither durable nor skipped."""
        done, skipped = self.status.durable, self.status.skipped
        return any(s.id > done and s.id not in skipped for s in self._pieces.ready())

    def fail(self, error: object) -> None:
        """Say why the drain is late."""
        if str(error) != self.status.reason:
            logger.warning("%s", error)
        self.status.reason = str(error)
        self.write_status()


@dataclass(eq=False)
class _PieceSource(Source):
    """The data of a record: row i is chunk i of ``planned``, in the files of the piece."""

    piece: LocalStorage
    planned: Manifest

    @cached_property
    def _readers(self) -> list[FileReader]:
        return [self.piece.open(name) for name in self.planned.files]

    def blocks(self, row: int) -> Iterator[memoryview]:
        chunks = self.planned.chunks
        left = int(chunks.length[row])
        start = int(chunks.start[row])
        reader = self._readers[chunks.file[row]]
        buffer = memoryview(bytearray(min(left, _BUFFER)))
        while left:
            part = buffer[:left]
            reader.read_into(start, [part])
            yield part
            start += len(part)
            left -= len(part)


def _lease(host: str) -> str:
    """The name of the lease of a host."""
    return f"lease-{digest(host.encode()).hex()[:16]}"
