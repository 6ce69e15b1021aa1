"""The rows of a save plan as bytes on the host: as they stand where they can be, else by way of bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from mmap import MAP_PRIVATE, mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megackpt.planning.box import Box, Boxes, Int64
from megackpt.planning.manifest import DIGEST_BLOCK, SavePlan, carried_dtype

PIECE = 16 * DIGEST_BLOCK
"""Bytes that are copied to the host at a time where a tensor's memory cannot be written as it stands."""

_SMALL = 64 << 10
_LOOKED_AT = 1 << 22  # elements of which each one's place is compared with the others'
_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8)
)


def host_array(tensor: torch.Tensor) -> NDArray[Any]:
    """The memory of a CPU tensor as an array of ``carried_dtype``, with the same shape and strides; no copy."""
    size = tensor.element_size()
    carrier = None if tensor.dtype in _NUMPY else _CARRIER.get(size)
    array: NDArray[Any] = (tensor if carrier is None else tensor.view(carrier)).numpy()
    return array.view(carried_dtype(size))


def region(tensor: torch.Tensor, holder: Box, box: Box) -> torch.Tensor:
    """The view of ``tensor`` (which fills ``holder``; leading axes of extent 1 may be left out) that is ``box``."""
    missing = len(holder.shape) - tensor.dim()
    wide = tensor[(None,) * missing] if missing else tensor
    return wide if box.shape == holder.shape else wide[box.relative_to(holder).slices()]


def octets_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes; no copy."""
    # A contiguous tensor may have any stride along an axis of extent 1, or where it has no elements. Flattening keeps
    # that stride, and torch then refuses the view as bytes.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Are different elements of this tensor the same memory, as in expanded tensors and in windows by ``unfold``?

    Exact; but of memory that is interleaved in an uncommon way, and large, True is said without a look.
    """
    if tensor.numel() < 2 or tensor.is_contiguous():
        return False
    axes = sorted(
        (step, size)
        for step, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    )
    # An axis whose step is larger than what the axes of smaller steps reach over never meets them. Whatever slicing,
    # transposing and reshaping make of a contiguous tensor has such axes only.
    meeting = 0
    reach = 0
    for count, (step, size) in enumerate(axes, start=1):
        if step <= reach:
            meeting = count
        reach += step * (size - 1)
    places = np.zeros(1, np.int64)
    for step, size in axes[:meeting]:
        if len(places) * size > _LOOKED_AT:
            return True
        places = np.add.outer(places, np.arange(size) * step).ravel()
    return len(np.unique(places)) < len(places)


def settle(tensors: Iterable[object]) -> None:
    """Wait for what this thread has asked devices to do with these tensors: other threads are about to touch them."""
    devices = {t.device for t in tensors if isinstance(t, torch.Tensor) and t.is_cuda}
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
        torch.cuda.default_stream(
            device
        ).synchronize()  # the one that other threads use


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Without autograd and without lazy conjugation: memory that means what it says."""
    return tensor.detach().resolve_conj().resolve_neg()


def in_order(tensor: torch.Tensor) -> bool:
    """Is this tensor's memory, on the host, its elements one after another as they are written?"""
    return (
        tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


@dataclass(frozen=True, eq=False)
class Staged:
    """The Source of a save plan's rows.

    Contiguous CPU tensors are handed on as they are, everything else through a bounded buffer.
    ``held[i]`` is the tensor of row i of the rank's declarations, or a function that makes an object's blob;
    row i of ``holders`` the box that it fills.
    """

    plan: SavePlan
    held: Sequence[torch.Tensor | Callable[[], bytes]]
    holders: Boxes

    @cached_property
    def lengths(self) -> Int64:
        """The bytes of each row (0 for objects, which nobody has serialised yet)."""
        itemsize = np.array(
            [entry.meta.itemsize for entry in self.plan.tensors], np.int64
        )
        return self.plan.boxes.volume * itemsize[self.plan.tensor]

    @cached_property
    def rows(self) -> list[tuple[int, bool]]:
        """For each row of the plan the one of ``held`` that has it, and whether it is all of that."""
        width = max(self.plan.boxes.width, self.holders.width)
        boxes, holders = (
            self.plan.boxes.widened(width),
            self.holders.take(self.plan.source).widened(width),
        )
        whole = ((boxes.offset == holders.offset) & (boxes.shape == holders.shape)).all(
            axis=1
        )
        return list(zip(self.plan.source.tolist(), whole.tolist(), strict=True))

    def value(self, row: int) -> torch.Tensor | bytes:
        """A row's part of its tensor, or its blob."""
        value = self.held[self.rows[row][0]]
        return self.tensor(row) if isinstance(value, torch.Tensor) else value()

    def tensor(self, row: int) -> torch.Tensor:
        source, whole = self.rows[row]
        value = self.held[source]
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"row {row} is an object: it has no tensor")
        if whole:
            return value.detach()
        item = self.plan.row(row)
        return region(
            value.detach(),
            self.holders.row(source, len(item.meta.shape)),
            item.shard.box,
        )

    def blocks(self, row: int) -> Iterator[memoryview]:
        value = self.value(row)
        if isinstance(value, bytes):
            yield memoryview(value)
        elif in_order(value):
            yield octets_of(value)
        else:
            size = value.numel() * value.element_size()
            buffer = piece_of(size)
            for start in range(0, size, len(buffer)):
                yield copy_out(value, start, min(start + len(buffer), size), buffer)


def piece_of(size: int) -> NDArray[np.uint8]:
    """Memory for the pieces of a row of this size."""
    if size <= _SMALL:
        return np.empty(max(1, size), np.uint8)
    # Of its own, given back at once: malloc would keep it, and put small things into it, row after row.
    return np.frombuffer(
        mmap(-1, max(1, min(PIECE, size)), flags=MAP_PRIVATE), np.uint8
    )


def copy_out(
    tensor: torch.Tensor, start: int, stop: int, into: NDArray[np.uint8]
) -> memoryview:
    """Bytes [start, stop) of a tensor's elements in C order, copied to where ``into`` begins.

    ``start`` and ``stop`` lie between elements. The copy is complete when this returns, whatever the device.
    """
    size = tensor.element_size()
    octets = into[: stop - start]
    if start == stop:
        return octets.data
    buffer = torch.from_numpy(octets).view(tensor.dtype)
    filled = 0
    for run in Box.whole(tensor.shape).runs(start // size, stop // size):
        buffer[filled : filled + run.volume].view(run.shape).copy_(tensor[run.slices()])
        filled += run.volume
    return octets.data
