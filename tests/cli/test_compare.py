"""Comparing two checkpoints: the figures are right, and equal digests save the reading."""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import megackpt
from megackpt import ShardedObject, ShardedTensor
from megackpt.checkpoint import INDEX, open_checkpoint
from megackpt.checkpoint.index import decode_index, encode_index
from megackpt.cli import compare as module
from megackpt.cli.compare import (
    Comparison,
    TensorDifference,
    Tolerance,
    compare,
    object_changes,
)
from megackpt.loader.regions import Regions
from megackpt.planning.box import Box
from megackpt.planning.manifest import ITEMSIZE, OBJECT
from megackpt.staging.source import host_array

MIB = 1 << 20


def cut(
    key: str, tensor: torch.Tensor, pieces: int, axis: int = 0
) -> list[ShardedTensor]:
    parts = tensor.chunk(pieces, axis)
    return [
        ShardedTensor.from_rank_offsets(key, p.contiguous(), (axis, i, pieces))
        for i, p in enumerate(parts)
    ]


def saved(
    folder: Path, name: str, state: dict[str, Any], to: str = "torch_dist"
) -> Path:
    megackpt.save(state, folder / name, to)
    return folder / name


def found(a: Path, b: Path, **options: Any) -> Comparison:
    options = {"read": True, **options}
    return compare(open_checkpoint(a), open_checkpoint(b), **options)


def test_equal_digests_are_enough(tmp_path: Path) -> None:
    def state() -> dict[str, Any]:
        return {
            "w": cut("w", torch.arange(64.0).reshape(8, 8), 2),
            "o": ShardedObject("o", {"a": 1}, (1,), (0,)),
        }

    a, b = saved(tmp_path, "a", state()), saved(tmp_path, "b", state())
    result = found(a, b)
    assert result.same
    assert (result.compared, result.by_digest, result.bytes_read) == (3, 3, 0)


def strip(checkpoint: Path) -> None:
    """Cut all of its files that hold data to nothing."""
    names = set(open_checkpoint(checkpoint).manifest.files)
    assert names
    for name in names:
        (checkpoint / name).write_bytes(b"")


@pytest.mark.parametrize("formats", [("torch_dist", "zarr"), ("safetensors",) * 2])
def test_digests_decide_without_the_data(
    tmp_path: Path, formats: tuple[str, str]
) -> None:
    def state(change: float) -> dict[str, Any]:
        w = torch.arange(64.0).reshape(8, 8)
        return {
            "same": cut("same", w, 2),
            "other": cut("other", w + change, 2),
            "byte": cut("byte", torch.zeros(4).byte() + int(change), 1),
            "empty": cut("empty", torch.zeros(0), 1),
            "nan": cut("nan", torch.full((3,), float("nan")), 1),
        }

    sides = []
    for name, change, to in zip("ab", (0.0, 1.0), formats, strict=True):
        strategy = megackpt.Strategy(to, check_values="note")
        megackpt.save(state(change), tmp_path / name, strategy)
        sides.append(tmp_path / name)
    for side in sides:
        strip(side)
    result = found(*sides, read=False)
    assert (result.compared, result.by_digest, result.by_data) == (6, 6, 0)
    assert result.bytes_read == 0
    assert [(t.key, t.elements, t.total) for t in result.tensors] == [
        ("other", None, 64),
        ("byte", None, 4),
    ]
    assert [(t.noted_a, t.noted_b) for t in result.tensors] == [
        ((0, 63.0), (0, 64.0)),
        (None, None),
    ]
    assert not result.objects
    for options in ({"read": True}, {"tolerance": Tolerance(1.0)}):
        with pytest.raises(megackpt.CorruptCheckpoint):
            found(*sides, **{"read": False, **options})


def test_a_chunk_twice_does_not_fill_a_hole(tmp_path: Path) -> None:
    """Neither where both sides have it, whose digests are then equal."""
    for name in "ab":
        path = saved(tmp_path, name, {"w": cut("w", torch.arange(8.0), 2)}) / INDEX
        manifest, small = decode_index(path.read_bytes())
        rows = np.arange(len(manifest.chunks))
        first, second = np.flatnonzero(
            manifest.chunks.tensor == manifest.numbers()["w"]
        )
        rows[second] = first
        forged = replace(manifest, chunks=manifest.chunks.take(rows))
        path.write_bytes(encode_index(forged, small))
    with pytest.raises(megackpt.CorruptCheckpoint, match="hold 4 elements"):
        found(tmp_path / "a", tmp_path / "b", read=False)


def test_what_digests_do_not_decide_is_read(tmp_path: Path) -> None:
    """Other cuts, other dtypes, objects, and checkpoints without digests."""
    w = torch.arange(64.0).reshape(8, 8)

    def state(pieces: int, dtype: torch.dtype, seed: int) -> dict[str, Any]:
        return {
            "cut": cut("cut", w, pieces),
            "dtype": cut("dtype", w.to(dtype), 2),
            "alike": cut("alike", w + seed, 2),
            "o": ShardedObject("o", {"seed": seed}, (1,), (0,)),
        }

    a = saved(tmp_path, "a", state(2, torch.float32, 1))
    b = saved(tmp_path, "b", state(4, torch.bfloat16, 2))
    result = found(a, b, read=False)
    assert (result.compared, result.by_digest, result.by_data) == (5, 2, 3)
    assert result.bytes_read >= w.nbytes * (2 + 1.5)
    assert [(t.key, t.elements) for t in result.tensors] == [("alike", None)]
    assert [one.changes for one in result.objects] == [(((0, "seed"), 1, 2),)]
    strategy = megackpt.Strategy("safetensors", options={"index": False})
    tensors = {"w": cut("w", w, 1), "v": cut("v", w, 1)}
    megackpt.save(tensors, tmp_path / "c", strategy)
    tensors["v"] = cut("v", w + 1, 1)
    d = saved(tmp_path, "d", tensors, "safetensors")
    result = found(tmp_path / "c", d, read=False)
    assert (result.by_digest, result.by_data) == (0, 2)
    assert [(t.key, t.elements) for t in result.tensors] == [("v", 64)]


def test_other_cuts_and_formats_are_read(tmp_path: Path) -> None:
    w = torch.arange(64.0).reshape(8, 8)
    a = saved(tmp_path, "a", {"w": cut("w", w, 2)})
    for name, pieces, axis, to in (
        ("b", 4, 0, "torch_dist"),
        ("c", 2, 1, "torch_dist"),
        ("d", 4, 1, "zarr"),
    ):
        result = found(a, saved(tmp_path, name, {"w": cut("w", w, pieces, axis)}, to))
        assert result.same
        assert result.bytes_read >= 2 * w.nbytes


def test_only_the_chunks_that_differ_are_read(tmp_path: Path) -> None:
    w = torch.zeros(4, 1000)
    a = saved(tmp_path, "a", {"w": cut("w", w, 4)})
    w[2, 17] = 2.0
    result = found(a, saved(tmp_path, "b", {"w": cut("w", w, 4)}))
    (tensor,) = result.tensors
    assert result.bytes_read == 2 * 4000
    assert (tensor.elements, tensor.max, tensor.total) == (1, 2.0, 4000)
    assert tensor.first == [((2, 17), 0.0, 2.0)]


def test_large_tensors_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", 500)
    sizes = []
    w = torch.arange(6000, dtype=torch.int16).reshape(60, 100)
    a = saved(tmp_path, "a", {"w": cut("w", w, 3, 0), "v": cut("v", w + 1, 1)})
    b = saved(tmp_path, "b", {"w": cut("w", w.flip(1), 2, 1), "v": cut("v", w, 2)})
    arrays = Regions.arrays

    def measured(self: Regions, regions: Any) -> Any:
        got = arrays(self, regions)
        sizes.append(sum(array.nbytes for array in got))
        return got

    monkeypatch.setattr(Regions, "arrays", measured)
    result = found(a, b)
    assert max(sizes) <= 1000
    by_key = {tensor.key: tensor for tensor in result.tensors}
    assert (by_key["w"].elements, by_key["w"].max) == (6000, 99)
    assert [index for index, *_ in by_key["w"].first] == [(0, i) for i in range(5)]
    assert (by_key["v"].elements, by_key["v"].max) == (6000, 1)


def test_keys_shapes_and_dtypes(tmp_path: Path) -> None:
    a = saved(
        tmp_path,
        "a",
        {
            "x": cut("x", torch.ones(4), 1),
            "y": cut("y", torch.ones(4), 1),
            "n": cut("n", torch.ones(4), 1),
        },
    )
    b = saved(
        tmp_path,
        "b",
        {
            "x": cut("x", torch.ones(5), 1),
            "y": cut("y", torch.ones(4).bfloat16(), 1),
            "z": cut("z", torch.ones(4), 1),
        },
    )
    result = found(a, b)
    assert (result.only_a, result.only_b) == (["n"], ["z"])
    assert {
        (key, mine.shape, yours.shape) for key, mine, yours in result.described
    } == {
        ("x", (4,), (5,)),
        ("y", (4,), (4,)),
    }
    assert not result.tensors  # y holds the same values, whatever their dtype
    assert not result.same
    assert found(a, b, select="no*").same
    assert not found(a, b, select="n*").same


def test_values_of_other_dtypes_are_compared(tmp_path: Path) -> None:
    w = torch.tensor([1.0, 1.0 + 2**-10, float("nan"), float("inf")])
    a, b = (
        saved(tmp_path, "a", {"w": cut("w", w, 1)}),
        saved(tmp_path, "b", {"w": cut("w", w.bfloat16(), 1)}),
    )
    (tensor,) = found(a, b).tensors
    assert (tensor.elements, tensor.max) == (1, 2**-10)
    assert not found(a, b, tolerance=Tolerance(absolute=1e-3)).tensors


def test_nans(tmp_path: Path) -> None:
    nan = float("nan")
    a = saved(tmp_path, "a", {"w": cut("w", torch.tensor([nan, 1.0, nan, 2.0]), 1)})
    b = saved(tmp_path, "b", {"w": cut("w", torch.tensor([nan, nan, 3.0, 5.0]), 1)})
    (tensor,) = found(a, b).tensors
    assert (tensor.elements, tensor.max) == (3, 3.0)  # 2.0 and 5.0
    c = saved(tmp_path, "c", {"w": cut("w", torch.tensor([nan, nan, nan, 2.0]), 1)})
    (tensor,) = found(a, c).tensors
    assert tensor.elements == 1
    assert math.isnan(tensor.max)


def test_norms_tell_how_far_a_tensor_has_moved(tmp_path: Path) -> None:
    """The norm of B is of the chunks that differ."""
    before = torch.ones(4, 2)
    after = before.clone()
    after[2] = torch.tensor([4.0, 5.0])
    a = saved(tmp_path, "a", {"w": cut("w", before, 4), "v": cut("v", before, 1)})
    b = saved(tmp_path, "b", {"w": cut("w", after, 4), "v": cut("v", after, 1)})
    by_key = {found.key: found for found in found(a, b, read=True).tensors}
    assert by_key["w"].distance == by_key["v"].distance == 5.0
    assert by_key["w"].norm == pytest.approx(math.sqrt(16 + 25))
    assert by_key["v"].norm == pytest.approx(math.sqrt(6 + 16 + 25))


def test_a_tensor_that_was_not_read_has_no_norm(tmp_path: Path) -> None:
    a = saved(tmp_path, "a", {"w": cut("w", torch.ones(4), 2)})
    b = saved(tmp_path, "b", {"w": cut("w", torch.zeros(4), 2)})
    (tensor,) = found(a, b, read=False).tensors
    assert (tensor.elements, tensor.distance, tensor.norm) == (None, None, None)


def test_bits_decide_unless_a_tolerance_is_given(tmp_path: Path) -> None:
    a = saved(tmp_path, "a", {"w": cut("w", torch.tensor([0.0, 1.0]), 1)})
    b = saved(tmp_path, "b", {"w": cut("w", torch.tensor([-0.0, 1.01]), 1)})
    assert found(a, b).tensors[0].elements == 2
    assert found(a, b, tolerance=Tolerance()).tensors[0].elements == 1
    assert found(a, b, tolerance=Tolerance(relative=0.02)).same
    assert found(a, b, tolerance=Tolerance(absolute=0.02)).same
    assert not found(a, b, tolerance=Tolerance(relative=0.005)).same


def test_infinity_is_close_to_nothing_else(tmp_path: Path) -> None:
    inf = float("inf")
    a = saved(tmp_path, "a", {"w": cut("w", torch.tensor([inf, -inf, 1.0]), 1)})
    b = saved(tmp_path, "b", {"w": cut("w", torch.tensor([inf, inf, inf]), 1)})
    (tensor,) = found(a, b, tolerance=Tolerance(1.0, 1.0)).tensors
    assert (tensor.elements, tensor.max) == (2, inf)


def test_objects_and_the_common_state(tmp_path: Path) -> None:
    def state(seed: int, lr: float) -> dict[str, Any]:
        return {
            "o": ShardedObject("o", [{"seed": seed, "t": torch.arange(3)}], (2,), (0,)),
            "p": ShardedObject("o", {"same": float("nan")}, (2,), (1,)),
            "args": argparse.Namespace(lr=lr, name="x"),
            "only": {f"a{seed}": 1},
        }

    result = found(
        saved(tmp_path, "a", state(1, 0.1)), saved(tmp_path, "b", state(2, 0.2))
    )
    changes = {one.key: set(one.changes) for one in result.objects}
    assert {(one.key, one.offset) for one in result.objects} == {
        ("o", (0,)),
        ("common_state", ()),
    }
    assert changes["o"] == {((0, 0, "seed"), 1, 2)}
    assert changes["common_state"] == {
        (("args", "lr"), 0.1, 0.2),
        (("only", "a1"), 1, ...),
        (("only", "a2"), ..., 1),
    }


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        (torch.tensor([1], dtype=torch.int32), torch.tensor([1])),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (np.arange(2, dtype=np.int32), np.arange(2)),
        (torch.eye(2).to_sparse(), torch.eye(2)),
        (io.BytesIO(b"a"), io.BytesIO(b"b")),
        ([1, 2], [1]),
    ],
)
def test_parts_of_objects_differ_bit_for_bit(tmp_path: Path, a: Any, b: Any) -> None:
    result = found(saved(tmp_path, "a", {"x": a}), saved(tmp_path, "b", {"x": b}))
    assert [len(one.changes) for one in result.objects] == [1]


@pytest.mark.parametrize(
    "same",
    [
        lambda: io.BytesIO(b"a"),
        lambda: torch.tensor([float("nan"), 1.0]),
        lambda: torch.tensor(1.0, dtype=torch.bfloat16),
        lambda: torch.arange(6).reshape(2, 3).t(),
        lambda: torch.eye(2).to_sparse(),
        lambda: np.array([np.nan]),
        lambda: 10**5000,
        lambda: np.longdouble(1.5),
    ],
)
def test_equal_parts_are_not_listed(tmp_path: Path, same: Callable[[], Any]) -> None:
    a, b = ({"x": same(), "step": n} for n in (1, 2))
    (one,) = found(saved(tmp_path, "a", a), saved(tmp_path, "b", b)).objects
    assert one.changes == ((("step",), 1, 2),)


def test_a_tensor_with_more_elements_than_storage_is_not_expanded() -> None:
    vast = torch.zeros(1).expand(1 << 50)
    assert (
        len(list(object_changes({"x": vast}, {"x": torch.ones(1).expand(1 << 50)})))
        == 1
    )


class Untrusted:
    """A class that is not trusted."""

    def __init__(self, number: int) -> None:
        self.number = number


def test_untrusted_classes_are_inspected(tmp_path: Path) -> None:
    a = saved(tmp_path, "a", {"o": ShardedObject("o", Untrusted(1), (1,), (0,))})
    b = saved(tmp_path, "b", {"o": ShardedObject("o", Untrusted(2), (1,), (0,))})
    with pytest.raises(megackpt.UntrustedClass):
        megackpt.load({"o": ShardedObject("o", None, (1,), (0,))}, a)
    ((change,),) = [one.changes for one in found(a, b).objects]
    assert change == ((0, "number"), 1, 2)


def test_a_hole_is_an_error(tmp_path: Path) -> None:
    w = torch.arange(64.0)
    a, b = (saved(tmp_path, name, {"w": cut("w", w, 2)}) for name in "ab")
    opened = open_checkpoint(a)
    rows = np.flatnonzero(opened.manifest.chunks.boxes.volume != 32)
    rows = np.append(rows, np.flatnonzero(opened.manifest.chunks.boxes.volume == 32)[0])
    chunks = opened.manifest.chunks.take(rows)
    holed = replace(opened, manifest=replace(opened.manifest, chunks=chunks))
    for sides in ((holed, open_checkpoint(b)), (open_checkpoint(b), holed)):
        with pytest.raises(megackpt.CorruptCheckpoint, match="'w'"):
            compare(*sides)


def test_damage_is_an_error(tmp_path: Path) -> None:
    w = torch.arange(64.0)
    a, b = (
        saved(tmp_path, "a", {"w": cut("w", w, 2)}),
        saved(tmp_path, "b", {"w": cut("w", w + 1, 1)}),
    )
    file = a / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(megackpt.CorruptCheckpoint):
        found(a, b)


@pytest.mark.parametrize("dtype", sorted(set(ITEMSIZE) - {OBJECT}))
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_bits_of_any_dtype(dtype: str, data: st.DataObject) -> None:
    """Compared with Python's own numbers, one by one."""
    size = ITEMSIZE[dtype]
    sides = []
    base = bytearray(data.draw(st.binary(min_size=6 * size, max_size=6 * size)))
    for _ in range(2):
        octets = bytearray(base)
        for at in data.draw(st.lists(st.integers(0, len(octets) - 1), max_size=3)):
            octets[at] = data.draw(st.integers(0, 255))
        if dtype == "bool":
            octets = bytearray(b & 1 for b in octets)
        sides.append(
            torch.frombuffer(octets, dtype=getattr(torch, dtype)).reshape(2, 3)
        )
    raw = [host_array(side.contiguous()) for side in sides]
    difference = TensorDifference("w", 12)
    box = Box((2, 0), (2, 3))
    module._compare_elements(difference, box, *raw, (dtype, dtype), None)

    x, y = (exact(side.reshape(-1)) for side in sides)
    differing = [
        i
        for i in range(6)
        if raw[0].reshape(-1)[i].tobytes() != raw[1].reshape(-1)[i].tobytes()
    ]
    with np.errstate(all="ignore"):
        distances = [
            distance(x[i], y[i]) for i in differing if x[i] == x[i] and y[i] == y[i]
        ]
    assert difference.elements == len(differing)
    assert [index for index, *_ in difference.first] == [
        (2 + i // 3, i % 3) for i in differing[:5]
    ]
    if not distances:
        assert math.isnan(difference.max)
    elif all(map(math.isfinite, distances)):
        assert difference.max == pytest.approx(max(distances), rel=1e-12)


def exact(column: torch.Tensor) -> list[Any]:
    """The elements as Python's numbers."""
    dtype = column.dtype
    if dtype.is_complex:
        halves = {4: torch.float16, 8: torch.float32, 16: torch.float64}[dtype.itemsize]
        parts = column.view(halves).double().tolist()
        return [complex(*pair) for pair in zip(parts[0::2], parts[1::2], strict=True)]
    if dtype.is_floating_point:
        return column.double().tolist()
    if dtype == torch.uint64:
        return [n % 2**64 for n in column.view(torch.int64).tolist()]
    return [int(n) for n in column.tolist()]


def distance(x: Any, y: Any) -> Any:
    try:
        return abs(x - y)
    except OverflowError:
        return float("inf")
