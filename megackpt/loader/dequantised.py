"""Plain tensors filled with the values of stored quantised ones, in bands of bounded memory."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from megackpt import limits
from megackpt.checkpoint import Opened
from megackpt.errors import MismatchError
from megackpt.loader.load_session import LoadSession, destination
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    Declaration,
    Declarations,
    Manifest,
    ShardId,
    TensorParts,
)
from megackpt.state import ShardedObject, ShardedTensor, dtype_named
from megackpt.state.tensor_subclasses import Cut, cuts_of, placed, rule_named

_TILES = 1 << 20
"""Elements that a stored inner tensor may have beyond those of the outer one, as padding."""


@dataclass(frozen=True, eq=False)
class Dequantised:
    """A plain tensor, which is to hold the values of a box of the stored tensor ``key``.

    ``kind`` is the class of the stored tensor. ``manifest`` has its inner tensors alone, and
    ``axes`` says how each of them is cut.
    """

    key: str
    target: torch.Tensor
    box: Box
    record: dict[str, Any]
    kind: Any
    axes: list[list[Cut]]
    manifest: Manifest

    def read(self, session: LoadSession, opened: Opened, verify: bool) -> None:
        """Fill the target in bands, each of about ``limits.DEQUANTISED_BYTES`` as float32.

        Raises MismatchError if the class makes no values of what is stored.
        """
        whole = self.record["shape"]
        steps = [1] * len(whole)
        for axis, step in (cut for axes in self.axes for cut in axes):
            steps[axis] = math.lcm(steps[axis], 1 if axis < 0 else step or whole[axis])
        low = []
        size = []
        for first, stop, step, end in zip(
            self.box.offset, self.box.stop, steps, whole, strict=True
        ):
            low.append(first // step * step)
            size.append(min(-(-stop // step) * step, end) - low[-1])
        rows = limits.DEQUANTISED_BYTES // 4 // max(math.prod(size[1:]), 1)
        rows = max(rows // steps[0], 1) * steps[0]
        for top in range(0, size[0], rows):
            height = min(rows, size[0] - top)
            band = Box((low[0] + top, *low[1:]), (height, *size[1:]))
            if common := band.intersect(self.box):
                values = self._values(band, session, opened, verify)
                part = self.target[common.relative_to(self.box).slices()]
                part.copy_(values[common.relative_to(band).slices()])

    def _values(
        self, band: Box, session: LoadSession, opened: Opened, verify: bool
    ) -> torch.Tensor:
        rows = []
        tensors = []
        parts = {}
        whole = tuple(self.record["shape"])
        for (key, meta), axes in zip(self.manifest.tensors, self.axes, strict=True):
            box, _ = placed(
                axes, band.offset, band.shape, whole, meta.shape, repr(self.key)
            )
            rows.append(Declaration(ShardId(key, box), meta, 0, False, 0, 0))
            dtype = dtype_named(meta.dtype)
            tensor = torch.empty(box.shape, dtype=dtype, device="cpu")
            tensors.append(tensor)
            if axes[-1:] == [(-1, 16)]:
                *lead, high, wide, height, width = box.shape
                tensor = tensor.view(*lead, high * height, wide * width)
            parts[key.rpartition(".")[2]] = tensor
        opened = replace(opened, manifest=self.manifest)
        session.rows(opened, Declarations.of(rows), tensors, verify=verify)
        context = {
            name: self._decoded(name, value, band.shape)
            for name, value in self.record["context"].items()
        }
        try:
            made: torch.Tensor = self.kind.__tensor_unflatten__(
                parts, context, band.shape, None
            )
            values = made.dequantize().to(self.target.dtype)
            return values.view(band.shape)
        except Exception as error:  # the code of the class may raise anything
            raise MismatchError(
                f"{self.key!r}: {self.record['class']} makes no values of what is stored: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _decoded(self, name: str, value: Any, shape: Sequence[int]) -> Any:
        """An entry of the context, for values of the target's dtype."""
        if name in ("dtype", "orig_dtype"):
            return self.target.dtype
        if isinstance(value, str) and value.startswith("torch."):
            return getattr(torch, value.removeprefix("torch."), None)
        if isinstance(value, list) and name == "block_size":
            return [size or extent for size, extent in zip(value, shape, strict=True)]
        return None if isinstance(value, dict) else value


def dequantised(
    shards: Sequence[ShardedTensor | ShardedObject],
    declared: Declarations,
    manifest: Manifest,
) -> dict[int, Dequantised]:
    """The shards, by number, that ask for values of a stored tensor that wraps others.

    Raises MismatchError for another shape, a dtype without fractions, an unknown class, and for a
    class that gives no values.
    """
    records = dict(manifest.subclasses)
    numbers = manifest.numbers()
    parts = TensorParts(manifest)
    found = {}
    for i, row in enumerate(declared.rows()):
        key = row.shard.key
        shard = shards[i]
        if key not in records or not isinstance(shard, ShardedTensor):
            continue
        record = json.loads(records[key])
        shape = tuple(record["shape"])
        stored = [numbers[f"{key}.{inner}"] for inner in record["inner"]]
        excerpt = parts.excerpt(stored)
        is_alike = shape == row.meta.shape != () and shard.dtype.is_floating_point
        axes: list[list[Cut]] = []
        kind: Any = torch.Tensor
        module, _, name = record["class"].rpartition(".")
        rule = rule_named(record["class"])
        if rule is not None and is_alike:
            try:
                kind = getattr(import_module(module), name)
                for inner, (_, meta) in zip(
                    record["inner"], excerpt.tensors, strict=True
                ):
                    dims = len(meta.shape)
                    axes.append(
                        cuts_of(
                            rule, inner, record["context"], len(shape), dims, repr(key)
                        )
                    )
                    is_alike &= fits(axes[-1], shape, meta.shape)
            except (
                ArithmeticError,
                ImportError,
                AttributeError,
                IndexError,
                TypeError,
                ValueError,
            ) as error:
                raise MismatchError(
                    f"{key!r} is stored as a {record['class']}, which is not installed, or has a "
                    f"damaged record ({error})"
                ) from error
        if kind.dequantize is torch.Tensor.dequantize or not is_alike:
            raise MismatchError(
                f"{key!r} is stored as a {record['class']} of shape {record['shape']}, and asked "
                f"for as a tensor {row.meta}: the shapes differ, or it is asked for as integers, "
                "or the class has no rule or no `dequantize`. Its tensors can be loaded one by "
                f"one: {record['inner']} below that key"
            )
        target = destination(shard)
        found[i] = Dequantised(key, target, row.shard.box, record, kind, axes, excerpt)
    return found


def fits(axes: Sequence[Cut], whole: Sequence[int], inner: Sequence[int]) -> bool:
    """Whether an inner tensor of this shape has an element for each part of the outer one."""
    if len(axes) != len(inner) or math.prod(inner) > math.prod(whole) + _TILES:
        return False
    for (axis, step), size in zip(axes, inner, strict=True):
        if step < 0 or (axis >= 0 and step and -(-whole[axis] // step) != size):
            return False
    return True
