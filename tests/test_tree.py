"""Nested dicts and lists: every verb, deep nesting, odd keys, and the semantics callers of Megatron know."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from megackpt import tree
from megackpt.errors import ShardingError

leaves = st.one_of(
    st.integers(), st.none(), st.text(max_size=3), st.tuples(st.integers())
)
keys = st.one_of(st.text(max_size=3), st.integers(-2, 5))
trees = st.recursive(
    leaves,
    lambda t: st.one_of(st.lists(t, max_size=4), st.dictionaries(keys, t, max_size=4)),
    max_leaves=15,
)
roots = st.dictionaries(keys, trees, max_size=4)


def deep(levels: int, leaf: object = 1) -> dict:
    node: object = {"leaf": leaf}
    for i in range(levels):
        node = {"a": node} if i % 2 else [node]
    return {"top": node}


def test_walk_is_depth_first_in_order_and_tuples_are_leaves():
    state = {"b": [1, {"x": 2}], "a": (3, 4), 7: {}, "e": []}
    assert list(tree.walk(state)) == [
        (("b", 0), 1),
        (("b", 1, "x"), 2),
        (("a",), (3, 4)),
    ]
    assert list(tree.walk(state, empties=True))[-2:] == [((7,), {}), (("e",), [])]
    assert list(tree.walk(5)) == [((), 5)]
    assert list(tree.walk({}, empties=True)) == []


def plainly(path: tuple, node: object, empties: bool) -> list:
    if not tree.is_branch(node):
        return [(path, node)]
    below = [
        leaf
        for key, value in tree.items(node)
        for leaf in plainly((*path, key), value, empties)
    ]
    return [(path, node)] if empties and path and not node else below


@given(trees, st.booleans())
def test_walk_is_the_plain_recursion(state, empties):
    assert list(tree.walk(state, empties=empties)) == plainly((), state, empties)


@given(roots)
def test_maps_and_copies(state):
    before = repr(state)
    assert tree.copied(state) == state
    assert list(tree.copied(state)) == list(state)
    marked = tree.dict_list_map_outplace(lambda leaf: ("seen", leaf), state)
    assert repr(state) == before
    assert [leaf for _, leaf in tree.walk(marked)] == [
        ("seen", leaf) for leaf in tree.nested_values(state)
    ]
    copy = tree.copied(state)
    assert tree.dict_list_map_inplace(lambda leaf: ("seen", leaf), copy) is copy
    assert copy == marked


@given(roots)
def test_extract_matching_values_splits_everything(state):
    match, rest = tree.extract_matching_values(
        state, lambda x: isinstance(x, int), return_lists_as_dicts=True
    )
    ints = {path for path, leaf in tree.walk(state) if isinstance(leaf, int)}
    assert {path for path, _ in tree.walk(match)} == ints
    assert {p for p, _ in tree.walk(rest)} == {
        p for p, leaf in tree.walk(state) if not isinstance(leaf, int)
    }


def test_extract_matching_values_compacts_lists():
    state = {"l": ["a", 1, "b", 2], "only": [1], "empty": {}, "d": {"x": 1}}
    match, rest = tree.extract_matching_values(state, lambda x: isinstance(x, int))
    assert match == {"l": [1, 2], "only": [1], "d": {"x": 1}}
    assert rest == {"l": ["a", "b"], "empty": {}}
    with pytest.raises(ValueError):
        tree.extract_matching_values(3, bool)


def test_merge():
    left = {"a": {"x": 1}, "l": [{"p": 1}, {}]}
    assert tree.merge(left, {"a": {"y": 2}, "l": [{"q": 2}, {"r": 3}], 5: 6}) is left
    assert left == {"a": {"x": 1, "y": 2}, "l": [{"p": 1, "q": 2}, {"r": 3}], 5: 6}
    with pytest.raises(ValueError, match=r"lengths \(1 and 2\).*\['l'\]"):
        tree.merge({"l": [1]}, {"l": [1, 2]})
    with pytest.raises(ValueError, match=r"\['a'\]\['x'\]: 1 and 2"):
        tree.merge({"a": {"x": 1}}, {"a": {"x": 2}})


def test_diff_tells_paths_and_types():
    assert tree.diff({"rank": 0, "a": 1}, {"rank": 3, "a": 1}) == (
        [],
        [],
        [(("rank",), int, int)],
    )
    left, right, mismatch = tree.diff(
        {"a": [1, 2, 3], "t": torch.ones(2), "x": 1},
        {"a": [1, 5], "t": torch.zeros(2), "y": 1, "z": {}},
    )
    assert sorted(map(str, left)) == ["('a', 2)", "('x',)"]
    assert right == [("y",), ("z",)]
    assert {path for path, _, _ in mismatch} == {("a", 1), ("t",)}
    assert tree.diff(
        {"t": torch.ones(2), "n": [1]}, {"t": torch.ones(2), "n": [1]}
    ) == ([], [], [])
    assert tree.diff({"t": torch.ones(2)}, {"t": torch.ones(3)})[2] == [
        (("t",), torch.Tensor, torch.Tensor)
    ]
    assert tree.diff({"t": [1]}, {"t": {0: 1}})[2] == [(("t",), list, dict)]


def test_map_reduce():
    assert tree.map_reduce([1, 2, 3, 4], lambda x: x % 2, lambda x: x * 10, sum) == {
        1: 40,
        0: 60,
    }


def test_500_levels_are_no_trouble():
    state = deep(500)
    (path, leaf), *_ = list(tree.walk(state))
    assert (len(path), leaf) == (502, 1)
    assert tree.lookup(tree.copied(state), path) == 1
    assert tree.merge(tree.copied(state), {"x": 1})["x"] == 1
    assert tree.diff(state, deep(500, leaf=2))[2][0][1:] == (int, int)
    assert tree.extract_matching_values(state, lambda x: x == 1)[1] == {}


def test_a_container_that_holds_itself_is_an_error_not_a_hang():
    state: dict = {"a": {}}
    state["a"]["again"] = state
    with pytest.raises(ShardingError, match="hold itself"):
        list(tree.walk(state))
    with pytest.raises(ShardingError, match="hold itself"):
        tree.copied(state)
