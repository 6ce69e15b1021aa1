"""What a rank leaves for the agents: the record beside its piece, and the mark in the storage.

Both are a *sheet*: a digest, a line of JSON, and an index of megackpt. The index of a record says
where the bytes of the rank's plan are in its piece, the index of a mark where they are in the
storage.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from megackpt.checkpoint import decode_index, encode_index
from megackpt.errors import CorruptCheckpoint
from megackpt.manager.local.pieces import LocalSave, Piece
from megackpt.planning.manifest import (
    Manifest,
    SavePlan,
)
from megackpt.storage import digest

RECORD = "megackpt.drain"
OBJECTS = "megackpt.objects"
"""Files in the directory of a piece: the record, and the objects of the rank's plan."""


@dataclass(frozen=True)
class SaveNotes:
    """The part of a sheet that is JSON.

    Attributes:
        save: the id of the local save; ``step`` and ``size`` (ranks) are of it, too.
        host: the name of the host whose rank has written the piece.
        name: of the checkpoint, relative to the directory of the run.
        saved: when, in seconds since 1970.
        overwrite, metrics: as for ``CheckpointManager.save``.
        options: of the format torch_dist.
        attempt: of a mark: the folder that has the files.
        order: of a record: for each chunk of the index its row in the plan.
    """

    save: str
    step: int
    size: int
    rank: int
    host: str
    name: str
    saved: float
    overwrite: bool
    metrics: dict[str, float]
    options: dict[str, Any]
    attempt: str = ""
    order: tuple[int, ...] = ()

    @property
    def piece(self) -> Piece:
        return Piece(LocalSave(self.step, self.save, self.size), self.rank)


_TYPES = {"order": list, "saved": (int, float)}
_STRINGS = ("save", "host", "name", "attempt")
_NUMBERS = ("step", "size", "rank")


def parse_notes(line: bytes) -> SaveNotes:
    """Raises ValueError or TypeError for other fields, or other types."""
    fields = json.loads(line)
    types: dict[str, Any] = {
        **dict.fromkeys(_STRINGS, str),
        **dict.fromkeys(_NUMBERS, int),
        **_TYPES,
        "overwrite": bool,
        "metrics": dict,
        "options": dict,
    }
    for name, value in fields.items():
        if not isinstance(value, types.get(name, object)):
            raise TypeError(f"{name} is {value!r:.60}")
    return SaveNotes(**{**fields, "order": tuple(fields["order"])})


class Sheet(NamedTuple):
    """What is known of the part of one rank: notes, and its tensors and chunks."""

    notes: SaveNotes
    manifest: Manifest

    def encode(self) -> bytes:
        line = json.dumps(asdict(self.notes)).encode()
        body = line + b"\n" + encode_index(self.manifest, {})
        return digest(body).hex().encode() + b"\n" + body

    @classmethod
    def decode(cls, data: bytes, where: str) -> Sheet:
        """Raises CorruptCheckpoint if the bytes are damaged."""
        head, _, body = data.partition(b"\n")
        if head != digest(body).hex().encode():
            raise CorruptCheckpoint(f"{where} is damaged: it has another digest")
        line, _, index = body.partition(b"\n")
        try:
            notes = parse_notes(line)
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptCheckpoint(f"{where} makes no sense: {error}") from error
        return cls(notes, decode_index(index, where)[0])

    @property
    def planned(self) -> Manifest:
        """Of a record: its manifest with the chunks in the order of the plan."""
        chunks = self.manifest.chunks
        order = np.argsort(np.array(self.notes.order, np.int64))
        if len(order) != len(chunks):
            raise CorruptCheckpoint(f"the record of {self.notes.piece.name} is cut off")
        return replace(self.manifest, chunks=chunks.take(order))

    def written(self, manifest: Manifest, attempt: str) -> Sheet:
        """The mark of an attempt. ``manifest``: where it has put the chunks."""
        return Sheet(replace(self.notes, attempt=attempt, order=()), manifest)


def plan_of(sheet: Sheet) -> SavePlan:
    """The plan of a record. Row i is chunk i of ``sheet.planned``."""
    manifest = sheet.planned
    chunks = manifest.chunks
    return SavePlan(
        sheet.notes.rank,
        manifest.tensors,
        manifest.grids,
        chunks.tensor,
        chunks.boxes,
        np.arange(len(chunks), dtype=np.int32),
    )
