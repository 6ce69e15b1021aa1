"""Messages between ranks: values arrive as they were, and no message runs code that it names."""

from __future__ import annotations

import math
import os
import pickle
import random
import zlib
from collections import OrderedDict
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan as TorchPlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megackpt import CheckpointingException, StorageError, limits
from megackpt.dcp import item_writer
from megackpt.distributed import wire_format
from megackpt.distributed.messages import join, split
from megackpt.distributed.wire_format import compress, pack, unpack
from megackpt.planning.manifest import Manifest, TensorEntry, TensorMeta
from megackpt.testing import ThreadedGroup
from tests.faults.share import part

VALUES: list[Any] = [
    None,
    True,
    -(1 << 100),
    1.5,
    math.inf,
    "key",
    "lone \ud800 surrogate, and a pair \ud83d\ude00",
    b"",
    b"bytes",
    [],
    [1, [2.5, (None, "x")], {"a", "b"}, frozenset([3])],
    {1: "one", (1, 2): {"inner": b"x"}, None: []},
    np.float32(2.5),
    np.int64(7),
    OrderedDict(b=1, a=2),
    Path("/checkpoints"),
    torch.bfloat16,
    torch.Size([2, 3]),
    StorageError,
    (TensorEntry("w", TensorMeta((2, 3), "float32")),),
]
ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(10, dtype=np.int32)[::3],
    np.zeros((0, 5), np.uint8),
    np.array(3.0),
    np.array([True, False]),
    np.array([1, 2], ">i8"),
    np.array(["text", None], object),
]


@pytest.mark.parametrize("value", VALUES, ids=map(str, range(len(VALUES))))
def test_a_value_arrives_as_it_was(value: Any) -> None:
    came = unpack(pack(value))
    assert came == value
    assert type(came) is type(value)


@pytest.mark.parametrize("array", ARRAYS, ids=repr)
def test_an_array_arrives_as_it_was(array: Any) -> None:
    came = unpack(pack([array, array.dtype.kind]))[0]
    assert (came.dtype, came.shape) == (array.dtype, array.shape)
    assert (came == array).all()
    assert came.flags.writeable
    assert came.flags.aligned


def test_a_tensor_arrives_as_it_was() -> None:
    came = unpack(pack({"rng": torch.arange(4)}))
    assert torch.equal(came["rng"], torch.arange(4))


def torch_plan(count: int) -> TorchPlan:
    items = []
    for i in range(count):
        size = torch.Size([i, 2])
        data = TensorWriteData(
            ChunkStorageMetadata(size, size), TensorProperties(torch.float16), size
        )
        index = MetadataIndex(f"t{i}", size, i)
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    data = BytesIOWriteData(9)
    items.append(WriteItem(MetadataIndex("o"), WriteItemType.BYTE_IO, data))
    return TorchPlan(items, planner_data={"t0": ("t", 0)})


@pytest.mark.parametrize("count", [0, 1, 3])
def test_plans_of_torch_arrive_as_they_were(count: int) -> None:
    plan = torch_plan(count)
    assert unpack(pack([plan, None])) == [plan, None]


def test_every_name_that_a_message_may_call_exists() -> None:
    assert f"{item_writer.__name__}.Assignment" in wire_format._CALLED
    for name in wire_format._CALLED:
        assert callable(wire_format._function(name))
    for module, name in wire_format._CALLED.values():
        found = getattr(import_module(module), name)
        assert f"{found.__module__}.{found.__qualname__}" == f"{module}.{name}"


class Outsider:
    """Its pickle makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("verb", ["gather", "broadcast"])
def test_no_message_runs_code_that_it_names(tmp_path: Path, verb: str) -> None:
    evil = Outsider(tmp_path / "made")

    def run(group: ThreadedGroup) -> None:
        if verb == "gather":
            group.reduce_broadcast("plan", lambda: evil, len)
        else:
            group.broadcast("plan", lambda: evil)

    for error in ThreadedGroup.outcomes(2, run, timeout=10):
        assert isinstance(error, CheckpointingException)
    assert not evil.folder.exists()


def test_a_class_that_is_not_trusted_is_named_before_it_is_sent() -> None:
    def run(group: ThreadedGroup) -> None:
        group.reduce_broadcast("data", lambda: {"dice": random.Random(group.rank)}, len)

    for error in ThreadedGroup.outcomes(2, run, timeout=10):
        assert isinstance(error, CheckpointingException)
        assert "cannot send one another a random.Random" in str(error)
        assert "torch.serialization.add_safe_globals" in str(error)


class OfTheUser(StorageError):
    """An exception class that other ranks must not import."""


@pytest.mark.parametrize("where", ["work", "decide"])
def test_an_exception_of_the_users_travels_as_text(where: str) -> None:
    def raise_it(*_: Any) -> Any:
        raise OfTheUser("no space")

    def run(group: ThreadedGroup) -> None:
        if where == "work":
            group.reduce_broadcast("write", raise_it, len)
        else:
            group.reduce_broadcast("write", lambda: 1, raise_it)

    for error in ThreadedGroup.outcomes(2, run, timeout=10):
        assert not isinstance(error, OfTheUser)
        assert type(error) is StorageError
        assert "OfTheUser: no space" in str(error)


def refused(message: bytes) -> str:
    with pytest.raises(CheckpointingException, match="a message of rank 3 cannot") as e:
        unpack(message, 3)
    return str(e.value)


def text(words: str, *buffers: bytes) -> bytes:
    return join([words.encode(), *buffers])


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff\xff\xff\xff",
        pickle.dumps(1),
        join([]),
        text("{"),
        text('["os.system","id"]'),
        text('["megackpt.planning.box.Box"]'),
        text('["#","megackpt.planning.box.Box"]'),
        text('["e","CalledProcessError"]'),
        text('["megackpt.distributed.wire_format._torch_value","torch.load"]'),
        text('["b"]'),
        text('["a","O",1]', bytes(8)),
        text('["a","<i8",2]', bytes(8)),
        text('["a","<i8",4611686018427387904]', bytes(8)),
        text('["a","<i8",1.5]', bytes(8)),
        text('["o"]', pickle.dumps(1)),
        text('["t"]', zlib.compress(b"[]")[:-5]),
        text("[" * 100_000),
    ],
)
def test_a_message_that_says_too_much_is_refused(message: bytes) -> None:
    refused(message)


def test_a_message_imports_no_module_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    refused(text('["megackpt.distributed.wire_format._torch_value","_lazy"]'))
    assert not asked


def test_a_blob_of_an_untrusted_class_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "blob"
    torch.save(Outsider(tmp_path / "made"), file)
    assert "UntrustedClass" in refused(text('["o"]', file.read_bytes()))
    assert not (tmp_path / "made").exists()


def test_what_expands_too_far_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    large = compress(pack(np.zeros(1 << 20)))
    assert len(unpack(large)) == 1 << 20
    monkeypatch.setattr(limits, "CONTROL_MESSAGE_BYTES", 1 << 20)
    assert "more than 1048576 bytes" in refused(large)
    table = zlib.compress(b"[" + b" " * (1 << 24) + b"]")
    assert "expands" in refused(text('["t"]', table))


def mutated(message: bytes, dice: random.Random) -> bytes:
    changed = bytearray(message)
    for _ in range(dice.randrange(1, 4)):
        kind = dice.randrange(4)
        at = dice.randrange(len(changed))
        if kind == 0:
            changed[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del changed[at : at + dice.randrange(1, 9)]
        elif kind == 2:
            changed[at:at] = dice.randbytes(dice.randrange(1, 9))
        else:
            changed[at : at + 8] = (1 << dice.randrange(64)).to_bytes(8, "big")
        changed = changed or bytearray(1)
    return bytes(changed)


def test_damaged_messages_are_values_or_errors_of_ours() -> None:
    manifest = Manifest.of(
        [TensorEntry(f"w{i}", TensorMeta((4,), "float32")) for i in range(3)], []
    )
    samples = [pack(value) for value in [*VALUES, *ARRAYS, torch_plan(2), manifest]]
    samples.append(zlib.compress(samples[-1]))
    dice = random.Random(23)
    for _ in range(part(10_000)):
        message = mutated(dice.choice(samples), dice)
        try:
            unpack(message)
        except CheckpointingException:
            continue


def test_parts_must_fill_their_message() -> None:
    whole = join([b"ab", b"c"])
    for wrong in (whole[:-1], whole + b"x"):
        with pytest.raises(ValueError, match="parts of"):
            split(wrong)
