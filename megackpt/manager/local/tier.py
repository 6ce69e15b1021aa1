"""The settings of checkpoints in node-local memory, and which ranks hold the copies."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LocalTier:
    """Frequent checkpoints in the memory of the hosts, in addition to the run's storage.

    Each rank keeps all shards that it holds in a directory of its host, and sends copies to ranks
    on other hosts while training continues. When a host is lost, other hosts have the shards of its
    ranks.

    Args:
        path: a directory of this host alone: on a tmpfs, such as ``/dev/shm/ckpt``, or a local
            disk. It must not be shared by hosts.
        every: steps that this number divides are saved in ``path``.
        copies: how many ranks on other hosts get a copy of each rank's shards. At most one less
            than there are hosts.
        generations: how many steps are held, the one that is being written included. The path needs
            space for ``generations`` x (1 + ``copies``) x the bytes of this host's ranks.
        host: the name of this host (None: the host name of the system).
        place_copies: a function that takes a rank and the hosts of all ranks, and returns the
            ranks that get its copies: ``copies`` of them, none on the host of the rank itself. Rank
            0 calls the function. None: see ``next_hosts``.
        drain: steps that are due in the storage are saved in ``path`` only, whatever ``every``
            says. A process of each host, which outlives this one, copies them into the storage.
        drain_bytes_per_second: the most that each host writes into the storage (None: no limit).
    """

    path: str | os.PathLike[str]
    every: int
    copies: int = 1
    generations: int = 2
    host: str | None = None
    place_copies: Callable[[int, Sequence[str]], Sequence[int]] | None = field(
        default=None, repr=False
    )
    drain: bool = False
    drain_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        for name, lowest in (("every", 1), ("copies", 0), ("generations", 2)):
            value = getattr(self, name)
            if type(value) is not int or value < lowest:
                raise ValueError(
                    f"{name} of a LocalTier is {lowest} or more, not {value!r}"
                )
        rate = self.drain_bytes_per_second
        if rate is not None and not (self.drain and rate > 0):
            raise ValueError(
                f"drain_bytes_per_second is more than 0, and needs drain=True, not {rate!r}"
            )

    @property
    def hostname(self) -> str:
        return self.host or socket.gethostname()

    def targets(self, hosts: Sequence[str]) -> list[list[int]]:
        """For each rank the ranks that get its copies. ``hosts``: the host of each rank.

        Raises ValueError if ``place_copies`` returns ranks that cannot hold them.
        """
        if self.place_copies is None:
            return next_hosts(hosts, self.copies)
        placed = [list(self.place_copies(rank, hosts)) for rank in range(len(hosts))]
        for rank, targets in enumerate(placed):
            there = {hosts[target] for target in targets if 0 <= target < len(hosts)}
            if len(there) != self.copies or len(targets) != self.copies:
                raise ValueError(
                    f"place_copies({rank}) is {targets}: {self.copies} ranks on as many hosts "
                    f"are needed, of {len(hosts)} ranks"
                )
            if hosts[rank] in there:
                raise ValueError(
                    f"place_copies({rank}) is {targets}: a copy on {hosts[rank]!r}, the rank's "
                    "own host, is lost with it"
                )
        return placed


def next_hosts(hosts: Sequence[str], copies: int) -> list[list[int]]:
    """For each rank the ranks at its position on the next hosts; fewer if hosts are missing.

    Hosts are in the order of their first ranks, in a ring.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    ring = list(by_host.values())
    targets: list[list[int]] = [[] for _ in hosts]
    for place, members in enumerate(ring):
        for distance in range(1, min(copies, len(ring) - 1) + 1):
            others = ring[(place + distance) % len(ring)]
            for position, rank in enumerate(members):
                targets[rank].append(others[position % len(others)])
    return targets
