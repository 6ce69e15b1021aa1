"""Nested dicts and lists: walk, map, split, merge, compare.

Any value but a dict or a list is a leaf, tuples too. A path is the tuple of the keys and indices
that lead to a leaf. Containers in results are plain dicts and lists. Functions with names of
Megatron-Core's ``dict_utils`` have its semantics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from megackpt import limits
from megackpt.errors import ShardingError

Path = tuple[Any, ...]
Leaves = list[tuple[Path, Any]]


def is_branch(node: Any) -> bool:
    """True for dicts and lists."""
    return isinstance(node, (dict, list))


def items(branch: Any) -> Iterable[tuple[Any, Any]]:
    """(key, value) of a dict, (index, value) of a list."""
    return branch.items() if isinstance(branch, dict) else enumerate(branch)


def show(path: Path) -> str:
    """A path as people write it: ``['optimizer']['state'][0]``."""
    return "".join(f"[{key!r}]" for key in path) or "the root"


def walk(tree: Any, *, empties: bool = False) -> Iterator[tuple[Path, Any]]:
    """(path, leaf) of every leaf, depth first, in the containers' own order.

    With ``empties``, an empty container below the root counts as a leaf.
    Raises ShardingError for more than ``limits.STATE_DEPTH`` levels (a container that holds itself).
    """
    if not is_branch(tree):
        yield (), tree
        return
    todo: list[tuple[Path, Iterator[tuple[Any, Any]]]] = [((), iter(items(tree)))]
    while todo:
        path, rest = todo[-1]
        for key, node in rest:
            if not isinstance(node, (dict, list)):
                yield (*path, key), node
            elif len(path) >= limits.STATE_DEPTH:
                raise ShardingError(
                    f"nested deeper than {limits.STATE_DEPTH} levels at {show(path[:3])}: does it hold itself?"
                )
            elif node:
                todo.append(((*path, key), iter(items(node))))
                break
            elif empties:
                yield (*path, key), node
        else:
            todo.pop()


def lookup(tree: Any, path: Path) -> Any:
    """The value at ``path``. Raises KeyError, IndexError or TypeError if there is none."""
    for key in path:
        tree = tree[key]
    return tree


def vacant(node: Any) -> bool:
    """True for None and empty containers, which may be replaced without loss."""
    return node is None or (is_branch(node) and not node)


def hollow(like: Any) -> Any:
    """An empty container like this one; a list keeps its length, and its dicts become empty."""
    if isinstance(like, dict):
        return {}
    return [{} if isinstance(value, dict) else None for value in like]


def graft(
    target: Any, path: Path, leaf: Any, like: Any, *, replace: bool = False
) -> None:
    """Put ``leaf`` at ``path`` into ``target``, in place.

    Missing containers on the path are made as they are in ``like``, a tree that has this path,
    so that indices are the same in both. Raises ValueError if ``target`` holds another value
    there (unless ``replace`` is set), or a list of another length.
    """
    for depth, key in enumerate(path[:-1], start=1):
        like = like[key]
        child = target.get(key) if isinstance(target, dict) else target[key]
        if vacant(child):
            target[key] = child = hollow(like)
        elif isinstance(child, dict) != isinstance(like, dict) or not is_branch(child):
            raise ValueError(
                f"{show(path[:depth])} is a {_kind(child)} here and a {_kind(like)} there"
            )
        elif isinstance(child, list) and len(child) != len(like):
            raise ValueError(
                f"{show(path[:depth])} is a list of {len(child)} here and of {len(like)} there"
            )
        target = child
    key = path[-1]
    present = target.get(key) if isinstance(target, dict) else target[key]
    if not replace and not vacant(present):
        raise ValueError(f"{show(path)} already holds a {_kind(present)}")
    target[key] = leaf


def _kind(node: Any) -> str:
    return type(node).__name__


def nested_values(x: Any) -> Iterator[Any]:
    """Every leaf, depth first."""
    return (leaf for _, leaf in walk(x))


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """A copy of the containers, with ``f(leaf)`` for each leaf; ``x`` does not change."""
    if not is_branch(x):
        return f(x)
    root: Any = _blank(x)
    todo = [(x, root, 0)]
    while todo:
        source, target, depth = todo.pop()
        if depth > limits.STATE_DEPTH:
            raise ShardingError(
                f"nested deeper than {limits.STATE_DEPTH} levels: does a container hold itself?"
            )
        for key, value in items(source):
            if is_branch(value):
                target[key] = _blank(value)
                todo.append((value, target[key], depth + 1))
            else:
                target[key] = f(value)
    return root


def _blank(branch: Any) -> Any:
    return {} if isinstance(branch, dict) else [None] * len(branch)


def copied(tree: Any) -> Any:
    """A copy of the containers, with the same leaves."""
    return dict_list_map_outplace(lambda leaf: leaf, tree)


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace each leaf by ``f(leaf)``, in place; returns ``x`` (or ``f(x)`` of a leaf).

    Results of ``f`` are not walked into. A container at several paths is mapped once.
    """
    if not is_branch(x):
        return f(x)
    todo, seen = [x], {id(x)}
    while todo:
        branch = todo.pop()
        for key, value in list(items(branch)):
            if is_branch(value):
                if id(value) not in seen:
                    seen.add(id(value))
                    todo.append(value)
            else:
                branch[key] = f(value)
    return x


def extract_matching_values(
    x: Any, predicate: Callable[[Any], bool], return_lists_as_dicts: bool = False
) -> tuple[Any, Any]:
    """Split into (leaves that match, the rest), both with the hierarchy of ``x``.

    Branches without a match are left out of the first; empty containers stay in the second.
    Lists are compacted, so indices shift, unless ``return_lists_as_dicts`` turns each list into
    ``{index: value}``. Raises ValueError if ``x`` is neither a dict nor a list.
    """
    if not is_branch(x):
        raise ValueError(f"a dict or a list is expected, not a {_kind(x)}")
    match: dict[Any, Any] = {}
    rest: dict[Any, Any] = {}
    for key, value in items(x):
        if not is_branch(value):
            (match if predicate(value) else rest)[key] = value
            continue
        inner_match, inner_rest = extract_matching_values(
            value, predicate, return_lists_as_dicts
        )
        if inner_match:
            match[key] = inner_match
        if inner_rest or not value:
            rest[key] = inner_rest
    if isinstance(x, dict) or return_lists_as_dicts:
        return match, rest
    return list(match.values()), list(rest.values())


def merge(x1: Any, x2: Any, key: Path = ()) -> Any:
    """Merge ``x2`` into ``x1``, in place, and return ``x1``. ``key`` is their path, for errors.

    Dicts are united, lists merged element by element. Raises ValueError for lists of different
    length, and where one side has a leaf and the other any value.
    """
    todo = [(key, x1, x2)]
    while todo:
        path, into, other = todo.pop()
        if isinstance(into, dict) and isinstance(other, dict):
            todo += [((*path, k), into[k], v) for k, v in other.items() if k in into]
            into.update({k: v for k, v in other.items() if k not in into})
        elif isinstance(into, list) and isinstance(other, list):
            if len(into) != len(other):
                sizes = f"{len(into)} and {len(other)}"
                raise ValueError(
                    f"lists of different lengths ({sizes}) cannot be merged, at {show(path)}"
                )
            todo += [
                ((*path, i), a, b)
                for i, (a, b) in enumerate(zip(into, other, strict=True))
            ]
        else:
            raise ValueError(
                f"both sides hold a value at {show(path)}: {into!r} and {other!r}"
            )
    return x1


def diff(
    x1: Any, x2: Any, prefix: Path = ()
) -> tuple[list[Path], list[Path], list[tuple[Path, type, type]]]:
    """(paths only in x1, paths only in x2, [(path, type in x1, type in x2)] of other leaves).

    Arrays and tensors are compared by shape and values, declared shards by their data. Leaves
    that cannot be compared count as different.
    """
    left: list[Path] = []
    right: list[Path] = []
    mismatch: list[tuple[Path, type, type]] = []
    todo = [(prefix, x1, x2)]
    while todo:
        path, a, b = todo.pop()
        if is_branch(a) and isinstance(b, dict if isinstance(a, dict) else list):
            mine, yours = dict(items(a)), dict(items(b))
            left += [(*path, k) for k in mine if k not in yours]
            right += [(*path, k) for k in yours if k not in mine]
            todo += [
                ((*path, k), v, yours[k])
                for k, v in reversed(mine.items())
                if k in yours
            ]
        elif _is_declared(a) and type(a) is type(b):
            todo.append(((*path, type(a)), a.data, b.data))
        elif _differ(a, b):
            mismatch.append((path, type(a), type(b)))
    return left, right, mismatch


def _is_declared(value: Any) -> bool:
    try:
        return hasattr(value, "replica_id")
    except Exception:  # noqa: BLE001 - the value's own code, which may raise anything
        return False


def _differ(a: Any, b: Any) -> bool:
    if a is b:
        return False
    try:
        if getattr(a, "shape", None) != getattr(b, "shape", None):
            return True
        unequal = a != b
        return bool(unequal.any() if hasattr(unequal, "any") else unequal)
    except Exception:  # noqa: BLE001 - the values' own code, which may raise anything
        return True  # e.g. tensors of two devices, or of a dtype without comparison


def map_reduce(
    xs: Iterable[Any],
    key_fn: Callable[[Any], Any] = lambda x: x,
    value_fn: Callable[[Any], Any] = lambda x: x,
    reduce_fn: Callable[[list[Any]], Any] = lambda values: values,
) -> Mapping[Any, Any]:
    """``reduce_fn`` of the list of ``value_fn(x)`` for each ``key_fn(x)``, in order."""
    groups: dict[Any, list[Any]] = {}
    for x in xs:
        groups.setdefault(key_fn(x), []).append(value_fn(x))
    return {key: reduce_fn(values) for key, values in groups.items()}
