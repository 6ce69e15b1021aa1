"""One checkpoint of all pieces of a local save, for a state of another layout.

The checkpoint is in the folder of the save. Its index names the pieces' files. A host may have only
the files that its ranks read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megackpt import serialization
from megackpt.backends.base import CONFIG
from megackpt.backends.object_files import COMMON_FILE
from megackpt.checkpoint import INDEX, encode_index, open_checkpoint
from megackpt.errors import CorruptCheckpoint
from megackpt.loader.comparison import Comparison, KeyMap, LoadRequest
from megackpt.manager.local.pieces import HostPieces, LocalSave, Piece
from megackpt.planning.box import Boxes
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import COMMON_KEY, Chunks, Manifest, TensorParts
from megackpt.planning.manifest.declarations import merged_tables
from megackpt.planning.strict import StrictHandling, requested
from megackpt.state import ShardedStateDict
from megackpt.storage import LocalStorage, digest


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
