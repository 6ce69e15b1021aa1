"""What ranks are told besides: that they contradict one another, or that something will not come back as it was."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from megackpt import objects, tree
from megackpt.errors import CorruptCheckpoint, ShardingError, some
from megackpt.runtime.collectives.failures import name_ranks

logger = logging.getLogger("megackpt.saver")


def check_same(what: str, said: Sequence[str]) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, word in enumerate(said):
        ranks.setdefault(word, []).append(rank)
    if len(ranks) > 1:
        named = [f"{name_ranks(those)}: {word}" for word, those in ranks.items()]
        raise ShardingError(f"the ranks of one save {what}: {some(named, 4)} (all must agree)")


def check_needed(stored: Mapping[str, str], needed: Sequence[Mapping[str, str]]) -> None:
    """Would hyperparameters be lost that other ranks than 0 need for parameters of theirs?"""
    lost = [
        f"{name} is {text} on rank {rank}, {stored.get(name, 'absent')} on rank 0"
        for rank, own in enumerate(needed)
        for name, text in own.items()
        if stored.get(name) != text
    ]
    if lost:
        raise ShardingError(
            f"groups of parameters differ between ranks, and rank 0's are stored: {some(lost, 6)}. Build the optimizer "
            "of the same groups on all ranks, also of those without a parameter there; and give groups a "
            "'name', or leave them in the order of the checkpoint that was loaded"
        )


def warn_of_untrusted(blobs: Iterable[bytes]) -> None:
    """Say now what a load would say too late: that it wants to be told to trust a class."""
    for blob in blobs:
        try:
            objects.load(blob)
        except CorruptCheckpoint as error:
            logger.warning("this is saved, but will not simply load: %s", error)


def warn_of_difference(rank: int, coordinators: Any, own: Any) -> None:
    only_own, only_coordinators, mismatched = tree.diff(own, coordinators)
    if only_own or only_coordinators or mismatched:
        logger.warning(
            "Rank %d common state dict differs from rank 0 common state dict. "
            "Keys only on rank 0: %s, Keys only on %d: %s, Mismatched keys: %s",
            rank,
            only_coordinators,
            rank,
            only_own,
            mismatched,
        )
    tensors = [path for path, *kinds in mismatched if any(issubclass(kind, torch.Tensor) for kind in kinds)]
    if tensors:
        logger.warning(
            "only rank 0's values of %s and %d more tensors are saved: what differs between ranks belongs in a "
            "ShardedTensor (sharded_state_dict(), not state_dict())",
            tree.show(tensors[0]),
            len(tensors) - 1,
        )
