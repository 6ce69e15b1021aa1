"""What a rank leaves for the agents, beside its piece, and what they leave in the storage.

Each file is a message as ranks send it (JSON and columns, and no pickle), behind its digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megackpt.distributed.wire_format import pack, unpack
from megackpt.errors import CheckpointingException, CorruptCheckpoint
from megackpt.planning.manifest import Manifest, SavePlan, WriteResult
from megackpt.storage import LocalStorage, digest

RECORD = "megackpt.drain"
"""The file in the directory of a piece."""
_DIGEST = len(digest(b""))


@dataclass(frozen=True, eq=False)
class Record:
    """The part of one rank of a save that is drained.

    Attributes:
        name: of the checkpoint, relative to the directory of the run.
        saved: when, in seconds since 1970.
        overwrite, metrics: as for ``CheckpointManager.save``.
        options: of the format torch_dist.
        plan: the rows that the rank writes. The piece holds their boxes.
        objects: the rows of the plan that are objects, with their blobs.
        manifest: of the checkpoint, on rank 0.
        host: the name of the host whose rank has written the piece.
    """

    name: str
    saved: float
    overwrite: bool
    metrics: dict[str, float]
    options: dict[str, Any]
    plan: SavePlan
    objects: Mapping[int, bytes]
    manifest: Manifest | None
    host: str = ""


@dataclass(frozen=True, eq=False)
class Mark:
    """The part of one rank is in the storage, in the folder ``attempt`` of the work area."""

    attempt: str
    written: WriteResult
    manifest: Manifest | None


def encode(value: object) -> bytes:
    body = pack(value)
    return digest(body) + body


def read_value(storage: LocalStorage, name: str) -> Any:
    """The value that was encoded in this file.

    Raises CorruptCheckpoint if it is damaged, FileNotFoundError if there is no file.
    """
    data = storage.get(name)
    body = data[_DIGEST:]
    try:
        if digest(body) == data[:_DIGEST]:
            return unpack(body)
        problem = "it has another digest"
    except CheckpointingException as error:
        problem = str(error)
    raise CorruptCheckpoint(f"{storage.location}/{name} is damaged: {problem}")
