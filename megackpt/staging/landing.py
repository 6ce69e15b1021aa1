"""Where the bytes of a load land: regions of the tensors asked for, on whatever device, and objects' blobs."""

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
from megackpt.staging.source import host_array, plain, region


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

    @property
    def nbytes(self) -> int:
        """Of all tensors, and of the blobs that have landed."""
        return sum(t.nbytes for t in self.tensors if t is not None) + sum(
            map(len, self.blobs.values())
        )

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

    def landed(self, target: int, box: Box) -> NDArray[Any]:
        """What this region of a tensor holds by now, in the tensor's own dtype."""
        place = self._place(target, box)
        return host_array(place if self._direct[target] else plain(place).cpu())

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
