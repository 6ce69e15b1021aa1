"""A run's position in a map-style dataset: one number, valid for any number of data-parallel ranks.

The number is how many samples all ranks together have trained on. This module computes the order of
an epoch itself, so no release of torch or numpy can change it.
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

_ROUNDS = 6
"""Rounds of the cipher that shuffles."""
_STRIDE = 0x9E3779B97F4A7C15
"""Odd and without a pattern, so neighbouring numbers become distant keys."""


@dataclass
class DataPosition:
    """A run's position in an endless sequence of epochs over ``samples`` samples.

    ``seed``: shuffles each epoch differently; None: the dataset's order. ``consumed_samples``: how
    many samples of the sequence all ranks together have trained on. Add a batch after its step, not
    when a loader draws it, as loaders draw ahead. All ranks have the same position, so
    ``state_dict()`` is common state.
    """

    samples: int
    seed: int | None = 0
    consumed_samples: int = 0

    def __setattr__(self, name: str, value: Any) -> None:
        """Converts numpy's and torch's integers, as only Python's compare equal after a load."""
        object.__setattr__(self, name, None if value is None else _as_int(name, value))

    def batches(
        self,
        batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> Iterable[list[int]]:
        """The indices of this rank's batches, without end: a DataLoader's ``batch_sampler``.

        A batch has ``batch_size`` samples for each rank and step, also across epochs. Each iterator
        begins at the position at which it is made; later changes of it have no effect. Raises
        ShardingError for an impossible rank or size.
        """
        batch_size = _as_int("batch_size", batch_size)
        dp_rank = _as_int("dp_rank", dp_rank)
        dp_size = _as_int("dp_size", dp_size)
        has_samples = self.samples >= 1 and self.consumed_samples >= 0
        if not has_samples or batch_size < 1 or not 0 <= dp_rank < dp_size:
            raise ShardingError(
                f"rank {dp_rank} of {dp_size} cannot read batches of {batch_size} from {self}: "
                "ranks count from 0, and there must be samples to read"
            )
        return _Batches(self, batch_size, dp_rank, dp_size)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a stored position. MismatchError for other ``samples`` or ``seed``."""
        given: object = state  # Callers without a type checker pass anything.
        stored: Mapping[Any, Any] = {}
        if isinstance(given, Mapping):
            stored = given
        own = self.state_dict()
        consumed = stored.get("consumed_samples")
        wrong = [
            name
            for name in ("samples", "seed")
            if name not in stored or stored[name] != own[name]
        ]
        if wrong or not isinstance(consumed, SupportsIndex) or index(consumed) < 0:
            names = ", ".join(wrong) or "consumed_samples"
            raise MismatchError(
                f"a run with {own} cannot continue from data position {state}, which does not fit "
                f"({names}): samples would be lost or repeated. Give the run the dataset "
                "and the seed that it had, or leave the position out of what you load, and start "
                "the data from the beginning"
            )
        self.consumed_samples = index(consumed)

    def indices(self, start: int, size: int) -> list[int]:
        """The ``size`` samples from ``start`` on in the sequence."""
        numbers = np.arange(start, start + size, dtype=np.uint64)
        epochs, places = np.divmod(numbers, np.uint64(self.samples))
        if self.seed is not None:
            seed = np.uint64(self.seed % 2**64)
            places = _shuffle(places, self.samples, seed, epochs)
        indices: list[int] = places.tolist()
        return indices


@dataclass(frozen=True)
class _Batches:
    """One rank's batches."""

    position: DataPosition
    size: int
    rank: int
    ranks: int

    def __iter__(self) -> Iterator[list[int]]:
        first = self.position.consumed_samples + self.rank * self.size
        # Not a generator function: that would take the position at the first batch, not now.
        starts = count(first, self.size * self.ranks)
        return (self.position.indices(start, self.size) for start in starts)


def _as_int(name: str, value: Any) -> int:
    try:
        return index(value)
    except TypeError as error:
        raise ShardingError(
            f"{name} of a data position is a whole number, not {value!r}"
        ) from error


def _shuffle(
    places: NDArray[np.uint64],
    samples: int,
    seed: np.uint64,
    epochs: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """The sample at each place of its epoch: a permutation of ``range(samples)``.

    A Feistel cipher permutes the numbers of an even count of bits. A result beyond the samples is
    encrypted again until it is below: the cycle of the permutation leads back below it.
    """
    half = np.uint64(((samples - 1).bit_length() + 1) // 2)
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = _mix(_mix(np.full_like(epochs, seed)) + epochs)
    result = places.copy()
    outside = np.ones(len(places), bool)
    while outside.any():
        left = result[outside] >> half
        right = result[outside] & mask
        for number in range(_ROUNDS):
            key = keys[outside] + np.uint64(number * _STRIDE % 2**64)
            left, right = right, left ^ (_mix(right ^ _mix(key)) & mask)
        result[outside] = (left << half) | right
        outside = result >= samples
    return result


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele et al., 2014): each bit depends on all bits of x."""
    x = (x + np.uint64(_STRIDE)).astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
