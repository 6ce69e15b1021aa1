"""Megatron's declarations as ours: known by module and name, unknown fields, factories, flattened ranges."""

from __future__ import annotations

import logging
import types
from dataclasses import field, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import megackpt
from megackpt.adapters import optimizer
from megackpt.adapters.megatron import from_megatron
from megackpt.adapters.modules import (
    add_prefix_for_sharding,
    apply_prefix_mapping,
    replace_prefix_for_sharding,
)
from megackpt.errors import ShardingError
from megackpt.megatron import utils
from megackpt.state import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
    extract,
)

TENSOR = (
    "key",
    "data",
    "dtype",
    "local_shape",
    "global_shape",
    "global_offset",
    "axis_fragmentations",
)
MORE = {
    "replica_id": 0,
    "prepend_axis_num": 0,
    "allow_shape_mismatch": False,
    "flattened_range": None,
}


def megatron(
    root: str = "megatron.core", names: tuple[str, ...] = TENSOR, **defaults: Any
) -> types.SimpleNamespace:
    """Classes as its module ``mapping`` has them, made anew; with these fields of ShardedTensor."""
    module = {"namespace": {"__module__": f"{root}.dist_checkpointing.mapping"}}
    base = type("ShardedBase", (), dict(module["namespace"]))

    def made(
        name: str, names: tuple[str, ...], defaults: dict[str, Any], **methods: Any
    ) -> Any:
        fields = [(n, Any) for n in names] + [
            (n, Any, field(default=d)) for n, d in defaults.items()
        ]
        kind = make_dataclass(name, fields, bases=(base,), namespace=methods)  # type: ignore[arg-type]
        kind.__module__ = (
            base.__module__
        )  # from Python 3.12 on it is the caller's, whatever the namespace has
        return kind

    def build(self: Any) -> Any:
        return self.build_fn(self.key, self.data, self.replica_id, None)

    local = type(
        "LocalNonpersistentObject",
        (),
        {**module["namespace"], "unwrap": lambda self: self.obj},
    )
    return types.SimpleNamespace(
        ShardedTensor=made("ShardedTensor", names, MORE | defaults),
        ShardedObject=made(
            "ShardedObject",
            ("key", "data", "global_shape", "global_offset"),
            {"replica_id": 0},
        ),
        ShardedTensorFactory=made(
            "ShardedTensorFactory",
            ("key", "data", "build_fn", "merge_fn"),
            {"replica_id": 0},
            build=build,
        ),
        LocalNonpersistentObject=local,
    )


def tensor(lib: Any, key: str, data: torch.Tensor | None = None, **options: Any) -> Any:
    data = torch.arange(6.0).reshape(2, 3) if data is None else data
    shape = tuple(data.shape)
    return lib.ShardedTensor(
        key,
        data,
        data.dtype,
        shape,
        shape,
        (0,) * len(shape),
        (1,) * len(shape),
        **options,
    )


@pytest.mark.parametrize("root", ["megatron.core", "mine.vendored", ""])
def test_its_classes_become_ours_over_the_same_data(root: str) -> None:
    lib = megatron(root)
    theirs = tensor(lib, "w", replica_id=(0, 1), allow_shape_mismatch=True)
    ours = from_megatron(theirs)
    assert type(ours) is ShardedTensor
    # By fields: from Python 3.13 on dataclasses compare their fields by ==, which a tensor has no answer to.
    assert vars(ours) == vars(
        ShardedTensor.from_rank_offsets(
            "w", theirs.data, replica_id=(0, 1), allow_shape_mismatch=True
        )
    )
    assert ours.data is theirs.data
    value = object()
    thing = from_megatron(lib.ShardedObject("o", value, (2,), (1,), 3))
    assert thing == ShardedObject("o", value, (2,), (1,), 3)
    local = lib.LocalNonpersistentObject()
    local.obj = value
    assert from_megatron(local).unwrap() is value
    derived = type("Derived", (lib.ShardedTensor,), {"__module__": "elsewhere"})
    assert vars(from_megatron(derived(*vars(theirs).values()))) == vars(ours)


@pytest.mark.parametrize(
    "leaf", [1, None, "text", torch.ones(2), ShardedObject("o", 1, (1,), (0,)), int]
)
def test_what_is_not_megatrons_stays_as_it_is(leaf: Any) -> None:
    assert from_megatron(leaf) is leaf


def test_unknown_fields_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    lib = megatron(compressed=True, layout="new")
    with caplog.at_level(logging.WARNING):
        assert [from_megatron(tensor(lib, key)).key for key in "ab"] == ["a", "b"]
    (record,) = caplog.records
    assert (
        "megatron.core.dist_checkpointing.mapping.ShardedTensor has fields"
        in record.getMessage()
    )
    assert "compressed, layout" in record.getMessage()


def test_fields_that_are_gone() -> None:
    lib = megatron(names=("key", "data", "dtype", "local_shape", "global_shape"))
    data = torch.ones(2)
    with pytest.raises(
        ShardingError,
        match=r"ShardedTensor has no global_offset, axis_fragmentations: this version",
    ):
        from_megatron(lib.ShardedTensor("w", data, data.dtype, (2,), (2,)))
    fewer = make_dataclass(
        "ShardedObject",
        ["key", "data", "global_shape", "global_offset"],
    )
    # Python 3.12 and newer set the module of the caller, whatever the namespace says.
    fewer.__module__ = "megatron.core.dist_checkpointing.mapping"
    assert from_megatron(fewer("o", 1, (1,), (0,))) == ShardedObject("o", 1, (1,), (0,))


def test_factories_build_megatrons_and_merge_plain_tensors(tmp_path: Path) -> None:
    lib, asked = megatron(), []
    data = torch.arange(8.0)

    def build(key: str, data: torch.Tensor, replica: Any, flat: Any) -> dict[str, Any]:
        assert (replica, flat) == ((0, 0), None)
        return {
            "halves": [
                tensor(lib, f"{key}.{i}", half, replica_id=replica)
                for i, half in enumerate(data.chunk(2))
            ]
        }

    def merge(found: dict[str, Any]) -> torch.Tensor:
        asked.append(found)
        return torch.cat(found["halves"])

    state = {
        "f": [lib.ShardedTensorFactory("f", data, build, merge, (0, 0))],
        "w": tensor(lib, "w"),
        "n": 7,
    }
    megackpt.save(state, tmp_path / "ckpt")
    assert type(state["f"][0]) is lib.ShardedTensorFactory
    saved, w = data.clone(), state["w"].data.clone()
    data.zero_()
    state["w"].data.zero_()
    found = megackpt.load({key: state[key] for key in "fw"}, tmp_path / "ckpt")
    assert found["f"][0].tolist() == saved.tolist() == data.tolist()
    assert [type(half) for half in asked[0]["halves"]] == [torch.Tensor] * 2
    assert torch.equal(found["w"], w)
    assert found["w"].data_ptr() == state["w"].data.data_ptr()
    assert found["n"] == 7


def test_a_derived_factory_builds_in_its_own_way() -> None:
    lib = megatron()

    class Halves(lib.ShardedTensorFactory):  # type: ignore[misc, name-defined]
        def build(self) -> Any:
            return [
                tensor(lib, f"{self.key}.{i}", half)
                for i, half in enumerate(self.data.chunk(2))
            ]

    given = Halves(
        "f", torch.arange(4.0), lambda *_: pytest.fail("not its own way"), torch.cat
    )
    moved = replace(from_megatron(given), key="momentum.f", data=torch.ones(4))
    built = extract({"theirs": given, "moved": moved}, from_megatron).shards
    assert {s.key: s.data.tolist() for s in built} == {
        "f.0": [0, 1], "f.1": [2, 3], "momentum.f.0": [1, 1], "momentum.f.1": [1, 1],
    }  # fmt: skip
    assert given.key == "f"


def test_helpers_know_them_and_ours_alike() -> None:
    """What looks for declarations in a state finds those that ``save`` takes."""
    lib, data = megatron(), torch.arange(4.0)

    def state(kinds: Any) -> dict[str, Any]:
        local = kinds.LocalNonpersistentObject.__new__(kinds.LocalNonpersistentObject)
        local.obj = 5
        build = kinds.ShardedTensorFactory(
            "a.f", data, lambda key, *_: {"built": key}, lambda x: (x, "merged")
        )
        thing = kinds.ShardedObject("a.o", 1, (1,), (0,))
        return {"w": tensor(kinds, "a.w"), "f": build, "o": thing, "l": local, "n": [1]}

    for kinds in (lib, megackpt):
        given = state(kinds)
        found = {
            name: sorted(getattr(utils, name)(given)[0])
            for name in dir(utils)
            if name.startswith("extract_") and name != "extract_matching_values"
        }
        assert found == {
            "extract_sharded_tensors": ["w"],
            "extract_sharded_tensors_and_factories": ["f", "w"],
            "extract_sharded_tensors_or_nonpersistent": ["f", "l", "w"],
            "extract_sharded_base": ["f", "o", "w"],
            "extract_nonpersistent": ["l"],
        }
        add_prefix_for_sharding(given, "student.")
        apply_prefix_mapping(given, {"student.a.o": "b.o"})
        assert [given[name].key for name in "wfo"] == [
            "student.a.w",
            "student.a.f",
            "b.o",
        ]
        with pytest.raises(
            ValueError, match=r"Expected b\.o to begin with prefix student"
        ):
            replace_prefix_for_sharding(given, "student.", "")
        factories = {"f": given["f"]}
        apply_factories(given)
        assert given["f"] == {"built": "student.a.f"}
        assert apply_factory_merges({"f": 3}, factories) == {"f": (3, "merged")}


def test_an_optimizer_of_their_parameters() -> None:
    """State of the parameter's shape, and what belongs to each tensor that its factory builds."""
    lib, weight = megatron(), torch.nn.Parameter(torch.arange(4.0))

    def build(key: str, data: torch.Tensor, *_: Any) -> list[Any]:
        return [tensor(lib, f"{key}.{i}", half) for i, half in enumerate(data.chunk(2))]

    adam = torch.optim.Adam([weight])
    weight.sum().backward()
    adam.step()
    declared = {"f": lib.ShardedTensorFactory("f", weight, build, torch.cat)}
    found = optimizer.get_param_id_to_sharded_param_map(declared, [weight])
    names = {
        f"optimizer.state.{name}.f.{i}"
        for name in ("exp_avg", "exp_avg_sq", "step")
        for i in range(2)
    }
    for params in (found, {0: declared["f"]}):
        state = optimizer.optim_state_to_sharding_state(adam.state_dict(), params)
        assert {shard.key for shard in extract(state, from_megatron).shards} >= names
    momentum = optimizer.make_sharded_optimizer_tensor(
        declared["f"], torch.ones(4), "m"
    )
    assert [shard.data.tolist() for shard in extract({"m": momentum}).shards] == [
        [1, 1],
        [1, 1],
    ]


def test_other_peoples_classes_of_such_names_are_none_of_these() -> None:
    foreign = type("ShardedTensor", (), {"key": "w"})()  # torch's legacy FSDP has one
    state = {"w": foreign}
    add_prefix_for_sharding(state, "student.")
    assert foreign.key == "w"
    assert utils.extract_sharded_tensors(state) == ({}, state)


def test_in_a_tuple_they_are_lost() -> None:
    lib = megatron()
    with pytest.raises(
        ShardingError, match=r"\['a'\]: a ShardedTensor \('hidden'\) in a tuple is lost"
    ):
        extract({"a": (tensor(lib, "hidden"),)}, from_megatron)


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), spans=st.data())
def test_a_flattened_range_is_the_boxes_that_it_fills(
    shape: list[int], spans: st.DataObject
) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    cuts = sorted(spans.draw(st.lists(st.integers(0, whole.numel()), max_size=3)))
    filled, flat = torch.full((2, *shape), -1.0), whole.reshape(-1)
    lib = megatron()
    for start, stop in zip((0, *cuts), (*cuts, whole.numel()), strict=True):
        theirs = lib.ShardedTensor(
            "w", flat[start:stop], whole.dtype, tuple(shape), (2, *shape), (1, *(0,) * len(shape)),
            (2, *(1,) * len(shape)), (0, 3), 1, False, slice(start, stop),
        )  # fmt: skip
        run = from_megatron(theirs)
        assert isinstance(run, ShardedTensorFactory)
        pieces = run.build()
        assert pieces
        assert start < stop or not pieces[0].data.numel(), (
            "an empty one is declared, so that a hole is seen"
        )
        for piece in pieces:
            piece.validate_metadata_integrity()
            assert piece.replica_id == (0, 3)
            filled[piece.global_slice()] = piece.data
        assert run.merge_fn([piece.data for piece in pieces]) is theirs.data
    assert torch.equal(filled[1], whole)
    assert filled[0].eq(-1).all()


def test_flattened_without_data_comes_back_flat() -> None:
    theirs = tensor(megatron(), "w", flattened_range=slice(1, 6))
    theirs.data = None
    run = from_megatron(theirs)
    merged = run.merge_fn([torch.ones(piece.local_shape) for piece in run.build()])
    assert merged.tolist() == [1.0] * 5


@pytest.mark.parametrize(
    "span", [slice(4, 8), slice(0, 6), slice(-1, 4), slice(None, None)]
)
def test_a_flattened_range_that_does_not_fit(span: slice) -> None:
    theirs = tensor(megatron(), "w", flattened_range=span)
    theirs.data = torch.ones(5)
    with pytest.raises(
        ShardingError,
        match=r"'w': data of shape \(5,\) is not elements .*shape \(2, 3\)",
    ):
        from_megatron(theirs)
