"""Loads the newest step of which all ranks' shards are on some host, and undamaged."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

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
    RankLost,
    RefusedObject,
    UntrustedClass,
    join_truncated,
    name_ranks,
)
from megackpt.loader import load
from megackpt.loader.comparison import find_missing
from megackpt.manager.local.merged import (
    MergedSave,
    PieceTable,
    read_table,
    transfers,
)
from megackpt.manager.local.pieces import HostPieces, LocalSave, Piece, transfer
from megackpt.manager.local.saves import as_one_rank
from megackpt.planning.strict import StrictHandling, parse_strict_flag
from megackpt.state import ShardedStateDict

logger = logging.getLogger("megackpt.manager")

_OF_RANK = {
    StrictHandling.RAISE_ALL: StrictHandling.RAISE_UNEXPECTED,
    StrictHandling.LOG_ALL: StrictHandling.LOG_UNEXPECTED,
    StrictHandling.RETURN_ALL: StrictHandling.RETURN_UNEXPECTED,
}
"""Which keys are missing is known from the requests of all ranks; each rank reads with the rest."""
_NAMED = 1000  # ranks in a message


class Loaded(NamedTuple):
    """What a restore from the hosts has done."""

    save: LocalSave | None
    """None if no local save was loaded."""
    state: Any = None
    changed: bool = False
    """Whether a load has failed after others had changed their tensors."""


class Holdings:
    """Which hosts have which pieces. ``answers``: of each rank its host and the pieces there."""

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
        """A piece is damaged there."""
        self._pieces[host].discard(piece)

    def to_check(self, rank: int, save: LocalSave) -> list[Piece]:
        """The pieces of a save that this rank checks: its share of those on its host."""
        host = self.hosts[rank]
        there = sorted(piece for piece in self._pieces[host] if piece.save == save)
        members = [r for r, other in enumerate(self.hosts) if other == host]
        return there[members.index(rank) :: len(members)]


class LocalRestore:
    """Restores local saves of one run. All ranks call it.

    Args:
        pieces: the directory of this host.
        host: its name.
        process_group: of all ranks.
    """

    def __init__(
        self,
        pieces: HostPieces,
        host: str,
        process_group: GroupLike,
        timeout: timedelta,
    ) -> None:
        self._pieces = pieces
        self._host = host
        self._process_group = process_group
        self._timeout = timeout

    def newest(
        self,
        state: ShardedStateDict,
        lowest: int,
        options: Mapping[str, Any],
        finite: bool,
        highest: int | None = None,
    ) -> Loaded:
        """Load the newest save that is whole, of the steps from ``lowest`` to ``highest``.

        The log says what came from where, and why a save is not loaded.
        """
        changed = False
        with group_over(self._process_group, self._timeout) as group:

            def holdings() -> tuple[str, list[Piece]]:
                return self._host, self._pieces.held()

            held = Holdings(group.reduce_broadcast("local pieces", holdings, list))
            for save in held.saves():
                if save.step < lowest or (highest is not None and save.step > highest):
                    continue
                problem = self._check(group, save, held, finite)
                if not problem:
                    loaded, problem = self._take(group, save, held, state, options)
                    if not problem:
                        return Loaded(save, loaded)
                    changed = True
                if group.is_coordinator:
                    logger.warning("local step %d is skipped: %s", save.step, problem)
        return Loaded(None, changed=changed)

    def clear(self, keep: Sequence[LocalSave], into: HostPieces | None = None) -> None:
        """Remove all others from the hosts, and move these ``into`` a directory. Collective."""
        with group_over(self._process_group, self._timeout) as group:
            hosts = group.reduce_broadcast("hosts", lambda: self._host, list)

            def work() -> None:
                if hosts.index(self._host) == group.rank:
                    self._pieces.clear(keep)
                    if into is not None:
                        os.rename(self._pieces.location, into.location)

            group.reduce_broadcast("clear", work, len)

    def _check(
        self, group: Group, save: LocalSave, held: Holdings, finite: bool
    ) -> str:
        """Read all pieces of a save. Returns why it cannot be loaded, or ""."""

        def check() -> dict[Piece, str]:
            mine = held.to_check(group.rank, save)
            return {piece: self._pieces.problem(piece, finite) for piece in mine}

        checked = group.reduce_broadcast("check local pieces", check, list)
        for rank, problems in enumerate(checked):
            for piece, problem in problems.items():
                if problem:
                    held.drop(piece, held.hosts[rank])
                    if group.is_coordinator:
                        where = f"{piece.name} on host {held.hosts[rank]!r}"
                        logger.warning("%s is damaged: %s", where, problem)
        # The size is that of a directory's name, which may be damaged as well.
        absent = (r for r in range(save.size) if not held.holders(Piece(save, r)))
        lost = list(islice(absent, _NAMED))
        if lost:
            return f"no host has the shards of {name_ranks(lost)} undamaged"
        return ""

    def _take(
        self,
        group: Group,
        save: LocalSave,
        held: Holdings,
        state: ShardedStateDict,
        options: Mapping[str, Any],
    ) -> tuple[Any, str]:
        """The loaded state of this rank, and why the load has failed on any rank, or ""."""
        try:
            strict = parse_strict_flag(options["strict"])
            if save.size == group.size and strict not in _OF_RANK:
                self._fetch(group, save, held, [{rank} for rank in range(save.size)])
                path = self._pieces.path(Piece(save, group.rank))
                # A key that is not in this piece may be in another one.
                own = {**options, "strict": StrictHandling.RAISE_UNEXPECTED}
                loaded = attempt(partial(self._read, path, state, own))
                problem = group.reduce_broadcast(
                    "load", partial(_error, loaded), _first
                )
                if not problem:
                    if StrictHandling.requires_returning_mismatch_keys(strict):
                        return (loaded.value, set(), set()), ""
                    return loaded.value, ""
                if group.is_coordinator:
                    logger.info(
                        "local step %d is of another layout: %s", save.step, problem
                    )
            return self._reshard(group, save, held, state, options, strict), ""
        except (RankLost, UntrustedClass, RefusedObject):
            raise
        except CheckpointingException as error:
            return None, f"it cannot be loaded: {error}"

    def _reshard(
        self,
        group: Group,
        save: LocalSave,
        held: Holdings,
        state: ShardedStateDict,
        options: Mapping[str, Any],
        strict: StrictHandling,
    ) -> Any:
        """Load a state of another layout from all pieces."""

        def tables() -> list[PieceTable]:
            mine = held.to_check(group.rank, save)
            first = [piece for piece in mine if held.holders(piece)[0] == self._host]
            return [read_table(self._pieces, piece) for piece in first]

        def merge(parts: Sequence[list[PieceTable]]) -> MergedSave:
            return MergedSave.of([table for part in parts for table in part])

        merged = group.reduce_broadcast("local tables", tables, merge)

        def needed() -> tuple[set[int], set[str]]:
            return merged.needed(state, group.rank, strict, options["key_map"])

        def plan(
            answers: Sequence[tuple[set[int], set[str]]],
        ) -> tuple[list[set[int]], set[str]]:
            missing = set()
            if strict in _OF_RANK:
                names = [asked for _, asked in answers]
                missing = find_missing(names, merged.manifest, strict)
            return [ranks for ranks, _ in answers], missing

        ranks, missing = group.reduce_broadcast("local plan", needed, plan)
        self._fetch(group, save, held, ranks)
        is_first = held.hosts.index(self._host) == group.rank

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
        held: Holdings,
        needed: Sequence[Collection[int]],
    ) -> None:
        """Send each host the pieces that it lacks. ``needed``: the pieces that each rank reads."""
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
            logger.info("%s", _moves_of(save, rounds, held.hosts))


def _error(loaded: Attempt[Any]) -> str:
    """Why a rank could not load; "" if it has."""
    return "" if loaded.error is None else str(loaded.error) or repr(loaded.error)


def _first(problems: Sequence[str]) -> str:
    """The first problem of any rank."""
    return next(filter(None, problems), "")


def _moves_of(
    save: LocalSave,
    rounds: Sequence[Mapping[int, tuple[int, int]]],
    hosts: Sequence[str],
) -> str:
    """Which pieces have travelled."""
    moves = [
        f"those of rank {owner} from {hosts[sender]!r} to {hosts[to]!r}"
        for turn in rounds
        for to, (sender, owner) in turn.items()
    ]
    moved = join_truncated(moves, 8, ", ") or "none"
    return f"local step {save.step}: shards that were fetched from other hosts: {moved}"
