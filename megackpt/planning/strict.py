"""Requested keys, shapes and dtypes of a load, compared with the stored ones.

Tensors are compared by key, objects by unique key: an object whose grid changed is another
object. The common state is not counted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from enum import Enum
from typing import Literal, NamedTuple

import numpy as np

from megackpt.errors import MismatchError, join_truncated
from megackpt.planning.box import Boxes, distinct
from megackpt.planning.coverage import key_pattern
from megackpt.planning.manifest import (
    Declarations,
    Int32,
    Manifest,
    ShardId,
    TensorEntry,
    TensorMeta,
    itemsizes,
    unique_key,
)

_NAMED = 50  # keys named in a message
_ADVISED = 10  # names of a message for which a similar stored name is searched


StrictName = Literal[
    "assume_ok_unexpected",
    "log_unexpected",
    "log_all",
    "raise_unexpected",
    "raise_all",
    "return_unexpected",
    "return_all",
    "ignore_all",
]


_COMPARED = 5000  # kinds of stored names to compare with a name


class StoredNames:
    """The names that a checkpoint holds."""

    def __init__(self, names: Collection[str], manifest: Manifest) -> None:
        self._names = set(names)
        self._metas = {e.key: e.meta for e in manifest.tensors if not e.is_common}
        self._patterns: dict[str, str] = {}  # pattern -> first name
        for name in sorted(names):
            self._patterns.setdefault(key_pattern(name), name)

    def note(self, name: str) -> str:
        """A remark on a name that is not stored; "" if no stored name is similar."""
        meta = self._metas.get(name) or self._metas.get(name.rpartition("/shard_")[0])
        if meta is not None:
            if meta.is_object:
                return f" (stored as objects of the grid {meta.shape})"
            return f" (stored as a tensor {meta.shape} {meta.dtype}, asked for as an object)"
        # Names that differ in numbers only belong to other layers.
        pattern = key_pattern(name)
        if pattern in self._patterns:
            return ""
        known = list(self._patterns)[:_COMPARED]
        for near in get_close_matches(pattern, known, 1, 0.75):
            meant = near
            for number in re.findall(r"\b[0-9]+\b", name):
                meant = meant.replace("*", number, 1)
            if meant not in self._names:
                meant = self._patterns[near]
            return f" (did you mean {meant!r}?)"
        return ""


def shape_hint(key: str, asked: Sequence[int], stored: Sequence[int]) -> str:
    """The likely cause of a global shape that is not stored."""
    if re.search("embed|vocab|output_layer|lm_head", key) and asked[1:] == stored[1:]:
        return (
            "\n  hint: if this is a vocabulary padded for another parallelism, "
            "allow_shape_mismatch=True on the shard loads what both have, and zeros behind it"
        )
    return (
        "\n  hint: 'loaded' is the shape in the checkpoint, 'expected' the shape of your tensor. "
        "Build the model that was saved"
    )


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
    """Leave unexpected keys out, and return them together with the state."""
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
    def requires_all_keys(val: StrictHandling) -> bool:
        """Does a load raise unless all keys asked for are stored?"""
        assumed = StrictHandling.ASSUME_OK_UNEXPECTED, StrictHandling.RAISE_UNEXPECTED
        return val in (*assumed, StrictHandling.RAISE_ALL)

    @staticmethod
    def requires_raising(val: StrictHandling) -> bool:
        return val.value.startswith("raise")

    @staticmethod
    def requires_logging(val: StrictHandling) -> bool:
        return val.value.startswith("log")


Strictness = StrictHandling | StrictName | bool


def parse_strict_flag(strict: str | bool | Enum) -> StrictHandling:
    """The flag by value, or of Megatron's enum; True means RAISE_ALL, False LOG_ALL.

    Raises ValueError for any other value.
    """
    if isinstance(strict, Enum):
        strict = strict.value
    if isinstance(strict, bool):
        if strict:
            return StrictHandling.RAISE_ALL
        return StrictHandling.LOG_ALL
    try:
        return StrictHandling(strict)
    except ValueError:
        values = [flag.value for flag in StrictHandling]
        flags = ", ".join(map(repr, values))
        raise ValueError(
            f"Invalid strict flag: {strict!r}; one of {flags}, True or False is expected"
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


def keys(names: Collection[str], tensors: Sequence[TensorEntry]) -> set[str]:
    """The keys of these names. All cells of an object have one key."""
    objects = {entry.key for entry in tensors if entry.meta.is_object}
    found = set()
    for name in names:
        key = name.rpartition("/shard_")[0]
        found.add(key if key in objects else name)
    return found


def describe_unexpected(
    names: Collection[str], manifest: Manifest, advise: bool = True
) -> str:
    """The error text about names that are asked for and not stored.

    With ``advise`` the text also names similar stored keys.
    """
    similar: set[str] = set()
    if advise:
        similar = stored(manifest)
    known = StoredNames(similar, manifest)
    ordered = sorted(names)
    lines = [f"Unexpected keys: asked for, but not in the checkpoint ({len(names)}):"]
    for number, name in enumerate(ordered):
        note = ""
        if number < _ADVISED:
            note = known.note(name)
        lines.append(f"  {name!r}{note}")
    text = join_truncated(lines, 1 + _NAMED, "\n")
    if all(entry.is_common for entry in manifest.tensors):
        text += (
            "\n  hint: nothing but common state is stored: megackpt.load({}, directory) "
            "returns it, with tensors that were saved without megackpt.sharded"
        )
    return text


def describe_missing(names: Collection[str]) -> str:
    """The error text about stored names that no rank asks for."""
    lines = [
        f"Missing keys: in the checkpoint, but asked for by no rank ({len(names)}):"
    ]
    lines += [f"  {name!r}" for name in sorted(names)]
    return join_truncated(lines, 1 + _NAMED, "\n")


def check_shapes(
    wanted: Declarations, manifest: Manifest, dtype_policy: str = "convert"
) -> None:
    """Raise MismatchError for global shapes (with "error": and dtypes) that are not stored so.

    Flexible tensors may differ in extents, not in the number of dimensions. Keys that are not
    stored are ignored, and so are grids of objects: another grid has other names.
    """
    rigid = np.zeros(len(wanted.tensors), np.bool_)
    rigid[wanted.tensor[~wanted.flexible]] = True
    numbers = manifest.numbers()
    problems = []
    hints = []
    for i in distinct(wanted.tensor, len(wanted.tensors))[0].tolist():
        key, meta = wanted.tensors[i]
        if key not in numbers or manifest.tensors[numbers[key]].meta == meta:
            continue
        held = manifest.tensors[numbers[key]].meta
        if meta.is_object != held.is_object:
            kind = "a tensor"
            if held.is_object:
                kind = "an object"
            problems.append(
                f"{key!r} is stored as {kind} ({held.dtype}), but asked for as {meta.dtype}"
            )
        elif not meta.is_object:
            if len(meta.shape) != len(held.shape) or (
                rigid[i] and meta.shape != held.shape
            ):
                problems.append(
                    f"Global shape mismatch for loaded {held.shape} and expected "
                    f"{meta.shape} tensor for key {key}"
                )
                hints.append(shape_hint(key, meta.shape, held.shape))
            if dtype_policy == "error" and meta.dtype != held.dtype:
                problems.append(
                    f"dtype mismatch for loaded {held.dtype} and expected {meta.dtype} "
                    f"tensor for key {key} (dtype_policy='convert' would convert)"
                )
    if problems:
        listed = join_truncated(problems, _NAMED, "\n")
        raise MismatchError("".join([listed, *dict.fromkeys(hints)]))


def _names(tensors: Sequence[TensorEntry], tensor: Int32, boxes: Boxes) -> set[str]:
    is_object = itemsizes(tensors) == 0
    numbers, _ = distinct(tensor[~is_object[tensor]], len(tensors))
    names = {tensors[number].key for number in numbers.tolist()}
    for row in np.flatnonzero(is_object[tensor]).tolist():
        entry = tensors[tensor[row]]
        if not entry.is_common:
            box = boxes.row(row, len(entry.meta.shape))
            names.add(unique_key(entry.key, box.offset, entry.meta.shape))
    return names


class Unasked(NamedTuple):
    """Stored keys that no rank asks for and that differ in numbers only.

    ``name`` is the key, or their pattern, with * for the numbers. ``nbytes`` are stored bytes.
    """

    name: str
    keys: int
    nbytes: int


def unasked(asked: Collection[str], manifest: Manifest) -> list[Unasked]:
    """Stored keys that the load does not ask for, in groups, the largest first."""
    chunks = manifest.chunks
    nbytes = np.bincount(chunks.tensor, chunks.length, len(manifest.tensors))
    groups: dict[str, list[int]] = {}
    for i, entry in enumerate(manifest.tensors):
        if entry.key not in asked and not entry.is_common:
            groups.setdefault(key_pattern(entry.key), []).append(i)
    found = []
    for pattern, numbers in groups.items():
        name = pattern
        if len(numbers) == 1:
            name = manifest.tensors[numbers[0]].key
        found.append(Unasked(name, len(numbers), int(nbytes[numbers].sum())))
    return sorted(found, key=lambda group: (-group.nbytes, group.name))
