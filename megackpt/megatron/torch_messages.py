"""Messages over the caller's process group, for Megatron's strategies.

A save or load of megackpt uses ``Group`` instead, which raises an error of any rank on all ranks.
Here all other ranks wait for a failed rank until torch's timeout. All functions but
``message_device`` are collective over the group (None: all ranks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megackpt.distributed import rank_and_size

if TYPE_CHECKING:
    import torch


def gather_all(value: Any, process_group: Any = None) -> list[Any]:
    """The values of all ranks, in rank order. They are pickled."""
    import torch.distributed as dist

    _, size = rank_and_size(process_group)
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=process_group)
    return values


def message_device(process_group: Any = None) -> torch.device:
    """The device of the tensors that the group sends: NCCL, for one, sends from GPUs only."""
    import torch
    import torch.distributed as dist

    backend = dist.get_backend(process_group)
    kinds = dist.Backend.backend_capability.get(backend, ["cpu"])
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def broadcast(tensor: torch.Tensor, source: int, process_group: Any = None) -> None:
    """Fill ``tensor`` with rank ``source``'s tensor of equal shape and dtype.

    It is sent as bytes, because gloo does not know every dtype.
    """
    import torch
    import torch.distributed as dist

    group: Any = process_group or dist.group.WORLD
    device = message_device(group)
    flat = tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
    dist.broadcast(flat, src=dist.get_global_rank(group, source), group=group)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.dtype).reshape(tensor.shape))
