"""The range engine: the right bytes into the right places, few of them, and damage found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from megackpt.backends.base import Target
from megackpt.backends.ranges import SKIP, Pieces, read_raw
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    ITEMSIZE,
    Chunks,
    LoadPlan,
    Manifest,
    TensorEntry,
    TensorMeta,
)
from megackpt.storage import FileReader, LocalStorage, digest_blocks

CARRIED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


@dataclass
class Counting(LocalStorage):
    """A storage that counts calls and bytes read."""

    path: Path
    calls: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        LocalStorage.__init__(self, self.path, create=True)

    def open(self, name: str) -> FileReader:
        return _CountingReader(self, LocalStorage.open(self, name))


class _CountingReader(FileReader):
    def __init__(self, owner: Counting, inner: FileReader) -> None:
        self.owner, self.inner, self.size = owner, inner, inner.size
        self.expected: list[tuple[int, int]] = []

    def expect(self, spans: Iterable[tuple[int, int]]) -> None:
        self.expected = list(spans)
        assert all(0 <= start < stop for start, stop in self.expected)
        assert self.expected == sorted(self.expected, key=lambda span: span[0])

    def read_into(self, start: int, buffers: Sequence[memoryview]) -> None:
        self.owner.calls += 1
        self.owner.bytes += sum(b.nbytes for b in buffers)
        if (
            self.expected
        ):  # what is read was foretold, but for what is skipped between neighbours
            at = start
            for low, high in self.expected:
                at = max(at, high) if low <= at + SKIP else at
            assert at >= start + sum(b.nbytes for b in buffers)
        self.inner.read_into(start, buffers)

    def close(self) -> None:
        self.inner.close()


@dataclass
class Arrays(Target):
    """A target of numpy arrays; ``holders[i]`` is the box that ``arrays[i]`` fills."""

    arrays: list[NDArray[Any]]
    holders: list[Box]
    blobs: dict[int, bytes] = field(default_factory=dict)
    lent: int = 0

    def open(self, target: int, box: Box) -> NDArray[Any]:
        self.lent = max(self.lent, box.volume * self.arrays[target].itemsize)
        return self.arrays[target][
            (..., *box.relative_to(self.holders[target]).slices())
        ]

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        assert filled.shape == box.shape

    def blob(self, target: int, data: bytes) -> None:
        self.blobs[target] = data


def filled(shape: tuple[int, ...], itemsize: int, seed: int = 0) -> NDArray[Any]:
    octets = np.random.default_rng(seed).integers(0, 256, (*shape, itemsize), np.uint8)
    if itemsize == 16:
        octets = octets & 0x3F  # no NaN, which equals nothing
    return octets.view(CARRIED[itemsize]).reshape(shape)


class Stored:
    """Tensors written as raw chunks of one file, with gaps, and a manifest of them."""

    def __init__(
        self,
        path: Path,
        tensors: list[tuple[str, NDArray[Any], list[Box]]],
        gap: int = 100,
    ) -> None:
        self.root = Counting(path)
        self.tensors = tensors
        content, digests = bytearray(b"#" * 37), b""
        start, length, number, boxes = [], [], [], []
        for i, (_, whole, cut) in enumerate(tensors):
            for box in cut:
                raw = np.ascontiguousarray(whole[box.slices()]).tobytes()
                number.append(i)
                boxes.append(box)
                start.append(len(content))
                length.append(len(raw))
                digests += digest_blocks(memoryview(raw))
                content += raw + b"#" * gap
        self.root.put("data", bytes(content))
        entries = tuple(
            TensorEntry(key, TensorMeta(whole.shape, _dtype(whole)))
            for key, whole, _ in tensors
        )
        chunks = Chunks(
            np.array(number, np.int32),
            Boxes.of(boxes),
            np.zeros(len(boxes), np.int32),
            np.zeros(len(boxes), np.int32),
            np.array(start, np.int64),
            np.array(length, np.int64),
            np.frombuffer(digests, np.uint8).reshape(-1, 16),
        )
        self.manifest = Manifest(entries, (None,) * len(entries), chunks, ("data",))

    def plan(self, wanted: list[tuple[int, Box]]) -> LoadPlan:
        rows, boxes, target = [], [], []
        at = 0
        for i, (_, _, cut) in enumerate(self.tensors):
            for n, box in enumerate(cut):
                for t, (tensor, region) in enumerate(wanted):
                    common = region.intersect(box) if tensor == i else None
                    if common is not None:
                        rows.append(at + n)
                        boxes.append(common)
                        target.append(t)
            at += len(cut)
        return LoadPlan(
            self.manifest,
            np.array(rows, np.int64),
            Boxes.of(boxes),
            np.array(target, np.int64),
        )

    def read(
        self,
        wanted: list[tuple[int, Box]],
        verify: bool,
        arrays: list[NDArray[Any]] | None = None,
    ) -> Arrays:
        if arrays is None:
            arrays = [
                np.zeros(box.shape, self.tensors[i][1].dtype) for i, box in wanted
            ]
        target = Arrays(arrays, [box for _, box in wanted])
        self.root.calls = self.root.bytes = 0
        read_raw(self.root, self.plan(wanted), target, verify)
        for (i, box), array in zip(wanted, arrays, strict=True):
            np.testing.assert_array_equal(array, self.tensors[i][1][box.slices()])
        return target


def _dtype(array: NDArray[Any]) -> str:
    return next(name for name, size in ITEMSIZE.items() if size == array.itemsize)


def slabs(shape: tuple[int, ...], axis: int, count: int) -> list[Box]:
    """The tensor cut along one axis."""
    edges = np.linspace(0, shape[axis], count + 1).astype(int).tolist()
    boxes = []
    for low, high in pairwise(edges):
        offset, extent = [0] * len(shape), list(shape)
        offset[axis], extent[axis] = low, high - low
        boxes.append(Box(tuple(offset), tuple(extent)))
    return boxes


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], int, list[Box], Box, bool]:
    ndim = draw(st.integers(0, 4))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=ndim, max_size=ndim)))
    itemsize = draw(st.sampled_from(sorted(CARRIED)))
    cut = [Box.whole(shape)]
    if ndim:
        cut = slabs(shape, draw(st.integers(0, ndim - 1)), draw(st.integers(1, 3)))
    low = [draw(st.integers(0, n - 1)) for n in shape]
    high = [draw(st.integers(a + 1, n)) for a, n in zip(low, shape, strict=True)]
    region = Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))
    return shape, itemsize, cut, region, draw(st.booleans())


@settings(max_examples=80, deadline=None)
@given(layout=layouts(), verify=st.booleans())
def test_any_region_of_any_cut(
    tmp_path_factory: pytest.TempPathFactory,
    layout: tuple[tuple[int, ...], int, list[Box], Box, bool],
    verify: bool,
) -> None:
    shape, itemsize, cut, region, strided = layout
    stored = Stored(
        tmp_path_factory.mktemp("raw"), [("w", filled(shape, itemsize), cut)]
    )
    array = np.zeros(region.shape, CARRIED[itemsize])
    if strided and region.shape:
        array = np.zeros((*region.shape[::-1], 2), CARRIED[itemsize])[..., 0].T
    stored.read([(0, region)], verify, [array])


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("parts", [(2, 1), (1, 2), (2, 4), (3, 2)])
def test_resharding_large_tensors(
    tmp_path: Path, axis: int, parts: tuple[int, int], verify: bool
) -> None:
    shape = (1500, 1300)
    stored = Stored(tmp_path, [("w", filled(shape, 4), slabs(shape, axis, parts[0]))])
    stored.read([(0, box) for box in slabs(shape, axis, parts[1])], verify)
    stored.read([(0, box) for box in slabs(shape, 1 - axis, parts[1])], verify)
    wide = np.zeros((1500, 2600), np.uint32)[:, 700:2000]
    stored.read([(0, Box.whole(shape))], verify, [wide])


def test_an_eighth_along_the_first_axis_reads_no_more_than_it_needs(
    tmp_path: Path,
) -> None:
    shape = (4096, 600)
    tensors = [(f"w{i}", filled(shape, 2, i), slabs(shape, 0, 2)) for i in range(2)]
    stored = Stored(tmp_path, tensors)
    eighth = slabs(shape, 0, 8)[3]
    stored.read([(i, eighth) for i in range(2)], verify=False)
    assert stored.root.bytes == 2 * eighth.volume * 2
    stored.read([(i, eighth) for i in range(2)], verify=True)
    assert stored.root.bytes <= 2 * (eighth.volume * 2 + 2 * DIGEST_BLOCK)


def test_an_eighth_along_the_last_axis_skips_large_gaps(tmp_path: Path) -> None:
    shape = (64, 80000)
    stored = Stored(tmp_path, [("w", filled(shape, 4), [Box.whole(shape)])])
    eighth = slabs(shape, 1, 8)[5]
    stored.read([(0, eighth)], verify=False)
    assert stored.root.bytes == eighth.volume * 4
    assert stored.root.calls == 64


def test_distant_runs_are_not_announced(tmp_path: Path) -> None:
    """An object store would fetch what lies between them along: asked for one by one they cost less."""
    whole = filled((3, 3 << 20), 4)
    stored = Stored(tmp_path, [("w", whole, [Box.whole(whole.shape)])])
    for width, foretold in ((1 << 18, False), (5 << 18, False), (2 << 20, True)):
        plan = stored.plan([(0, Box((0, 0), (3, width)))])
        pieces = Pieces.of(plan, np.arange(len(plan)))
        assert len(list(pieces.spans(slice(None), checked=False))) == (
            len(pieces) if foretold else 0
        )
        assert len(list(pieces.spans(slice(None), checked=True))) == len(pieces)


def test_short_rows_are_read_with_their_gaps_by_few_calls(tmp_path: Path) -> None:
    shape = (2000, 256)
    stored = Stored(tmp_path, [("w", filled(shape, 4), [Box.whole(shape)])])
    stored.read([(0, slabs(shape, 1, 8)[2])], verify=False)
    assert stored.root.calls <= 4


def test_small_neighbours_share_calls(tmp_path: Path) -> None:
    tensors = [
        (f"w{i}", filled((1000 + i,), 4, i), [Box.whole((1000 + i,))])
        for i in range(300)
    ]
    stored = Stored(tmp_path, tensors, gap=700)
    for verify in (False, True):
        stored.read(
            [(i, Box.whole(t.shape)) for i, (_, t, _) in enumerate(tensors)], verify
        )
        assert stored.root.calls <= 12


def test_a_digest_block_wanted_by_several_rows_is_read_once(tmp_path: Path) -> None:
    shape = (40, 1000)
    stored = Stored(tmp_path, [("w", filled(shape, 4), [Box.whole(shape)])])
    stored.read([(0, box) for box in slabs(shape, 0, 5)], verify=True)
    assert stored.root.bytes == 40 * 1000 * 4


def test_the_target_lends_bounded_memory(tmp_path: Path) -> None:
    shape = (3, 13 << 20)
    stored = Stored(tmp_path, [("w", filled(shape, 1), [Box.whole(shape)])])
    assert 8 << 20 < stored.read([(0, Box.whole(shape))], verify=True).lent <= 32 << 20


def test_empty_and_zero_dimensional(tmp_path: Path) -> None:
    stored = Stored(
        tmp_path,
        [
            ("e", filled((0, 3), 4), [Box.whole((0, 3))]),
            ("s", filled((), 8), [Box((), ())]),
        ],
    )
    plan = LoadPlan(
        stored.manifest,
        np.array([0, 1]),
        Boxes.of([Box.whole((0, 3)), Box((), ())]),
        np.array([0, 1]),
    )
    target = Arrays(
        [np.zeros((0, 3), np.uint32), np.zeros((), np.uint64)],
        [Box.whole((0, 3)), Box((), ())],
    )
    read_raw(stored.root, plan, target, verify=True)
    assert target.arrays[1] == stored.tensors[1][1]


@pytest.mark.parametrize(
    "region",
    [Box.whole((600, 1000)), Box((250, 0), (30, 1000)), Box((0, 10), (600, 20))],
)
def test_the_error_for_a_flipped_bit_names_key_file_and_block(
    tmp_path: Path, region: Box
) -> None:
    shape = (600, 1000)
    stored = Stored(tmp_path, [("w", filled(shape, 4), [Box.whole(shape)])])
    path = tmp_path / "data"
    data = bytearray(path.read_bytes())
    place = 37 + 270 * 4000 + 41  # row 270 is in block 1
    data[place] ^= 4
    path.write_bytes(data)
    with pytest.raises(
        CorruptCheckpoint,
        match=r"'w' \[0:600, 0:1000\] in data is damaged.* block 1 \(from byte",
    ):
        stored.read([(0, region)], verify=True)


def test_a_flipped_bit_in_a_small_tensor(tmp_path: Path) -> None:
    tensors = [(f"w{i}", filled((100,), 4, i), [Box.whole((100,))]) for i in range(9)]
    stored = Stored(tmp_path, tensors)
    path = tmp_path / "data"
    data = bytearray(path.read_bytes())
    data[37 + 4 * 500 + 3] ^= 128
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="'w4'"):
        stored.read([(i, Box.whole((100,))) for i in range(9)], verify=True)


def test_a_truncated_and_a_missing_file(tmp_path: Path) -> None:
    shape = (600, 1000)
    stored = Stored(tmp_path, [("w", filled(shape, 4), [Box.whole(shape)])])
    path = tmp_path / "data"
    path.write_bytes(path.read_bytes()[:-5000])
    for verify in (False, True):
        with pytest.raises(CorruptCheckpoint, match="data"):
            stored.read([(0, Box.whole(shape))], verify)
    path.unlink()
    with pytest.raises(CorruptCheckpoint, match="'data' of the checkpoint is missing"):
        stored.read([(0, Box.whole(shape))], verify=False)


def test_a_chunk_of_the_wrong_length(tmp_path: Path) -> None:
    stored = Stored(tmp_path, [("w", filled((8, 8), 4), [Box.whole((8, 8))])])
    stored.manifest.chunks.length[0] -= 4
    with pytest.raises(CorruptCheckpoint, match="'w'"):
        stored.read([(0, Box.whole((8, 8)))], verify=False)
