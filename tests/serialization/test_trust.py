"""Only classes that are trusted are made; others are named in the error."""

from __future__ import annotations

import copyreg
import enum
import os
import pathlib
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megackpt import serialization
from megackpt.errors import UntrustedClass
from tests.serialization.pickles import (
    Calls,
    archive,
)


@dataclass
class Point:
    x: int
    y: int = 2


class Colour(enum.Enum):
    RED = 1


def colour_named(name: str) -> Colour:
    return Colour[name]


class Slotted:
    __slots__ = ("a",)

    def __init__(self) -> None:
        self.a = 5


class TestTrust:
    @pytest.mark.parametrize("value", [Point(1), Colour.RED, Slotted(), Point])
    def test_unknown_classes_are_named_and_not_made(self, value: Any) -> None:
        name = type(value).__name__ if not isinstance(value, type) else value.__name__
        with pytest.raises(
            UntrustedClass, match=rf"common\.pt: .*\.{name}, which is not trusted"
        ) as caught:
            serialization.load(serialization.dump({"deep": [value]}), where="common.pt")
        assert isinstance(caught.value, pickle.UnpicklingError)
        assert f"trusted=({name},)" in str(caught.value)
        assert "torch.serialization.add_safe_globals" in str(caught.value)

    def test_trusted_classes(self) -> None:
        blob = serialization.dump([Point(1), Colour.RED, Slotted()])
        point, colour, slotted = serialization.load(
            blob, trusted=(Point, Colour, Slotted)
        )
        assert point == Point(1)
        assert colour is Colour.RED
        assert slotted.a == 5

    @pytest.mark.parametrize("check", [None, lambda _: None])
    def test_what_copyreg_says_of_an_enum_holds(
        self, check: Callable[[Any], None] | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(
            copyreg.dispatch_table,
            Colour,
            lambda member: (colour_named, (member.name,)),
        )
        assert (
            serialization.load(
                serialization.dump(Colour.RED, check), trusted=(colour_named,)
            )
            is Colour.RED
        )

    def test_torch_safe_globals_are_honoured_and_left_alone(self) -> None:
        with torch.serialization.safe_globals([Point]):
            assert serialization.load(serialization.dump(Point(3))) == Point(3)
            assert Point in torch.serialization.get_safe_globals()
        with pytest.raises(UntrustedClass):
            serialization.load(serialization.dump(Point(3)))

    def test_trust_given_to_one_load_is_not_seen_by_another_thread(self) -> None:
        blob, stop, refused = serialization.dump([Point(1)] * 50), threading.Event(), []

        def stranger() -> None:
            while not stop.is_set():
                try:
                    serialization.load(blob)
                except UntrustedClass:
                    refused.append(True)
                else:
                    refused.append(False)

        thread = threading.Thread(target=stranger)
        thread.start()
        for _ in range(100):
            serialization.load(blob, trusted=(Point,))
        stop.set()
        thread.join()
        assert refused
        assert all(refused)


@pytest.mark.parametrize(
    "function",
    [
        os.system,
        eval,
        exec,
        getattr,
        __import__,
        open,
        pickle.loads,
        torch.load,
        os._exit,
        type,
    ],
)
def test_functions_are_refused_and_not_run(
    function: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    with pytest.raises(UntrustedClass):
        serialization.load(
            serialization.dump(Calls(function, f"touch {tmp_path}/witness"))
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "pickled",
    [
        b"(%(getattr)b2%(red)bt.",  # getattr, copied and called once: it stays below the member
        b"(%(getattr)b2%(red)b0cos\nsystem\nt.",
        b"}%(getattr)b2%(red)bs.",
        b"(%(getattr)bcos\nsystem\n\x85q\x000(%(colour)bX\x03\0\0\0REDtR0h\x00t.",  # a tuple kept aside
    ],
)
def test_names_given_to_getattr_are_no_values(pickled: bytes) -> None:
    colour = f"c{Colour.__module__}\n{Colour.__qualname__}\n".encode()
    parts = {
        b"getattr": b"cbuiltins\ngetattr\n",
        b"colour": colour,
        b"red": colour + b"X\x03\0\0\0RED\x86R",
    }
    with pytest.raises(UntrustedClass, match="the object holds"):
        serialization.load(archive(b"\x80\x02" + pickled % parts), trusted=(Colour,))


class Outer:
    class Inner:
        pass


class Kept(list[object]):
    def __init__(self, *parts: object) -> None:
        super().__init__()
        self.parts = parts


@pytest.mark.parametrize(
    "pickled",
    [
        b"%(kept)b]h\x07a\x85R.",  # deep in an argument
        b"%(kept)b)R}X\x01\0\0\0a]h\x07asb.",  # in the state
        b"%(kept)b)R]h\x07aa.",  # in an item
        b"]%(kept)bh\x07\x85Ra.",
        b"cos\nsystem\n0N.",
        b"h\x06cos\nsystem\n0h\x07X\x05\0\0\0Inner\x86R.",
    ],
)
def test_an_outer_class_is_not_hidden_in_trusted_objects(pickled: bytes) -> None:
    """``Outer`` was an argument of getattr (memo 7), which alone needs no trust."""
    module = __name__.encode()
    begin = b"cbuiltins\ngetattr\nq\x06c%b\nOuter\nq\x07X\x05\0\0\0Inner\x86R" % module
    parts = {b"kept": b"c%b\nKept\n" % module}
    inner = serialization.load(
        archive(b"\x80\x02" + begin + b"."), trusted=(Outer.Inner,)
    )
    assert inner is Outer.Inner
    with pytest.raises(UntrustedClass, match=r"Outer|os\.system|posix\.system"):
        serialization.load(
            archive(b"\x80\x02" + begin + b"0" + pickled % parts),
            trusted=(Outer.Inner, Kept),
        )
