"""State dicts split (``extract``) and joined again (``restore``), without changing the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from megackpt import limits, tree
from megackpt.errors import MismatchError, ShardingError, join_truncated
from megackpt.planning.manifest import COMMON_KEY
from megackpt.state.storable import (
    SHARDED,
    distributed_name,
    is_declared,
    is_distributed,
)
from megackpt.state.values import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.tree import Leaves, Path


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()
"""For ``restore``: the value of a shard that was not loaded."""


@dataclass(frozen=True, slots=True, eq=False)
class Extracted:
    """A state dict, its leaves sorted by kind.

    Attributes:
        state: the caller's state with new containers, and factories replaced by their products.
        shards: ``shards[i]``, the caller's or made of a foreign one, is at ``paths[i]``.
        common: all other leaves that are saved. Lists keep their indices (None or {} replace
            leaves of other kinds); branches without a common leaf are left out.
        local: the values that every rank keeps for itself.
        empties: the paths of empty containers.
        factories: the factories with their paths, outer ones first.
    """

    state: dict[Any, Any]
    shards: list[ShardedTensor | ShardedObject]
    paths: list[Path]
    common: dict[Any, Any]
    local: Leaves
    empties: list[Path]
    factories: list[tuple[Path, ShardedTensorFactory]]


def extract(
    state: dict[Any, Any], native: Callable[[Any], Any] = lambda leaf: leaf
) -> Extracted:
    """Sort the leaves of a sharded state dict.

    ``native`` converts declarations of other libraries. It is called with every leaf that is
    not a ShardedTensor, of the state and of the products of factories.
    Raises ShardingError for a state of another type, for shards that would be lost (in tuples
    or sets, as keys), for shards of an unknown class and for the reserved key "common_state";
    all problems at once.
    """
    given: object = state
    if not isinstance(given, dict):
        advice = ""
        if isinstance(given, (list, tuple)):
            advice = ": put it into one, under a key"
        raise ShardingError(
            f"a sharded state dict must be a dict, not a {type(given).__name__}{advice}"
        )
    built, factories = _built(state, native)
    shards: list[ShardedTensor | ShardedObject] = []
    paths: list[Path] = []
    local: Leaves = []
    common: Leaves = []
    problems: list[str] = []
    for path, leaf in tree.walk(built, empties=True):
        if isinstance(leaf, (ShardedTensor, ShardedObject)):
            shards.append(leaf)
            paths.append(path)
            if leaf.key == COMMON_KEY:
                problems.append(
                    f"{tree.show(path)}: the key {COMMON_KEY!r} is reserved for the common state"
                )
        elif isinstance(leaf, LocalNonpersistentObject):
            local.append((path, leaf.unwrap()))
        else:
            common.append((path, tree.hollow(leaf) if tree.is_branch(leaf) else leaf))
            problems += _misplaced(path, leaf)
    problems += _sharded_keys(built)
    if problems:
        raise ShardingError(join_truncated(problems, separator="\n"))
    empties = [path for path, leaf in common if tree.is_branch(leaf)]
    return Extracted(
        built, shards, paths, _planted(common, built), local, empties, factories
    )


def _built(
    state: dict[Any, Any], native: Callable[[Any], Any]
) -> tuple[dict[Any, Any], list[tuple[Path, ShardedTensorFactory]]]:
    """The state with every factory, nested ones too, replaced by its product; the factories."""
    seen: list[Any] = []

    def kept(leaf: Any) -> Any:
        if type(leaf) is ShardedTensor:
            return leaf
        leaf = native(leaf)
        if isinstance(leaf, ShardedTensorFactory):
            seen.append(leaf)
        return leaf

    built = tree.dict_list_map_outplace(kept, state)
    todo = [(0, path, factory) for path, factory in _factories(built)] if seen else []
    # The list grows in the loop: a product may hold further factories.
    for level, path, factory in todo:
        if level > limits.NESTED_FACTORIES:
            raise ShardingError(
                f"{factory.key!r}: factories nested deeper than {limits.NESTED_FACTORIES} builds"
            )
        with _naming(factory, "build_fn"):
            subtree = tree.dict_list_map_outplace(native, factory.build())
        tree.lookup(built, path[:-1])[path[-1]] = subtree
        todo += [
            (level + 1, (*path, *inner), nested)
            for inner, nested in _factories(subtree)
        ]
    return built, [(path, factory) for _, path, factory in todo]


@contextmanager
def _naming(factory: ShardedTensorFactory, function: str) -> Iterator[None]:
    """Add a note to an exception of the caller's function: the function, and its factory."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the {function} of the factory {factory.key!r}")
        if isinstance(error, (TypeError, ValueError)):
            arguments = "key, data, replica_id, flattened_range"
            got = (
                f"({arguments})"
                if function == "build_fn"
                else "what build_fn gave, with tensors for shards"
            )
            error.add_note(f"which is called with {got}")
        raise


def _factories(x: Any) -> list[tuple[Path, ShardedTensorFactory]]:
    return [
        (path, leaf)
        for path, leaf in tree.walk(x)
        if isinstance(leaf, ShardedTensorFactory)
    ]


def _planted(leaves: Leaves, like: dict[Any, Any]) -> dict[Any, Any]:
    root: dict[Any, Any] = {}
    for path, leaf in leaves:
        tree.graft(root, path, leaf, like)
    return root


def _misplaced(path: Path, leaf: Any) -> list[str]:
    if is_declared(leaf):
        kind = f"{type(leaf).__module__}.{type(leaf).__name__}"
        return [
            f"{tree.show(path)}: {kind} is not one of the classes of megackpt: import it from there"
        ]
    hidden = next(
        (
            x
            for x in chain([leaf], _inside(leaf))
            if is_declared(x) or is_distributed(x)
        ),
        None,
    )
    if hidden is None:
        return []
    if is_distributed(hidden):
        kind = distributed_name(hidden)
        return [
            (
                f"{tree.show(path)}: a {kind} is not common state, because a checkpoint "
                f"keeps only one rank's; {SHARDED}"
            )
        ]
    what, where = type(hidden).__name__, type(leaf).__name__
    name = getattr(hidden, "key", "")
    lost = f"a {what} ({name!r}) in a {where} is lost"
    return [
        f"{tree.show(path)}: {lost}; only dicts and lists are walked into: make it one of these"
    ]


def _inside(leaf: Any) -> Iterable[Any]:
    """The values in a leaf that is a container of another kind, at any depth."""
    todo = [leaf]
    while todo:
        node = todo.pop()
        if isinstance(node, (tuple, set, frozenset, list, Mapping)):
            todo += node.values() if isinstance(node, Mapping) else node
        elif node is not leaf:
            yield node


def _sharded_keys(state: dict[Any, Any]) -> list[str]:
    problems: list[str] = []
    todo: list[Any] = [state]
    while todo:
        branch = todo.pop()
        if isinstance(branch, dict):
            problems += [
                f"a {type(key).__name__} is a dict key: {key!r}"
                for key in branch
                if type(key) is not str and is_declared(key)
            ]
        todo += [value for _, value in tree.items(branch) if tree.is_branch(value)]
    return problems


def restore(
    extracted: Extracted, values: Sequence[Any], common: dict[Any, Any]
) -> dict[Any, Any]:
    """The loaded state: ``values[i]`` for ``shards[i]``, ``common``, and this rank's local values.

    Common leaves come from the checkpoint only, not from the state asked for. Then each
    factory's ``merge_fn`` is called with the values at its path, inner factories first. A leaf
    whose value is ``ABSENT`` is left out (in a list: None), with every factory around it.
    Raises MismatchError if the common state has a leaf where a shard was asked for, or a list
    of another length.
    """
    result: dict[Any, Any] = tree.copied(common)
    loaded = [
        (path, value)
        for path, value in zip(extracted.paths, values, strict=True)
        if value is not ABSENT
    ]
    try:
        for path, value in extracted.local:
            tree.graft(result, path, value, extracted.state, replace=True)
        for path, value in loaded:
            tree.graft(result, path, value, extracted.state)
    except ValueError as error:
        raise MismatchError(
            f"the stored common state does not fit the state asked for (there): {error}"
        ) from error
    for path in extracted.empties:
        if not _holds(result, path):
            tree.graft(
                result,
                path,
                tree.hollow(tree.lookup(extracted.state, path)),
                extracted.state,
            )
    missing = [
        path
        for path, value in zip(extracted.paths, values, strict=True)
        if value is ABSENT
    ]
    _merge_factories(result, extracted, missing)
    return result


def _merge_factories(
    result: dict[Any, Any], extracted: Extracted, missing: list[Path]
) -> None:
    incomplete = set(
        chain.from_iterable(
            (path[:n] for n in range(len(path) + 1)) for path in missing
        )
    )
    for path, factory in reversed(extracted.factories):
        if path not in incomplete and _exists(result, path):
            parent = tree.lookup(result, path[:-1])
            with _naming(factory, "merge_fn"):
                parent[path[-1]] = factory.merge_fn(parent[path[-1]])
        elif _holds(result, path):
            parent = tree.lookup(result, path[:-1])
            if isinstance(parent, dict):
                del parent[path[-1]]
            else:
                parent[path[-1]] = None


def _holds(x: Any, path: Path) -> bool:
    """Does the path lead to a value other than None?"""
    return _exists(x, path) and tree.lookup(x, path) is not None


def _exists(x: Any, path: Path) -> bool:
    """Does the path lead to a value, be it None?"""
    for key in path:
        inside = (
            key in x if isinstance(x, dict) else isinstance(x, list) and key < len(x)
        )
        if not inside:
            return False
        x = x[key]
    return True


def apply_factories(sharded_state_dict: dict[Any, Any]) -> None:
    """Replace each factory by its product, in place. Products are not searched for factories.

    (``extract`` also builds nested factories, and does not change the caller's dict.)
    """
    tree.dict_list_map_inplace(
        lambda leaf: leaf.build() if is_declared(leaf, ShardedTensorFactory) else leaf,
        sharded_state_dict,
    )


def apply_factory_merges(x1: Any, x2: Any, key: Path = ()) -> Any:
    """Undo ``apply_factories`` on the loaded state ``x1``, in place, and return it.

    ``x2`` holds nothing but the factories at their places; lists may be given as ``{index: ...}``.
    Raises ValueError if ``x1`` lacks a path of ``x2``: an absent key, a list of another length,
    an index that is not an int or out of range, a leaf instead of a container.
    """
    if is_declared(x2, ShardedTensorFactory):
        return x2.merge_fn(x1)
    problem = _unmergeable(x1, x2)
    if problem:
        raise ValueError(f"apply_factory_merges, at {tree.show(key)}: {problem}")
    for k, factories in tree.items(x2):
        x1[k] = apply_factory_merges(x1[k], factories, (*key, k))
    return x1


def _unmergeable(x1: Any, x2: Any) -> str:
    """Why ``x1`` lacks a path of the factories in ``x2``, one level deep; "" if it has them."""
    if isinstance(x1, dict) and isinstance(x2, dict):
        absent = [k for k in x2 if k not in x1]
        return f"keys {absent} are absent; there are {list(x1)}" if absent else ""
    if isinstance(x1, list) and isinstance(x2, list):
        if len(x1) == len(x2):
            return ""
        return f"lists of different lengths ({len(x1)} and {len(x2)}) cannot be merged"
    if isinstance(x1, list) and isinstance(x2, dict):
        named = [k for k in x2 if not isinstance(k, int)]
        if named:
            return f"keys {named} of non-integer type cannot name elements of a list"
        outside = [k for k in x2 if not 0 <= k < len(x1)]
        if not outside:
            return ""
        return f"indices {outside} are out of bound for a list of length {len(x1)}"
    return f"a value {x1!r} is where {x2!r} belongs"
