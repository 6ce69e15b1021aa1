"""Pickles of all protocols are read; bombs, rubbish and damage are errors at once."""

from __future__ import annotations

import io
import pickle
import pickletools
import time
import tracemalloc
from typing import Any

import pytest
import torch

from megackpt import serialization
from megackpt.errors import CorruptCheckpoint
from megackpt.serialization.allowlist import finder
from megackpt.serialization.unpickler import translate, unpickle
from tests.serialization.pickles import PLAIN, archive, named, raw_archive, text


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_other_protocols(protocol: int) -> None:
    buffer = io.BytesIO()
    torch.save(
        [b"x", {1}, frozenset((2,)), "y", bytearray(b"z"), {"k": 2**70}],
        buffer,
        pickle_protocol=protocol,
    )
    assert serialization.load(buffer.getvalue()) == [
        b"x",
        {1},
        frozenset((2,)),
        "y",
        bytearray(b"z"),
        {"k": 2**70},
    ]


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02]" + b"]a" * 0 + b")" + b"\x85" * 200_000 + b".",
        b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"Ns.",
        b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
        b"\x80\x02)" + b"2\x86" * 100 + b".",
        b"\x80\x02]" + b"q\x00(" + b"h\x00" * 100 + b"e.",
        b"\x80\x02cbuiltins\nset\n](" + b")2\x86" + b"2\x86" * 60 + b"e\x85R.",
        b"\x80\x02Nr\xff\xff\xff\xff0j\xff\xff\xff\x7f.",
        b"\x80\x04B\xff\xff\xff\xff.",
        b"\x80\x02",
        b"",
        b".",
        b"\x80\x09N.",
        b"\x80\x02csys\n",
        b"\x80\x02Pid\n.",
        b"\x80\x02}]Ns.",
    ],
)
def test_bombs_and_rubbish(pickled: bytes) -> None:
    begin = time.thread_time()
    if (
        pickled.endswith(b"e.") and b"q\x00" in pickled
    ):  # a list in itself is odd, but pickle writes it
        assert len(serialization.load(raw_archive(pickled))) == 100
        return
    with pytest.raises(CorruptCheckpoint):
        serialization.load(raw_archive(pickled))
    assert time.thread_time() - begin < 5


def test_shared_parts_that_explode() -> None:
    value: list[Any] = []
    for _ in range(60):
        value = [value, value]
    with pytest.raises(CorruptCheckpoint, match="parts"):
        serialization.load(serialization.dump(value))


@pytest.mark.parametrize(
    "pickled",
    [
        b"Nr\xff\xff\xff\x7f",  # a gap in the memo: Python allocates up to the index
        b"\x8e" + b"\xff" * 8,
        b"\x96" + (1 << 40).to_bytes(8, "little"),
        b"\x95" + (1 << 62).to_bytes(8, "little"),
        b"X\xff\xff\xff\x7fab",
    ],
)
def test_lengths_are_bounded_by_the_pickle(pickled: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpoint):
            serialization.load(archive(pickled))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "target",
    [
        named("collections.OrderedDict"),
        named("builtins.int"),
        named("torch.float32"),
        b"]",
        b"}",
        text("x"),
    ],
)
def test_only_instances_get_a_state(target: bytes) -> None:
    with pytest.raises(CorruptCheckpoint, match="sets the state of"):
        serialization.load(archive(target + b"}" + text("a") + b"K\x01sb"))


def test_python_itself_only_looks_up_names_and_persistent_ids() -> None:
    """Opcodes that call, hash or change a value are gone from what its unpickler reads."""
    for protocol in range(2, 6):
        for opcode, _, _ in pickletools.genops(
            translate(pickle.dumps(PLAIN, protocol))
        ):
            assert opcode.name not in (
                "REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD", "APPEND", "APPENDS", "ADDITEMS",
                "SETITEM", "SETITEMS", "DICT", "FROZENSET", "INST", "OBJ", "EXT1", "EXT2", "EXT4",
            )  # fmt: skip


def test_what_a_pickle_writes_as_a_persistent_id_is_one() -> None:
    """No operands in a pickle pass for a translated opcode."""
    forged = b"]K\x01\x86KR\x86"  # what REDUCE of a list with arguments 1 becomes
    found: list[Any] = []
    unpickle(b"\x80\x02" + forged + b"Q.", finder(), found.append)
    assert found == [(([], 1), ord("R"))]
