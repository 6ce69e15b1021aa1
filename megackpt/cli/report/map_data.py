"""The data of the shard map, as plain JSON values: of a manifest, or of declarations.

Boxes are columns (a list of numbers each), sorted by tensor. Offsets and extents are concatenated
rows, each with as many numbers as the tensor has dimensions.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.planning.box import Box, Boxes, Int64
from megackpt.planning.coverage import miscounted, shapes_table, uncovered
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    Declarations,
    Manifest,
    TensorEntry,
    is_main_replica,
)
from megackpt.planning.save_plan import assign

Data = dict[str, Any]

MAX_REGIONS = 64
"""Holes, overlaps and boxes out of bounds that are listed for one tensor."""
MAX_LOCATED = 1000
"""Tensors for which they are listed."""
MAX_AXES = 10
"""Axes of a tensor whose coverage is checked; the cost doubles with each."""
OUTSIDE = -1
"""The count of a region that is out of bounds."""
MAX_ROWS = 48
"""Rows of the overview."""
RAMP = ("41518f", "387aa0", "4aa291", "97c070", "e9c452")
"""The colours of the first to the last rank. They become lighter: print and most eyes show that."""
Parts = tuple[str, ...]


def manifest_data(manifest: Manifest) -> Data:
    """The data of a checkpoint: for each chunk the rank that wrote it, and its bytes in a file."""
    chunks = manifest.chunks
    order = _sorted_by_box(chunks.tensor, chunks.boxes)
    # As declarations of main replicas, so that their coverage can be checked.
    stored = Declarations.of_boxes(
        manifest.tensors,
        chunks.tensor[order],
        chunks.boxes.take(order),
        chunks.length[order],
        chunks.writer[order],
    )
    columns: dict[str, NDArray[Any]] = {
        "writer": chunks.writer,
        "file": chunks.file,
        "start": chunks.start,
        "length": chunks.length,
    }
    columns = {name: column[order] for name, column in columns.items()}
    # The tensors that their chunks do not cover exactly once.
    ndim = _dimensions(stored.tensors)
    checked = stored.take(np.flatnonzero(ndim[stored.tensor] <= MAX_AXES))
    wrong = uncovered(checked)
    counts = np.bincount(stored.tensor, minlength=len(stored.tensors))
    problems = {}
    for number, entry in enumerate(stored.tensors):
        is_missing = counts[number] == 0 and 0 not in entry.meta.shape
        if is_missing or entry.key in wrong:
            problems[number] = ""
    name, version = manifest.backend
    written_as = "not written yet"
    if name:
        written_as = f"{name} {version}"
    sizes = "with what the format adds to each chunk"
    if manifest.encoding == "raw":
        sizes = ""
    return {
        "kind": "checkpoint",
        "facts": [
            ["format", written_as],
            ["save", manifest.save_id],
            ["sizes", sizes],
        ],
        "encoding": manifest.encoding,
        "block": DIGEST_BLOCK if len(chunks.digests) else 0,
        "ranks": len(np.unique(chunks.writer[chunks.writer >= 0])),
        "files": list(manifest.files),
        "small": [],
        "holders": None,
        "replicas": [],
        **_tensors(manifest.tensors, manifest.grids),
        **_boxes(stored, np.arange(len(stored)), columns, problems),
    }


def declarations_data(declared: Declarations, balance: bool) -> Data:
    """The data of a future save: for each distinct box its ranks, and its future writer."""
    shards = declared.shards
    shard_of = np.empty(len(declared), np.int64)
    shard_of[shards.order] = shards.number
    writing = assign(declared, balance)
    writer = np.full(len(shards), -1, np.int64)
    writer[shard_of[writing]] = declared.rank[writing]
    texts = uncovered(declared)
    problems = {}
    for number, (key, _) in enumerate(declared.tensors):
        if key in texts:
            problems[number] = texts[key]
    first = shards.first
    order = _sorted_by_box(declared.tensor[first], declared.boxes.take(first))
    columns = {"writer": writer[order], "length": declared.nbytes[first[order]]}
    holders = np.zeros(0, np.int64)
    if len(order):
        holders = np.concatenate([shards.rows(row) for row in order.tolist()])
    holding = np.unique(declared.rank)
    world = holding
    if len(declared.domains) > 1:
        world = np.union1d(np.arange(len(declared.domains)), holding)
    ids = declared.replica_ids
    replicas = [[str(replica), is_main_replica(replica)] for replica in ids]
    written_by = "main replicas"
    if balance:
        written_by = "the least loaded holder of each box; objects by main replicas"
    return {
        "kind": "declaration",
        "facts": [["written by", written_by]],
        "encoding": "raw",
        "block": 0,
        "ranks": len(world),
        "idle": np.setdiff1d(world, holding).tolist(),
        "files": [],
        "small": [],
        "holders": {
            "count": np.diff(shards.bounds)[order].tolist(),
            "rank": declared.rank[holders].tolist(),
            "replica": declared.replica[holders].tolist(),
        },
        "replicas": replicas,
        **_tensors(declared.tensors, [None] * len(declared.tensors)),
        **_boxes(declared, first[order], columns, problems),
    }


def _sorted_by_box(tensor: NDArray[Any], boxes: Boxes) -> Int64:
    return np.lexsort([*boxes.offset.T[::-1], tensor]).astype(np.int64)


def _dimensions(entries: Sequence[TensorEntry]) -> Int64:
    return np.array([len(entry.meta.shape) for entry in entries], np.int64)


def _tensors(
    entries: Sequence[TensorEntry], grids: Sequence[tuple[int, ...] | None]
) -> Data:
    dtypes = sorted({entry.meta.dtype for entry in entries})
    columns: dict[str, list[Any]] = {"key": [], "dtype": [], "ndim": [], "shape": []}
    for key, meta in entries:
        columns["key"].append(key)
        columns["dtype"].append(dtypes.index(meta.dtype))
        columns["ndim"].append(len(meta.shape))
        columns["shape"] += meta.shape
    return {"dtypes": dtypes, "tensors": {**columns, "grid": grids}}


def _boxes(
    declared: Declarations,
    rows: Int64,
    columns: dict[str, NDArray[Any]],
    problems: dict[int, str],
) -> Data:
    """The boxes in these rows, with these columns; and the regions that they do not cover once."""
    tensor = declared.tensor[rows]
    ndim = _dimensions(declared.tensors)
    boxes = declared.boxes.take(rows).widened(int(ndim.max(initial=0)))
    own = np.arange(boxes.width) < ndim[tensor][:, None]
    # A key that is declared in several ways is several tensors, each without some boxes.
    keys = [entry.key for entry in declared.tensors]
    times = Counter(keys)
    flaws: dict[str, list[int]]
    flaws = {"tensor": [], "count": [], "offset": [], "extent": []}
    located = [n for n in problems if times[declared.tensors[n].key] == 1]
    for number in located[:MAX_LOCATED]:
        for box, count in _regions(declared, number):
            flaws["tensor"].append(number)
            flaws["count"].append(count)
            flaws["offset"] += box.offset
            flaws["extent"] += box.shape
    nbytes = np.bincount(tensor, columns["length"], len(ndim))
    return {
        "overview": overview_data(keys, nbytes.tolist()),
        "pieces": {
            "count": np.bincount(tensor, minlength=len(ndim)).tolist(),
            "offset": boxes.offset[own].tolist(),
            "extent": boxes.shape[own].tolist(),
            **{name: column.tolist() for name, column in columns.items()},
        },
        "problems": [[number, text] for number, text in problems.items()],
        "flaws": {**flaws, "most": MAX_REGIONS},
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
    rows = np.flatnonzero(leaves.any(axis=1)).tolist()
    outside = dict.fromkeys(boxes.row(row, len(shape)) for row in rows)
    for box in islice(outside, MAX_REGIONS):
        yield box, OUTSIDE
    yield from islice(miscounted(mine.boxes.take(mine.main), shape), MAX_REGIONS)


def overview_data(keys: Sequence[str], nbytes: Sequence[int]) -> dict[str, Any]:
    """The labels of the rows, and the numbers of the tensors of each."""
    # The key of a weight, or this key without the name of its object -> the key.
    weights = {}
    for key in keys:
        if "." in key and "optim" not in key:
            weights[key.partition(".")[2]] = key
    weights.update(zip(keys, keys, strict=True))
    parts = []
    for key in keys:
        own = tuple(key.split(".", 32))
        if "optim" in key:
            own = _weight_of(own, weights)
        parts.append(own)
    rows = _rows(parts, nbytes)
    names = sorted(rows, key=_natural)
    labels = [".".join(name) for name in names]
    return {"labels": labels, "tensors": [rows[name] for name in names], "ramp": RAMP}


def _weight_of(parts: Parts, weights: dict[str, str]) -> Parts:
    """The key of the weight that is within the key of an optimizer's tensor; else that key."""
    for begin in range(1, len(parts)):
        for end in (len(parts), len(parts) - 1):
            weight = weights.get(".".join(parts[begin:end]))
            if weight is not None:
                return tuple(weight.split(".", 32))
    return parts


def _rows(parts: Sequence[Parts], nbytes: Sequence[int]) -> dict[Parts, list[int]]:
    """The tensors of at most MAX_ROWS rows. The largest branches are split, down to layers."""
    rows: dict[Parts, list[int]] = {(): list(range(len(parts)))}
    waiting = dict.fromkeys(rows, 0)
    while waiting:
        branch = max(waiting, key=waiting.__getitem__)
        del waiting[branch]
        below: dict[Parts, list[int]] = defaultdict(list)
        for tensor in rows[branch]:
            below[parts[tensor][: len(branch) + 1]].append(tensor)
        room = MAX_ROWS - len(rows) + 1
        step = max(1, -(-len(below) // room))
        if step > 1 and room < 2:
            break
        del rows[branch]
        names = sorted(below, key=_natural)
        for start in range(0, len(names), step):
            # Where too many are below, neighbours share a row.
            group = names[start : start + step]
            name = group[0]
            if len(group) > 1:
                name = (*branch, f"{name[-1]}–{group[-1][-1]}")
            elif name != branch and not name[-1].isdecimal():
                waiting[name] = sum(nbytes[tensor] for tensor in below[name])
            rows[name] = [tensor for own in group for tensor in below[own]]
    return rows


def _natural(name: Parts) -> list[Any]:
    """Sorts layer 10 after layer 9."""
    pieces: list[Any] = re.split(r"(\d{1,9})", ".".join(name), flags=re.ASCII)
    pieces[1::2] = map(int, pieces[1::2])
    return pieces
