"""What a save stores without reading it back is what a load gives back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from megackpt import serialization
from megackpt.errors import UntrustedClass
from megackpt.state import storable
from megackpt.state.storable import loadable


class Unknown:
    """A class that no load trusts by itself."""


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_plain_values_come_back(value: Any) -> None:
    blob, untrusted = loadable("the object", value)
    assert untrusted == serialization.check(blob) == []
    assert serialization.load(blob) == value


def test_only_small_values_of_exact_types_are_not_checked() -> None:
    class Text(str):
        __slots__ = ()

    class Numbers(list[int]):
        pass

    cycle: list[Any] = []
    cycle.append(cycle)
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    shared: list[Any] = [0] * 8
    for _ in range(8):
        shared = [shared] * 8
    assert storable._is_plain({"a": [1, 2.5, None, True, {"b": "c"}]})
    for value in (
        Text("a"),
        Numbers([1]),
        {1: 2},
        {"\ud800": 1},
        2**64,
        (1, 2),
        b"bytes",
        cycle,
        deep,
        shared,
        [0] * 10_000,
    ):
        assert not storable._is_plain(value)


def test_the_search_for_a_part_that_cannot_be_saved_ends() -> None:
    tried: list[Any] = []
    assert storable._where([0] * 100_000, tried.append) == ""
    assert len(tried) < 5000


def test_a_text_names_each_class_that_a_load_must_trust() -> None:
    blob, untrusted = loadable("the object", [Unknown()])
    assert len(untrusted) == 1
    assert "Unknown" in untrusted[0]
    with pytest.raises(UntrustedClass, match="Unknown"):
        serialization.load(blob)
