"""Compares two checkpoints: by digests, and by reading the tensors that digests do not decide.

Digests decide about tensors that both checkpoints cut into the same chunks. Objects with other
digests are read, because equal objects may have different pickles. Equal means equal bit for bit,
unless a tolerance is given.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from megackpt import events
from megackpt.checkpoint import Opened
from megackpt.errors import CorruptCheckpoint
from megackpt.loader.regions import Regions
from megackpt.planning.box import Box
from megackpt.planning.manifest import Manifest, TensorMeta, TensorParts

PIECE = 1 << 20
"""Elements that are read and compared at once; as float64 they take 8 MiB."""
FIRST = 5
"""Number of differing elements that are listed for a tensor."""
_BOX_COST = 256
"""Elements that cost as much time as reading one more box."""

Raw = NDArray[Any]


class Described(NamedTuple):
    """A key with different shapes or dtypes."""

    key: str
    a: TensorMeta
    b: TensorMeta


class Element(NamedTuple):
    """A differing element, and its values."""

    index: tuple[int, ...]  # type: ignore[assignment]
    a: Any
    b: Any


class Change(NamedTuple):
    """A differing part of an object. A side without a value at ``path`` has ``...``."""

    path: tuple[Any, ...]
    a: Any
    b: Any


@dataclass(frozen=True)
class Tolerance:
    """Elements are equal if ``|a - b| <= absolute + relative * |b|``, or if both are NaN."""

    relative: float = 0.0
    absolute: float = 0.0


class Noted(NamedTuple):
    """A save's notes on the values of a tensor, see ``Strategy.check_values``."""

    nonfinite: int
    largest: float


@dataclass
class TensorDifference:
    """Differing elements of one tensor."""

    key: str
    total: int
    """Number of elements of the tensor."""
    elements: int | None = 0
    """Number of elements that differ. None: digests differ, and the tensor was not read."""
    max: float | None = math.nan
    """The largest absolute difference; NaN if a side of every differing element is NaN."""
    distance: float | None = None
    """The Euclidean norm of A - B; None if the tensor was not read."""
    norm: float | None = None
    """The Euclidean norm of B in the chunks that were read, which are the chunks that differ."""
    noted_a: Noted | None = None
    noted_b: Noted | None = None
    first: list[Element] = field(default_factory=list)
    """The first differing elements, in C order."""


@dataclass(frozen=True)
class ObjectDifference:
    """Differing parts of one object, or of the common state."""

    key: str
    offset: tuple[int, ...]
    changes: tuple[Change, ...]


@dataclass
class Comparison:
    """Everything that differs between two checkpoints."""

    compared: int = 0
    """Keys in both checkpoints."""
    by_digest: int = 0
    """Keys whose digests have decided, without reading, whether they are equal."""
    by_data: int = 0
    """Keys that were read."""
    bytes_read: int = 0
    """From both checkpoints."""
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    described: list[Described] = field(default_factory=list)
    """If only the dtypes differ, values are compared, too."""
    tensors: list[TensorDifference] = field(default_factory=list)
    objects: list[ObjectDifference] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether the checkpoints do not differ."""
        found = (self.only_a, self.only_b, self.described, self.tensors, self.objects)
        return not any(found)


def compare(
    a: Opened,
    b: Opened,
    select: str = "*",
    tolerance: Tolerance | None = None,
    read: bool = False,
) -> Comparison:
    """Compare the keys that match the pattern ``select``; the common state is "common_state".

    With ``read`` or a tolerance, chunks whose digests differ are read, and elements compared.
    Memory is bounded: some tens of MiB, and the largest object.

    Raises:
        CorruptCheckpoint: a checkpoint cannot be read.
    """
    side_a, side_b = _Side(a, select), _Side(b, select)
    result = Comparison()
    result.only_b = [key for key in side_b.numbers if key not in side_a.numbers]
    regions: list[tuple[str, Box]] = []
    shards: list[tuple[str, Box]] = []
    by_digest: list[TensorDifference] = []
    with events.operation("diff", a.storage.location), events.stage("read") as stage:
        for key in side_a.numbers:
            if key not in side_b.numbers:
                result.only_a.append(key)
                continue
            result.compared += 1
            meta_a, meta_b = side_a.meta(key), side_b.meta(key)
            if meta_a != meta_b:
                result.described.append(Described(key, meta_a, meta_b))
            if meta_a.shape != meta_b.shape or meta_a.is_object != meta_b.is_object:
                continue
            in_a, in_b = side_a.chunk_digests(key), side_b.chunk_digests(key)
            boxes = list(in_a)
            if meta_a.is_object:
                boxes = sorted({*in_a, *in_b})
            is_comparable = side_a.has_digests and side_b.has_digests
            is_comparable &= meta_a == meta_b and in_a.keys() == in_b.keys()
            if is_comparable:
                boxes = [box for box in boxes if in_a[box] != in_b[box]]
            boxes = [box for box in boxes if box.volume]
            is_read = read or tolerance is not None or meta_a.is_object
            if boxes and is_comparable and not is_read:
                total = math.prod(meta_a.shape)
                by_digest.append(TensorDifference(key, total, None, None))
                boxes = []
            if boxes:
                result.by_data += 1
            else:
                result.by_digest += 1
            for box in boxes:
                if meta_a.is_object:
                    shards.append((key, box))
                    continue
                regions.append((key, box))
                stage.todo += box.volume * (meta_a.itemsize + meta_b.itemsize)
        by_data = _compare_tensors(regions, side_a, side_b, tolerance, stage)
        result.tensors = sorted(
            by_digest + by_data, key=lambda found: side_a.numbers[found.key]
        )
        for found in result.tensors:
            found.noted_a, found.noted_b = (
                side_a.noted(found.key),
                side_b.noted(found.key),
            )
        result.objects = list(_compare_objects(shards, side_a, side_b, stage))
        result.bytes_read = events.current().operation.bytes = stage.done
    return result


class _Side:
    """One of the two checkpoints. ``numbers``: matching key -> number of the tensor."""

    def __init__(self, opened: Opened, select: str) -> None:
        self.location = opened.storage.location
        self.manifest: Manifest = opened.manifest
        self._regions = Regions(opened)
        self.has_digests = len(opened.manifest.chunks.digests) > 0
        self.has_digests &= not opened.backend.properties.is_delta
        self._parts = TensorParts(opened.manifest)
        self.numbers: dict[str, int] = {}
        for key, number in opened.manifest.numbers().items():
            if fnmatch.fnmatchcase(key, select):
                self.numbers[key] = number

    def meta(self, key: str) -> TensorMeta:
        return self.manifest.tensors[self.numbers[key]].meta

    def noted(self, key: str) -> Noted | None:
        values, number = self.manifest.values, self.numbers[key]
        if values is None or values.nonfinite[number] < 0:
            return None
        return Noted(int(values.nonfinite[number]), float(values.largest[number]))

    def read(self, pieces: Sequence[tuple[str, Box]]) -> list[Raw]:
        return self._regions.arrays([(self.numbers[key], box) for key, box in pieces])

    def read_object(self, key: str, box: Box) -> bytes | None:
        """The blob of one shard, if this checkpoint has it."""
        if box not in self.chunk_digests(key):
            return None
        return self._regions.blobs([(self.numbers[key], box)])[0]

    def chunk_digests(self, key: str) -> dict[Box, bytes]:
        """The digests of all blocks of each chunk. Raises CorruptCheckpoint for holes."""
        chunks, meta = self.manifest.chunks, self.meta(key)
        found = {}
        for row in self._parts.rows(self.numbers[key]).tolist():
            box = chunks.boxes.row(row, len(meta.shape))
            blocks = self.manifest.chunk(row).digests
            found[box] = blocks.tobytes()
        volume = sum(box.volume for box in found)
        # Where B has holes or overlaps, reading the boxes of A from it fails.
        if volume != math.prod(meta.shape) and not meta.is_object:
            raise CorruptCheckpoint(
                f"{self.location}: the chunks of {key!r} hold {volume} elements, "
                f"but its shape {meta.shape} has {math.prod(meta.shape)}"
            )
        return found


def _batches(
    regions: Sequence[tuple[str, Box]],
) -> Iterator[list[tuple[str, Box]]]:
    """Pieces that are read together, of at most PIECE elements.

    To read many small tensors one by one takes ten times as long.
    """
    batch: list[tuple[str, Box]] = []
    volume = 0
    for key, box in regions:
        for start in range(0, box.volume, PIECE):
            # A range of elements in C order is not always a box, but always a few boxes.
            for piece in box.runs(start, min(start + PIECE, box.volume)):
                if batch and volume + piece.volume > PIECE:
                    yield batch
                    batch, volume = [], 0
                batch.append((key, piece))
                volume += max(piece.volume, _BOX_COST)
    if batch:
        yield batch


def _compare_tensors(
    regions: Sequence[tuple[str, Box]],
    a: _Side,
    b: _Side,
    tolerance: Tolerance | None,
    stage: events.Stage,
) -> list[TensorDifference]:
    found: dict[str, TensorDifference] = {}
    for batch in _batches(regions):
        arrays_a, arrays_b = a.read(batch), b.read(batch)
        for (key, box), x, y in zip(batch, arrays_a, arrays_b, strict=True):
            meta = a.meta(key)
            empty = TensorDifference(key, math.prod(meta.shape))
            dtypes = meta.dtype, b.meta(key).dtype
            _compare_elements(
                found.setdefault(key, empty), box, x, y, dtypes, tolerance
            )
            stage.advance(x.nbytes + y.nbytes)
    return [difference for difference in found.values() if difference.elements]


def _compare_elements(
    found: TensorDifference,
    box: Box,
    a: Raw,
    b: Raw,
    dtypes: tuple[str, str],
    tolerance: Tolerance | None,
) -> None:
    """Compare the raw elements of one region of a tensor."""
    a, b = a.reshape(-1), b.reshape(-1)
    has_one_dtype = dtypes[0] == dtypes[1]
    rows = np.arange(len(a))
    if has_one_dtype and a.dtype.itemsize < 16:
        rows = np.flatnonzero(a != b)
    elif has_one_dtype:
        # numpy has no integers of 16 bytes: an element is two of 8.
        halves = a.view(np.uint64) != b.view(np.uint64)
        rows = np.flatnonzero(halves[0::2] | halves[1::2])
    # Any bits may be stored: infinities, signalling NaNs, numbers that overflow.
    with np.errstate(all="ignore"):
        whole = _values(b, dtypes[1])
        found.norm = math.hypot(found.norm or 0, np.linalg.norm(whole))
        x, y = _values(a[rows], dtypes[0]), _values(b[rows], dtypes[1])
        if x.dtype == y.dtype and x.dtype.kind in "iu":
            # Modulo 2**64 the result is right even if the subtraction overflows.
            larger, smaller = np.maximum(x, y), np.minimum(x, y)
            distance = larger.view(np.uint64) - smaller.view(np.uint64)
        else:
            # Integers become floats before they overflow.
            distance = np.abs(x * 1.0 - y * 1.0)
        if tolerance is not None or not has_one_dtype:
            tolerance = tolerance or Tolerance()
            limit = tolerance.absolute + tolerance.relative * np.abs(y * 1.0)
            is_close = (x == y) | (np.isnan(x) & np.isnan(y))
            is_close |= (distance <= limit) & np.isfinite(distance)
            differs = np.flatnonzero(~is_close)
            rows, x, y = rows[differs], x[differs], y[differs]
            distance = distance[differs]
        if not len(rows):
            return
        largest = np.fmax.reduce(distance).item()
        found.distance = math.hypot(found.distance or 0, np.linalg.norm(distance))
    found.elements = (found.elements or 0) + len(rows)
    if found.max is None or math.isnan(found.max) or largest > found.max:
        found.max = largest
    for i in range(min(FIRST, len(rows))):
        place = np.unravel_index(int(rows[i]), box.shape)
        index = tuple(int(p) + o for p, o in zip(place, box.offset, strict=True))
        found.first.append(Element(index, x[i].item(), y[i].item()))
    found.first.sort(key=lambda element: element[0])
    del found.first[FIRST:]


def _values(raw: Raw, dtype: str) -> Raw:
    """Raw elements as int64, uint64, float64 or complex128, without loss."""
    if dtype == "bool":
        return np.asarray(raw != 0, np.int64)
    if dtype == "complex32":
        return np.asarray(raw.view(np.float16), np.float64).view(np.complex128)
    typed = raw.view(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    wide = {"i": np.int64, "u": np.uint64, "c": np.complex128}
    return np.asarray(typed.astype(wide.get(typed.dtype.kind, np.float64)))


def _compare_objects(
    shards: Sequence[tuple[str, Box]], a: _Side, b: _Side, stage: events.Stage
) -> Iterator[ObjectDifference]:
    if not shards:
        return
    # Imports torch.
    from megackpt.serialization.inspection import look

    for key, box in shards:
        blobs = a.read_object(key, box), b.read_object(key, box)
        stage.advance(sum(len(blob) for blob in blobs if blob))
        if blobs[0] == blobs[1]:
            continue
        values: list[Any] = []
        for side, blob in zip((a, b), blobs, strict=True):
            where = f"{side.location}: {key!r} {box}"
            values.append(... if blob is None else look(blob, where))
        if changes := tuple(object_changes(*values)):
            yield ObjectDifference(key, box.offset, changes)


def object_changes(a: Any, b: Any, path: tuple[Any, ...] = ()) -> Iterator[Change]:
    """The parts in which two inspected objects differ: in dicts and lists, and in their leaves."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            yield from object_changes(a.get(key, ...), b.get(key, ...), (*path, key))
    elif isinstance(a, list) and isinstance(b, list):
        for i, (x, y) in enumerate(zip_longest(a, b, fillvalue=...)):
            yield from object_changes(x, y, (*path, i))
    else:
        from megackpt.serialization.inspection import UNSEEN

        # Parts that were too deep to inspect are not known to be equal.
        is_same = type(a) is type(b) and a is not UNSEEN
        if is_same and isinstance(a, float | complex | np.generic):
            # 0.0 and -0.0 differ; NaN equals NaN.
            is_same = repr(a) == repr(b)
        elif is_same and hasattr(a, "dtype") and hasattr(a, "shape"):
            is_same = a.dtype == b.dtype and a.shape == b.shape
            is_same = is_same and _array_bytes(a) == _array_bytes(b) is not None
        elif is_same:
            is_same = a == b
        if not is_same:
            yield Change(path, a, b)


def _array_bytes(array: Any) -> bytes | None:
    """The elements of an array or tensor; None for a tensor with more elements than storage."""
    if isinstance(array, np.ndarray):
        return array.tobytes()
    if array.numel() * array.element_size() > array.untyped_storage().nbytes():
        return None
    import torch

    # contiguous() would keep odd strides of dimensions of length 1.
    dense = array.detach().resolve_conj().resolve_neg()
    dense = dense.clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(dense.view(torch.uint8).numpy().tobytes())
