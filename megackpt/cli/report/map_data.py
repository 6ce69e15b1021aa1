"""The data of the shard map, as plain JSON values: of a manifest, or of declarations.

Boxes are columns (a list of numbers each), sorted by tensor. Offsets and extents are concatenated
rows, each with as many numbers as the tensor has dimensions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.planning.box import Box, Boxes, Int64
from megackpt.planning.coverage import shapes_table, uncovered
from megackpt.planning.dedup import assign
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    Declarations,
    Int32,
    Manifest,
    TensorEntry,
    is_main_replica,
)
from megackpt.planning.tiling import miscounted

Data = dict[str, Any]

MAX_REGIONS = 64
"""Holes, overlaps and boxes out of bounds that are listed for one tensor."""
MAX_LOCATED = 1000
"""Tensors for which they are listed."""
MAX_AXES = 10
"""Axes of a tensor whose coverage is checked; the cost doubles with each."""
OUTSIDE = -1
"""The count of a region that is out of bounds."""


def manifest_data(manifest: Manifest) -> Data:
    """Of a checkpoint: for each chunk the rank that wrote it, and its bytes in a file."""
    chunks = manifest.chunks
    order = _sorted_by_box(chunks.tensor, chunks.boxes)
    stored = _as_declared(manifest, order)
    suspects = _suspects(stored)
    name, version = manifest.backend
    sizes = (
        "" if manifest.encoding == "raw" else "with what the format adds to each chunk"
    )
    return {
        "kind": "checkpoint",
        "facts": [
            ["format", f"{name} {version}" if name else "not written yet"],
            ["save", manifest.save_id],
            ["sizes", sizes],
        ],
        "encoding": manifest.encoding,
        "block": DIGEST_BLOCK if len(chunks.digests) else 0,
        "ranks": len(np.unique(chunks.writer[chunks.writer >= 0])),
        **_tensors(manifest.tensors, manifest.grids),
        "pieces": {
            **_pieces(manifest.tensors, stored.tensor, stored.boxes),
            "writer": chunks.writer[order].tolist(),
            "file": chunks.file[order].tolist(),
            "start": chunks.start[order].tolist(),
            "length": chunks.length[order].tolist(),
        },
        "files": list(manifest.files),
        "small": [],
        "holders": None,
        "replicas": [],
        "problems": [[number, ""] for number in suspects],
        "flaws": _flaws(stored, suspects),
    }


def declarations_data(declared: Declarations, balance: bool) -> Data:
    """Of a save to come: for each distinct box its ranks, and the one that will write it."""
    shards = declared.shards()
    first = shards.first
    shard_of = np.empty(len(declared), np.int64)
    shard_of[shards.order] = shards.number
    writing = assign(declared, balance, shards)
    writer = np.full(len(shards), -1, np.int64)
    writer[shard_of[writing]] = declared.rank[writing]
    texts = {problem.key: problem.text for problem in uncovered(declared, shards)}
    keys = [entry.key for entry in declared.tensors]
    suspects = [number for number, key in enumerate(keys) if key in texts]
    # A key that is declared in several ways is several tensors, each without some boxes.
    times = Counter(keys)
    order = _sorted_by_box(declared.tensor[first], declared.boxes.take(first))
    groups = [shards.rows(group) for group in order.tolist()]
    rows = np.concatenate(groups) if groups else np.zeros(0, np.int64)
    holding = np.unique(declared.rank)
    world = np.arange(len(declared.domains)) if len(declared.domains) > 1 else holding
    balanced = "the least loaded holder of each box; objects by main replicas"
    return {
        "kind": "declaration",
        "facts": [["written by", balanced if balance else "main replicas"]],
        "encoding": "raw",
        "block": 0,
        "ranks": len(np.union1d(world, holding)),
        "idle": np.setdiff1d(world, holding).tolist(),
        **_tensors(declared.tensors, [None] * len(declared.tensors)),
        "pieces": {
            **_pieces(
                declared.tensors,
                declared.tensor[first[order]],
                declared.boxes.take(first[order]),
            ),
            "writer": writer[order].tolist(),
            "length": declared.nbytes[first[order]].tolist(),
        },
        "files": [],
        "small": [],
        "holders": {
            "count": np.diff(shards.bounds)[order].tolist(),
            "rank": declared.rank[rows].tolist(),
            "replica": declared.replica[rows].tolist(),
        },
        "replicas": [
            [str(replica), is_main_replica(replica)] for replica in declared.replica_ids
        ],
        "problems": [[number, texts[keys[number]]] for number in suspects],
        "flaws": _flaws(
            declared, [number for number in suspects if times[keys[number]] == 1]
        ),
    }


def _as_declared(manifest: Manifest, order: Int64) -> Declarations:
    """The chunks as declarations of main replicas, so that their coverage can be checked."""
    chunks = manifest.chunks
    return Declarations.of_boxes(
        manifest.tensors,
        chunks.tensor[order],
        chunks.boxes.take(order),
        chunks.length[order],
        chunks.writer[order],
    )


def _suspects(stored: Declarations) -> list[int]:
    """Numbers of the tensors that their chunks do not cover exactly once."""
    ndim = np.array([len(entry.meta.shape) for entry in stored.tensors], np.int64)
    checked = stored.take(np.flatnonzero(ndim[stored.tensor] <= MAX_AXES))
    wrong = {problem.key for problem in uncovered(checked)}
    chunks = np.bincount(stored.tensor, minlength=len(stored.tensors))
    suspects = []
    for number, entry in enumerate(stored.tensors):
        is_missing = chunks[number] == 0 and 0 not in entry.meta.shape
        if is_missing or entry.key in wrong:
            suspects.append(number)
    return suspects


def _sorted_by_box(tensor: NDArray[Any], boxes: Boxes) -> Int64:
    return np.lexsort([*boxes.offset.T[::-1], tensor]).astype(np.int64)


def _tensors(
    entries: Sequence[TensorEntry], grids: Sequence[tuple[int, ...] | None]
) -> Data:
    dtypes = sorted({entry.meta.dtype for entry in entries})
    number = {name: i for i, name in enumerate(dtypes)}
    return {
        "dtypes": dtypes,
        "tensors": {
            "key": [entry.key for entry in entries],
            "dtype": [number[entry.meta.dtype] for entry in entries],
            "ndim": [len(entry.meta.shape) for entry in entries],
            "shape": [extent for entry in entries for extent in entry.meta.shape],
            "grid": [grid and list(grid) for grid in grids],
        },
    }


def _pieces(entries: Sequence[TensorEntry], tensor: Int32, boxes: Boxes) -> Data:
    ndim = np.array([len(entry.meta.shape) for entry in entries], np.int64)
    wide = boxes.widened(int(ndim.max(initial=0)))
    own = np.arange(wide.width) < ndim[tensor][:, None]
    return {
        "count": np.bincount(tensor, minlength=len(entries)).tolist(),
        "offset": wide.offset[own].tolist(),
        "extent": wide.shape[own].tolist(),
    }


def _flaws(declared: Declarations, suspects: Sequence[int]) -> Data:
    """Regions that are not covered exactly once, each with its number of chunks."""
    found = [
        (n, box, count)
        for n in suspects[:MAX_LOCATED]
        for box, count in _regions(declared, n)
    ]
    return {
        "tensor": [number for number, _, _ in found],
        "count": [count for _, _, count in found],
        "offset": [o for _, box, _ in found for o in box.offset],
        "extent": [s for _, box, _ in found for s in box.shape],
        "most": MAX_REGIONS,
    }


def _regions(declared: Declarations, number: int) -> Iterator[tuple[Box, int]]:
    """Boxes out of bounds, then holes and overlaps; at most MAX_REGIONS of each kind."""
    shape = declared.tensors[number].meta.shape
    if len(shape) > MAX_AXES:
        return
    mine = declared.take(np.flatnonzero(declared.tensor == number))
    boxes = mine.boxes.widened(len(shape))
    whole = shapes_table(declared.tensors[number : number + 1], boxes.width)
    leaves = (boxes.offset < 0) | (boxes.shape < 0) | (boxes.stop > whole)
    outside = dict.fromkeys(
        boxes.row(int(i), len(shape)) for i in np.flatnonzero(leaves.any(axis=1))
    )
    yield from ((box, OUTSIDE) for box in islice(outside, MAX_REGIONS))
    yield from islice(miscounted(mine.boxes.take(mine.main), shape), MAX_REGIONS)
