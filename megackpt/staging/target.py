"""Where a load stores its bytes: regions of the tensors to be loaded, and objects' blobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import carried_dtype
from megackpt.staging.devices import Uploads, has_streams, host_copy, pinned
from megackpt.staging.source import HostMemory, host_array, region


@dataclass(frozen=True, eq=False)
class LoadTarget:
    """The Target of a load.

    ``tensors[i]`` is the tensor of wanted row i (None for objects), on any device; row i of
    ``holders`` is its box. ``stored[i]`` is the dtype in the checkpoint; values are converted from
    it. ``blobs`` receives the objects. Copies to devices are complete after ``synchronize``.
    """

    tensors: Sequence[torch.Tensor | None]
    holders: Boxes
    stored: Sequence[torch.dtype | None]
    blobs: dict[int, bytes]
    _uploads: Uploads = field(default_factory=Uploads)

    @cached_property
    def memory(self) -> HostMemory:
        """The memory of the tensors. The address is 0 for tensors whose values are converted."""
        found = HostMemory.of(self.tensors)
        pairs = zip(self.tensors, self.stored, strict=True)
        alike = [tensor is not None and tensor.dtype == kind for tensor, kind in pairs]
        return replace(found, address=np.where(alike, found.address, 0))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors and of the blobs received so far."""
        return int(self.memory.nbytes.sum()) + sum(map(len, self.blobs.values()))

    def read_back(self, target: int, box: Box) -> NDArray[Any]:
        """The present values of a region of a tensor, in the dtype of the tensor."""
        values = self._region(target, box)
        if not values.is_cpu or not self._is_as_stored(target):
            values = host_copy(values)
        return host_array(values)

    def views(
        self, targets: Sequence[int], sizes: Sequence[int]
    ) -> list[memoryview | None]:
        """For each tensor its memory, if it has this size and takes the bytes as they are."""
        return self.memory.views(targets, sizes)

    def open(self, target: int, box: Box) -> NDArray[Any]:
        tensor, stored = self.tensors[target], self.stored[target]
        if tensor is None or stored is None:
            raise TypeError(f"row {target} is an object: it has no region {box}")
        if self._is_as_stored(target) and tensor.is_cpu:
            return host_array(self._region(target, box))
        dtype = carried_dtype(stored.itemsize)
        if has_streams(tensor):
            memory = pinned(box.volume * stored.itemsize).numpy()
            return memory.view(dtype).reshape(box.shape)
        return np.empty(box.shape, dtype)

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        tensor, stored = self.tensors[target], self.stored[target]
        if tensor is None or stored is None:
            return
        if self._is_as_stored(target) and tensor.is_cpu:
            return
        octets = torch.from_numpy(filled.reshape(-1).view(np.uint8))
        values = octets.view(stored).reshape(box.shape)
        into = self._region(target, box)
        if self._is_as_stored(target) and has_streams(tensor):
            self._uploads.send(into, values)
        else:
            into.copy_(values)

    def blob(self, target: int, data: bytes) -> None:
        self.blobs[target] = data

    def _region(self, target: int, box: Box) -> torch.Tensor:
        tensor = self.tensors[target]
        if tensor is None:
            raise TypeError(f"row {target} is an object: it has no region {box}")
        if tensor.dim() == len(box.shape) and tensor.numel() == box.volume:
            return tensor
        return region(tensor, self.holders.row(target, len(box.shape)), box)

    def _is_as_stored(self, target: int) -> bool:
        """Whether the tensor's memory takes the stored bytes without conversion."""
        tensor = self.tensors[target]
        return (
            tensor is not None
            and tensor.dtype == self.stored[target]
            and not tensor.is_conj()
            and not tensor.is_neg()
        )
