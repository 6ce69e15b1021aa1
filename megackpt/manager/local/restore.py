"""Loads the newest step of which all ranks' shards are on some host, and undamaged."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from megackpt.distributed import (
    Group,
    GroupLike,
    SingleGroup,
    Stream,
    attempt,
    group_over,
)
from megackpt.errors import (
    CheckpointingException,
    RankLost,
    join_truncated,
    name_ranks,
)
from megackpt.loader import load
from megackpt.manager.local.pieces import HostPieces, LocalSave, Piece, PieceFiles
from megackpt.manager.local.saves import as_one_rank
from megackpt.state import ShardedStateDict

logger = logging.getLogger("megackpt.manager")


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

    def drop(self, piece: Piece, host: str) -> None:
        """A piece is damaged there."""
        self._pieces[host].discard(piece)

    def to_check(self, rank: int, save: LocalSave) -> list[Piece]:
        """The pieces of a save that this rank checks: its share of those on its host."""
        host = self.hosts[rank]
        there = sorted(piece for piece in self._pieces[host] if piece.save == save)
        members = [r for r, other in enumerate(self.hosts) if other == host]
        return there[members.index(rank) :: len(members)]

    def sources(self, save: LocalSave) -> dict[int, int]:
        """For each rank whose host lacks its piece, the rank that sends it."""
        sent = Counter[int]()
        found = {}
        for rank, host in enumerate(self.hosts):
            holders = self.holders(Piece(save, rank))
            if host not in holders:
                able = [r for r, other in enumerate(self.hosts) if other in holders]
                found[rank] = min(able, key=lambda r: sent[r])
                sent[found[rank]] += 1
        return found


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
                problem = self._fetch(group, save, held, finite)
                if not problem:
                    loaded, problem = self._load(group, save, state, options)
                    if not problem:
                        return Loaded(save, loaded)
                    changed = True
                if group.is_coordinator:
                    logger.warning("local step %d is skipped: %s", save.step, problem)
        return Loaded(None, changed=changed)

    def clear(self, keep: Sequence[LocalSave]) -> None:
        """Remove all others from the hosts. Collective."""
        with group_over(self._process_group, self._timeout) as group:
            hosts = group.reduce_broadcast("hosts", lambda: self._host, list)

            def work() -> None:
                if hosts.index(self._host) == group.rank:
                    self._pieces.clear(keep)

            group.reduce_broadcast("clear", work, len)

    def _fetch(
        self, group: Group, save: LocalSave, held: Holdings, finite: bool
    ) -> str:
        """Check the pieces of a save, and fetch those that their ranks' hosts lack.

        Returns why that is impossible, or "".
        """
        if save.size != group.size:
            return f"it is of {save.size} ranks, and these are {group.size}"

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
        lost = [
            rank for rank in range(save.size) if not held.holders(Piece(save, rank))
        ]
        if lost:
            return f"no host has the shards of {name_ranks(lost)} undamaged"
        sources = held.sources(save)
        try:
            self._exchange(group, save, sources)
        except RankLost:
            raise
        except CheckpointingException as error:
            return str(error)
        if group.is_coordinator:
            logger.info("%s", _story(save, sources, held.hosts))
        return ""

    def _exchange(
        self, group: Group, save: LocalSave, sources: Mapping[int, int]
    ) -> None:
        """Send pieces from host to host. ``sources``: rank -> the rank that sends its piece."""
        if not sources:
            return
        own = Piece(save, group.rank)
        sent = {
            to: Piece(save, to) for to, rank in sources.items() if rank == group.rank
        }

        def describe() -> dict[int, PieceFiles]:
            return {to: self._pieces.describe(piece) for to, piece in sent.items()}

        described = group.reduce_broadcast("describe local pieces", describe, list)
        files = {to: found for part in described for to, found in part.items()}

        def streams() -> tuple[dict[int, Stream], dict[int, Stream]]:
            out = {
                to: self._pieces.outgoing(piece, files[to])
                for to, piece in sent.items()
            }
            into = {}
            if group.rank in sources:
                into[sources[group.rank]] = self._pieces.incoming(
                    own, files[group.rank]
                )
            return out, into

        def accept() -> None:
            if group.rank in sources:
                self._pieces.accept(own, files[group.rank])

        group.exchange("local pieces", streams)
        group.reduce_broadcast("check local pieces", accept, len)

    def _load(
        self,
        group: Group,
        save: LocalSave,
        state: ShardedStateDict,
        options: Mapping[str, Any],
    ) -> tuple[Any, str]:
        """The loaded state of this rank, and why the load has failed on any rank, or ""."""

        def read() -> Any:
            return load(
                as_one_rank(state),
                self._pieces.path(Piece(save, group.rank)),
                process_group=SingleGroup(),
                timeout=self._timeout,
                **{**options, "validate_access_integrity": False},
            )

        loaded = attempt(read)

        def outcome() -> None:
            loaded.get()

        try:
            group.reduce_broadcast("load", outcome, len)
        except RankLost:
            raise
        except CheckpointingException as error:
            return None, f"it cannot be loaded: {error}"
        return loaded.value, ""


def _story(save: LocalSave, sources: Mapping[int, int], hosts: Sequence[str]) -> str:
    """Where the pieces of a save come from."""
    text = (
        f"local step {save.step}: {save.size - len(sources)} of {save.size} ranks have "
    )
    text += "their shards on their host"
    if sources:
        moves = [
            f"rank {rank} gets them from {hosts[source]!r}"
            for rank, source in sources.items()
        ]
        text += f"; {join_truncated(moves, 8, ', ')}"
    return text
