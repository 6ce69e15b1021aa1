"""torch's archives: zip readers read ours, and their pickles locate tensors."""

from __future__ import annotations

import io
import zipfile
import zlib

import pytest
import torch
from hypothesis import given, settings, strategies as st

from megackpt.backends.archives import (
    StoredTensor,
    UnsupportedTensor,
    load_structure,
    tensor_opcodes,
)
from megackpt.errors import BackendError, CorruptCheckpoint, UntrustedClass
from megackpt.serialization import archive as archives
from megackpt.serialization.archive import ALIGNMENT, Member, directory, header

CONTENTS = st.dictionaries(
    st.text("abc0123456789", min_size=1, max_size=9),
    st.binary(max_size=200),
    max_size=5,
)


@settings(deadline=None)
@given(CONTENTS, st.booleans(), st.sampled_from([0, 50, 100, 1 << 40]))
def test_zip_readers_find_what_was_written(
    contents: dict[str, bytes], aligned: bool, limit: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archives, "LIMIT", limit)
        data, members = b"", []
        for name, content in contents.items():
            members.append(Member(name, len(content), len(data), zlib.crc32(content)))
            data += header(members[-1], aligned)
            assert not aligned or len(data) % ALIGNMENT == 0
            data += content
        data += directory(members, len(data))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(f"archive/{name}") for name in contents} == contents


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@given(
    st.lists(st.integers(0, 5), max_size=5).map(tuple),
    st.sampled_from(["float32", "uint16", "bool", "complex32"]),
)
def test_a_tensor_is_located_as_it_was_pickled(
    shape: tuple[int, ...], dtype: str
) -> None:
    found = load_structure(b"\x80\x02" + tensor_opcodes(dtype, shape, "7") + b".")
    expected = torch.empty(shape, dtype=getattr(torch, dtype))
    assert isinstance(found, StoredTensor)
    assert (found.storage, found.dtype, found.shape) == ("7", dtype, shape)
    assert found.view.stride() == expected.stride()
    assert found.view.storage_offset() == 0
    assert found.is_plain
    assert found.nbytes == expected.numel() * expected.itemsize


def pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return zipfile.ZipFile(buffer).read("archive/data.pkl")


class Strange:
    pass


def test_classes_are_stand_ins_or_refused() -> None:
    pickle = pickled([Strange(), torch.ones(2)])
    with pytest.raises(UntrustedClass, match="Strange"):
        load_structure(pickle)
    strange, tensor = load_structure(pickle, stand_ins=True)
    assert strange.qualified_name.endswith("Strange")
    assert tensor.shape == (2,)


def test_views_are_not_plain() -> None:
    base = torch.randn(4, 6)
    views = [base, base[1:3], base[:, :1], base.t(), base[:1].expand(3, 6)]
    found = load_structure(pickled([*views, base[:0, 3:]]))
    assert [f.is_plain for f in found] == [True, True, False, False, False, True]
    for stored, view in zip(found, views, strict=False):
        assert stored.view.stride() == view.stride()
        assert stored.view.storage_offset() == view.storage_offset()
    assert len({f.storage for f in found}) == 1
    assert not load_structure(
        pickled(torch.ones(2, dtype=torch.complex64).conj())
    ).is_plain


def test_what_is_no_dense_tensor_is_named() -> None:
    assert load_structure(pickled(torch.eye(2).to_sparse())) == UnsupportedTensor(
        "_rebuild_sparse_tensor"
    )
    assert load_structure(pickled(torch.empty(2, device="meta"))).kind.startswith(
        "_rebuild_meta"
    )


def test_descriptions_are_not_stored_by_mistake() -> None:
    with pytest.raises(BackendError, match="neither a dict nor a list"):
        pickled(load_structure(pickled(torch.ones(2))))


def test_a_parameter_of_something_else_is_refused() -> None:
    with pytest.raises(CorruptCheckpoint, match="not made of a tensor"):
        load_structure(b"\x80\x02ctorch._utils\n_rebuild_parameter\n(K\5\x89}tR.")
    with pytest.raises(CorruptCheckpoint, match="without a storage"):
        load_structure(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\5K\0))\x89}tR.")
