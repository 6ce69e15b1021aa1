"""State dicts taken apart and put together: identity, factories, mixed lists, the caller's dict untouched."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, strategies as st

from megackpt import tree
from megackpt.errors import MismatchError, ShardingError
from megackpt.state import (
    ABSENT,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
    extract,
    restore,
)


def sharded(key: str, value: float = 0.0) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.full((2,), value))


def own(extracted) -> list:
    return [shard.data for shard in extracted.shards]


def halves(key: str, data: torch.Tensor) -> ShardedTensorFactory:
    """Stored as two shards, in a list."""

    def build(key, data, replica_id, flattened_range):
        assert flattened_range is None
        parts = data.chunk(2)
        return [
            ShardedTensor.from_rank_offsets(key, part, (0, i, 2), replica_id=replica_id)
            for i, part in enumerate(parts)
        ]

    return ShardedTensorFactory(key, data, build, torch.cat)


@st.composite
def leaf(draw):
    kind = draw(st.sampled_from(["common", "tensor", "object", "local"]))
    key = draw(st.text(min_size=1, max_size=3).filter(lambda k: k != "common_state"))
    number = draw(st.integers(1, 9))
    if kind == "tensor":
        return sharded(key, number)
    if kind == "object":
        return ShardedObject(key, {"v": number}, (1,), (0,))
    return LocalNonpersistentObject([number]) if kind == "local" else number


keys = st.one_of(st.text(max_size=3), st.integers(-2, 5))
states = st.dictionaries(
    keys,
    st.recursive(
        leaf(),
        lambda t: st.one_of(
            st.lists(t, max_size=4), st.dictionaries(keys, t, max_size=4)
        ),
        max_leaves=15,
    ),
    max_size=4,
)


def plain(state):
    def value(x):
        x = x.data if isinstance(x, (ShardedTensor, ShardedObject)) else x
        x = x.unwrap() if isinstance(x, LocalNonpersistentObject) else x
        return ("tensor", *x.tolist()) if isinstance(x, torch.Tensor) else x

    return tree.dict_list_map_outplace(value, state)


@given(states)
def test_extract_then_restore_is_the_identity(state):
    before, leaves = (
        copy.deepcopy(plain(state)),
        list(map(id, tree.nested_values(state))),
    )
    extracted = extract(state)
    result = restore(extracted, own(extracted), extracted.common)
    assert plain(result) == before
    assert plain(state) == before
    assert list(map(id, tree.nested_values(state))) == leaves


@given(states)
def test_every_leaf_goes_one_way_and_shards_know_their_paths(state):
    e = extract(state)
    assert all(
        tree.lookup(state, path) is shard
        for path, shard in zip(e.paths, e.shards, strict=True)
    )
    counted = [x for x in tree.nested_values(e.common) if x is not None]
    local = [
        x for x in tree.nested_values(state) if isinstance(x, LocalNonpersistentObject)
    ]
    assert len(counted) + len(local) + len(e.shards) == len(
        list(tree.nested_values(state))
    )
    assert not [
        x
        for x in tree.nested_values(e.common)
        if isinstance(x, (ShardedTensor, ShardedObject))
    ]


def test_what_goes_into_the_common_state():
    state = {
        "w": sharded("w"),
        "list": [sharded("a"), sharded("b")],
        "only": {"deep": [sharded("c")]},
        "groups": [
            {"lr": 1, "params": LocalNonpersistentObject([0])},
            {"lr": 2, "params": sharded("d")},
        ],
        "mixed": [sharded("e"), 5, {"x": sharded("f")}, [sharded("g")]],
        "empty": {},
        7: (1, 2),
    }
    e = extract(state)
    assert e.common == {
        "groups": [{"lr": 1}, {"lr": 2}],
        "mixed": [None, 5, {}, None],
        "empty": {},
        7: (1, 2),
    }
    assert [s.key for s in e.shards] == list("wabcdefg")


def test_loaded_common_wins_over_the_state_asked_for():
    state = {
        "w": sharded("w"),
        "iteration": 0,
        "gone": 1,
        "kept": LocalNonpersistentObject("mine"),
    }
    e = extract(state)
    result = restore(e, own(e), {"iteration": 100, "extra": [1], "kept": "stored"})
    assert result.pop("w") is state["w"].data
    assert result == {"iteration": 100, "extra": [1], "kept": "mine"}


def test_empty_containers_asked_for_come_back_even_where_the_coordinator_had_none():
    e = extract({"optimizer": {"state": {}}, "w": sharded("w")})
    assert restore(e, own(e), {})["optimizer"] == {"state": {}}


def test_common_state_in_the_way():
    e = extract({"a": {"w": sharded("w")}, "l": [sharded("x"), 1]})
    with pytest.raises(MismatchError, match=r"\['a'\]\['w'\] already holds a int"):
        restore(e, own(e), {"a": {"w": 5}})
    with pytest.raises(MismatchError, match=r"\['a'\] is a int here and a dict there"):
        restore(e, own(e), {"a": 5})
    with pytest.raises(
        MismatchError, match=r"\['l'\] is a list of 3 here and of 2 there"
    ):
        restore(e, own(e), {"l": [1, 2, 3]})


def test_the_loaded_common_state_is_not_changed():
    e = extract({"a": {"w": sharded("w")}})
    common = {"a": {"x": 1}}
    assert restore(e, ["W"], common) == {"a": {"x": 1, "w": "W"}}
    assert common == {"a": {"x": 1}}


def test_factories_are_built_and_merged_without_touching_the_callers_dict():
    factory = halves("w", torch.arange(4.0))
    state = {"list": [sharded("a"), factory, 3], "tail": 1}
    e = extract(state)
    assert state["list"][1] is factory
    assert [s.key for s in e.shards] == ["a", "w", "w"]
    assert e.common == {"list": [None, None, 3], "tail": 1}
    result = restore(e, own(e), e.common)
    assert torch.equal(result["list"][1], torch.arange(4.0))
    assert result["list"][2] == 3


def test_lists_may_mix_tensors_and_a_factory_that_builds_a_list():
    def build(key, data, replica_id, flattened_range):
        return [sharded(f"{key}.{i}", i) for i in range(3)]

    state = {
        "l": [
            sharded("a", 9),
            ShardedTensorFactory("f", None, build, sum),
            sharded("b", 8),
        ]
    }
    e = extract(state)
    assert [t.tolist() for t in restore(e, own(e), {})["l"]] == [
        [9.0, 9.0],
        [3.0, 3.0],
        [8.0, 8.0],
    ]


def test_nested_factories_merge_from_the_inside_out():
    order = []

    def outer_build(key, data, replica_id, flattened_range):
        inner = halves(f"{key}.inner", data)
        inner.merge_fn = lambda parts: order.append("inner") or torch.cat(parts)
        return {"x": inner, "y": sharded(f"{key}.y", 5)}

    def outer_merge(sub):
        order.append("outer")
        return sub["x"].sum() + sub["y"].sum()

    direct = ShardedTensorFactory(
        "d", torch.ones(4), lambda k, d, *_: halves(k, d), lambda x: x * 2
    )
    e = extract(
        {
            "o": ShardedTensorFactory("o", torch.ones(4), outer_build, outer_merge),
            "d": direct,
        }
    )
    assert [s.key for s in e.shards] == ["o.inner", "o.inner", "o.y", "d", "d"]
    result = restore(e, own(e), e.common)
    assert order == ["inner", "outer"]
    assert float(result["o"]) == 14.0
    assert result["d"].tolist() == [2.0] * 4


def test_factories_that_build_nothing_or_never_end():
    nothing = ShardedTensorFactory("n", 1, lambda *_: {}, lambda sub: ("merged", sub))
    e = extract({"n": nothing})
    assert restore(e, [], {}) == {"n": ("merged", {})}
    endless = ShardedTensorFactory("e", 1, lambda *_: endless, lambda sub: sub)
    with pytest.raises(ShardingError, match="'e': factories nested deeper"):
        extract({"e": endless})


def test_an_error_in_a_factorys_own_function_names_the_factory():
    def fails(*_):
        raise KeyError("w")

    whole = ShardedTensor.from_rank_offsets("t", torch.ones(2))
    with pytest.raises(KeyError) as told:
        extract({"f": ShardedTensorFactory("fc1", None, fails, len)})
    assert told.value.__notes__ == ["in the build_fn of the factory 'fc1'"]
    extracted = extract(
        {"f": ShardedTensorFactory("fc1", None, lambda *_: whole, fails)}
    )
    with pytest.raises(KeyError) as told:
        restore(extracted, [torch.ones(2)], {})
    assert told.value.__notes__ == ["in the merge_fn of the factory 'fc1'"]


def test_absent_values_are_left_out_with_the_factories_around_them():
    state = {
        "a": sharded("a"),
        "l": [sharded("b"), 1],
        "f": halves("w", torch.ones(4)),
        "g": halves("v", torch.ones(4)),
    }
    e = extract(state)
    values = [
        ABSENT if s.key in "ab" or (s.key == "w" and s.global_offset[0]) else s.data
        for s in e.shards
    ]
    result = restore(e, values, e.common)
    assert result.pop("g").tolist() == [1.0] * 4
    assert result == {"l": [None, 1]}


# A class as Megatron-Core's own, which is not common state either.
MEGATRONS = type(
    "ShardedTensor", (type("ShardedBase", (), {}),), {"__module__": "mapping"}
)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ([1], "must be a dict, not a list"),
        (None, "must be a dict, not a NoneType"),
        (
            {"t": (1, (sharded("hidden"),))},
            r"\['t'\]: a ShardedTensor \('hidden'\) in a tuple is lost",
        ),
        (
            {"a": [ShardedObject("common_state", 1, (1,), (0,))]},
            r"\['a'\]\[0\]: the key 'common_state' is reserved",
        ),
        (
            {"a": {LocalNonpersistentObject(1): 2}},
            "LocalNonpersistentObject is a dict key",
        ),
        (
            {"a": [MEGATRONS()]},
            r"\['a'\]\[0\]: mapping.ShardedTensor is not one of the classes of megackpt",
        ),
        ({"a": (MEGATRONS(),)}, r"a ShardedTensor \(''\) in a tuple is lost"),
    ],
    ids=["list", "none", "tuple", "reserved", "key", "foreign", "foreign in a tuple"],
)
def test_wrong_input(state, text):
    with pytest.raises(ShardingError, match=text):
        extract(state)


def test_a_state_that_holds_itself():
    state: dict = {}
    state["me"] = [state]
    with pytest.raises(ShardingError, match="hold itself"):
        extract(state)
    cycle: list = [1]
    cycle += [cycle, (cycle, {1: cycle})]
    assert extract({"a": (cycle,)}).common == {"a": (cycle,)}


def test_deep_odd_and_ordered_dicts():
    node: dict = {"w": sharded("w")}
    for i in range(500):
        node = {i: node}
    state = OrderedDict(top=node, empty=OrderedDict())
    e = extract(state)
    assert len(e.paths[0]) == 502
    assert tree.lookup(restore(e, ["W"], e.common), e.paths[0]) == "W"
    assert extract({}).common == {}
    assert restore(extract({}), [], {}) == {}


def test_apply_factories_in_place_builds_one_level():
    state = {
        "a": [halves("w", torch.arange(4.0)), 1],
        "f": ShardedTensorFactory("o", 0, lambda *_: nested, len),
    }
    nested = halves("n", torch.ones(2))
    assert apply_factories(state) is None
    assert [t.key for t in state["a"][0]] == ["w", "w"]
    assert state["f"] is nested


def test_apply_factory_merges():
    factory = halves("w", torch.arange(4.0))
    original = {"a": {"f": factory}, "l": {1: factory}}
    loaded = {
        "a": {"f": [torch.ones(1), torch.zeros(1)], "x": 1},
        "l": [0, [torch.ones(1)], 2],
    }
    assert apply_factory_merges(loaded, original) is loaded
    assert loaded["a"]["f"].tolist() == [1.0, 0.0]
    assert loaded["l"][1].tolist() == [1.0]
    assert loaded["l"][::2] == [0, 2]


@pytest.mark.parametrize(
    ("loaded", "factories", "text"),
    [
        ({"a": 1}, {"b": halves("w", 0)}, r"keys \['b'\] are absent"),
        (
            {"a": [1, 2]},
            {"a": [halves("w", 0)]},
            r"at \['a'\]: lists of different lengths \(2 and 1\)",
        ),
        ({"a": [1]}, {"a": {"x": halves("w", 0)}}, r"keys \['x'\] are absent"),
        ({"a": [1]}, {"a": {1: halves("w", 0)}}, r"keys \[1\] are absent"),
        ({"a": 5}, {"a": {"b": halves("w", 0)}}, "a value 5 is where"),
    ],
)
def test_apply_factory_merges_errors(loaded, factories, text):
    with pytest.raises(ValueError, match=text):
        apply_factory_merges(loaded, factories)
