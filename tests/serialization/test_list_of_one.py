"""Blobs put into a list and taken out of it: the same values, and not one class needed on the way."""

from __future__ import annotations

import io
import pickle
import sys
import types
import zipfile
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from megackpt import serialization
from megackpt.errors import CorruptCheckpoint, UntrustedClass

PROTOCOLS = [2, 3, 4, 5]


def dumped(value: Any, protocol: int = 2) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=protocol)
    return buffer.getvalue()


def archive(pickled: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", pickled)
    return buffer.getvalue()


def pickled(blob: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(blob)) as file:
        assert file.testzip() is None
        return file.read("archive/data.pkl")


def shared() -> dict[str, Any]:
    part = ["x" * 300, (1, 2)]
    return {"a": part, "b": (part, part), "long": "y" * 70_000, "bytes": b"z" * 70_000}


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.lists(inner, max_size=5).map(tuple)
    ),
    max_leaves=30,
)


@given(plain, st.sampled_from(PROTOCOLS))
def test_there_and_back(value: Any, protocol: int) -> None:
    blob = dumped(value, protocol)
    assert serialization.load(serialization.wrapped(blob)) == [value]
    assert (
        serialization.load(serialization.unwrapped(dumped([value], protocol))) == value
    )
    back = serialization.unwrapped(serialization.wrapped(blob))
    assert serialization.load(back) == value
    assert serialization.wrapped(back) == serialization.wrapped(blob)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_parts_stay_shared(protocol: int) -> None:
    for blob in (
        serialization.unwrapped(dumped([shared()], protocol)),
        serialization.unwrapped(serialization.wrapped(dumped(shared(), protocol))),
    ):
        value = serialization.load(blob)
        assert value == shared()
        assert value["a"] is value["b"][0] is value["b"][1]


def test_values_that_contain_themselves() -> None:
    loop: dict[str, Any] = {}
    loop["me"] = (loop, [loop])
    for protocol in PROTOCOLS:
        value = serialization.load(serialization.unwrapped(dumped([loop], protocol)))
        assert value["me"][0] is value
        value = serialization.load(serialization.wrapped(dumped(loop, protocol)))[0]
        assert value["me"][1][0] is value


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", [2, 3])
def test_torch_reads_them(protocol: int) -> None:
    base = torch.arange(40.0)
    value = {
        "t": base[3:9],
        "same": base,
        "bf16": torch.ones(2, 3, dtype=torch.bfloat16),
        "n": [1, "two"],
    }
    (found,) = torch.load(
        io.BytesIO(serialization.wrapped(dumped(value, protocol))), weights_only=True
    )
    bare = torch.load(
        io.BytesIO(serialization.unwrapped(dumped([value], protocol))),
        weights_only=True,
    )
    for each in (found, bare):
        assert each["n"] == [1, "two"]
        assert torch.equal(each["bf16"], value["bf16"])
        assert torch.equal(each["t"], base[3:9])
        assert (
            each["t"].untyped_storage().data_ptr()
            == each["same"].untyped_storage().data_ptr()
        )


def test_storages_are_aligned_as_torch_aligns_them() -> None:
    blob = serialization.wrapped(
        dumped({"a": torch.ones(3), "b": torch.zeros(5, dtype=torch.uint8)})
    )
    with zipfile.ZipFile(io.BytesIO(blob)) as file:
        starts = [
            m.header_offset
            for m in file.infolist()
            if m.filename.startswith("archive/data/")
        ]
    assert len(starts) == 2
    for start in starts:
        name, extra = (
            int.from_bytes(blob[start + at : start + at + 2], "little")
            for at in (26, 28)
        )
        assert (start + 30 + name + extra) % 64 == 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_unknown_classes_survive(
    protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("nobodys.module")
    module.Thing = type("Thing", (), {"__module__": "nobodys.module"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nobodys", types.ModuleType("nobodys"))
    monkeypatch.setitem(sys.modules, "nobodys.module", module)
    thing = module.Thing()
    thing.a = {"b": 1}
    bare, listed = dumped(thing, protocol), dumped([thing], protocol)
    monkeypatch.delitem(sys.modules, "nobodys.module")
    assert pickled(serialization.unwrapped(serialization.wrapped(bare))).endswith(
        pickled(bare)[-20:]
    )
    for blob in (serialization.wrapped(bare), serialization.unwrapped(listed)):
        with pytest.raises(UntrustedClass, match=r"nobodys\.module\.Thing"):
            serialization.load(blob)
    monkeypatch.setitem(sys.modules, "nobodys.module", module)
    (found,) = serialization.load(serialization.wrapped(bare), trusted=[module.Thing])
    assert found.a == {"b": 1}
    assert serialization.load(
        serialization.unwrapped(listed), trusted=[module.Thing]
    ).a == {"b": 1}


@pytest.mark.parametrize("value", [[], [1, 2], {"a": 1}, (1,), 5, [[1], [2]]], ids=repr)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_only_lists_of_one_are_taken_apart(value: Any, protocol: int) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"list of one|another number"):
        serialization.unwrapped(dumped(value, protocol))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_list_that_holds_itself_is_refused(protocol: int) -> None:
    loop: list[Any] = []
    loop.append({"list": loop})
    with pytest.raises(CorruptCheckpoint, match="refers to the list"):
        serialization.unwrapped(dumped(loop, protocol))


@pytest.mark.parametrize(
    "crafted",
    [
        b"\x80\x02]q\0K\1aK\2a.",  # two appended one by one
        b"\x80\x02]q\0K\1aa.",  # the list itself is taken
        b"\x80\x02]q\x000K\1a.",
        b"\x80\x02]q\0K\1a.K\1a.",  # goes on after its end
        b"\x80\x02]q\0(K\1a.",
        b"\x80\x02]q\0K\1K\2a.",
        b"\x80\x02]q\0.",
        b"\x80\x02]",
        b"\x80\x02",
        b"",
        b"]q\0K\1a.",
        b"\x80\x02]q\0X\xff\xff\xff\x7fabca.",
        b"\x80\x04\x95\x05\0\0\0\0\0\0\0]",
        b"\x80\x04\x95",
    ],
)
def test_crafted_pickles_are_refused(crafted: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        serialization.unwrapped(archive(crafted))


@pytest.mark.parametrize(
    "crafted", [b"\x80\x02K\1K\2.", b"\x80\x02.", b"\x80\x02(K\1.", b"\x80\x02K\1.K\2."]
)
def test_only_single_values_are_put_into_lists(crafted: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        serialization.wrapped(archive(crafted))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_any_damage_is_an_error_or_changes_nothing_else(protocol: int) -> None:
    """What comes out of a damaged pickle is refused, or is what the damaged pickle itself would have given."""
    whole = pickled(dumped([shared() | {"long": 1, "bytes": b"z"}], protocol))
    for at in range(len(whole)):
        for bit in (1, 0x40):
            crafted = archive(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            try:
                bare = serialization.unwrapped(crafted)
            except CorruptCheckpoint:
                continue
            assert [outcome(bare)] == outcome(crafted) or outcome(bare) is outcome(
                crafted
            ) is CorruptCheckpoint


@pytest.mark.filterwarnings("error")
def test_an_odd_escape_in_a_name_is_damage() -> None:
    with pytest.raises(CorruptCheckpoint, match="damaged"):
        serialization.wrapped(
            archive(b"\x80\x04c\\posix\nsystem\n(X\x04\x00\x00\x00truetR.")
        )


def outcome(blob: bytes) -> Any:
    try:
        return serialization.load(blob)
    except (CorruptCheckpoint, UntrustedClass):
        return CorruptCheckpoint


def test_what_is_no_archive_is_refused() -> None:
    for data in (b"", b"PK", pickle.dumps([1]), dumped([1])[:-5]):
        with pytest.raises(CorruptCheckpoint):
            serialization.unwrapped(data)
    blob = dumped([{"name": "value"}])
    at = blob.index(b"value")
    with pytest.raises(CorruptCheckpoint, match="checksum"):
        serialization.unwrapped(blob[:at] + b"V" + blob[at + 1 :])
