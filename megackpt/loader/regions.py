"""Read regions of tensors as numpy arrays, and objects as blobs, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.backends.base import Target
from megackpt.checkpoint.opening import Opened
from megackpt.planning.box import Box
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import (
    COMMON_KEY,
    Declaration,
    Declarations,
    ShardId,
    TensorParts,
    carried_dtype,
)

Region = tuple[int, Box]
"""The number of a tensor in the manifest, and a box of it."""


class Regions:
    """Reads regions of one checkpoint.

    ``verify``: check the digests of all blocks that a read touches.
    """

    def __init__(self, opened: Opened, verify: bool = True) -> None:
        self.opened = opened
        self._verify = verify
        self._parts = TensorParts(opened.manifest)

    def arrays(self, regions: Sequence[Region]) -> list[NDArray[Any]]:
        """One new array of ``carried_dtype`` items for each region.

        All arrays are in memory at once: request a few MiB at a time.
        """
        tensors = self.opened.manifest.tensors
        found = [
            np.empty(box.shape, carried_dtype(tensors[number].meta.itemsize))
            for number, box in regions
        ]
        self._read(regions, Landing(found, [box for _, box in regions], {}))
        return found

    def blobs(self, regions: Sequence[Region]) -> list[bytes]:
        """The bytes of one object for each region (a unit box)."""
        landing = Landing([], [], {})
        self._read(regions, landing)
        return [landing.blobs[row] for row in range(len(regions))]

    def common(self) -> bytes | None:
        """The blob of the common state, or None without one."""
        number = self.opened.manifest.numbers().get(COMMON_KEY)
        if number is None or not self.opened.manifest.tensors[number].is_common:
            return None
        return self.blobs([(number, Box((), ()))])[0]

    def _read(self, regions: Sequence[Region], landing: Landing) -> None:
        manifest = self.opened.manifest
        numbers = {number for number, _ in regions}
        if len(numbers) == 1:  # planned in time that depends on this tensor alone
            manifest = self._parts.excerpt([*numbers])
        wanted = []
        for number, box in regions:
            key, meta = self.opened.manifest.tensors[number]
            nbytes = box.volume * meta.itemsize
            wanted.append(Declaration(ShardId(key, box), meta, 0, False, nbytes, 0))
        plan = plan_load(Declarations.of(wanted), manifest)
        self.opened.backend.read(self.opened.storage, plan, landing, self._verify)


@dataclass(frozen=True, eq=False)
class Landing(Target):
    """The Target of a read: it writes directly into the arrays."""

    arrays: list[NDArray[Any]]
    holders: list[Box]
    blobs: dict[int, bytes]

    def open(self, target: int, box: Box) -> NDArray[Any]:
        inside: tuple[Any, ...] = box.relative_to(self.holders[target]).slices()
        # With "..." the result is a view even of an array without dimensions.
        return self.arrays[target][(*inside, ...)]

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        """No effect: ``open`` returned a view of the array."""

    def blob(self, target: int, data: bytes) -> None:
        self.blobs[target] = data
