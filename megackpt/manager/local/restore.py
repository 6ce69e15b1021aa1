"""Loads the newest step for which every rank's shards are on some host, and undamaged.

For a state of another layout, all pieces of a local save are one checkpoint in the folder of the
save. Its index names the pieces' files. A host may have only the files that its ranks read.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from megackpt import serialization
from megackpt.backends.base import CONFIG
from megackpt.backends.object_files import COMMON_FILE
from megackpt.checkpoint import INDEX, encode_index, open_checkpoint
from megackpt.distributed import (
    Attempt,
    Group,
    GroupLike,
    SingleGroup,
    attempt,
    group_over,
)
from megackpt.errors import (
    CheckpointingException,
    CorruptCheckpoint,
    StorageError,
    join_truncated,
    name_ranks,
)
from megackpt.loader.comparison import Comparison, KeyMap, LoadRequest, find_missing
from megackpt.loader.load_operation import load
from megackpt.manager.local.lineage import Lines
from megackpt.manager.local.pieces import (
    HostPieces,
    LocalSave,
    Piece,
    find_problem,
    transfer,
)
from megackpt.manager.local.saves import as_one_rank
from megackpt.planning.box import Boxes
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import COMMON_KEY, Chunks, Manifest, TensorParts
from megackpt.planning.manifest.declarations import merged_tables
from megackpt.planning.strict import StrictHandling, parse_strict_flag, requested
from megackpt.state import ShardedStateDict
from megackpt.storage import LocalStorage, digest

logger = logging.getLogger("megackpt.manager")

_OF_RANK = {
    StrictHandling.RAISE_ALL: StrictHandling.RAISE_UNEXPECTED,
    StrictHandling.LOG_ALL: StrictHandling.LOG_UNEXPECTED,
    StrictHandling.RETURN_ALL: StrictHandling.RETURN_UNEXPECTED,
}
"""Which keys are missing is known from the requests of all ranks; each rank reads with the rest."""
_NAMED = 1000  # ranks in a message


class Holdings:
    """Which hosts have which pieces. ``answers``: for each rank its host and the host's pieces."""

    def __init__(self, answers: Sequence[tuple[str, list[Piece]]]) -> None:
        self.hosts = [host for host, _ in answers]
        self._pieces: dict[str, set[Piece]] = {}
        for host, pieces in answers:
            self._pieces.setdefault(host, set()).update(pieces)

    def saves(self) -> list[LocalSave]:
        """The newest first."""
        pieces: set[Piece] = set().union(*self._pieces.values())
        return sorted({piece.save for piece in pieces}, reverse=True)

    def holders(self, piece: Piece) -> list[str]:
        """The hosts that have a piece."""
        return [host for host, pieces in self._pieces.items() if piece in pieces]

    def add(self, piece: Piece, host: str) -> None:
        """A host has got a piece."""
        self._pieces[host].add(piece)

    def drop(self, piece: Piece, host: str) -> None:
        """A piece on a host is damaged."""
        self._pieces[host].discard(piece)

    def to_check(self, rank: int, save: LocalSave) -> list[Piece]:
        """The pieces of a save that this rank checks: its share of the pieces on its host."""
        host = self.hosts[rank]
        there = sorted(piece for piece in self._pieces[host] if piece.save == save)
        members = [r for r, other in enumerate(self.hosts) if other == host]
        return there[members.index(rank) :: len(members)]


class LocalRestore:
    """One restore from the hosts. All ranks call it.

    ``choose`` finds a save, ``stored`` describes its contents, ``load`` loads it.

    Args:
        pieces: the directory of this host.
        host: the name of this host.
        process_group: of all ranks.
        lines: say which saves count.
    """

    def __init__(
        self,
        pieces: HostPieces,
        host: str,
        process_group: GroupLike,
        timeout: timedelta,
        lines: Lines,
    ) -> None:
        self._pieces = pieces
        self._host = host
        self._process_group = process_group
        self._timeout = timeout
        self.loaded: LocalSave | None = None
        """The save that was loaded."""
        self.changed = False
        """Whether a load has failed that may have changed tensors."""
        self._stored: dict[LocalSave, MergedSave] = {}
        # Why a save cannot be loaded; "" if it can.
        self._problems: dict[LocalSave, str] = {}
        with self._group() as group:

            def holdings() -> tuple[str, list[Piece]]:
                return host, pieces.held()

            answers = group.reduce_broadcast("local pieces", holdings, list)
            self._held = Holdings(answers)
            saves = self._held.saves()
            self._saves = [save for save in saves if save.counts(lines)]
            if saves[:1] != self._saves[:1] and group.is_coordinator:
                logger.warning(
                    "local step %d is skipped: its save was not complete, or it belongs to a "
                    "future that was given up or to another run",
                    saves[0].step,
                )

    def choose(
        self, lowest: int, highest: int | None = None, finite: bool = False
    ) -> LocalSave | None:
        """The newest save that is whole, of the steps from ``lowest`` to ``highest``.

        Reads all pieces of a save, and does not touch the caller's state. The log says why a save
        is skipped. Raises StorageError if a host refuses to read a piece that no other host has.
        """
        with self._group() as group:
            for save in self._saves:
                if save.step < lowest or (highest is not None and save.step > highest):
                    continue
                if save not in self._problems:
                    self._note(group, save, self._check(group, save, finite))
                if not self._problems[save]:
                    return save
        return None

    def stored(self, save: LocalSave) -> MergedSave:
        """The contents of a save: its ``manifest`` covers the shards of all ranks.

        Reads the small tables of the pieces, once. Raises CorruptCheckpoint if they disagree.
        """
        if save not in self._stored:

            def tables() -> list[PieceTable]:
                mine = self._held.to_check(group.rank, save)
                held = self._held.holders
                first = [piece for piece in mine if held(piece)[0] == self._host]
                return [read_table(self._pieces, piece) for piece in first]

            def merge(parts: Sequence[list[PieceTable]]) -> MergedSave:
                return MergedSave.of([table for part in parts for table in part])

            with self._group() as group:
                merged = group.reduce_broadcast("local tables", tables, merge)
            self._stored[save] = merged
        return self._stored[save]

    def skip(self, save: LocalSave, problem: str) -> None:
        """Choose this save no more. A load that has failed may have changed tensors."""
        self.changed = True
        with self._group() as group:
            self._note(
                group,
                save,
                f"it cannot be loaded, and the next one must hold all keys asked for: {problem}",
            )

    def _group(self) -> Group:
        return group_over(self._process_group, self._timeout)

    def _note(self, group: Group, save: LocalSave, problem: str) -> None:
        self._problems[save] = problem
        if problem and group.is_coordinator:
            logger.warning("local step %d is skipped: %s", save.step, problem)

    def _check(self, group: Group, save: LocalSave, finite: bool) -> str:
        """Read all pieces of a save. Returns why it cannot be loaded, or ""."""
        held = self._held

        def check() -> dict[Piece, CheckpointingException | None]:
            mine = held.to_check(group.rank, save)
            path, timeout = self._pieces.path, self._timeout
            return {p: find_problem(path(p), timeout, finite) for p in mine}

        refused: dict[int, str] = {}
        checked = group.reduce_broadcast("check local pieces", check, list)
        for rank, problems in enumerate(checked):
            for piece, problem in problems.items():
                if problem is None:
                    continue
                held.drop(piece, held.hosts[rank])
                where = f"{piece.name} on host {held.hosts[rank]!r}"
                text = f"{where} is damaged: {problem}"
                if isinstance(problem, StorageError):
                    text = f"{where} cannot be read: {problem}"
                    refused[piece.rank] = text
                if group.is_coordinator:
                    logger.warning("%s", text)
        # The size comes from the name of a directory. The name may be damaged as well.
        absent = (r for r in range(save.size) if not held.holders(Piece(save, r)))
        lost = list(islice(absent, _NAMED))
        if lost and refused.keys() >= {*lost}:
            # This is not damage: the pieces may be whole, and to go back would be final.
            raise StorageError(
                f"local step {save.step}: "
                + join_truncated([refused[rank] for rank in lost], 3)
                + ". No other host has them. Cure that, and restore again; nothing is removed"
            )
        if lost:
            return f"no host has the shards of {name_ranks(lost)} undamaged"
        return ""

    def load(
        self, save: LocalSave, state: ShardedStateDict, options: Mapping[str, Any]
    ) -> Any:
        """The loaded state of this rank. The log has a line that says what came from where.

        Raises what ``megackpt.load`` raises, on all ranks.
        """
        strict = parse_strict_flag(options["strict"])
        with self._group() as group:
            if save.size == group.size and strict not in _OF_RANK:
                self._fetch(group, save, [{rank} for rank in range(save.size)])
                path = self._pieces.path(Piece(save, group.rank))
                # A key that is not in this piece may be in another one.
                own = {**options, "strict": StrictHandling.RAISE_UNEXPECTED}
                loaded = attempt(partial(self._read, path, state, own))
                problem = group.reduce_broadcast(
                    "load",
                    partial(_error, loaded),
                    lambda problems: next(filter(None, problems), ""),
                )
                if not problem:
                    self.loaded = save
                    if StrictHandling.requires_returning_mismatch_keys(strict):
                        return loaded.value, set(), set()
                    return loaded.value
                if group.is_coordinator:
                    logger.info(
                        "local step %d is of another layout: %s", save.step, problem
                    )
        merged = self.stored(save)
        with self._group() as group:
            value = self._reshard(group, merged, state, options, strict)
        self.loaded = save
        return value

    def _reshard(
        self,
        group: Group,
        merged: MergedSave,
        state: ShardedStateDict,
        options: Mapping[str, Any],
        strict: StrictHandling,
    ) -> Any:
        """Load a state of another layout from all pieces."""
        save = merged.save

        def needed() -> tuple[set[int], set[str]]:
            own = options["key_map"], options["trusted"]
            return merged.needed(state, group.rank, strict, *own)

        def plan(
            answers: Sequence[tuple[set[int], set[str]]],
        ) -> tuple[list[set[int]], set[str]]:
            missing = set()
            if strict in _OF_RANK:
                names = [asked for _, asked in answers]
                missing = find_missing(names, merged.manifest, strict)
            return [ranks for ranks, _ in answers], missing

        ranks, missing = group.reduce_broadcast("local plan", needed, plan)
        self._fetch(group, save, ranks)
        is_first = self._held.hosts.index(self._host) == group.rank

        def write() -> None:
            if is_first:
                merged.write(self._pieces)

        group.reduce_broadcast("local index", write, len)
        path = f"{self._pieces.location}/{save.folder}"
        own = {**options, "strict": _OF_RANK.get(strict, strict)}
        loaded = attempt(partial(self._read, path, state, own))

        def outcome() -> None:
            if loaded.error is not None:
                raise loaded.error

        try:
            group.reduce_broadcast("load", outcome, len)
        finally:
            if is_first:
                merged.remove(self._pieces)
        if StrictHandling.requires_returning_mismatch_keys(strict):
            found, _, unexpected = loaded.get()
            return found, missing, unexpected
        return loaded.value

    def _read(
        self, path: str, state: ShardedStateDict, options: Mapping[str, Any]
    ) -> Any:
        return load(
            as_one_rank(state),
            path,
            process_group=SingleGroup(),
            timeout=self._timeout,
            **{**options, "validate_access_integrity": False},
        )

    def _fetch(
        self,
        group: Group,
        save: LocalSave,
        needed: Sequence[Collection[int]],
    ) -> None:
        """Send each host the pieces that it lacks. ``needed``: the pieces that each rank reads."""
        held = self._held
        holders = {rank: held.holders(Piece(save, rank)) for rank in range(save.size)}
        rounds = transfers(needed, held.hosts, holders)
        for turn in rounds:
            sent, received = {}, {}
            for to, (sender, owner) in turn.items():
                if sender == group.rank:
                    sent[to] = Piece(save, owner)
                if to == group.rank:
                    received[sender] = Piece(save, owner)
            transfer(group, self._pieces, sent, received)
            for rank, (_, owner) in turn.items():
                held.add(Piece(save, owner), held.hosts[rank])
        if group.is_coordinator:
            moves = [
                f"those of rank {owner} from {held.hosts[sender]!r} to {held.hosts[to]!r}"
                for turn in rounds
                for to, (sender, owner) in turn.items()
            ]
            logger.info(
                "local step %d: shards that were fetched from other hosts: %s",
                save.step,
                join_truncated(moves, 8, ", ") or "none",
            )


def _error(loaded: Attempt[Any]) -> str:
    """Why a rank could not load; "" if it has."""
    return "" if loaded.error is None else str(loaded.error) or repr(loaded.error)


class PieceTable(NamedTuple):
    """The tables by which a piece is merged. ``small``: the small files of rank 0's piece."""

    piece: Piece
    manifest: Manifest
    small: Mapping[str, bytes]


def read_table(pieces: HostPieces, piece: Piece) -> PieceTable:
    """Raises CorruptCheckpoint if the index is damaged."""
    opened = open_checkpoint(pieces.path(piece))
    small = {}
    if piece.rank == 0:
        names = {CONFIG, COMMON_FILE} & {*opened.storage.list()}
        small = {name: opened.storage.get(name) for name in names}
    return PieceTable(piece, opened.manifest, small)


class MergedSave(NamedTuple):
    """The manifest of all pieces, and the small files of the checkpoint."""

    save: LocalSave
    manifest: Manifest
    small: Mapping[str, bytes]

    @classmethod
    def of(cls, tables: Sequence[PieceTable]) -> MergedSave:
        """``tables``: the tables of all pieces. Of equal chunks the chunk of the lowest rank stays.

        Raises CorruptCheckpoint if the pieces disagree about a tensor.
        """
        tables = sorted(tables, key=lambda table: table.piece.rank)
        chunks = [table.manifest.chunks for table in tables]
        tensors, tensor = merged_tables(
            [table.manifest.tensors for table in tables], [c.tensor for c in chunks]
        )
        keys = Counter(entry.key for entry in tensors)
        if twice := [key for key, count in keys.items() if count > 1]:
            raise CorruptCheckpoint(
                f"the ranks have saved {twice[0]!r} with different shapes or dtypes"
            )
        names = []
        for table in tables:
            folder = table.piece.folder
            paths = [f"{folder}/{name}" for name in table.manifest.files]
            if table.piece.rank == 0:
                # The format recognizes common state by the name of its file.
                common = f"{folder}/{COMMON_FILE}"
                paths = [COMMON_FILE if path == common else path for path in paths]
            names.append(tuple(paths))
        files, file = merged_tables(names, [c.file for c in chunks])
        boxes = Boxes.concat([c.boxes for c in chunks])
        places = np.column_stack([tensor, boxes.offset, boxes.shape])
        first = np.sort(np.unique(places, axis=0, return_index=True)[1])
        every = Chunks(
            tensor,
            boxes,
            np.concatenate([c.writer for c in chunks]),
            file,
            np.concatenate([c.start for c in chunks]),
            np.concatenate([c.length for c in chunks]),
            np.concatenate([c.digests for c in chunks]),
        )
        whole = replace(
            tables[0].manifest,
            tensors=tensors,
            grids=(None,) * len(tensors),
            chunks=every.take(first),
            files=files,
            values=None,
        )
        used = TensorParts(whole).excerpt(range(len(tensors)))
        return cls(tables[0].piece.save, used, tables[0].small)

    def needed(
        self,
        state: ShardedStateDict,
        rank: int,
        strict: StrictHandling,
        key_map: KeyMap | None,
        trusted: Sequence[type] = (),
    ) -> tuple[set[int], set[str]]:
        """The ranks whose pieces a rank has to read, and the keys that it asks for.

        MismatchError if the state does not fit. The load itself logs unexpected keys.
        """
        if StrictHandling.requires_logging(strict):
            strict = StrictHandling.IGNORE_ALL
        request = LoadRequest("", state, strict=strict, key_map=key_map)
        values = {}
        if COMMON_FILE in self.small:
            blob = self.small[COMMON_FILE]
            values[COMMON_KEY] = serialization.load(blob, trusted=trusted)
        request = request.declared(self.manifest, values)
        compared = Comparison.of(request, self.manifest, rank)
        chunks = plan_load(compared.wanted, self.manifest).chunk
        files = {
            self.manifest.files[i] for i in self.manifest.chunks.file[chunks].tolist()
        }
        owners = {Piece(self.save, rank).folder: rank for rank in range(self.save.size)}
        pieces = {owners[name.split("/")[0]] for name in files if "/" in name}
        return pieces, requested(compared.declared)

    def write(self, pieces: HostPieces) -> str:
        """Write the tables into the folder of the save; returns its path."""
        path = f"{pieces.location}/{self.save.folder}"
        storage = LocalStorage(path, create=True)
        config = self.small[CONFIG]
        index = encode_index(self.manifest, {CONFIG: (len(config), digest(config))})
        for name, data in {**self.small, INDEX: index}.items():
            storage.put(name, data)
        return path

    def remove(self, pieces: HostPieces) -> None:
        """Remove the tables."""
        storage = LocalStorage(f"{pieces.location}/{self.save.folder}")
        for name in (INDEX, *self.small):
            storage.delete(name)


def transfers(
    needed: Sequence[Collection[int]],
    hosts: Sequence[str],
    held: Mapping[int, Collection[str]],
) -> list[dict[int, tuple[int, int]]]:
    """Rounds of transfers: receiving rank -> (sending rank, the rank whose piece it is).

    ``needed``: for each rank the pieces that it reads; ``held``: for each piece the hosts that have
    it. A host gets each piece once. In a round, no rank receives two.
    """
    sent = Counter[int]()
    rounds: list[dict[int, tuple[int, int]]] = []
    for host in dict.fromkeys(hosts):
        members = [rank for rank, other in enumerate(hosts) if other == host]
        wanted = set().union(*(needed[rank] for rank in members))
        lacking = sorted(piece for piece in wanted if host not in held[piece])
        for number, piece in enumerate(lacking):
            able = [rank for rank, other in enumerate(hosts) if other in held[piece]]
            sender = min(able, key=lambda rank: sent[rank])
            sent[sender] += 1
            turn, member = divmod(number, len(members))
            rounds += [{} for _ in range(turn + 1 - len(rounds))]
            rounds[turn][members[member]] = sender, piece
    return rounds
