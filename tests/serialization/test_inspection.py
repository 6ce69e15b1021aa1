"""Objects that are only looked at: opened to the last leaf, whatever their classes; never run, never endless."""

from __future__ import annotations

import argparse
import enum
import io
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch

from megackpt import CorruptCheckpoint, UntrustedClass, serialization
from megackpt.serialization.inspection import UNSEEN, look


class Colour(enum.Enum):
    """A class that is not trusted."""

    RED = 3


class Config:
    """Another one, with state."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def test_unknown_classes_are_shown_by_name() -> None:
    blob = serialization.dump(
        {"c": Config(a=1, inner=Config(b=[Colour.RED])), "kind": Config}
    )
    with pytest.raises(UntrustedClass):
        serialization.load(blob)
    assert look(blob) == {
        "c": {
            "<class>": f"{__name__}.Config",
            "a": 1,
            "inner": {
                "<class>": f"{__name__}.Config",
                "b": [{"<class>": f"{__name__}.Colour", "<arguments>": [3]}],
            },
        },
        "kind": f"<class {__name__}.Config>",
    }


def test_known_containers_are_opened() -> None:
    value = {
        "namespace": argparse.Namespace(x=(1, {2})),
        "ordered": OrderedDict(a=deque([1])),
        "array": np.array([Config(a=1), None], dtype=object),
        "scalar": np.float64(0.5),
    }
    assert look(serialization.dump(value)) == {
        "namespace": {"x": [1, [2]]},
        "ordered": {"a": [1]},
        "array": [{"<class>": f"{__name__}.Config", "a": 1}, None],
        "scalar": 0.5,
    }
    assert torch.equal(look(serialization.dump(torch.arange(3))), torch.arange(3))


def test_what_has_no_text_of_its_own_is_taken_apart() -> None:
    told = look(
        serialization.dump(
            {"b": io.BytesIO(b"abc"), "s": torch.tensor([0.0, 2.0]).to_sparse()}
        )
    )
    assert told["b"] == b"abc"
    assert (told["s"]["<class>"], told["s"]["shape"]) == ("torch.sparse_coo", [2])
    assert (told["s"]["indices"].tolist(), told["s"]["values"].tolist()) == (
        [[1]],
        [2.0],
    )


def test_numbers_that_python_does_not_write() -> None:
    long = 10**5000
    told = look(
        serialization.dump(
            {long: {long}, "range": range(long), "in a key": {(long,): 1}}
        )
    )
    assert told[hex(long)] == [hex(long)]
    assert told["range"] == "<range of numbers too long to print>"
    assert repr(told)


def test_it_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert look(serialization.dump(loop)) == [1, "..."]
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    told = look(serialization.dump(deep))
    levels = 0
    while isinstance(told, list):
        told, levels = told[0], levels + 1
    assert (told, levels) == (UNSEEN, 101)
    monkeypatch.setattr("megackpt.serialization.inspection._PARTS", 10)
    assert look(serialization.dump(list(range(20)))) == [*range(9), *[UNSEEN] * 11]


def test_damage_raises() -> None:
    with pytest.raises(CorruptCheckpoint, match="here: "):
        look(serialization.dump([1])[:-30], "here")
