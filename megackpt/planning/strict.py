"""Keys, shapes and dtypes that a load asks for, compared with those that are stored.

Tensors are compared by key, objects by unique key: an object whose grid changed is another
object. The common state is not counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from enum import Enum
from math import prod
from typing import NamedTuple

import numpy as np

from megackpt.errors import MismatchError, join_truncated
from megackpt.planning.box import Boxes
from megackpt.planning.manifest import (
    Declarations,
    Int32,
    Manifest,
    ShardId,
    TensorEntry,
    TensorMeta,
    unique_key,
)
from megackpt.planning.mismatch_hints import (
    ADVISED,
    ShapeDifference,
    StoredNames,
    shape_hints,
)

GROUPS = 6
"""Groups of keys, by the names with which they begin, that a warning names at most."""
_NAMED = 50  # keys named in a message
_DEPTH = 8  # names of a key that decide on its group
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a name that is a number


class StrictHandling(Enum):
    """The policy for keys asked for but not stored (unexpected), and the reverse (missing)."""

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """Unexpected keys raise; a load warns of missing ones. The default."""
    LOG_UNEXPECTED = "log_unexpected"
    """Leave unexpected keys out and warn."""
    LOG_ALL = "log_all"
    """Leave unexpected keys out and warn of these and of missing ones."""
    RAISE_UNEXPECTED = "raise_unexpected"
    """Unexpected keys raise, missing ones are ignored: to load a part on purpose."""
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    """Leave unexpected keys out, and return them beside the state."""
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"
    """Leave unexpected keys out silently."""

    # The first three have the names that Megatron gives them.

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Is there a policy for names that are not stored?"""
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Must all ranks send the names that they ask for, so that missing ones are found?"""
        return val.value.endswith("_all")

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Does the load return (state, missing, unexpected)?"""
        return val.value.startswith("return")

    @staticmethod
    def requires_raising(val: StrictHandling) -> bool:
        return val.value.startswith("raise")

    @staticmethod
    def requires_logging(val: StrictHandling) -> bool:
        return val.value.startswith("log")


def parse_strict_flag(strict: str | bool | Enum) -> StrictHandling:
    """The flag by value, or of Megatron's enum; True means RAISE_ALL, False LOG_ALL.

    Raises ValueError for any other value.
    """
    if isinstance(strict, Enum):
        strict = strict.value
    if isinstance(strict, bool):
        return StrictHandling.RAISE_ALL if strict else StrictHandling.LOG_ALL
    try:
        return StrictHandling(strict)
    except ValueError:
        values = [flag.value for flag in StrictHandling]
        near = get_close_matches(str(strict), values, 1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        flags = ", ".join(map(repr, values))
        raise ValueError(
            f"Invalid strict flag: {strict!r}{meant}; one of {flags}, True or False is "
            "expected"
        ) from None


def name_of(shard: ShardId, meta: TensorMeta) -> str:
    """The name under which a shard is compared."""
    if meta.is_object:
        return unique_key(shard.key, shard.box.offset, meta.shape)
    return shard.key


def requested(wanted: Declarations) -> set[str]:
    """The names that a rank asks for."""
    return _names(wanted.tensors, wanted.tensor, wanted.boxes)


def stored(manifest: Manifest) -> set[str]:
    """The names that a checkpoint holds."""
    return _names(manifest.tensors, manifest.chunks.tensor, manifest.chunks.boxes)


def unexpected(wanted: Declarations, manifest: Manifest) -> set[str]:
    """The names that this rank asks for and the checkpoint does not hold."""
    return requested(wanted) - stored(manifest)


def missing(
    requested_by_ranks: Iterable[Collection[str]], manifest: Manifest
) -> set[str]:
    """The names that the checkpoint holds and no rank asks for; ``requested`` of each rank."""
    return stored(manifest).difference(*requested_by_ranks)


def keys(names: Collection[str], tensors: Sequence[TensorEntry]) -> set[str]:
    """The keys of these names. All cells of an object have one key."""
    objects = {entry.key for entry in tensors if entry.meta.is_object}
    found = set()
    for name in names:
        key = name.rpartition("/shard_")[0]
        found.add(key if key in objects else name)
    return found


def describe(
    unexpected: Collection[str],
    missing: Collection[str],
    manifest: Manifest,
    asked: Collection[str] = (),
) -> str:
    """The error text about these names, with similar stored ones; "" if there are none.

    ``asked`` are all names that are asked for, if known: these are not meant by other names.
    """
    lines = []
    if unexpected:
        names, known = sorted(unexpected), StoredNames(stored(manifest), manifest)
        lines.append(
            f"Unexpected keys: asked for, but not in the checkpoint ({len(names)}):"
        )
        notes = [known.note(name, asked) for name in names[:ADVISED]]
        lines += _listed(names, notes)
        hint = known.hint(names, asked)
        if hint:
            lines.append(f"  hint: {hint}")
    if missing:
        lines.append(
            f"Missing keys: in the checkpoint, but asked for by no rank ({len(missing)}):"
        )
        lines += _listed(sorted(missing), [])
    return "\n".join(lines)


def _listed(names: Sequence[str], notes: Sequence[str]) -> list[str]:
    """A line for each of the first names, with its note."""
    lines = [f"  {name!r}" for name in names[:_NAMED]]
    for i, note in enumerate(notes):
        lines[i] += note
    if len(names) > _NAMED:
        lines.append(f"  and {len(names) - _NAMED} more")
    return lines


def check_shapes(
    wanted: Declarations, manifest: Manifest, dtype_policy: str = "convert"
) -> None:
    """Raise MismatchError for global shapes (with "error": and dtypes) that are not stored so.

    Flexible tensors may differ in extents, not in the number of dimensions. Keys that are not
    stored are ignored; see ``unexpected``. Raises ValueError for another ``dtype_policy``.
    """
    if dtype_policy not in ("convert", "error"):
        raise ValueError(
            f"dtype_policy must be 'convert' or 'error', not {dtype_policy!r}"
        )
    rigid = np.zeros(len(wanted.tensors), np.bool_)
    rigid[wanted.tensor[~wanted.flexible]] = True
    numbers = manifest.numbers()
    problems: list[str] = []
    shapes: list[ShapeDifference] = []
    tensors, rows = np.unique(wanted.tensor, return_index=True)
    for i, row in zip(tensors.tolist(), rows.tolist(), strict=True):
        key, meta = wanted.tensors[i]
        number = numbers.get(key)
        if number is None or manifest.tensors[number].meta == meta:
            continue
        held = manifest.tensors[number].meta
        if meta.is_object != held.is_object:
            kind = "an object" if held.is_object else "a tensor"
            problems.append(
                f"{key!r} is stored as {kind} ({held.dtype}), but asked for as {meta.dtype}"
            )
            continue
        if meta.is_object:
            continue  # another grid is another name
        ndim = len(meta.shape)
        if ndim != len(held.shape) or (rigid[i] and meta.shape != held.shape):
            problems.append(
                f"Global shape mismatch for loaded {held.shape} and expected {meta.shape} "
                f"tensor for key {key}"
            )
            local = wanted.boxes.row(row, ndim).shape
            shapes.append(ShapeDifference(key, meta.shape, held.shape, local))
        if dtype_policy == "error" and meta.dtype != held.dtype:
            problems.append(
                f"dtype mismatch for loaded {held.dtype} and expected {meta.dtype} tensor for "
                f"key {key} (dtype_policy='convert' would convert)"
            )
    if problems:
        lines = [join_truncated(problems, _NAMED, "\n")]
        lines += [f"  hint: {hint}" for hint in shape_hints(shapes)]
        raise MismatchError("\n".join(lines))


def _names(tensors: Sequence[TensorEntry], tensor: Int32, boxes: Boxes) -> set[str]:
    is_object = np.array([entry.meta.is_object for entry in tensors], np.bool_)
    present = np.zeros(len(tensors), np.bool_)
    present[tensor] = True
    names = {tensors[i].key for i in np.flatnonzero(present & ~is_object).tolist()}
    if not is_object.any():
        return names
    for row in np.flatnonzero(is_object[tensor]).tolist():
        entry = tensors[tensor[row]]
        if not entry.is_common:
            shape = entry.meta.shape
            names.add(unique_key(entry.key, boxes.row(row, len(shape)).offset, shape))
    return names


class Unasked(NamedTuple):
    """Stored keys that begin alike and that no rank asks for.

    ``name`` is the key, or the names that the keys share, with * for numbers and for the rest.
    """

    name: str
    tensors: int
    objects: int
    nbytes: int


def unasked(asked: Collection[str], manifest: Manifest) -> list[Unasked]:
    """Stored keys that are not among those asked for, in groups, the largest first.

    ``nbytes`` is the size of whole tensors and of serialised objects.
    """
    tensors = manifest.tensors
    # Keys of layers differ in numbers only: there are few patterns of very many keys.
    patterns: dict[str, list[int]] = {}
    for i, entry in enumerate(tensors):
        if entry.key not in asked and not entry.is_common:
            patterns.setdefault(_NUMBER.sub("*", entry.key), []).append(i)
    groups: dict[str, list[int]] = {}
    for name, numbers in zip(_prefixes(list(patterns)), patterns.values(), strict=True):
        groups.setdefault(name, []).extend(numbers)
    found = []
    for name, numbers in groups.items():
        metas = Counter(tensors[i].meta for i in numbers)
        objects, nbytes = 0, 0
        for meta, count in metas.items():
            objects += count * meta.is_object
            nbytes += count * prod(meta.shape) * meta.itemsize
        if objects:
            rows = np.isin(
                manifest.chunks.tensor,
                [i for i in numbers if tensors[i].meta.is_object],
            )
            nbytes += int(manifest.chunks.length[rows].sum())
        if len(numbers) == 1:
            name = tensors[numbers[0]].key
        found.append(Unasked(name, len(numbers) - objects, objects, nbytes))
    return sorted(found, key=lambda group: (-group.nbytes, group.name))


def _prefixes(keys: Sequence[str]) -> list[str]:
    """For each key its group: as many leading names as leave at most GROUPS, but at least one."""
    names = [key.split(".", _DEPTH) for key in keys]
    chosen: list[str] = []
    for depth in range(1, _DEPTH + 1):
        prefixes = []
        for each in names:
            rest = ".*" if len(each) > depth else ""
            prefixes.append(".".join(each[:depth]) + rest)
        if chosen and len(set(prefixes)) > GROUPS:
            break
        chosen = prefixes
    return chosen
