"""Where a load stores its bytes: regions of the tensors to be loaded, and objects' blobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import carried_dtype
from megackpt.staging.source import host_array, memory_of, region, resolved


@dataclass(frozen=True, eq=False)
class LoadTarget:
    """The Target of a load.

    ``tensors[i]`` is the tensor of wanted row i (None for objects), on any device; row i of
    ``holders`` is its box. ``stored[i]`` is the dtype in the checkpoint; values are converted from
    it. ``blobs`` receives the objects.
    """

    tensors: Sequence[torch.Tensor | None]
    holders: Boxes
    stored: Sequence[torch.dtype | None]
    blobs: dict[int, bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors and of the blobs received so far."""
        tensors = sum(tensor.nbytes for tensor in self.tensors if tensor is not None)
        return tensors + sum(map(len, self.blobs.values()))

    def read_back(self, target: int, box: Box) -> NDArray[Any]:
        """The present values of a region of a tensor, in the tensor's own dtype."""
        values = self._region(target, box)
        if not self._direct[target]:
            values = resolved(values).cpu()
        return host_array(values)

    def views(
        self, targets: Sequence[int], sizes: Sequence[int]
    ) -> list[memoryview | None]:
        """For each tensor its memory, if it has this size and takes the bytes as they are."""
        views: list[memoryview | None] = []
        for target, size in zip(targets, sizes, strict=True):
            tensor = self.tensors[target]
            view = None
            if tensor is not None and tensor.dtype == self.stored[target]:
                view = memory_of(tensor, size)
            views.append(view)
        return views

    def open(self, target: int, box: Box) -> NDArray[Any]:
        if self._direct[target]:
            return host_array(self._region(target, box))
        stored = self.stored[target]
        return np.empty(box.shape, carried_dtype(stored.itemsize if stored else 1))

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        stored = self.stored[target]
        if stored is None or self._direct[target]:
            return
        values = torch.from_numpy(filled.reshape(-1).view(np.uint8)).view(stored)
        self._region(target, box).copy_(values.reshape(box.shape))

    def blob(self, target: int, data: bytes) -> None:
        self.blobs[target] = data

    def _region(self, target: int, box: Box) -> torch.Tensor:
        tensor = self.tensors[target]
        if tensor is None:
            raise TypeError(f"row {target} is an object: it has no region {box}")
        if tensor.dim() == len(box.shape) and tensor.numel() == box.volume:
            return tensor
        return region(tensor, self.holders.row(target, len(box.shape)), box)

    @cached_property
    def _direct(self) -> list[bool]:
        """For each tensor whether its memory takes the stored bytes without conversion."""
        direct = []
        for tensor, stored in zip(self.tensors, self.stored, strict=True):
            direct.append(
                tensor is not None
                and tensor.dtype == stored
                and tensor.is_cpu
                and not tensor.is_conj()
                and not tensor.is_neg()
            )
        return direct
