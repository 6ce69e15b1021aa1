"""What differs between the releases of torch, from 2.8 on, where it is no name that one can look for."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])

TIMES_OPERATIONS_OUT = RELEASE >= (2, 9)
"""Collectives of gloo keep the timeout of their own options. Older releases keep the one that the group was made with.
(Messages from one rank to another keep the timeout of their ``wait`` in all releases.)"""

DROPS_ERRORS_OF_READERS = (2, 9) <= RELEASE < (2, 12)
"""Where a storage reader cannot read the metadata, ``dcp.load`` says "metadata is None", and no more."""

COPIES_FLOAT4 = RELEASE >= (2, 10)
"""``Tensor.copy_`` knows float4_e2m1fn_x2, which older releases only have."""


def order_of_cuts(tensor: DTensor) -> tuple[int, ...] | None:
    """The dimensions of the mesh in the order in which they cut; None: the strided shards tell it, if there are any.

    torch has orders since 2.10. There one beside strided shards is what torch decoded from them, and takes the place
    of their factors; since 2.11 it is beside them only where they are cuts of their own.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    cuts = getattr(tensor._spec, "shard_order", None)
    is_decoded = not hasattr(tensor._spec, "use_strided_shard_as_shard_order")
    if cuts is None or (
        is_decoded and any(isinstance(p, _StridedShard) for p in tensor.placements)
    ):
        return None
    cutting = [dim for entry in cuts for dim in entry.mesh_dims]
    return (
        *cutting,
        *(dim for dim in range(tensor.device_mesh.ndim) if dim not in cutting),
    )


@lru_cache(maxsize=1)
def strides_are_cut_at_once() -> bool:
    """How ``distribute_tensor`` cuts a strided shard of n ranks and factor f, where the size does not divide.

    True: into n * f pieces, of which each rank has every n-th. False: into f pieces, and each of these into n. In
    pieces of one size it comes to the same. (FSDP2 never cuts so: it cuts what tensor parallelism has left.)
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    pieces, _ = _StridedShard(0, split_factor=2)._split_tensor(
        torch.arange(5, device="cpu"), 2, with_padding=False
    )
    found: list[int] = pieces[0].tolist()
    return found == [0, 1, 4]
