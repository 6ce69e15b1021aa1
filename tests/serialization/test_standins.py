"""Objects of Megatron's classes become stand-ins, survive saves, and never run."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import types
from typing import Any

import pytest
import torch

from megackpt import serialization


class TestMegatron:
    @pytest.fixture
    def blob(self, monkeypatch: pytest.MonkeyPatch) -> bytes:
        """An object of Megatron's classes, made while these could be imported."""
        module = types.ModuleType("megatron.core.enums")
        source = """
import enum, os
class ModelType(enum.Enum):
    encoder = 1
class Config:
    def __init__(self): self.lr = 0.5
    def __setstate__(self, state): os._exit(3)
    def __reduce__(self): return Config.make, (7,), {"lr": self.lr}
    @staticmethod
    def make(n): os._exit(3)
class Fields:
    pass
"""
        exec(compile(source, "megatron", "exec"), module.__dict__)  # noqa: S102 - a module of that name
        for name in ("megatron", "megatron.core"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, "megatron.core.enums", module)
        fields = module.Fields()
        fields.a = torch.ones(2)
        return serialization.dump(
            {
                "kind": module.ModelType.encoder,
                "again": module.ModelType.encoder,
                "fields": fields,
            }
        )

    def test_stand_ins(self, blob: bytes) -> None:
        found = serialization.load(blob)
        assert isinstance(found["kind"], serialization.StandIn)
        assert found["kind"].qualified_name == "megatron.core.enums.ModelType"
        assert found["kind"].args == (1,)
        assert found["kind"] == found["again"]
        assert (
            repr(found["kind"])
            == "<stand-in for megatron.core.enums.ModelType args=(1,)>"
        )
        assert torch.equal(found["fields"].state["a"], torch.ones(2))
        assert found["fields"].a is found["fields"].state["a"]
        assert "a" in dir(found["fields"])
        assert found["kind"].value == 1

    def test_trusted_they_are_themselves(self, blob: bytes) -> None:
        module = sys.modules["megatron.core.enums"]
        found = serialization.load(blob, trusted=(module.ModelType,))
        assert found["kind"] is module.ModelType.encoder
        assert isinstance(found["fields"], serialization.StandIn)

    def test_stand_ins_survive_saving(self, blob: bytes) -> None:
        found = serialization.load(blob)
        again = serialization.load(serialization.dump(found))
        assert again["kind"] == found["kind"]
        assert again["kind"] is again["again"]
        assert torch.equal(again["fields"].a, found["fields"].a)

    def test_saved_stand_ins_for_plain_classes_are_what_they_stand_for(
        self, blob: bytes
    ) -> None:
        module = sys.modules["megatron.core.enums"]
        found = serialization.load(blob)
        saved = serialization.dump(
            {"kinds": [found["kind"], found["again"]], "tensor": torch.ones(2)}
        )
        assert b"megackpt" not in saved
        kinds = torch.load(io.BytesIO(saved), weights_only=False)["kinds"]
        assert kinds == [module.ModelType.encoder] * 2

    def test_others_never_come_alive(self) -> None:
        """A hostile checkpoint may hold stand-ins of any name; what is saved of them runs nothing."""
        for name in (
            "os.system",
            "megatron.core.utils.run",
            "megatron.core.enums\nModelType",
            "x",
        ):
            hostile = serialization.load(pickled_stand_in(name, ("touch witness",)))
            saved = serialization.dump([hostile, serialization.StandInClass(name)])
            found = torch.load(io.BytesIO(saved), weights_only=False)
            assert found == [hostile, serialization.StandInClass(name)]
            assert serialization.load(saved) == found

    def test_attributes(self) -> None:
        slots = serialization.StandIn("a.B", (), ({"x": 1, "state": 2}, {"y": 3}))
        assert (slots.x, slots.y, slots.state[0]["state"]) == (1, 3, 2)
        for name in ("z", "value", "__len__", "__setstate__"):
            with pytest.raises(AttributeError, match=f"a.B has no attribute '{name}'"):
                getattr(slots, name)
        for twin in (
            copy.copy(slots),
            copy.deepcopy(slots),
            pickle.loads(pickle.dumps(slots)),
        ):
            assert twin == slots
        assert not hasattr(serialization.StandIn.__new__(serialization.StandIn), "x")
        loop = serialization.StandIn("a.B", (), {})
        loop.state["me"] = loop
        assert repr(loop) == "<stand-in for a.B state={'me': ...}>"


def pickled_stand_in(name: str, args: tuple[Any, ...]) -> bytes:
    """What nobody but a forger writes."""
    buffer = io.BytesIO()
    torch.save(serialization.StandIn(name, args), buffer)
    return buffer.getvalue()
