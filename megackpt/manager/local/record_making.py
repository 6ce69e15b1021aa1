"""Makes the record of a rank, from its part of the plan and from the piece that it has written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from megackpt.errors import BackendError
from megackpt.manager.local.drain_records import OBJECTS, SaveNotes, Sheet
from megackpt.planning.box import Boxes, Int64, group_equal
from megackpt.planning.manifest import (
    Chunks,
    Int32,
    Manifest,
    digest_rows,
    join_manifests,
)
from megackpt.saver.deferred_save import DeferredPart
from megackpt.saver.nonfinite import merge
from megackpt.storage import digest_blocks


def make_record(
    notes: SaveNotes, part: DeferredPart, piece: Manifest
) -> tuple[Sheet, bytes]:
    """The record of a rank, and the content of ``OBJECTS``. ``piece``: what its piece holds.

    Raises BackendError if the piece lacks a shard of the plan.
    """
    plan = part.plan
    numbers = piece.numbers()
    unknown = len(piece.tensors)
    own = np.array(
        [numbers.get(entry.key, unknown) for entry in plan.tensors], np.int32
    )
    is_object = np.zeros(len(plan), np.bool_)
    is_object[list(part.objects)] = True
    rows = np.flatnonzero(~is_object)
    place = _find(own[plan.tensor[rows]], plan.boxes.take(rows), piece.chunks)
    if (place < 0).any():
        row = plan.row(int(rows[place < 0][0]))
        raise BackendError(
            f"{notes.piece.name} does not hold {row.shard}, which rank {notes.rank} writes into "
            "the storage"
        )
    chunks = replace(piece.chunks.take(place), tensor=plan.tensor[rows])
    tensors = Manifest(plan.tensors, plan.grids, chunks, piece.files)
    both = join_manifests([_objects(part), tensors])
    # In the order of the plan, then by tensor as an index has them.
    order = np.argsort(np.concatenate([np.flatnonzero(is_object), rows]))
    chunks = both.chunks.take(order)
    chunks = replace(chunks, writer=np.zeros(len(plan), np.int32))
    whole = replace(both, chunks=chunks)
    if part.values:
        whole = replace(whole, values=merge(whole, [part.values]))
    sorting = np.argsort(chunks.tensor, kind="stable")
    notes = replace(notes, order=tuple(sorting.tolist()))
    return Sheet(notes, whole), b"".join(part.objects.values())


def _find(tensor: Int32, boxes: Boxes, chunks: Chunks) -> Int64:
    """For each of these boxes the chunk that is the same box of the same tensor, or -1."""
    owner = np.concatenate([chunks.tensor, tensor])
    number = np.empty(len(owner), np.int64)
    groups = group_equal(owner, Boxes.concat([chunks.boxes, boxes]))
    number[groups.order] = groups.number
    found = np.full(len(groups), -1, np.int64)
    found[number[: len(chunks)]] = np.arange(len(chunks))
    return found[number[len(chunks) :]]


def _objects(part: DeferredPart) -> Manifest:
    """The objects of a part, one after another in the file ``OBJECTS``."""
    plan = part.plan
    blobs: Mapping[int, bytes] = part.objects
    rows = np.array(list(blobs), np.int64)
    length = np.array(list(map(len, blobs.values())), np.int64)
    chunks = Chunks(
        plan.tensor[rows],
        plan.boxes.take(rows),
        np.zeros(len(rows), np.int32),
        np.zeros(len(rows), np.int32),
        np.cumsum(length) - length,
        length,
        digest_rows(b"".join(digest_blocks(memoryview(b)) for b in blobs.values())),
    )
    return Manifest(plan.tensors, plan.grids, chunks, (OBJECTS,))
