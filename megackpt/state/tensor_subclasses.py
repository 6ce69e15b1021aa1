"""Tensors that wrap other tensors, declared as these, by a rule for each class.

A rule says which axis of an inner tensor follows which axis of the outer tensor. Inner tensors are
ShardedTensors under ``KEY.NAME``. Class and context travel with them as a record, a JSON text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from enum import Enum
from functools import partial
from hashlib import blake2b
from importlib.metadata import EntryPoint
from typing import Any

import torch

from megackpt.errors import MismatchError, ShardingError
from megackpt.planning.box import Box
from megackpt.state.values import (
    FilledFactory,
    LocalNonpersistentObject,
    ShardedTensor,
)

Shape = tuple[int, ...]
Cut = tuple[int, int]
"""An axis of the outer tensor, and its elements for one of the inner one (0: it may not be cut).

Axis -1: the axis of the inner tensor is not cut. It has that many elements, if not 0.
"""
Rule = Mapping[str, str]
Stored = Callable[[str], str | None] | None
"""Gives the record that a checkpoint has for a key. None in a save."""

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
"""The classes of data that has no inner tensors."""
_TORCHAO = EntryPoint("torchao", "megackpt.integrations.torchao:register", "megackpt")
_rules: dict[str, Rule] = {}


@dataclass
class InnerTensor(ShardedTensor):
    """A tensor that another one wraps. ``facts``: see ``Declarations``; first the other's key."""

    facts: tuple[tuple[str, str], ...] = field(kw_only=True, repr=False)


def register_tensor_subclass(name: str, rule: Rule) -> None:
    """Let ``save`` and ``load`` take tensors of a class that wraps other tensors.

    The inner tensors are those of ``__tensor_flatten__``. They are stored as tensors ``KEY.NAME``,
    and the context as a record of plain values: dtypes and enums by name, dataclasses as dicts. A
    load compares class and context with those of the tensor that it fills. An entry ``shape`` of
    the context is not stored. In an entry ``block_size``, a list, None is stored where one block
    spans rows, or the tensor.

    Args:
        name: the class, as "package.module.Class".
        rule: names of inner tensors -> a word for each of their axes. "-2": the axis follows this
            axis of the outer tensor. "-2/128": an element belongs to 128 elements of that axis,
            which is cut at multiples of 128. "-2/block_size": to as many as this entry of the
            context says, a number or a list with one for each axis (None: the axis is not cut).
            "-2/0": that axis may not be cut. "...": the axes before the last two. "-": the axis
            is not cut, "=16": nor is it, and the stored form has an axis of 16 elements there.
            A tensor with another number of axes is not cut. Parts that are not cut must be equal
            on all ranks. "NAME if ENTRY" is the rule where this entry of the context is
            true, "NAME if ENTRY=TEXT" where it is this text.

    Example::

        rule = {"data": "... -2 -1", "scale zero_point": "... -2 -1/group_size"}
        megackpt.register_tensor_subclass("package.module.Quantized", rule)
    """
    _rules[name] = rule


def rule_named(name: str) -> Rule | None:
    """The rule of a class; None without one. The package of the class is not imported."""
    if name not in _rules and name.startswith("torchao."):
        _TORCHAO.load()()
    return _rules.get(name)


def expanded(shard: ShardedTensor, stored: Stored) -> ShardedTensor | FilledFactory:
    """A shard whose data has a rule, as a factory of its inner tensors.

    Data of a class without a rule stays, and ``declare`` refuses it.
    """
    name = qualified(type(shard.data))
    rule = rule_named(name)
    if rule is None:
        return shard
    build = partial(_inner_tensors, shard, name, rule, stored)
    return FilledFactory(shard.key, shard.data, build)


def qualified(kind: type) -> str:
    """The name of a class, with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _inner_tensors(
    shard: ShardedTensor, name: str, rule: Rule, stored: Stored, *_: Any
) -> Any:
    data: Any = shard.data
    key = shard.key
    whole = shard.global_shape
    here = shard.local_shape
    offset = shard.global_offset
    replace(shard, data=None).validate_metadata_integrity()
    if (data.dtype, data.shape) != (shard.dtype, here):
        raise ShardingError(f"{key!r}: dtype or shape of data differ from {shard!r}")
    if shard.prepend_axis_num or shard.allow_shape_mismatch:
        raise ShardingError(
            f"{key!r}: a {name} is declared without prepended axes and allow_shape_mismatch"
        )
    if 0 in here and 0 not in whole:
        return LocalNonpersistentObject(data)
    names, given = data.__tensor_flatten__()
    if not isinstance(given, dict):
        given = dict(enumerate(given or ()))
    record = {"class": name, "shape": whole, "dtype": data.dtype, "inner": names}
    try:
        text = json.dumps({**record, "context": given}, default=_named, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ShardingError(
            f"{key!r}: no record can be made of the context of a {name}: {error}"
        ) from error
    record = json.loads(text)
    was = json.loads((stored(key) if stored else None) or "{}")
    context = record["context"]
    context.pop("shape", None)
    _settle_blocks(context, here, was.get("context"))
    differing = [name for name in record if was and was.get(name) != record[name]]
    if differing:
        stored_values = [was.get(name) for name in differing]
        raise MismatchError(
            f"{key!r}: {differing} are stored as {stored_values}, and the tensor to fill has "
            f"{[record[name] for name in differing]}"
        )
    text = json.dumps(record, sort_keys=True)
    cut = {axis for axis, size in enumerate(here) if size != whole[axis]}
    shards = {}
    for inner in names:
        where = f"{key!r}: {inner} of a {name} of shape {here} at {offset} of {whole}"
        tensor = getattr(data, inner).detach()
        axes = cuts_of(rule, inner, context, len(here), tensor.dim(), where)
        sizes = [
            size if axis < 0 else -(-here[axis] // size) for axis, size in axes if size
        ]
        fits = math.prod(sizes) == tensor.numel() and tensor.is_contiguous()
        if len(axes) > tensor.dim() and fits:
            tensor = tensor.view(sizes)
        box, inner_whole = placed(axes, offset, here, whole, tensor.shape, where)
        if tensor.is_meta or box.shape != tensor.shape:
            raise ShardingError(
                f"{where} has the shape {tuple(tensor.shape)} and not {box.shape}, as its rule "
                "says, or is transposed, or on the meta device"
            )
        replica = shard.replica_id
        facts = [(key, text)]
        if missed := cut - {axis for axis, _ in axes}:
            # The ranks along these axes hold replicas.
            outer = (replica,) if isinstance(replica, int) else tuple(replica)
            replica = (*outer, int(any(offset[axis] for axis in missed)))
            if stored is None:
                facts.append((f"{key}.{inner} at {box.offset}", _digest(tensor)))
        shards[inner] = InnerTensor(
            f"{key}.{inner}",
            tensor,
            tensor.dtype,
            box.shape,
            inner_whole,
            box.offset,
            None,
            replica,
            facts=tuple(facts),
        )
    return shards


def cuts_of(
    rule: Rule, name: str, context: Any, axes: int, inner_axes: int, where: str
) -> list[Cut]:
    """How each axis of an inner tensor, in the stored form, follows those of the outer one."""
    found = None
    for names, text in rule.items():
        named, _, flag = names.partition(" if ")
        entry, _, value = flag.partition("=")
        applies = not flag or context.get(entry) == (value or True)
        if applies and name in named.split():
            found = text
    if found is None:
        raise ShardingError(f"{where}: the rule of its class does not name it")
    cuts: list[Cut] = []
    for word in found.split():
        axis, _, unit = word.partition("/")
        if axis == "-" or axis[0] == "=":
            cuts.append((-1, int(axis[1:] or 0)))
            continue
        outer = range(axes - 2) if axis == "..." else [axes + int(axis)]
        for each in outer:
            step = context.get(unit) if unit.isidentifier() else unit or 1
            if isinstance(step, list):
                step = step[each]
            cuts.append((-1, 0) if step is None else (each, int(step)))
    if len(cuts) != inner_axes and "=" not in found:
        return [(-1, 0)] * inner_axes
    return cuts


def placed(
    axes: Sequence[Cut],
    offset: Shape,
    here: Shape,
    whole: Shape,
    known: Shape,
    where: str,
) -> tuple[Box, Shape]:
    """The box of an inner tensor for a part of the outer one, and the inner global shape.

    ``known`` has the sizes of axes that are not cut. Raises ShardingError for a cut between the
    elements of the inner tensor.
    """
    places = []
    for (axis, step), size in zip(axes, known, strict=False):
        if axis < 0 or here[axis] == whole[axis]:
            places.append((0, size, size))
            continue
        start = offset[axis]
        stop = start + here[axis]
        if not step or start % step or (stop % step and stop != whole[axis]):
            raise ShardingError(
                f"{where}: axis {axis} is cut at {start} and {stop}, and may be cut at multiples "
                f"of {step or whole[axis]} only"
            )
        first = start // step
        places.append((first, -(-stop // step) - first, -(-whole[axis] // step)))
    offsets, sizes, wholes = zip(*places, strict=True) if places else ((), (), ())
    return Box(offsets, sizes), wholes


def _settle_blocks(context: dict[str, Any], here: Shape, stored: Any) -> None:
    """None for blocks of a row or of the tensor, whose sizes are those of this part."""
    blocks = context.get("block_size")
    if not isinstance(blocks, list) or len(blocks) != len(here):
        return
    known = (stored or {}).get("block_size")
    if not isinstance(known, list) or len(known) != len(here):
        known = None
    spans = all(size in (1, extent) for size, extent in zip(blocks, here, strict=True))
    for axis, size in enumerate(blocks):
        is_whole = known[axis] is None if known else spans and size > 1
        if is_whole and size == here[axis]:
            blocks[axis] = None


def _named(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value):
        return {"class": type(value).__name__, **vars(value)}
    raise TypeError(f"{type(value).__qualname__} is no plain value")


def _digest(tensor: torch.Tensor) -> str:
    raw = tensor.contiguous().cpu().flatten().view(torch.uint8).numpy()
    return blake2b(raw.tobytes(), digest_size=8).hexdigest()
