"""The device: planned shards to the host on a save, and from the host back to where they live on a load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from mmap import MAP_PRIVATE, mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import DIGEST_BLOCK, SavePlan

PIECE = 16 * DIGEST_BLOCK
"""Bytes that are copied to the host at a time where a tensor's memory cannot be written as it stands."""

_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY = frozenset((torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8))
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def carried_dtype(itemsize: int) -> np.dtype[Any]:
    """The numpy dtype under which elements of this many bytes travel, whatever they mean."""
    return np.dtype(_UNSIGNED[itemsize])


def host_array(tensor: torch.Tensor) -> NDArray[Any]:
    """The memory of a CPU tensor as an array of ``carried_dtype``, with the same shape and strides; no copy."""
    size = tensor.element_size()
    carrier = None if tensor.dtype in _NUMPY else _CARRIER.get(size)
    array: NDArray[Any] = (tensor if carrier is None else tensor.view(carrier)).numpy()
    return array.view(_UNSIGNED[size])


def region(tensor: torch.Tensor, holder: Box, box: Box) -> torch.Tensor:
    """The view of ``tensor`` (which fills ``holder``; leading axes of extent 1 may be left out) that is ``box``."""
    missing = len(holder.shape) - tensor.dim()
    wide = tensor[(None,) * missing] if missing else tensor
    return wide if box.shape == holder.shape else wide[box.relative_to(holder).slices()]


def settle(tensors: Iterable[object]) -> None:
    """Wait for what this thread has asked devices to do with these tensors: other threads are about to touch them."""
    devices = {t.device for t in tensors if isinstance(t, torch.Tensor) and t.is_cuda}
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
        torch.cuda.default_stream(device).synchronize()  # the one that other threads use


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Without autograd and without lazy conjugation: memory that means what it says."""
    return tensor.detach().resolve_conj().resolve_neg()


@dataclass(frozen=True, eq=False)
class Staged:
    """The Source of a save plan's rows.

    Contiguous CPU tensors are handed on as they are, everything else through a bounded buffer (``array``: whole).
    ``held[i]`` is the tensor of row i of the rank's declarations, or a function that makes an object's blob;
    row i of ``holders`` the box that it fills.
    """

    plan: SavePlan
    held: Sequence[torch.Tensor | Callable[[], bytes]]
    holders: Boxes

    @cached_property
    def _rows(self) -> list[tuple[int, bool]]:
        """For each row of the plan the one of ``held`` that has it, and whether it is all of that."""
        width = max(self.plan.boxes.width, self.holders.width)
        boxes, holders = self.plan.boxes.widened(width), self.holders.take(self.plan.source).widened(width)
        whole = ((boxes.offset == holders.offset) & (boxes.shape == holders.shape)).all(axis=1)
        return list(zip(self.plan.source.tolist(), whole.tolist(), strict=True))

    def _tensor(self, row: int) -> torch.Tensor | bytes:
        source, whole = self._rows[row]
        value = self.held[source]
        if not isinstance(value, torch.Tensor):
            return value()
        if whole:
            return plain(value)
        item = self.plan.row(row)
        return region(plain(value), self.holders.row(source, len(item.meta.shape)), item.shard.box)

    def blocks(self, row: int) -> Iterator[memoryview]:
        value = self._tensor(row)
        if isinstance(value, bytes):
            yield memoryview(value)
        elif value.device.type == "cpu" and value.is_contiguous():
            yield value.reshape(-1).view(torch.uint8).numpy().data
        else:
            yield from _copied(value)

    def array(self, row: int) -> NDArray[Any]:
        value = self._tensor(row)
        if isinstance(value, bytes):
            return np.frombuffer(value, np.uint8)
        return host_array(value.cpu().contiguous()).reshape(self.plan.row(row).shard.box.shape)


def _copied(tensor: torch.Tensor) -> Iterator[memoryview]:
    size = tensor.element_size()
    whole = Box.whole(tensor.shape)
    step = PIECE // size
    # Memory of its own, given back at once: malloc would keep it, and put small things into it, row after row.
    octets = np.frombuffer(mmap(-1, max(1, min(step, tensor.numel()) * size), flags=MAP_PRIVATE), np.uint8)
    buffer = torch.from_numpy(octets[: len(octets) // size * size]).view(tensor.dtype)
    for start in range(0, tensor.numel(), step):
        filled = 0
        for run in whole.runs(start, min(start + step, tensor.numel())):
            buffer[filled : filled + run.volume].view(run.shape).copy_(tensor[run.slices()])
            filled += run.volume
        yield octets.data[: filled * size]


@dataclass(frozen=True, eq=False)
class Landing:
    """The Target of a load: regions of the tensors asked for, and the blobs of objects.

    ``tensors[i]`` is the tensor of wanted row i (None for objects), row i of ``holders`` its box,
    ``stored[i]`` the dtype that the checkpoint holds; where it differs the values are converted.
    """

    tensors: Sequence[torch.Tensor | None]
    holders: Boxes
    stored: Sequence[torch.dtype | None]
    blobs: dict[int, bytes]

    def _place(self, target: int, box: Box) -> torch.Tensor:
        tensor = self.tensors[target]
        if tensor is None:
            raise TypeError(f"row {target} is an object: it has no region {box}")
        if tensor.dim() == len(box.shape) and tensor.numel() == box.volume:
            return tensor
        return region(tensor, self.holders.row(target, len(box.shape)), box)

    @cached_property
    def _direct(self) -> list[bool]:
        """Tensors whose memory takes the stored bytes as they are."""
        return [
            tensor is not None
            and tensor.dtype == stored
            and tensor.device.type == "cpu"
            and not tensor.is_conj()
            and not tensor.is_neg()
            for tensor, stored in zip(self.tensors, self.stored, strict=True)
        ]

    def open(self, target: int, box: Box) -> NDArray[Any]:
        if self._direct[target]:
            return host_array(self._place(target, box))
        stored = self.stored[target]
        return np.empty(box.shape, carried_dtype(stored.itemsize if stored else 1))

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        stored = self.stored[target]
        if stored is None or self._direct[target]:
            return
        octets = torch.from_numpy(filled.reshape(-1).view(np.uint8))
        self._place(target, box).copy_(octets.view(stored).reshape(box.shape))

    def blob(self, target: int, data: bytes) -> None:
        self.blobs[target] = data
