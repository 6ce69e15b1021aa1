"""numpy's arrays and scalars come back, and nothing in a pickle can make an unsafe one."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from megackpt import serialization
from megackpt.errors import CorruptCheckpoint, UntrustedClass
from tests.serialization.pickles import (
    Calls,
    archive,
)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(["abc", "d"]),
        np.array([b"x", b"yz"]),
        np.array([1, "a", None], dtype=object),
        np.zeros((0, 3), np.float16),
        np.array(5, np.uint8),
        np.array([True, False]),
        np.array([1, 2**31], ">i8"),
        np.array(["2020-02-29", "NaT"], "M8[D]"),
        np.array([1, -1], ">m8[25us]"),
        np.array([3], "i8").view("m8"),
        np.array(
            [(1, 2.5, b"a"), (3, 4.5, b"bc")], [("x", "i1"), ("y", "<f4"), ("z", "S3")]
        ),
        np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
        np.array([([[1, 2]], "1999")], [("x", ">i4", (1, 2)), ("when", "M8[Y]")]),
        np.array(
            [(7,)],
            np.dtype(
                {"names": ["far"], "formats": ["u2"], "offsets": [5], "itemsize": 9}
            ),
        ),
        np.zeros((2, 0), [("a", "c8")]),
    ],
)
def test_numpy_arrays_come_back(array: np.ndarray[Any, Any]) -> None:
    found = serialization.load(serialization.dump(array))
    expected = pickle.loads(
        pickle.dumps(array, 2)
    )  # numpy brings numbers into the machine's byte order
    assert (found.dtype, found.shape, found.flags.f_contiguous) == (
        expected.dtype,
        expected.shape,
        expected.flags.f_contiguous,
    )
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("protocol", [2, 5])
def test_numpy_scalars_come_back(protocol: int) -> None:
    record = np.array([(1, 2.5)], [("x", "i1"), ("y", "<f4")])[0]
    values = [
        np.float32(0.5),
        np.datetime64("2020-01-01T00:00", "ns"),
        np.timedelta64(5, "D"),
        np.bool_(True),
        record,
    ]
    buffer = io.BytesIO()
    torch.save(values, buffer, pickle_protocol=protocol)
    found = serialization.load(buffer.getvalue())
    assert found == values
    assert [v.dtype for v in found] == [v.dtype for v in values]


def test_dtypes_that_hold_themselves() -> None:
    """A structure's state is set, then that of its field: to a structure that has the first one as its field."""
    opened = b"cnumpy\ndtype\nX\x02\0\0\0V8\x89\x88\x87R"

    def holding(memo: bytes) -> bytes:
        field = b"}X\x01\0\0\0a" + memo + b"K\0\x86s"
        return b"(K\x03X\x01\0\0\0|NX\x01\0\0\0a\x85" + field + b"K\x08K\x01K\0tb"

    outer_first = (
        b"\x80\x02" + opened + b"q\0" + opened + b"q\1" + b"0" + holding(b"h\1")
    )
    (name,) = serialization.load(archive(outer_first + b".")).names
    assert name == "a"
    with pytest.raises(CorruptCheckpoint):
        serialization.load(archive(outer_first + b"h\1" + holding(b"h\0") + b"\x86."))


def test_damage_to_structures() -> None:
    array = np.array(
        [([1, 2], "1999-01", 3.5)], [("x", ">i4", 2), ("t", "M8[M]"), ("y", "f8")]
    )
    whole = pickle.dumps(array, 2)
    for at in range(len(whole)):
        for bit in range(8):
            damaged = whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
            try:
                repr(serialization.load(archive(damaged)))
            except (CorruptCheckpoint, UntrustedClass):
                continue


def test_builtin_dtypes_are_not_changed() -> None:
    serialization.load(serialization.dump(np.dtype(">i4")))
    hostile = Calls(
        np.dtype, "i4", False, False, state=(3, ">", None, None, None, -1, -1, 0)
    )
    assert serialization.load(serialization.dump(hostile)).byteorder == ">"
    assert np.dtype("i4").isnative
