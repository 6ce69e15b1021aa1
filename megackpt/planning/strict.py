"""What is asked for against what is stored: which keys, shapes and dtypes differ, and what the caller wants.

Tensors are compared by key, objects by unique key (an object whose grid changed is another object). The
common state is never counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from enum import Enum

import numpy as np

from megackpt.errors import MismatchError
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

_TOLD = 50  # keys named in a message
_ADVISED = 10  # keys of a message for which a similar stored one is looked for
_NEIGHBOURS = 40  # stored keys that are compared in earnest, on each side of the alphabet


class StrictHandling(Enum):
    """What a load does about keys asked for but not stored (unexpected), or the reverse (missing)."""

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """Ask for nothing that is not stored: unexpected keys raise, missing ones do not matter. The default."""
    LOG_UNEXPECTED = "log_unexpected"
    """Leave unexpected keys out and warn."""
    LOG_ALL = "log_all"
    """Leave unexpected keys out and warn of these and of missing ones."""
    RAISE_UNEXPECTED = "raise_unexpected"
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


def parse_strict_flag(strict: str | bool | StrictHandling) -> StrictHandling:
    """The flag by value or name; True means RAISE_ALL, False LOG_ALL. Raises ValueError for anything else."""
    if isinstance(strict, StrictHandling):
        return strict
    if isinstance(strict, bool):
        return StrictHandling.RAISE_ALL if strict else StrictHandling.LOG_ALL
    try:
        return StrictHandling(strict)
    except ValueError as e:
        flags = ", ".join(repr(flag.value) for flag in StrictHandling)
        raise ValueError(f"Invalid strict flag: {strict!r}; one of {flags}, True or False is expected") from e


def name_of(shard: ShardId, meta: TensorMeta) -> str:
    """The name under which a shard is compared."""
    return unique_key(shard.key, shard.box.offset, meta.shape) if meta.is_object else shard.key


def requested(wanted: Declarations) -> set[str]:
    """The names that a rank asks for."""
    return _names(wanted.tensors, wanted.tensor, wanted.boxes)


def stored(manifest: Manifest) -> set[str]:
    """The names that a checkpoint holds."""
    return _names(manifest.tensors, manifest.chunks.tensor, manifest.chunks.boxes)


def unexpected(wanted: Declarations, manifest: Manifest) -> set[str]:
    """Names that this rank asks for and the checkpoint does not hold."""
    return requested(wanted) - stored(manifest)


def missing(requested_by_ranks: Iterable[Collection[str]], manifest: Manifest) -> set[str]:
    """Names that the checkpoint holds and no rank asks for; one collection (see ``requested``) a rank."""
    return stored(manifest).difference(*requested_by_ranks)


def describe(unexpected: Collection[str], missing: Collection[str], manifest: Manifest) -> str:
    """What differs, in words, with similar stored names for unexpected ones; empty where nothing does."""
    paragraphs = []
    if unexpected:
        paragraphs.append(
            f"Unexpected keys: asked for, but not in the checkpoint ({len(unexpected)}):\n  "
            + "\n  ".join(_listed(unexpected, sorted(stored(manifest))))
        )
    if missing:
        paragraphs.append(
            f"Missing keys: in the checkpoint, but asked for by no rank ({len(missing)}):\n  "
            + "\n  ".join(_listed(missing, []))
        )
    return "\n".join(paragraphs)


def check_shapes(wanted: Declarations, manifest: Manifest, dtype_policy: str = "convert") -> None:
    """Raise MismatchError listing tensors whose global shape (with "error": or dtype) is not the stored one.

    Flexible tensors may differ in extents, not in the number of dimensions. Keys that are not stored are left
    to ``unexpected``. Raises ValueError for a ``dtype_policy`` other than "convert" and "error".
    """
    if dtype_policy not in ("convert", "error"):
        raise ValueError(f"dtype_policy must be 'convert' or 'error', not {dtype_policy!r}")
    rigid = np.zeros(len(wanted.tensors), np.bool_)
    rigid[wanted.tensor[~wanted.flexible]] = True
    numbers = manifest.numbers()
    problems = []
    for i in np.unique(wanted.tensor).tolist():
        entry = wanted.tensors[i]
        number = numbers.get(entry.key)
        if number is not None:
            problems += _differences(entry, manifest.tensors[number], bool(rigid[i]), dtype_policy == "error")
    if problems:
        more = [f"and {len(problems) - _TOLD} more"] if len(problems) > _TOLD else []
        raise MismatchError("\n".join(problems[:_TOLD] + more))


def _differences(asked: TensorEntry, there: TensorEntry, rigid: bool, dtype: bool) -> list[str]:
    key, meta = asked
    held = there.meta
    if meta.is_object != held.is_object:
        kind = "an object" if held.is_object else "a tensor"
        return [f"{key!r} is stored as {kind} ({held.dtype}), but asked for as {meta.dtype}"]
    if meta.is_object:
        return []
    problems = []
    if len(meta.shape) != len(held.shape) or (rigid and meta.shape != held.shape):
        text = f"Global shape mismatch for loaded {held.shape} and expected {meta.shape} tensor for key {key}"
        if len(meta.shape) == len(held.shape):
            text += " (allow_shape_mismatch=True would load what overlaps)"
        problems.append(text)
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


def _listed(names: Collection[str], known: list[str]) -> list[str]:
    """The first names in alphabetical order, each with the most similar one of ``known`` (sorted)."""
    lines = [repr(name) for name in sorted(names)[:_TOLD]]
    if known:
        backwards = sorted(name[::-1] for name in known)
        for i, name in enumerate(sorted(names)[:_ADVISED]):
            near = _nearest(name, known, backwards)
            lines[i] += f" (did you mean {near!r}?)" if near else ""
    if len(names) > _TOLD:
        lines.append(f"and {len(names) - _TOLD} more")
    return lines


def _nearest(name: str, known: list[str], backwards: list[str]) -> str | None:
    """The most similar known name among those that share the longest beginnings and endings with this one."""
    candidates = set(_around(known, name))
    candidates.update(other[::-1] for other in _around(backwards, name[::-1]))
    return next(iter(get_close_matches(name, sorted(candidates), 1, 0.7)), None)


def _around(names: list[str], name: str) -> list[str]:
    place = bisect_left(names, name)
    return names[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS]
