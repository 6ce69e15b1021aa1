"""What is asked for against what is stored: which keys, shapes and dtypes differ, and what the caller wants.

Tensors are compared by key, objects by unique key (an object whose grid changed is another object). The
common state is never counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from enum import Enum

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
from megackpt.planning.strict.advice import ADVISED, Difference, Stored, shape_hints
from megackpt.planning.strict.unasked import (
    GROUPS as GROUPS,
    Unasked as Unasked,
    unasked as unasked,
)

_TOLD = 50  # keys named in a message


class StrictHandling(Enum):
    """What a load does about keys asked for but not stored (unexpected), or the reverse (missing)."""

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """Ask for nothing that is not stored: unexpected keys raise. Of missing ones a load warns. The default."""
    LOG_UNEXPECTED = "log_unexpected"
    """Leave unexpected keys out and warn."""
    LOG_ALL = "log_all"
    """Leave unexpected keys out and warn of these and of missing ones."""
    RAISE_UNEXPECTED = "raise_unexpected"
    """Unexpected keys raise, missing ones do not matter: to load a part on purpose."""
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    """Leave unexpected keys out, and return them beside the state."""
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"
    """Leave unexpected keys out silently."""

    # Questions about a flag; the first three under the names by which Megatron's users know them.

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Must the stored names be compared with those asked for?"""
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Must all ranks tell what they ask for? Then missing names are found too."""
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
    """The flag by value or name, also of Megatron's enum; True means RAISE_ALL, False LOG_ALL.

    Raises ValueError for anything else.
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
            f"Invalid strict flag: {strict!r}{meant}; one of {flags}, True or False is expected"
        ) from None


def name_of(shard: ShardId, meta: TensorMeta) -> str:
    """The name under which a shard is compared."""
    return (
        unique_key(shard.key, shard.box.offset, meta.shape)
        if meta.is_object
        else shard.key
    )


def requested(wanted: Declarations) -> set[str]:
    """The names that a rank asks for."""
    return _names(wanted.tensors, wanted.tensor, wanted.boxes)


def stored(manifest: Manifest) -> set[str]:
    """The names that a checkpoint holds."""
    return _names(manifest.tensors, manifest.chunks.tensor, manifest.chunks.boxes)


def unexpected(wanted: Declarations, manifest: Manifest) -> set[str]:
    """Names that this rank asks for and the checkpoint does not hold."""
    return requested(wanted) - stored(manifest)


def missing(
    requested_by_ranks: Iterable[Collection[str]], manifest: Manifest
) -> set[str]:
    """Names that the checkpoint holds and no rank asks for; one collection (see ``requested``) a rank."""
    return stored(manifest).difference(*requested_by_ranks)


def keys(names: Collection[str], tensors: Sequence[TensorEntry]) -> set[str]:
    """The keys that these names stand for, as a caller is told them: of an object one, whatever cells it has."""
    objects = {entry.key for entry in tensors if entry.meta.is_object}
    return {
        key if (key := name.rpartition("/shard_")[0]) in objects else name
        for name in names
    }


def describe(
    unexpected: Collection[str],
    missing: Collection[str],
    manifest: Manifest,
    asked: Collection[str] = (),
) -> str:
    """What differs, in words, with what could have been meant; empty where nothing does.

    ``asked`` are the names that are asked for where they are known: none of them can be meant by another.
    """
    paragraphs = []
    if unexpected:
        names, known = sorted(unexpected), Stored(stored(manifest), manifest)
        notes = [known.note(name, asked) for name in names[:ADVISED]]
        paragraphs += [
            f"Unexpected keys: asked for, but not in the checkpoint ({len(names)}):",
            *_listed(names, notes),
            *(f"  hint: {hint}" for hint in known.hints(names, asked)),
        ]
    if missing:
        paragraphs.append(
            f"Missing keys: in the checkpoint, but asked for by no rank ({len(missing)}):"
        )
        paragraphs += _listed(sorted(missing), [])
    return "\n".join(paragraphs)


def check_shapes(
    wanted: Declarations, manifest: Manifest, dtype_policy: str = "convert"
) -> None:
    """Raise MismatchError listing tensors whose global shape (with "error": or dtype) is not the stored one.

    Flexible tensors may differ in extents, not in the number of dimensions. Keys that are not stored are left
    to ``unexpected``. Raises ValueError for a ``dtype_policy`` other than "convert" and "error".
    """
    if dtype_policy not in ("convert", "error"):
        raise ValueError(
            f"dtype_policy must be 'convert' or 'error', not {dtype_policy!r}"
        )
    rigid = np.zeros(len(wanted.tensors), np.bool_)
    rigid[wanted.tensor[~wanted.flexible]] = True
    numbers = manifest.numbers()
    problems: list[str] = []
    shapes: list[Difference] = []
    for i, row in zip(
        *(c.tolist() for c in np.unique(wanted.tensor, return_index=True)), strict=True
    ):
        entry = wanted.tensors[i]
        number = numbers.get(entry.key)
        if number is None:
            continue
        there = manifest.tensors[number]
        if entry.meta == there.meta:
            continue
        found = _differences(entry, there, bool(rigid[i]), dtype_policy == "error")
        problems += found
        if found and entry.meta.shape != there.meta.shape and not there.meta.is_object:
            piece = wanted.boxes.row(row, len(entry.meta.shape)).shape
            shapes.append(
                Difference(entry.key, entry.meta.shape, there.meta.shape, piece)
            )
    if problems:
        hints = [f"  hint: {hint}" for hint in shape_hints(shapes)]
        raise MismatchError("\n".join([join_truncated(problems, _TOLD, "\n"), *hints]))


def _differences(
    asked: TensorEntry, there: TensorEntry, rigid: bool, dtype: bool
) -> list[str]:
    key, meta = asked
    held = there.meta
    if meta.is_object != held.is_object:
        kind = "an object" if held.is_object else "a tensor"
        return [
            f"{key!r} is stored as {kind} ({held.dtype}), but asked for as {meta.dtype}"
        ]
    if meta.is_object:
        return []
    problems = []
    if len(meta.shape) != len(held.shape) or (rigid and meta.shape != held.shape):
        problems.append(
            f"Global shape mismatch for loaded {held.shape} and expected {meta.shape} tensor for key {key}"
        )
    if dtype and meta.dtype != held.dtype:
        problems.append(
            f"dtype mismatch for loaded {held.dtype} and expected {meta.dtype} tensor for key {key} "
            "(dtype_policy='convert' would convert)"
        )
    return problems


def _names(tensors: Sequence[TensorEntry], tensor: Int32, boxes: Boxes) -> set[str]:
    is_object = np.array([entry.meta.is_object for entry in tensors], np.bool_)
    present = np.zeros(len(tensors), np.bool_)
    present[tensor] = True
    names = {tensors[i].key for i in np.flatnonzero(present & ~is_object).tolist()}
    for row in np.flatnonzero(is_object[tensor]).tolist() if len(tensors) else []:
        entry = tensors[tensor[row]]
        if not entry.is_common:
            shape = entry.meta.shape
            names.add(unique_key(entry.key, boxes.row(row, len(shape)).offset, shape))
    return names


def _listed(names: Sequence[str], notes: Sequence[str]) -> list[str]:
    """The first names, a line each, with the notes that there are behind them."""
    lines = [f"  {name!r}" for name in names[:_TOLD]]
    for i, note in enumerate(notes):
        lines[i] += note
    return [*lines, f"  and {len(names) - _TOLD} more"] if len(names) > _TOLD else lines
