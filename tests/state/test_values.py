"""What people declare: places, integrity, narrowing, and every wrong declaration with key and numbers."""

from __future__ import annotations

import pytest
import torch

from megackpt.errors import CheckpointingException, ShardingError
from megackpt.state import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    declare,
    dtype_name,
    dtype_named,
    is_main_replica,
)


def irregular(data: torch.Tensor | None = None, **changes) -> ShardedTensor:
    data = torch.zeros(3, 2) if data is None else data
    fields = {
        "local_shape": tuple(data.shape),
        "global_shape": (8, 2),
        "global_offset": (1, 0),
    } | changes
    return ShardedTensor("w", data, data.dtype, axis_fragmentations=None, **fields)


def test_from_rank_offsets():
    data = torch.rand(1, 5, 10, 10, 10, dtype=torch.float64)
    t = ShardedTensor.from_rank_offsets(
        "keyA", data, (0, 1, 2), (2, 3, 8), replica_id=(0, 1)
    )
    assert t.local_shape == (1, 5, 10, 10, 10)
    assert t.global_shape == (2, 5, 80, 10, 10)
    assert t.global_offset == (1, 0, 30, 0, 0)
    assert t.axis_fragmentations == (2, 1, 8, 1, 1)
    assert (t.dtype, t.replica_id, t.has_regular_grid) == (torch.float64, (0, 1), True)
    assert t.max_allowed_chunks() == (1, 5, 10, 10, 10)
    assert t.local_chunk_offset_in_global() == (1, 0, 3, 0, 0)
    assert t.global_slice()[2] == slice(30, 40)
    t.validate_metadata_integrity()


def test_prepended_axes():
    t = ShardedTensor.from_rank_offsets(
        "w", torch.zeros(4, 6), (0, 3, 8), (1, 0, 2), (2, 1, 2), prepend_axis_num=2
    )
    assert (t.local_shape, t.global_shape, t.global_offset) == (
        (4, 6),
        (8, 2, 8, 6),
        (3, 0, 4, 0),
    )
    assert t.axis_fragmentations == (8, 2, 2, 1)
    assert t.global_slice() == (3, 0, slice(4, 8), slice(0, 6))
    assert t.local_chunk_offset_in_global() == (3, 0, 1, 0)
    t.validate_metadata_integrity()


@pytest.mark.parametrize(
    "triple",
    [(-1, 0, 1), (0, -1, 2), (0, 0, 0), (0, 2, 2), (2, 0, 1), (0, 3, 2)],
    ids=str,
)
def test_invalid_rank_offsets(triple):
    with pytest.raises(CheckpointingException, match=r"Invalid rank offsets.*'keyA'"):
        ShardedTensor.from_rank_offsets("keyA", torch.zeros(4, 4), triple)
    with pytest.raises(CheckpointingException, match="Invalid rank offsets"):
        ShardedTensor.from_rank_offsets("keyA", torch.zeros(4, 4), (0, 0, 2), (0, 1, 2))


def test_flattened_range_is_refused():
    with pytest.raises(ValueError, match="flattened_range"):
        ShardedTensor.from_rank_offsets(
            "k", torch.zeros(4), flattened_range=slice(0, 2)
        )
    with pytest.raises(
        ShardingError, match=r"'w'.*ShardedTensor.flattened_range is not supported\."
    ):
        irregular(flattened_range=slice(0, 2)).validate_metadata_integrity()
    with pytest.raises(ShardingError, match=r"must be a torch\.Tensor, not list"):
        ShardedTensor.from_rank_offsets("k", [1, 2])


def test_integrity_on_fresh_and_meta_tensors_and_after_tampering():
    for device in ("cpu", "meta"):
        t = ShardedTensor.from_rank_offsets(
            "k", torch.zeros(2, 6, device=device), (0, 1, 3)
        )
        t.validate_metadata_integrity()
        t.local_shape = (1, 6)
        with pytest.raises(
            CheckpointingException,
            match=r"Data shape should match `local_shape`.*\(1, 6\)",
        ):
            t.validate_metadata_integrity()
        t.local_shape, t.global_offset = (2, 6), (0, 2, 0)
        with pytest.raises(
            CheckpointingException,
            match="Global offset dimensions should be equal to global",
        ):
            t.validate_metadata_integrity()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtype": torch.float16}, "Data dtype should match `dtype` attribute"),
        (
            {"global_shape": (2, 6, 2), "global_offset": (0, 0, 0)},
            "Local shape together with `prepend_axis_num`",
        ),
        (
            {"global_offset": (1, 0)},
            r"Global offset \(\(1, 0\)\) must be divisible by local shape",
        ),
        ({"global_offset": (-2, 0)}, "must not be negative"),
        ({"axis_fragmentations": (3,)}, "do not fit the global shape"),
        ({"key": ""}, "key must be a text"),
        ({"key": 5}, "key must be a text"),
        ({"data": [1]}, "not list; other values go into a ShardedObject"),
    ],
)
def test_contradictions_name_key_and_numbers(changes, text):
    t = ShardedTensor.from_rank_offsets("some.key", torch.zeros(2, 6), (0, 1, 3))
    for name, value in changes.items():
        setattr(t, name, value)
    with pytest.raises(ShardingError, match=text) as info:
        t.validate_metadata_integrity()
    assert repr(t.key) in str(info.value)


def test_irregular_grid_is_free_of_grid_checks():
    t = irregular()
    t.validate_metadata_integrity()
    assert not t.has_regular_grid
    irregular(torch.zeros(0, 2)).validate_metadata_integrity()
    with pytest.raises(ShardingError, match="irregular"):
        t.max_allowed_chunks()
    with pytest.raises(ShardingError, match="must be divisible"):
        t.local_chunk_offset_in_global()


def test_max_allowed_chunks_with_a_rest():
    t = ShardedTensor.from_rank_offsets("k", torch.zeros(3), (0, 1, 2))
    t.global_shape = (7,)
    with pytest.raises(
        CheckpointingException,
        match=r"Axis shape \(7\) not divisible by axis fragmentation \(2\)",
    ):
        t.max_allowed_chunks()
    t.allow_shape_mismatch = True
    assert t.max_allowed_chunks() == (3,)


def test_narrow():
    t = ShardedTensor.from_rank_offsets(
        "k", torch.arange(48.0).view(4, 12), (0, 2, 5), (2, 1, 2), prepend_axis_num=1
    )
    (n,) = t.narrow(1, 3, 6)
    assert (n.local_shape, n.global_shape, n.global_offset) == (
        (4, 6),
        (5, 4, 12),
        (2, 0, 6),
    )
    assert torch.equal(n.data, t.data[:, 3:9])
    assert (t.local_shape, t.global_shape) == ((4, 12), (5, 4, 24))
    n.validate_metadata_integrity()
    assert t.without_data().narrow(0, 0, 2)[0].data is None
    with pytest.raises(ShardingError, match="regular grid"):
        irregular().narrow(0, 0, 1)
    with pytest.raises(ShardingError, match=r"\[3:15\] is not within"):
        t.narrow(1, 3, 12)
    assert t.narrow(-1, 3, 6)[0].global_shape == (5, 4, 12)
    with pytest.raises(ShardingError, match="'k': cannot narrow axis 2"):
        t.narrow(2, 0, 1)


@pytest.mark.parametrize(
    "offset", [(0, 1), (0, 0, 1, 1), (0, "0", 1), (0, 0.0, 1), None]
)
def test_rank_offsets_that_are_no_triples(offset):
    with pytest.raises(ShardingError, match=r"Invalid rank offsets: .* for key 'k'"):
        ShardedTensor.from_rank_offsets("k", torch.zeros(2), offset)


def test_data_comes_and_goes():
    t = ShardedTensor.from_rank_offsets("k", torch.ones(2, 3))
    bare = t.without_data()
    assert bare.data is None
    assert t.data is not None
    bare.validate_metadata_integrity()
    bare.init_data("cpu", torch.zeros)
    assert torch.equal(bare.data, torch.zeros(2, 3))
    kept = bare.data
    bare.init_data("cpu")
    assert bare.data is kept
    assert "tensor(" not in repr(t)
    assert "tensor(" not in repr(ShardedTensorFactory("k", torch.ones(2), len, len))


def test_is_main_replica():
    assert is_main_replica(0)
    assert is_main_replica((0, 0))
    assert not is_main_replica(1)
    assert not is_main_replica((0, 1))


def test_objects_and_their_unique_keys():
    o = ShardedObject("ObjB", [1], (1, 8), (0, 3), replica_id=2)
    assert o.unique_key == "ObjB/shard_0.3_1.8"
    o.validate_metadata_integrity()
    assert ShardedObject("no/grid", 0, (), ()).unique_key == "no/grid"
    for key in ("plain", "a/b/shard_1/c", "x_y.z/ü"):
        for shape, offset in [((1, 8), (0, 3)), ((4,), (2,))]:
            back = ShardedObject.empty_from_unique_key(
                ShardedObject(key, 0, shape, offset).unique_key, 7
            )
            assert (back.key, back.global_shape, back.global_offset) == (
                key,
                shape,
                offset,
            )
            assert (back.data, back.replica_id) == (None, 7)
    assert ShardedObject.empty_from_unique_key("k/shard_0.3_1").global_shape == (1, -1)
    for bad in ("k", "k/shard_a_b", "k/shard_0", "k/shard_0_1_2", "k/shard_0_1.2"):
        with pytest.raises(ShardingError):
            ShardedObject.empty_from_unique_key(bad)
    for shape, offset in [((1,), (1,)), ((2, 2), (0,)), ((2,), (-1,))]:
        with pytest.raises(ShardingError, match="is not a cell of"):
            ShardedObject("k", 0, shape, offset).validate_metadata_integrity()


def test_dtypes():
    for name in ("bfloat16", "float8_e4m3fn", "bool", "complex64"):
        assert dtype_name(dtype_named(name)) == name
    with pytest.raises(ShardingError, match="dequantize"):
        dtype_name(torch.qint8)
    with pytest.raises(ShardingError, match="unknown to torch"):
        dtype_named("float3")


class Quantized(torch.Tensor):
    def dequantize(self):
        return self


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
def test_what_cannot_be_stored_says_the_way_out():
    plain = torch.eye(2)
    cases = [
        (torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8), "dequantize"),
        (plain.to_sparse(), "to_dense"),
        (plain.to_sparse_csr(), "to_dense"),
        (plain.as_subclass(Quantized), "dequantize"),
    ]
    for data, way_out in cases:
        t = ShardedTensor("k", data, data.dtype, (2, 2), (2, 2), (0, 0), (1, 1))
        with pytest.raises(ShardingError, match=f"'k'.*{way_out}"):
            declare([t], rank=0)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(ShardingError, match="to_padded_tensor"):
        declare(
            [ShardedTensor("k", nested, nested.dtype, (2, 2), (2, 2), (0, 0), (1, 1))],
            rank=0,
        )


def test_local_objects():
    assert LocalNonpersistentObject([1]).unwrap() == [1]
