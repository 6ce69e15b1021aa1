"""State dicts split (``extract``) and joined again (``restore``), without changing the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from megackpt import limits, tree
from megackpt.errors import MismatchError, ShardingError, join_truncated
from megackpt.planning.manifest import COMMON_KEY
from megackpt.state.storable import (
    SHARDED,
    distributed_name,
    is_declared,
    is_distributed,
    is_stateful,
)
from megackpt.state.tensor_subclasses import PLAIN, expanded
from megackpt.state.values import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.tree import Path


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
        factories: the factories with their paths, outer ones first.
    """

    state: dict[Any, Any]
    shards: list[ShardedTensor | ShardedObject]
    paths: list[Path]
    common: dict[Any, Any]
    factories: list[tuple[Path, ShardedTensorFactory]]


def extract(
    state: dict[Any, Any],
    native: Callable[[Any], Any] = lambda leaf: leaf,
    stored: Callable[[str], str | None] | None = None,
) -> Extracted:
    """Sort the leaves of a sharded state dict.

    ``native`` converts declarations of other libraries. It is called with every leaf that is
    not a ShardedTensor, of the state and of the products of factories. ``stored``: see
    ``tensor_subclasses.expanded``, which declares tensors that wrap others.
    Raises ShardingError for a state of another type, for shards that would be lost (in tuples
    or sets, as keys), for shards of an unknown class and for the reserved key "common_state";
    all problems at once.
    """
    given: object = state
    if not isinstance(given, dict):
        advice = (
            "give the state of an object, megackpt.sharded(net.state_dict()), or the object to a "
            "CheckpointManager, save(step, model=net). Are arguments swapped? save(state, "
            "directory), restore(state, step=3)"
        )
        if isinstance(given, (list, tuple)):
            advice = "put it into one, under a key"
        raise ShardingError(
            f"a sharded state dict must be a dict, not a {type(given).__name__}: {advice}. "
            f"Given: {given!r:.60}"
        )
    built, factories, problems = _built(state, native, stored)
    shards: list[ShardedTensor | ShardedObject] = []
    paths: list[Path] = []

    def choose_common(path: Path, leaf: Any) -> Any:
        if isinstance(leaf, (ShardedTensor, ShardedObject)):
            shards.append(leaf)
            paths.append(path)
            if leaf.key == COMMON_KEY:
                problems.append(
                    f"{tree.show(path)}: the key {COMMON_KEY!r} is reserved for the common state"
                )
        elif not isinstance(leaf, LocalNonpersistentObject):
            problems.append(_misplaced(path, leaf))
            return leaf
        return ABSENT

    common = _select(built, choose_common)
    problems = [problem for problem in problems if problem]
    if problems:
        raise ShardingError(join_truncated(problems, separator="\n"))
    if common is ABSENT:
        common = {}
    return Extracted(built, shards, paths, common, factories)


def _built(
    state: dict[Any, Any],
    native: Callable[[Any], Any],
    stored: Callable[[str], str | None] | None,
) -> tuple[dict[Any, Any], list[tuple[Path, ShardedTensorFactory]], list[str]]:
    """The state with every factory, nested ones too, replaced by its product; the factories.

    And a text for each declaration that is a key of a dict.
    """
    factories: list[tuple[Path, ShardedTensorFactory]] = []
    problems: list[str] = []

    def build(node: Any, path: Path, level: int) -> Any:
        if tree.is_branch(node):
            tree.check_depth(len(path))
            result = tree.blank(node)
            for key, value in tree.items(node):
                if type(key) is not str and is_declared(key):
                    problems.append(f"a {type(key).__name__} is a dict key: {key!r}")
                result[key] = build(value, (*path, key), level)
            return result
        if type(node) is not ShardedTensor:
            node = native(node)
        if type(node) is ShardedTensor:  # an isinstance of an ABC takes much longer
            if type(node.data) in PLAIN:
                return node
            node = expanded(node, stored)
        if not isinstance(node, ShardedTensorFactory):
            return node
        if level > limits.NESTED_FACTORIES:
            raise ShardingError(
                f"{node.key!r}: factories nested deeper than {limits.NESTED_FACTORIES} builds"
            )
        factories.append((path, node))
        with _naming(node, "build_fn"):
            product = node.build()
        return build(product, path, level + 1)

    return build(state, (), 0), factories, problems


def _select(branch: Any, choose: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The part of a branch for whose leaves ``choose`` returns a value other than ABSENT.

    It includes empty containers. Lists keep their indices: None or {} replace elements that are
    left out. ABSENT if the part would be empty.
    """
    found: dict[Any, Any] = {}
    for key, node in tree.items(branch):
        below = (*path, key)
        if not tree.is_branch(node):
            chosen = choose(below, node)
        elif node:
            chosen = _select(node, choose, below)
        else:
            chosen = tree.blank(node)
        if chosen is not ABSENT:
            found[key] = chosen
    if not found:
        return ABSENT
    if isinstance(branch, dict):
        return found
    result = tree.blank(branch)
    for number, node in enumerate(branch):
        if number in found:
            result[number] = found[number]
        elif isinstance(node, dict):
            result[number] = {}
    return result


@contextmanager
def _naming(factory: ShardedTensorFactory, function: str) -> Iterator[None]:
    """Add a note to an exception of the caller's function: the function, and its factory."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the {function} of the factory {factory.key!r}")
        if isinstance(error, (TypeError, ValueError)):
            arguments = "key, data, replica_id, flattened_range"
            got = "what build_fn gave, with tensors for shards"
            if function == "build_fn":
                got = f"({arguments})"
            error.add_note(f"which is called with {got}")
        raise


def _misplaced(path: Path, leaf: Any) -> str:
    """Why a leaf is not common state; empty if it is."""
    if is_declared(leaf):
        kind = f"{type(leaf).__module__}.{type(leaf).__name__}"
        return (
            f"{tree.show(path)}: {kind} is not one of the classes of megackpt: import it from "
            "there"
        )
    inside = [leaf]
    walked = set()
    for value in inside:  # grows: containers of other kinds, at any depth
        if is_distributed(value):
            return (
                f"{tree.show(path)}: a {distributed_name(value)} is not common state, because a "
                f"checkpoint keeps only one rank's; {SHARDED}"
            )
        if is_stateful(value):
            return (
                f"{tree.show(path)} is a {type(value).__name__}, an object and not its state: "
                "give it to a CheckpointManager by name (save(step, model=net)), or put its "
                "state_dict() here (of a DataLoader: the number of batches read)"
            )
        if is_declared(value):
            name = getattr(value, "key", "")
            return (
                f"{tree.show(path)}: a {type(value).__name__} ({name!r}) in a "
                f"{type(leaf).__name__} is lost; only dicts and lists are walked into: make it one "
                "of these"
            )
        if isinstance(value, (Mapping, tuple, set, frozenset, list)):
            if id(value) not in walked:  # it may be in itself
                inside += value.values() if isinstance(value, Mapping) else value
            walked.add(id(value))
    return ""


class Placed(NamedTuple):
    """A value to put at its place in a loaded state, in place of a stored one or not."""

    value: Any
    replaces: bool


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
    following = iter(values)  # in the order in which ``extract`` met the shards

    def place(_: Path, leaf: Any) -> Any:
        if isinstance(leaf, (ShardedTensor, ShardedObject)):
            value = next(following)
            if value is ABSENT:
                return value
            return Placed(value, replaces=False)
        if isinstance(leaf, LocalNonpersistentObject):
            return Placed(leaf.unwrap(), replaces=True)
        return ABSENT

    result: dict[Any, Any] = tree.copied(common)
    placed = _select(extracted.state, place)
    if placed is not ABSENT:
        result = joined(result, placed, ())
    incomplete = set[Path]()
    for path, value in zip(extracted.paths, values, strict=True):
        if value is ABSENT:
            incomplete.update(path[:n] for n in range(len(path) + 1))
    for path, factory in reversed(extracted.factories):
        if not _exists(result, path):
            continue
        parent = tree.lookup(result, path[:-1])
        key = path[-1]
        if path not in incomplete:
            with _naming(factory, "merge_fn"):
                parent[key] = factory.merge_fn(parent[key])
        elif isinstance(parent, dict):
            del parent[key]
        else:
            parent[key] = None
    return result


def joined(stored: Any, asked: Any, path: Path) -> Any:
    """``stored`` with the values that ``asked`` places in it, in place.

    None and empty containers may be replaced; an empty container is asked for if there is none.
    """
    vacant = stored is None or (tree.is_branch(stored) and not stored)
    if asked is None:
        return stored
    if isinstance(asked, Placed) and (vacant or asked.replaces):
        return asked.value
    if tree.is_branch(asked) and vacant and (asked or stored is None):
        stored = tree.blank(asked)
    here = type(stored).__name__
    if isinstance(asked, Placed):
        problem = f"already holds a {here}"
    elif not isinstance(stored, dict if isinstance(asked, dict) else list):
        problem = f"is a {here} here and a {type(asked).__name__} there"
    elif isinstance(stored, list) and len(stored) != len(asked):
        problem = f"is a list of {len(stored)} here and of {len(asked)} there"
    else:
        for key, value in tree.items(asked):
            if isinstance(stored, dict):
                present = stored.get(key)
            else:
                present = stored[key]
            stored[key] = joined(present, value, (*path, key))
        return stored
    if any(isinstance(leaf, Placed) for leaf in tree.nested_values(asked)):
        raise MismatchError(
            "the stored common state does not fit the state asked for (there): "
            f"{tree.show(path)} {problem}"
        )
    return stored


def _exists(x: Any, path: Path) -> bool:
    """Does the path lead to a value, be it None?"""
    for key in path:
        inside = isinstance(x, list) and key < len(x)
        if isinstance(x, dict):
            inside = key in x
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

    ``x2`` holds only the factories at their places; lists may be given as ``{index: ...}``.
    Raises ValueError if ``x1`` lacks a path of ``x2``: an absent key, a list of another length,
    an index that is not an int or out of range, a leaf instead of a container.
    """
    if is_declared(x2, ShardedTensorFactory):
        return x2.merge_fn(x1)
    problem = ""
    if isinstance(x1, list) and isinstance(x2, list) and len(x1) != len(x2):
        sizes = f"{len(x1)} and {len(x2)}"
        problem = f"lists of different lengths ({sizes}) cannot be merged"
    elif not isinstance(x1, dict) and not isinstance(x1, list):
        problem = f"a value {x1!r} is where {x2!r} belongs"
    else:
        present = dict(tree.items(x1))
        absent = [k for k, _ in tree.items(x2) if k not in present]
        if absent:
            problem = f"keys {absent} are absent; there are {list(present)}"
    if problem:
        raise ValueError(f"apply_factory_merges, at {tree.show(key)}: {problem}")
    for k, factories in tree.items(x2):
        x1[k] = apply_factory_merges(x1[k], factories, (*key, k))
    return x1
