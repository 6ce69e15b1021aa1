"""The rows of a save plan as bytes on the host, and views of tensors' memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from mmap import MAP_PRIVATE, mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megackpt.planning.box import Box, Boxes, Int64
from megackpt.planning.manifest import SavePlan, carried_dtype, itemsizes
from megackpt.staging.devices import COPIED_AT_ONCE, host_blocks, parts

_SMALL = 64 << 10  # bytes
_COMPARED = 1 << 22  # addresses of elements that are compared with one another
_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
)


def host_array(tensor: torch.Tensor) -> NDArray[Any]:
    """The memory of a CPU tensor as ``carried_dtype``, of the same shape and strides; no copy."""
    size = tensor.element_size()
    if tensor.dtype not in _NUMPY_DTYPES and size in _CARRIER:
        tensor = tensor.view(_CARRIER[size])
    array: NDArray[Any] = tensor.numpy()
    return array.view(carried_dtype(size))


def region(tensor: torch.Tensor, holder: Box, box: Box) -> torch.Tensor:
    """The view of ``tensor`` that is ``box``. The tensor fills ``holder``.

    Leading axes of extent 1 may be missing from the tensor.
    """
    missing = len(holder.shape) - tensor.dim()
    if missing:
        tensor = tensor[(None,) * missing]
    if box.shape == holder.shape:
        return tensor
    return tensor[box.relative_to(holder).slices()]


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes; no copy."""
    # A contiguous tensor may have any stride along an axis of extent 1, or where it has no
    # elements. Flattening keeps that stride, and torch then refuses the view as bytes.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


MEMORY = memoryview((ctypes.c_ubyte * sys.maxsize).from_address(0)).cast("B")
"""All memory of this process. A slice of it costs a fraction of a tensor's own view, and does not
keep the tensor alive."""


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements of this tensor share memory, as in expanded tensors and windows by
    ``unfold``.

    Exact, except for large memory that is interleaved in an uncommon way: that counts as shared.
    """
    if tensor.numel() < 2 or tensor.is_contiguous():
        return False
    axes = []
    for step, size in zip(tensor.stride(), tensor.shape, strict=True):
        if size > 1:
            axes.append((step, size))
    axes.sort()
    # An axis cannot overlap the axes of smaller steps if its step is larger than their reach. All
    # axes are so in what slicing, transposing and reshaping make of a contiguous tensor.
    overlapping = 0
    reach = 0
    for count, (step, size) in enumerate(axes, start=1):
        if step <= reach:
            overlapping = count
        reach += step * (size - 1)
    addresses = np.zeros(1, np.int64)
    for step, size in axes[:overlapping]:
        if len(addresses) * size > _COMPARED:
            return True
        addresses = np.add.outer(addresses, np.arange(size) * step).ravel()
    return len(np.unique(addresses)) < len(addresses)


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory, on the host, holds its elements in C order."""
    return (
        tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


@dataclass(frozen=True, eq=False)
class HostMemory:
    """Where tensors are in memory, as columns, so that small ones cost little.

    ``address`` is 0 unless memory on the host holds the ``nbytes`` of the tensor in C order.
    """

    address: Int64
    nbytes: Int64

    @classmethod
    def of(cls, tensors: Iterable[object]) -> HostMemory:
        """Both columns are 0 for what is not a tensor."""
        rows = []
        for tensor in tensors:
            row = (0, 0)
            if isinstance(tensor, torch.Tensor):
                size = tensor.nbytes
                row = (_address(tensor, size) if size else 0, size)
            rows.append(row)
        address, nbytes = np.array(rows, np.int64).reshape(-1, 2).T
        return cls(address, nbytes)

    def views(self, rows: Any, sizes: Sequence[int]) -> list[memoryview | None]:
        """For each of these rows its memory, if it has an address and this size."""
        address = np.where(self.nbytes[rows] == sizes, self.address[rows], 0)
        views: list[memoryview | None] = []
        for start, size in zip(address.tolist(), sizes, strict=True):
            view = None
            if start:
                view = MEMORY[start : start + size]
            views.append(view)
        return views


def memory_of(tensor: torch.Tensor, size: int) -> memoryview | None:
    """The tensor's bytes, if they are so many, and memory on the host holds them in C order."""
    return HostMemory.of([tensor]).views([0], [size])[0]


def _address(tensor: torch.Tensor, size: int) -> int:
    """The address of a tensor's ``size`` bytes in C order on the host; 0 if they are not there."""
    if not is_plain_memory(tensor):
        return 0
    storage = tensor.untyped_storage()
    try:
        begin, start = storage.data_ptr(), tensor.data_ptr()
    except RuntimeError:  # a wrapper has no memory of its own
        return 0
    # A storage that was freed or cut has less than the tensor. Beyond sys.maxsize: a tag.
    within = begin <= start and start + size <= begin + storage.nbytes()
    if not begin or not within or start > sys.maxsize - size:
        return 0
    return start


def pieces(value: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in C order: its memory, or copies of at most ``COPIED_AT_ONCE``.

    A piece is valid until the next one is made.
    """
    if is_plain_memory(value):
        yield byte_view(value)
        return
    itemsize = value.element_size()
    size = value.numel() * itemsize
    if value.is_cuda and size > _SMALL:
        yield from host_blocks(value)
        return
    if size <= _SMALL:
        buffer = np.empty(max(1, size), np.uint8)
    else:
        # A mapping of its own is freed at once. malloc would keep the memory and fragment it.
        memory = mmap(-1, min(COPIED_AT_ONCE, size), flags=MAP_PRIVATE)
        buffer = np.frombuffer(memory, np.uint8)
    for start in range(0, size, len(buffer)):
        stop = min(start + len(buffer), size)
        block = buffer[: stop - start]
        octets = torch.from_numpy(block)
        # Both are multiples of the element size. Each copy is complete when it returns.
        for part, run in parts(octets, value, start // itemsize, stop // itemsize):
            part.copy_(run)
        yield block.data


@dataclass(frozen=True, eq=False)
class TensorSource:
    """The Source of a save plan's rows that reads the tensors themselves.

    ``held[i]`` is the tensor of row i of the rank's declarations, or a function that serializes its
    object; row i of ``holders`` is the box that it fills. Contiguous CPU tensors are not copied.
    """

    plan: SavePlan
    held: Sequence[torch.Tensor | Callable[[], bytes]]
    holders: Boxes

    @cached_property
    def is_object(self) -> NDArray[np.bool_]:
        """For each row of the plan whether it is an object."""
        itemsize = itemsizes(self.plan.tensors)[self.plan.tensor]
        return np.asarray(itemsize == 0)

    @cached_property
    def rows(self) -> list[tuple[int, bool]]:
        """For each row of the plan its row in ``held``, and whether it is all of that."""
        plan = self.plan
        width = max(plan.boxes.width, self.holders.width)
        boxes = plan.boxes.widened(width)
        holders = self.holders.take(plan.source).widened(width)
        same = (boxes.offset == holders.offset) & (boxes.shape == holders.shape)
        return list(zip(plan.source.tolist(), same.all(axis=1).tolist(), strict=True))

    def blob(self, row: int) -> bytes:
        """The serialized object of a row."""
        value = self.held[self.rows[row][0]]
        if isinstance(value, torch.Tensor):
            raise TypeError(f"row {row} is a tensor, not an object")
        return value()

    def tensor(self, row: int) -> torch.Tensor:
        """The part of its tensor that a row is, without autograd."""
        source, whole = self.rows[row]
        value = self.held[source]
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"row {row} is an object: it has no tensor")
        if whole:
            return value.detach()
        item = self.plan.row(row)
        holder = self.holders.row(source, len(item.meta.shape))
        return region(value.detach(), holder, item.shard.box)

    @cached_property
    def _memory(self) -> HostMemory:
        """The memory of the rows that are whole tensors."""
        return HostMemory.of(
            self.held[source] if whole else None for source, whole in self.rows
        )

    def views(
        self, rows: Sequence[int], sizes: Sequence[int]
    ) -> list[memoryview | None]:
        """For each row its bytes, if it is a whole tensor of this size, and in C order.

        They are valid while this source exists, and its tensors keep their memory.
        """
        return self._memory.views(rows, sizes)

    def blocks(self, row: int) -> Iterator[memoryview]:
        if not isinstance(self.held[self.rows[row][0]], torch.Tensor):
            yield memoryview(self.blob(row))
            return
        yield from pieces(self.tensor(row))
