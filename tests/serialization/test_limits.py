"""Small blobs that would take much: memory, time, the stack, or what is not theirs. All are errors, at once."""

from __future__ import annotations

import collections
import enum
import io
import pickle
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import megackpt
from megackpt import serialization
from megackpt.errors import CorruptCheckpoint
from tests.serialization.pickles import archive, named, number, text


def chain(links: int, link: bytes) -> bytes:
    """A value made of the one before it, which is memo 0, again and again."""
    return b"Nq\x00" + (b"0" + link + b"q\x00") * links


RANGE = named("builtins.range") + b"\x8a\x06\x00\x00\x00\x00\x00\x01\x85R"
DEEP = b"N" + b"\x85" * 1_000_000
SHARED = b")q\x00" + b"0h\x00h\x00\x86q\x00" * 60
STORAGE = (
    b"("
    + text("storage")
    + named("torch.FloatStorage")
    + text("0")
    + text("cpu")
    + b"K\x00tQ"
)
DTYPE = named("numpy.dtype") + text("S5") + b"\x89\x88\x87Rq\x01"
ARRAY = (
    named("numpy.core.multiarray._reconstruct")
    + named("numpy.ndarray")
    + b"K\x00\x85"
    + b"C\x01b\x87R(K\x01"
)

TUPLE = text("a") + b"q\x02(" + b"h\x02" * 100_000 + b"tq\x00"
PRIME = (1 << 61) - 1  # hashes of integers are what they leave over when divided by it

BOMBS = {
    "set of a range": named("builtins.set") + RANGE + b"\x85R",
    "deque of a range": named("collections.deque") + RANGE + b"\x85R",
    "last one of a range": named("collections.deque") + RANGE + b"K\x01\x86R",
    "size of a range": named("torch.Size") + RANGE + b"\x85R",
    "paths doubled": text("a" * 8)
    + b"q\x00"
    + (b"0" + named("pathlib.PosixPath") + b"h\x00h\x00\x86Rq\x00") * 45,
    "one list, many sets": b"("
    + b"".join(b"M" + struct.pack("<H", i) for i in range(50_000))
    + b"lq\x00"
    + named("builtins.set")
    + b"q\x01("
    + b"h\x01h\x00\x85R" * 20_000
    + b"t",
    "counted tuples": named("collections.Counter") + b"]K\x01" + DEEP + b"\x86a\x85R",
    "counted shared tuples": named("collections.Counter")
    + b"]K\x01"
    + SHARED
    + b"\x86a\x85R",
    "stand-in as a key": b"}"
    + named("megackpt.serialization.standins.StandIn")
    + DEEP
    + b"\x85RNs",
    "slices": chain(200_000, named("builtins.slice") + b"h\x00\x85R"),
    "deques": chain(200_000, named("collections.deque") + b"(h\x00l\x85R"),
    "default dicts": chain(
        200_000, named("collections.defaultdict") + b")RK\x01h\x00s"
    ),
    "arrays of objects": named("numpy.dtype")
    + text("O8")
    + b"\x89\x88\x87Rq\x01"
    + chain(100_000, ARRAY + b")h\x01\x89(h\x00ltb"),
    "bytes of a negative size": DTYPE
    + b"0"
    + ARRAY
    + b"K\x05\x85h\x01\x89C\x19"
    + b"x" * 25
    + b"tb0h\x01(K\x03"
    + text("|")
    + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
    "a storage that would grow": named("torch._utils._rebuild_tensor_v2")
    + b"("
    + STORAGE
    + b"K\x00J\x00\x00\x00\x10\x85K\x01\x85\x89"
    + named("collections.OrderedDict")
    + b")RtR",
    "keywords": named("collections.deque") + b")}" + text("items") + RANGE + b"s\x92",
    "keywords of a set": named("builtins.set")
    + b")}"
    + text("items")
    + RANGE
    + b"s\x92",
    "a tuple of arguments": TUPLE
    + named("megatron.core.X")
    + b"q\x01("
    + b"h\x01h\x00R" * 20_000
    + b"t",
    "a path of many": TUPLE
    + named("pathlib.PurePosixPath")
    + b"q\x01("
    + b"h\x01h\x00R" * 20_000
    + b"t",
    "numbers of one hash": b"}("
    + b"".join(number(n * PRIME) + b"N" for n in range(1, 40_000))
    + b"u",
    "one by one": b"}" + b"".join(number(n * PRIME) + b"Ns" for n in range(1, 40_000)),
    "a set of one hash": named("builtins.set")
    + b"]("
    + b"".join(number(n * PRIME) for n in range(1, 40_000))
    + b"e\x85R",
    "tuples of one hash": b"}("
    + b"".join(number(n * PRIME) + b"\x85N" for n in range(1, 40_000))
    + b"u",
    "a long key, many dicts": b"("
    + b"K\x01" * 50_000
    + b"tq\x00("
    + b"}h\x00Ns" * 20_000
    + b"t",
    "a long number": b"\x8b\x00\x00\x02\x00"
    + b"\x7f" * (1 << 17)
    + b"q\x00"
    + named("builtins.range")
    + b"q\x01("
    + b"h\x01h\x00\x85R" * 40_000
    + b"t",
    "an attribute that hides a method": named("collections.OrderedDict")
    + b")R}"
    + text("keys")
    + b"K\x01sb",
}


SLOW = ("arrays of objects", "counted tuples", "deques")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in BOMBS],
)
def test_bombs(name: str) -> None:
    begin = time.thread_time()
    with pytest.raises(CorruptCheckpoint):
        serialization.load(archive(BOMBS[name], **{"0": b""}))
    assert time.thread_time() - begin < 20


def test_counts_of_parts_stay_small_numbers() -> None:
    doubled = b")" + b"2\x86" * 40_000  # has 2^40000 parts
    tracemalloc.start()
    for body in (doubled, b"}(" + doubled + b"Nu"):
        with pytest.raises(CorruptCheckpoint, match="levels deep"):
            serialization.load(archive(body))
    assert tracemalloc.get_traced_memory()[1] < 40 << 20
    tracemalloc.stop()


TABLES = (
    "keywords of a set",
    "a path of many",
    "numbers of one hash",
    "one by one",
    "a set of one hash",
)


@pytest.mark.parametrize("name", TABLES)
def test_bombs_in_a_table_of_contents_of_torch(name: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + BOMBS[name] + b".")
    with pytest.raises(megackpt.CorruptCheckpoint):
        megackpt.load({}, tmp_path)


def test_enums_of_a_table_of_contents_as_python_3_11_0_names_them(
    tmp_path: Path,
) -> None:
    dcp.save({"w": torch.arange(6.0)}, checkpoint_id=tmp_path)

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return (
                (getattr, (type(value), value.name))
                if isinstance(value, enum.Enum)
                else NotImplemented
            )

    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for protocol in (2, 4):
        buffer = io.BytesIO()
        Pickler(buffer, protocol).dump(metadata)
        assert b"getattr" in buffer.getvalue()
        (tmp_path / ".metadata").write_bytes(buffer.getvalue())
        assert torch.equal(
            megackpt.load_plain_tensors(tmp_path)["w"], torch.arange(6.0)
        )


@pytest.mark.slow
def test_what_is_dropped_does_no_harm_either() -> None:
    pickled = BOMBS["deques"] + b"0" + BOMBS["default dicts"] + b"0Nq\x00"
    assert serialization.load(archive(pickled)) is None


def test_what_a_trusted_object_holds_stays() -> None:
    blob = serialization.dump(
        Holder(collections.deque([1, 2]), collections.defaultdict(list, a=[3]))
    )
    found = serialization.load(blob, trusted=(Holder,))
    assert (list(found.queue), dict(found.table)) == ([1, 2], {"a": [3]})


class Holder:
    def __init__(self, queue: Any, table: Any) -> None:
        self.queue = queue
        self.table = table
