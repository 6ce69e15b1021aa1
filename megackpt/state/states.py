"""State dicts taken apart (``extract``) and put together again (``restore``), never changing the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from megackpt import tree
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

MAX_NESTED_FACTORIES = 100


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()
"""For ``restore``: the value of a shard that was not loaded (left out by a lenient StrictHandling)."""


@dataclass(frozen=True, slots=True, eq=False)
class Extracted:
    """A state dict, sorted by what happens to its leaves.

    ``state`` is the caller's state with its containers made anew and each factory replaced by what it
    built. ``shards[i]`` (a ShardedTensor or ShardedObject: the caller's, or made of a foreign one) stands at
    ``paths[i]`` in it.
    ``common`` is everything else that is saved: lists in it keep the indices of ``state`` (None or {} stands
    for what is not common), branches without any common leaf are left out. ``local`` is what every rank keeps
    for itself, ``empties`` the places of empty containers, ``factories`` the factories with their places,
    outer ones first.
    """

    state: dict[Any, Any]
    shards: list[ShardedTensor | ShardedObject]
    paths: list[Path]
    common: dict[Any, Any]
    local: Leaves
    empties: list[Path]
    factories: list[tuple[Path, ShardedTensorFactory]]


def _as_it_is(leaf: Any) -> Any:
    return leaf


def extract(
    state: dict[Any, Any], native: Callable[[Any], Any] = _as_it_is
) -> Extracted:
    """Sort the leaves of a sharded state dict.

    ``native`` turns other people's declarations into ours: it is given every leaf that is no ShardedTensor, of the
    state and of what factories build.
    Raises ShardingError for what is no dict, for shards in places where they would be lost (in tuples or
    sets, as keys), for shards of a foreign kind and for the reserved key "common_state"; all at once.
    """
    if not isinstance(state, dict):
        raise ShardingError(
            f"a sharded state dict must be a dict, not a {type(state).__name__}"
            + (
                ": put it into one, under a key"
                if isinstance(state, (list, tuple))
                else ""
            )
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
    """The state with every factory replaced by what it builds, to the last one; and the factories."""
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
    for (
        level,
        path,
        factory,
    ) in todo:  # grows on the way: a build may hold further factories
        if level > MAX_NESTED_FACTORIES:
            raise ShardingError(
                f"{factory.key!r}: factories nested deeper than {MAX_NESTED_FACTORIES} builds"
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
    """Add to an exception of the caller's own function where it was called."""
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
            f"{tree.show(path)}: a {kind} is no common state, of which one rank's is kept; {SHARDED}"
        ]
    what, where = type(hidden).__name__, type(leaf).__name__
    name = getattr(hidden, "key", "")
    lost = f"a {what} ({name!r}) in a {where} is lost"
    return [
        f"{tree.show(path)}: {lost}; only dicts and lists are walked into: make it one of these"
    ]


def _inside(leaf: Any) -> Iterable[Any]:
    """What a leaf that is a foreign container holds, at any depth."""
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
                f"a {type(key).__name__} stands as a dict key: {key!r}"
                for key in branch
                if type(key) is not str and is_declared(key)
            ]
        todo += [value for _, value in tree.items(branch) if tree.is_branch(value)]
    return problems


def restore(
    extracted: Extracted, values: Sequence[Any], common: dict[Any, Any]
) -> dict[Any, Any]:
    """The loaded state: ``values[i]`` for ``shards[i]``, the loaded ``common``, each rank's own local values.

    Common leaves come from the checkpoint only: those of the state asked for are not looked at. Then each
    factory's ``merge_fn`` gets what was loaded at its place, inner factories first. Where a value is
    ``ABSENT``, its leaf is left out (in a list: None), and with it every factory around it.
    Raises MismatchError where the common state stands in the way: a leaf where a shard was asked for, or a
    list of another length.
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
        if path not in incomplete and _stands(
            result, path
        ):  # not, where it built what is not stored
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
    """Does the path lead to something?"""
    return _stands(x, path) and tree.lookup(x, path) is not None


def _stands(x: Any, path: Path) -> bool:
    """Does the path lead anywhere, be it to None?"""
    for key in path:
        inside = (
            key in x if isinstance(x, dict) else isinstance(x, list) and key < len(x)
        )
        if not inside:
            return False
        x = x[key]
    return True


def apply_factories(sharded_state_dict: dict[Any, Any]) -> None:
    """Replace each factory by what it builds, in place. What is built is not searched for more of them.

    (``extract`` does better: it leaves the caller's dict alone and builds nested factories too.)
    """
    tree.dict_list_map_inplace(
        lambda leaf: leaf.build() if is_declared(leaf, ShardedTensorFactory) else leaf,
        sharded_state_dict,
    )


def apply_factory_merges(x1: Any, x2: Any, key: Path = ()) -> Any:
    """Undo ``apply_factories`` on the loaded state ``x1``, in place, and return it.

    ``x2`` holds nothing but the factories at their places; lists may be given as ``{index: ...}``.
    Raises ValueError where ``x1`` lacks a place of ``x2``: an absent key, a list of another length, an index
    that is no int or out of range, a leaf in the place of a container.
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
    """Why the factories of ``x2`` have no place in ``x1``, one level deep; empty where they have."""
    if isinstance(x1, dict) and isinstance(x2, dict):
        absent = [k for k in x2 if k not in x1]
        return f"keys {absent} are absent; there are {list(x1)}" if absent else ""
    if isinstance(x1, list) and isinstance(x2, list):
        same = len(x1) == len(x2)
        return (
            ""
            if same
            else f"lists of different lengths ({len(x1)} and {len(x2)}) cannot be merged"
        )
    if isinstance(x1, list) and isinstance(x2, dict):
        named = [k for k in x2 if not isinstance(k, int)]
        if named:
            return f"keys {named} of non-integer type cannot name elements of a list"
        outside = [k for k in x2 if not 0 <= k < len(x1)]
        return (
            f"indices {outside} are out of bound for a list of length {len(x1)}"
            if outside
            else ""
        )
    return f"a value {x1!r} stands where {x2!r} belongs"
