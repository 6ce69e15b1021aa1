"""The gallery of mistakes: each with the error that all ranks raise, and what its message holds.

A test file imports ``test_gallery``, which runs once for each mistake in that file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megackpt import ShardedTensor

Mistake = Callable[[Any], Any]
piece = ShardedTensor.from_rank_offsets


def mistake(error: type[Exception], *told: str) -> Callable[[Mistake], Mistake]:
    """A function that every rank calls, the error that all must raise, and what its message must hold."""

    def add(function: Mistake) -> Mistake:
        vars(function).update(error=error, told=told)
        return function

    return add


def rows(
    key: str, start: int, stop: int, whole: int, replica_id: Any = 0
) -> ShardedTensor:
    """Elements of a flat tensor, as optimizers shard it."""
    data = torch.zeros(max(0, stop - start))
    return ShardedTensor(
        key, data, data.dtype, (stop - start,), (whole,), (start,), None, replica_id
    )


def test_gallery(made: Any, stranger: Any) -> None:
    message = stranger.reads(made, made.error)
    assert [part for part in made.told if part not in message] == []
