"""torch's archives by hand: what zip readers make of them, and what their pickles are said to describe."""

from __future__ import annotations

import io
import zipfile
import zlib

import pytest
import torch
from hypothesis import given, settings, strategies as st

from megackpt.backends.archives import (
    ALIGNMENT,
    Described,
    Member,
    Refused,
    described,
    directory,
    header,
    plain_strides,
    tensor_opcodes,
    writing,
)
from megackpt.errors import BackendError, CorruptCheckpoint, UntrustedClass

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
        patch.setattr(writing, "LIMIT", limit)
        data, members = b"", []
        for name, content in contents.items():
            members.append(
                Member(name.encode(), len(content), len(data), zlib.crc32(content))
            )
            data += header(members[-1], aligned)
            assert not aligned or len(data) % ALIGNMENT == 0
            data += content
        data += directory(members, len(data), wide=len(data) >= limit)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(f"archive/{name}") for name in contents} == contents


@given(st.lists(st.integers(0, 5), max_size=5).map(tuple))
def test_plain_strides_are_torchs(shape: tuple[int, ...]) -> None:
    assert plain_strides(shape) == torch.empty(shape).stride()


@given(
    st.lists(st.integers(0, 5), max_size=5).map(tuple),
    st.sampled_from(["float32", "uint16", "bool", "complex32"]),
)
def test_a_tensor_is_described_as_it_was_pickled(
    shape: tuple[int, ...], dtype: str
) -> None:
    found = described(b"\x80\x02" + tensor_opcodes(dtype, shape, "7") + b".")
    assert isinstance(found, Described)
    assert (found.dtype, found.shape, found.offset, found.storage.name) == (
        dtype,
        shape,
        0,
        "7",
    )
    assert found.is_plain
    assert (
        found.storage.nbytes
        == torch.empty(shape).numel() * getattr(torch, dtype).itemsize
    )


def pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return zipfile.ZipFile(buffer).read("archive/data.pkl")


class Strange:
    pass


def test_classes_are_stand_ins_or_refused() -> None:
    pickle = pickled([Strange(), torch.ones(2)])
    with pytest.raises(UntrustedClass, match="Strange"):
        described(pickle)
    strange, tensor = described(pickle, stand_ins=True)
    assert strange.qualified_name.endswith("Strange")
    assert tensor.shape == (2,)


def test_views_are_not_plain() -> None:
    base = torch.randn(4, 6)
    found = described(
        pickled(
            [
                base,
                base[1:3],
                base[:, :1],
                base.t(),
                base[:1].expand(3, 6),
                base[:0, 3:],
            ]
        )
    )
    assert [f.is_plain for f in found] == [True, True, False, False, False, True]
    assert [f.reach for f in found] == [24, 12, 19, 24, 6, 0]
    assert len({f.storage for f in found}) == 1
    assert not described(pickled(torch.ones(2, dtype=torch.complex64).conj())).is_plain


def test_what_is_no_dense_tensor_is_named() -> None:
    assert described(pickled(torch.eye(2).to_sparse())) == Refused(
        "_rebuild_sparse_tensor"
    )
    assert described(pickled(torch.empty(2, device="meta"))).kind.startswith(
        "_rebuild_meta"
    )


def test_descriptions_are_not_stored_by_mistake() -> None:
    with pytest.raises(BackendError, match="neither dict nor list"):
        pickled(described(pickled(torch.ones(2))))


def test_a_parameter_of_something_else_is_refused() -> None:
    with pytest.raises(CorruptCheckpoint, match="no tensor"):
        described(b"\x80\x02ctorch._utils\n_rebuild_parameter\n(K\5\x89}tR.")
    with pytest.raises(CorruptCheckpoint, match="no storage"):
        described(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\5K\0))\x89}tR.")
