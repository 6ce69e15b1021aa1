"""Adam whose state and work are dealt out over data-parallel ranks (ZeRO-1), by equal parts of one flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class ShardedAdam(torch.optim.Adam):
    """All parameters are consecutive in a buffer, which ends in padding; each rank updates one part of the buffer.

    Parts do not follow the bounds of parameters: most have the end of one, some whole ones, and the beginning of
    another. ``ranges``: number of a parameter -> which of its elements are in this rank's part, often none.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        rank: int,
        ranks: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.params, self.group, self.ranges = list(params), group, dict[int, slice]()
        length = -(-sum(p.numel() for p in self.params) // ranks)
        self.buffer = torch.zeros(length * ranks, device="cpu")
        self.parts = self.buffer.view(ranks, length).unbind()
        self.mine = self.parts[rank]
        place, shards = 0, []
        for number, p in enumerate(self.params):
            flat = self.buffer[place : place + p.numel()]
            p.data = flat.copy_(p.data.flatten()).view(p.shape)
            low, high = (
                min(max(n * length - place, 0), p.numel()) for n in (rank, rank + 1)
            )
            self.ranges[number] = slice(low, high)
            shards.append(nn.Parameter(flat[low:high]))
            place += p.numel()
        super().__init__(shards, lr=lr)
        for (
            shard
        ) in shards:  # Adam makes these in its first step; a load needs them before
            moments = {
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }
            self.state[shard] = {"step": torch.tensor(0.0, device="cpu"), **moments}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.params:
            p.grad = None if set_to_none or p.grad is None else p.grad.zero_()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's part, by the gradients of the whole parameters; then fetch all other parts."""
        shards = self.param_groups[0]["params"]
        for p, shard, part in zip(
            self.params, shards, self.ranges.values(), strict=True
        ):
            shard.grad = None if p.grad is None else p.grad.flatten()[part]
        loss = super().step(closure)
        if self.group is not None:
            dist.all_gather(list(self.parts), self.mine.clone(), self.group)
        return loss
