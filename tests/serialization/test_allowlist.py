"""Data of Python and torch comes back; known functions check their arguments."""

from __future__ import annotations

import argparse
import collections
import io
import pathlib
import pickle
import random

import numpy as np
import pytest
import torch

from megackpt import serialization
from megackpt.errors import CorruptCheckpoint
from tests.serialization.pickles import (
    PLAIN,
    Calls,
    archive,
)


def test_plain_data_comes_back() -> None:
    found = serialization.load(serialization.dump(PLAIN))
    assert found == PLAIN
    for key, value in PLAIN.items():
        assert type(found[key]) is type(value)
    assert found["default"].default_factory is list
    assert found["deque"].maxlen == 5


def test_generator_states_come_back() -> None:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    found = serialization.load(serialization.dump(state))
    assert found["python"] == state["python"]
    np.random.set_state(found["numpy"])
    torch.set_rng_state(found["torch"])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.ones(3, dtype=torch.uint16),
        torch.empty(0, 2),
        torch.tensor(3.0),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.eye(3).to_sparse(),
    ],
)
def test_tensors_come_back(tensor: torch.Tensor) -> None:
    found = serialization.load(serialization.dump([tensor]))[0]
    assert (type(found), found.dtype, found.shape) == (
        type(tensor),
        tensor.dtype,
        tensor.shape,
    )
    assert (found.requires_grad, found.layout) == (tensor.requires_grad, tensor.layout)
    assert torch.equal(found.to_dense().float(), tensor.to_dense().float())
    if found.layout == torch.strided:
        assert found.stride() == tensor.stride()


def test_storages_stay_shared() -> None:
    base = torch.arange(10)
    first, second = serialization.load(serialization.dump([base[:5], base[5:]]))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_bytes_io_keeps_its_position() -> None:
    stream = io.BytesIO(b"hello")
    stream.seek(2)
    assert serialization.load(serialization.dump(stream)).read() == b"llo"


def test_what_torch_reads_and_writes() -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(3)}, buffer)
    assert torch.equal(serialization.load(buffer.getvalue())["a"], torch.ones(3))
    assert torch.equal(
        torch.load(io.BytesIO(serialization.dump(torch.ones(2))), weights_only=True),
        torch.ones(2),
    )


def test_paths_as_python_3_13_names_them() -> None:
    pickled = b"\x80\x02cpathlib._local\nPosixPath\n(X\x01\0\0\0aX\x01\0\0\0btR."
    assert serialization.load(archive(pickled)) == pathlib.PosixPath("a/b")


def test_lazily_conjugated_and_negated_tensors_mean_what_they_say() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    state = {
        "conj": numbers.conj(),
        "neg": numbers.clone().conj().imag,
        "grad": torch.ones(2, requires_grad=True),
    }
    assert state["conj"].is_conj()
    assert state["neg"].is_neg()
    back = serialization.load(serialization.dump(state))
    assert back["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert back["neg"].tolist() == [-2.0, 4.0]
    assert back["grad"].requires_grad


NESTED = np.dtype([("inner", "i4")])


@pytest.mark.parametrize(
    "call",
    [
        Calls(bytearray, 1 << 40),
        Calls(collections.defaultdict, print),
        Calls(np.dtype, "O,i4"),
        Calls(
            np.dtype,
            "f8",
            False,
            True,
            state=(3, "<", None, ("a",), {"a": (np.dtype("i4"), 99)}, 8, 8, 0),
        ),
        Calls(
            np.dtype,
            "S4",
            False,
            True,
            state=(3, "|", None, None, None, 1 << 30, 1, 0),
        ),
        Calls(
            np.dtype,
            "V4",
            False,
            True,
            state=(3, "|", None, ("a",), {"a": (np.dtype("i8"), 0)}, 4, 1, 0),
        ),
        Calls(
            np.dtype,
            "V4",
            False,
            True,
            state=(3, "|", None, ("a",), {"a": (np.dtype("i4"), -1)}, 4, 1, 0),
        ),
        Calls(
            np.dtype,
            "V8",
            False,
            True,
            state=(3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0),
        ),
        Calls(
            np.dtype,
            "V8",
            False,
            True,
            state=(3, "|", None, ("a",), {"b": (np.dtype("i8"), 0)}, 8, 1, 0),
        ),
        Calls(
            np.dtype,
            "V4",
            False,
            True,
            state=(3, "|", None, ("a",), {"a": (NESTED, 0)}, 4, 1, 0),
        ),
        Calls(
            np.dtype,
            "V8",
            False,
            True,
            state=(3, "|", (np.dtype("i4"), (1 << 40,)), None, None, 8, 1, 0),
        ),
        Calls(
            np.dtype,
            "V8",
            False,
            True,
            state=(3, "|", (np.dtype("i4"), (-2,)), None, None, 8, 1, 0),
        ),
        Calls(
            np.dtype,
            "M8",
            False,
            True,
            state=(4, "<", None, None, None, -1, -1, 0, (None, (b"x", 1, 1, 1))),
        ),
        Calls(
            np.dtype,
            "M8",
            False,
            True,
            state=(4, "<", None, None, None, -1, -1, 0, (None, (b"s", 0, 1, 1))),
        ),
        Calls(np.dtype, "M8", False, True, state=(4, "<", None, None, None, -1, -1, 0)),
        Calls(np.float32(1).__reduce__()[0], np.dtype((np.int32, (2,))), b"abcdefgh"),
        Calls(
            np.frombuffer(b"", np.uint8).__reduce__()[0],
            np.ndarray,
            (1 << 40,),
            b"b",
            state=(1, (1 << 40,), np.dtype("u1"), False, b"x"),
        ),
        Calls(np.float32(1).__reduce__()[0], np.dtype("f8"), b"abc"),
        Calls(np.float32(1).__reduce__()[0], np.dtype("O"), b"abcdefgh"),
        Calls(torch._utils._rebuild_tensor_v2, None, 0, (1,), (1,), False, None),
        Calls(io.BytesIO, state=("text", 0, None)),
        Calls(argparse.Namespace, state=[1]),
    ],
)
def test_known_functions_check_what_they_get(call: Calls) -> None:
    with pytest.raises(CorruptCheckpoint):
        serialization.load(serialization.dump(call))


@pytest.mark.parametrize(
    ("size", "stride"),
    [
        ((3,), (1,)),
        ((2, 2), (0, 5)),
        ((1,), (1 << 62,)),
        ((-1,), (1,)),
        ((2,), (-1,)),
    ],
)
def test_tensors_stay_inside_their_storage(
    size: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    offset = 1 if size == (1,) else 0
    pickled = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nByteStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x02tQ"
        + pickle.dumps(offset + (2 if size == (1,) else 0), 2)[2:-1]
        + pickle.dumps(size, 2)[2:-1]
        + pickle.dumps(stride, 2)[2:-1]
        + b"\x89NtR."
    )
    with pytest.raises(CorruptCheckpoint):
        serialization.load(archive(pickled, **{"0": b"ab"}))


def test_a_storage_that_claims_more_than_is_there() -> None:
    storage = b"(X\x07\0\0\0storagectorch\nByteStorage\nX\x01\0\0\x000X\x03\0\0\0cpu"
    pickled = b"\x80\x02" + storage + b"\x8a\x06\0\0\0\0\0\x01tQ."
    with pytest.raises(CorruptCheckpoint, match="holds 2 bytes"):
        serialization.load(archive(pickled, **{"0": b"ab"}))
