"""Nested dicts and lists: walk, map, split, merge, compare.

Any value but a dict or a list is a leaf, tuples too. A path is the tuple of the keys and indices
that lead to a leaf. Containers in results are plain dicts and lists. Functions with names of
Megatron-Core's ``dict_utils`` have its semantics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from megackpt import limits
from megackpt.errors import ShardingError

Path = tuple[Any, ...]


def is_branch(node: Any) -> bool:
    """True for dicts and lists."""
    return isinstance(node, (dict, list))


def items(branch: Any) -> Iterable[tuple[Any, Any]]:
    """(key, value) of a dict, (index, value) of a list."""
    if isinstance(branch, dict):
        return branch.items()
    return enumerate(branch)


def show(path: Path) -> str:
    """A path as people write it: ``['optimizer']['state'][0]``."""
    return "".join(f"[{key!r}]" for key in path) or "the root"


def walk(
    tree: Any, *, empties: bool = False, above: Path = ()
) -> Iterator[tuple[Path, Any]]:
    """(path, leaf) of every leaf, depth first, in the order of the containers.

    With ``empties``, an empty container below the root counts as a leaf. ``above``: the path of
    ``tree`` itself.
    Raises ShardingError for more than ``limits.STATE_DEPTH`` levels: a container that holds
    itself.
    """
    if not is_branch(tree):
        yield above, tree
        return
    check_depth(len(above))
    for key, node in items(tree):
        path = (*above, key)
        if not is_branch(node) or (empties and not node):
            yield path, node
        else:
            yield from walk(node, empties=empties, above=path)


def check_depth(levels: int) -> None:
    """Raise ShardingError for more than ``limits.STATE_DEPTH`` levels."""
    if levels > limits.STATE_DEPTH:
        raise ShardingError(
            f"nested deeper than {limits.STATE_DEPTH} levels: does a container hold itself?"
        )


def lookup(tree: Any, path: Path) -> Any:
    """The value at ``path``. Raises KeyError, IndexError or TypeError if there is none."""
    for key in path:
        tree = tree[key]
    return tree


def blank(branch: Any) -> Any:
    """A dict for a dict; a list of as many None for a list."""
    if isinstance(branch, dict):
        return {}
    return [None] * len(branch)


def nested_values(x: Any) -> Iterator[Any]:
    """Every leaf, depth first."""
    return (leaf for _, leaf in walk(x))


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any, depth: int = 0) -> Any:
    """A copy of the containers, with ``f(leaf)`` for each leaf; ``x`` does not change."""
    if not is_branch(x):
        return f(x)
    check_depth(depth)
    result = blank(x)
    for key, value in items(x):
        result[key] = dict_list_map_outplace(f, value, depth + 1)
    return result


def copied(tree: Any) -> Any:
    """A copy of the containers, with the same leaves."""
    return dict_list_map_outplace(lambda leaf: leaf, tree)


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace each leaf by ``f(leaf)``, in place; returns ``x`` (or ``f(x)`` of a leaf).

    Results of ``f`` are not walked into.
    """
    if not is_branch(x):
        return f(x)
    for key, value in list(items(x)):
        x[key] = dict_list_map_inplace(f, value)
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
        raise ValueError(f"a dict or a list is expected, not a {type(x).__name__}")
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

    Dicts are united, lists are merged element by element. Raises ValueError for lists of different
    length, and for a leaf on one side with any value on the opposite side.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        for k, value in x2.items():
            if k in x1:
                value = merge(x1[k], value, (*key, k))
            x1[k] = value
    elif isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            sizes = f"{len(x1)} and {len(x2)}"
            raise ValueError(
                f"lists of different lengths ({sizes}) cannot be merged, at {show(key)}"
            )
        for i, value in enumerate(x2):
            x1[i] = merge(x1[i], value, (*key, i))
    else:
        raise ValueError(f"both sides hold a value at {show(key)}: {x1!r} and {x2!r}")
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
    are_branches = is_branch(x1) and is_branch(x2)
    if are_branches and isinstance(x1, dict) == isinstance(x2, dict):
        mine, yours = dict(items(x1)), dict(items(x2))
        for key in {**mine, **yours}:
            path = (*prefix, key)
            if key not in yours:
                left.append(path)
            elif key not in mine:
                right.append(path)
            else:
                inner = diff(mine[key], yours[key], path)
                left += inner[0]
                right += inner[1]
                mismatch += inner[2]
    elif hasattr(type(x1), "replica_id") and type(x1) is type(x2):  # shards
        return diff(x1.data, x2.data, (*prefix, type(x1)))
    elif _differ(x1, x2):
        mismatch.append((prefix, type(x1), type(x2)))
    return left, right, mismatch


def are_alike(values: Sequence[Any]) -> bool:
    """Whether ``diff`` finds no difference between them."""
    return not any(any(diff(values[0], other)) for other in values[1:])


def _differ(a: Any, b: Any) -> bool:
    if a is b:
        return False
    try:
        if getattr(a, "shape", None) != getattr(b, "shape", None):
            return True
        unequal = a != b
        if hasattr(unequal, "any"):
            unequal = unequal.any()
        return bool(unequal)
    except Exception:  # noqa: BLE001 - the code of the values may raise anything
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
