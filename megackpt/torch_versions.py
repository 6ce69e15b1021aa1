"""Differences between the releases of torch, from 2.8 on, that no attribute shows."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])

DROPS_ERRORS_OF_READERS = (2, 9) <= RELEASE < (2, 12)
"""Whether ``dcp.load`` only says "metadata is None" if a reader cannot read the metadata."""

COPIES_FLOAT4 = RELEASE >= (2, 10)
"""Whether ``Tensor.copy_`` supports float4_e2m1fn_x2. Older releases only have the dtype."""


def cutting_order(tensor: DTensor) -> tuple[int, ...] | None:
    """The dimensions of the mesh in the order in which they cut. None: strided shards imply it.

    torch 2.10 introduced orders. In 2.10 the order of a tensor with strided shards was decoded from
    the shards, and replaces their factors. From 2.11 on such a tensor has an order only if its
    strided shards are separate cuts.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    order = getattr(tensor._spec, "shard_order", None)
    if order is None:
        return None
    decoded = not hasattr(tensor._spec, "use_strided_shard_as_shard_order")
    if decoded and any(isinstance(p, _StridedShard) for p in tensor.placements):
        return None
    cutting = [dim for entry in order for dim in entry.mesh_dims]
    others = [dim for dim in range(tensor.device_mesh.ndim) if dim not in cutting]
    return (*cutting, *others)


@lru_cache(maxsize=1)
def strides_are_cut_at_once() -> bool:
    """How ``distribute_tensor`` cuts a strided shard of n ranks and factor f into unequal pieces.

    True: into n * f pieces; each rank has every n-th. False: into f pieces, and each of these into
    n. With equal pieces both are the same. (FSDP2 never cuts so: it cuts what tensor parallelism
    has left.)
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    shard = _StridedShard(0, split_factor=2)
    numbers = torch.arange(5, device="cpu")
    pieces, _ = shard._split_tensor(numbers, 2, with_padding=False)
    found: list[int] = pieces[0].tolist()
    return found == [0, 1, 4]
