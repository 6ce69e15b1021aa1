"""Where a run stands in a map-style dataset: one number, which means the same to any number of data-parallel ranks.

What a rank reads next follows from the samples that all ranks have trained on, so nothing about the ranks that there
were is kept. The order of a pass is arithmetic of our own: no release of torch or numpy can change it under a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import count
from operator import index
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from megackpt.errors import MismatchError, ShardingError

_ROUNDS = 6  # of the cipher that shuffles
_STRIDE = 0x9E3779B97F4A7C15  # odd, far from any pattern: neighbouring numbers become keys far apart


@dataclass
class DataPosition:
    """A run's place in an endless row of passes over ``samples`` samples.

    ``seed`` shuffles each pass, in an order of its own; with None all are in the dataset's. ``consumed_samples`` is
    how many of the row all ranks together have trained on: add a batch after its step, not when a loader draws it,
    for loaders draw ahead. All ranks hold the same, so ``state_dict()`` is common state.
    """

    samples: int
    seed: int | None = 0
    consumed_samples: int = 0

    def __setattr__(self, name: str, value: Any) -> None:
        """Numbers of numpy's and of torch's become plain ones: only those mean the same when they are loaded."""
        object.__setattr__(self, name, None if value is None else _whole(name, value))

    def batches(
        self, batch_size: int, dp_rank: int = 0, dp_size: int = 1
    ) -> Iterable[list[int]]:
        """The indices of this rank's batches, without an end: a DataLoader's ``batch_sampler``.

        ``batch_size`` samples a rank and step. Batches go on into the next pass, so none is short. Each iterator begins
        where the run stands when it is made, whatever those before it had drawn; what is consumed later does not move
        it. Raises ShardingError for a rank or a size that cannot be.
        """
        batch_size, dp_rank = (
            _whole("batch_size", batch_size),
            _whole("dp_rank", dp_rank),
        )
        dp_size = _whole("dp_size", dp_size)
        if (
            self.samples < 1
            or self.consumed_samples < 0
            or batch_size < 1
            or not 0 <= dp_rank < dp_size
        ):
            raise ShardingError(
                f"rank {dp_rank} of {dp_size} cannot read batches of {batch_size} from {self}: ranks count from 0, "
                "and there must be samples to read"
            )
        return _Batches(self, batch_size, dp_rank, dp_size)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. Raises MismatchError where the row is another one: samples would be lost or repeated."""
        given: object = state  # callers without a type checker give anything
        there = given if isinstance(given, Mapping) else {}
        mine, consumed = self.state_dict(), there.get("consumed_samples")
        wrong = [
            name
            for name in ("samples", "seed")
            if name not in there or there[name] != mine[name]
        ]
        if wrong or not isinstance(consumed, SupportsIndex) or index(consumed) < 0:
            raise MismatchError(
                f"no run with {mine} can go on from data position {state}, which is in another row of samples "
                f"({', '.join(wrong or ['consumed_samples'])}): some would be lost or repeated. Give the run the "
                "dataset and the seed that it had, or leave the position out of what you load, and begin anew"
            )
        self.consumed_samples = index(consumed)

    def indices(self, start: int, size: int) -> list[int]:
        """The samples at so many places of the row."""
        passes, places = np.divmod(
            np.arange(start, start + size, dtype=np.uint64), np.uint64(self.samples)
        )
        if self.seed is not None:
            places = _shuffled(
                places, self.samples, np.uint64(self.seed % 2**64), passes
            )
        indices: list[int] = places.tolist()
        return indices


@dataclass(frozen=True)
class _Batches:
    """One rank's batches from where the run stands: a loader that is left early, or reads ahead, loses none."""

    position: DataPosition
    size: int
    rank: int
    ranks: int

    def __iter__(self) -> Iterator[list[int]]:
        starts = count(
            self.position.consumed_samples + self.rank * self.size,
            self.size * self.ranks,
        )
        return (self.position.indices(start, self.size) for start in starts)


def _whole(name: str, value: Any) -> int:
    try:
        return index(value)
    except TypeError as error:
        raise ShardingError(
            f"{name} of a data position is a whole number, not {value!r}"
        ) from error


def _shuffled(
    places: NDArray[np.uint64],
    samples: int,
    seed: np.uint64,
    passes: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """Where each place of a pass leads: a permutation of ``range(samples)`` for each seed and pass.

    A Feistel cipher permutes the numbers of an even count of bits. Who lands beyond the samples is sent on from
    there, and comes back in at last, for the cycle that it walks has begun within.
    """
    half = np.uint64(((samples - 1).bit_length() + 1) // 2)
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = _mixed(_mixed(np.full_like(passes, seed)) + passes)
    result, outside = places.copy(), np.ones(len(places), bool)
    while outside.any():
        left, right = result[outside] >> half, result[outside] & mask
        for number in range(_ROUNDS):
            key = keys[outside] + np.uint64(number * _STRIDE % 2**64)
            left, right = right, left ^ (_mixed(right ^ _mixed(key)) & mask)
        result[outside] = (left << half) | right
        outside = result >= samples
    return result


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of the result depends on every bit of x: the finaliser of SplitMix64 (Steele, Lea, Flood, 2014)."""
    x = (x + np.uint64(_STRIDE)).astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
