"""What tests take from torch's private modules, and what its releases from 2.8 on have there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])

HAS_ORDERS_OF_CUTS = RELEASE >= (2, 10)
"""DTensors may be cut in another order than the mesh's, and say so."""

CUTS_STRIDES_AT_ONCE = RELEASE < (2, 10)
"""Strided shards are every n-th of split_factor * n pieces of the whole, where these are not of one size."""

HAS_SAVES_WITHOUT_COLLECTIVES = RELEASE >= (2, 9)
"""``dcp.save`` takes use_collectives=False, and writes a table of contents for each rank."""

COPIES_FLOAT4 = RELEASE >= (2, 10)
"""Tensors of float4_e2m1fn_x2 can be copied, and so loaded by stock."""

DROPS_ERRORS_OF_READERS = (2, 9) <= RELEASE < (2, 12)
"""``dcp.load`` does not say why a reader could not read the metadata."""

ASKS_FOR_METADATA_TWICE = RELEASE >= (2, 9)
"""``dcp.load`` asks a reader for a rank's own metadata where it gave none of all ranks."""

PROCESS_OUTLIVES_ERRORS = RELEASE >= (2, 9)
"""The process of ``async_save`` goes on after a save that was refused."""

HAS_STAGERS = RELEASE >= (2, 9)
"""``async_save`` takes a stager that keeps its buffers."""

DIMENSIONS_THAT_FSDP2_TAKES = 1 if RELEASE < (2, 9) else 2
"""Of the mesh of a module that ``fully_shard`` finds cut already, by tensor and expert parallelism."""


def without_gloo(output: str) -> str:
    """What a process has printed, but for what gloo of torch 2.8 to 2.10 prints when it connects."""
    return re.sub(
        r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. .* : \d+\n", "", output
    )


def decoded(
    placements: Sequence[Placement], mesh: Sequence[int]
) -> list[tuple[int, Placement]] | None:
    """The cuts in the order that torch decodes from strided shards, as (dimension of the mesh, plain shard).

    None: it can decode no order.
    """
    from torch.distributed.tensor import Shard

    if HAS_ORDERS_OF_CUTS:
        spec = import_module("torch.distributed.tensor._dtensor_spec").DTensorSpec
        sizes = SimpleNamespace(size=mesh.__getitem__)
        order = spec._maybe_convert_StridedShard_to_shard_order(
            tuple(placements), sizes
        )
        return order and [
            (dim, Shard(entry.tensor_dim)) for entry in order for dim in entry.mesh_dims
        ]
    explicit = import_module(
        "torch.distributed.tensor._utils"
    )._explicit_order_placements
    try:
        plain = explicit(mesh, placements)
    except (RuntimeError, NotImplementedError):
        return None
    # It drops strided shards that no plain one follows.
    cuts = [(dim, how) for dim, how in plain if isinstance(how, Shard)]
    return (
        cuts if len(cuts) == sum(isinstance(how, Shard) for how in placements) else None
    )


def cut_in_order(
    local: torch.Tensor, mesh: DeviceMesh, shape: Sequence[int], order: Sequence[int]
) -> Any:
    """A DTensor whose first axis all dimensions of the mesh cut, in this order (HAS_ORDERS_OF_CUTS)."""
    from torch.distributed.tensor import DTensor, Shard

    names = import_module("torch.distributed.tensor._dtensor_spec")
    whole = torch.empty(shape, dtype=local.dtype, device="meta")
    meta = names.TensorMeta(whole.shape, whole.stride(), whole.dtype)
    entry = names.ShardOrderEntry(0, tuple(order))
    spec = names.DTensorSpec(mesh, (Shard(0),) * mesh.ndim, meta, shard_order=(entry,))
    return DTensor(local, spec, requires_grad=False)
