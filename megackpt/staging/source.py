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

from megackpt.errors import ShardingError
from megackpt.planning.box import Box, Boxes, Int64
from megackpt.planning.manifest import SavePlan, carried_dtype, itemsizes
from megackpt.staging.devices import COPIED_AT_ONCE, has_streams, host_blocks, parts
from megackpt.state.shard_columns import is_cut
from megackpt.state.storable import DTYPES

_SMALL = 64 << 10  # bytes
_COMPARED = 1 << 22  # addresses of elements that are compared with one another
_begin = torch.UntypedStorage.data_ptr
_nbytes = torch.UntypedStorage.nbytes
_NO_STORAGE: torch.UntypedStorage = torch.empty(0, device="cpu").untyped_storage()


class _Memory:
    """A tensor's memory for numpy, whose arrays hold it, and with it the storage.

    Unlike ``Tensor.numpy()``, this leaves the storage resizable.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.storage = tensor.untyped_storage()
        self.__array_interface__ = {
            "version": 3,
            "typestr": carried_dtype(size).str,
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "data": (tensor.data_ptr(), False),
        }


def host_array(tensor: torch.Tensor) -> NDArray[Any]:
    """The memory of a CPU tensor as ``carried_dtype``, of the same shape and strides; no copy.

    It is valid until the tensor's storage is resized.
    """
    return np.asarray(_Memory(tensor))


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
    """The memory of a contiguous CPU tensor as bytes; no copy. See ``host_array``."""
    # A contiguous tensor may have any stride along an axis of extent 1, or where it has no
    # elements. Flattening keeps that stride, and torch then refuses the view as bytes.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return host_array(flat.view(torch.uint8)).data


MEMORY = memoryview((ctypes.c_ubyte * sys.maxsize).from_address(0)).cast("B")
"""All memory of this process. A slice of it costs a fraction of a view of a tensor. HostMemory
holds the storages of the slices."""


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements of this tensor share memory: expanded tensors, windows by ``unfold``.

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


def storage_error(name: str) -> ShardingError:
    return ShardingError(
        f"{name}: the tensor's storage was freed or resized while its bytes were written. Do not "
        "call untyped_storage().resize_() of it before the save is complete"
    )


@dataclass(frozen=True, eq=False)
class HostMemory:
    """Where tensors are in memory, as columns, so that small ones cost little.

    ``address`` is 0 unless memory on the host holds the ``nbytes`` of the tensor in C order.
    ``storages`` are held; ``begin`` and ``length`` are what their memory was.
    """

    address: Int64
    nbytes: Int64
    begin: NDArray[np.uint64]
    length: NDArray[np.uint64]
    storages: Sequence[torch.UntypedStorage]

    @classmethod
    def of(cls, tensors: Iterable[object]) -> HostMemory:
        """All columns are 0 for objects that are not tensors."""
        none = (0, 0, 0, 0, _NO_STORAGE)
        rows: list[tuple[int, int, int, int, torch.UntypedStorage]] = []
        for each in tensors:
            if not isinstance(each, torch.Tensor):
                rows.append(none)
                continue
            try:
                storage = each.untyped_storage()
                begin = _begin(storage)
                start = each.data_ptr() if is_plain_memory(each) else 0
                rows.append((start, each.nbytes, begin, _nbytes(storage), storage))
            except RuntimeError:
                # Wrappers have no memory, and other layouts no storage.
                rows.append((0, each.nbytes, 0, 0, _NO_STORAGE))
        *numbers, storages = zip(*rows or [none], strict=True)
        # A tag may make an address large.
        address, nbytes, first, length = np.array(numbers, np.uint64)
        end = address + nbytes
        # A storage that was freed or cut has less than the tensor.
        within = (first > 0) & (first <= address) & (end <= first + length)
        within &= end <= sys.maxsize
        address = np.where(within, address, 0).astype(np.int64)
        return cls(address, nbytes.astype(np.int64), first, length, storages)

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

    def changed(self, rows: Int64) -> Int64:
        """The rows among these whose storages were freed or resized after this was made."""
        storages = [self.storages[row] for row in rows.tolist()]
        begin = np.fromiter(map(_begin, storages), np.uint64, len(storages))
        length = np.fromiter(map(_nbytes, storages), np.uint64, len(storages))
        changed = (begin != self.begin[rows]) | (length != self.length[rows])
        return np.compress(changed, rows)


def pieces(value: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in C order: its memory or copies, at most ``COPIED_AT_ONCE`` at a time.

    A piece is valid until the next one is made.
    """
    if is_plain_memory(value):
        whole = byte_view(value)
        for start in range(0, max(1, len(whole)), COPIED_AT_ONCE):
            yield whole[start : start + COPIED_AT_ONCE]
        return
    itemsize = value.element_size()
    size = value.numel() * itemsize
    if size > _SMALL and has_streams(value):
        yield from host_blocks(value)
        return
    if size <= _SMALL:
        buffer = np.empty(max(1, size), np.uint8)
    else:
        # A separate mapping is freed at once. malloc would keep the memory and fragment it.
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


@dataclass(eq=False)
class TensorSource:
    """The Source of a save plan's rows that reads the tensors themselves.

    ``held[i]`` is the tensor of row i of the rank's declarations, or a function that serializes its
    object; row i of ``holders`` is the box that it fills. Contiguous CPU tensors are not copied.
    ``memory`` has the tensors for which the plan has rows. A tensor of another dtype than its row
    is converted, row by row.
    """

    plan: SavePlan
    held: Sequence[torch.Tensor | Callable[[], bytes]]
    holders: Boxes

    def __post_init__(self) -> None:
        plan = self.plan
        self.dtypes = [DTYPES.get(entry.meta.dtype) for entry in plan.tensors]
        used = dict(zip(plan.source.tolist(), plan.tensor.tolist(), strict=True))
        # Memory of another dtype than the row's does not count.
        self.memory = HostMemory.of(
            value
            if isinstance(value, torch.Tensor)
            and i in used
            and value.dtype == self.dtypes[used[i]]
            else None
            for i, value in enumerate(self.held)
        )

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
        """The part of its tensor that a row is, without autograd.

        Raises ShardingError if the tensor's storage was freed or cut.
        """
        source, whole = self.rows[row]
        value = self.held[source]
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"row {row} is an object: it has no tensor")
        if is_cut(value):
            raise storage_error(str(self.plan.row(row).shard))
        value = value.detach()
        if not whole:
            item = self.plan.row(row)
            holder = self.holders.row(source, len(item.meta.shape))
            value = region(value, holder, item.shard.box)
        return value.to(self.dtypes[self.plan.tensor[row]])

    def check(self, rows: Any = slice(None)) -> None:
        """Raise ShardingError if the storage of one of these rows was freed or resized."""
        changed = self.memory.changed(self.plan.source[rows])
        if len(changed):
            row = int(np.flatnonzero(self.plan.source == changed[0])[0])
            raise storage_error(str(self.plan.row(row).shard))

    def views(
        self, rows: Sequence[int], sizes: Sequence[int]
    ) -> list[memoryview | None]:
        """For each row its bytes, if it is a whole tensor of this size, and in C order.

        They are valid while this source exists and no storage is resized: see ``check``.
        """
        self.check(rows)
        return self.memory.views(self.plan.source[rows], sizes)

    def blocks(self, row: int) -> Iterator[memoryview]:
        if not isinstance(self.held[self.rows[row][0]], torch.Tensor):
            yield memoryview(self.blob(row))
            return
        self.check([row])
        for piece in pieces(self.tensor(row)):
            yield piece
            self.check([row])
