"""Same declarations, same plan: a fingerprint of what a rank declares, and the plans made earlier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain

import numpy as np

from megackpt.planning.manifest import Declarations, Manifest, SavePlan


def fingerprint(declared: Declarations, extra: str = "") -> int:
    """A number of 63 bits that changes with anything that a plan depends on.

    ``extra`` tells what the declarations do not: the strategy and its policy, the number of ranks. Nothing
    about the directory belongs there. The same in every process and on every machine.
    """
    keys = [entry.key for entry in declared.tensors]
    shapes = [entry.meta.shape for entry in declared.tensors]
    hasher = blake2b(digest_size=8)
    # Lengths go along with everything that is joined, so that different declarations give different bytes.
    for text in (
        extra,
        "".join(keys),
        " ".join(entry.meta.dtype for entry in declared.tensors),
        repr(declared.replica_ids),
        repr(declared.domains),
    ):
        data = text.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little") + data)
    for column in (
        _numbers(list(map(len, keys))),
        _numbers(list(map(len, shapes))),
        _numbers(list(chain.from_iterable(shapes))),
        declared.tensor,
        declared.boxes.offset,
        declared.boxes.shape,
        declared.replica,
        declared.flexible,
        declared.nbytes,
        declared.rank,
    ):
        hasher.update(repr(column.shape).encode() + np.ascontiguousarray(column).tobytes())
    return int.from_bytes(hasher.digest(), "little") >> 1


def _numbers(values: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(values, np.int64)


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """A rank's part of an earlier planning round.

    ``plan_id`` names the round, the same on all ranks. ``manifest`` is there on the coordinator only.
    ``uses`` counts the saves that were made with it, beyond the first.
    """

    plan_id: str
    plan: SavePlan
    manifest: Manifest | None = None
    uses: int = 0

    @property
    def token(self) -> int:
        """A number of 63 bits that equals another rank's only if both hold the same round, used as often."""
        digest = blake2b(f"{self.uses} {self.plan_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


class PlanCache:
    """The plans of the last few different declarations of one rank. Not safe to share between threads."""

    def __init__(self, size: int = 4) -> None:
        if size < 1:
            raise ValueError(f"a cache of {size} plans holds nothing; size must be at least 1")
        self._size = size
        self._plans: OrderedDict[int, CachedPlan] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def token(self, fingerprint: int) -> int | None:
        """What this rank shows in the vote on reusing a plan; None: it has none."""
        held = self._plans.get(fingerprint)
        return None if held is None else held.token

    def get(self, fingerprint: int) -> CachedPlan | None:
        """The plan made for these declarations, or None."""
        if fingerprint in self._plans:
            self._plans.move_to_end(fingerprint)
        return self._plans.get(fingerprint)

    def use(self, fingerprint: int) -> CachedPlan:
        """The plan, once all ranks have agreed to reuse it; counts the use. KeyError where there is none."""
        held = self._plans[fingerprint]
        self._plans[fingerprint] = replace(held, uses=held.uses + 1)
        self._plans.move_to_end(fingerprint)
        return held

    def put(self, fingerprint: int, plan_id: str, plan: SavePlan, manifest: Manifest | None = None) -> None:
        """Keep the plan of a new planning round; the one unused for longest makes room."""
        self._plans[fingerprint] = CachedPlan(plan_id, plan, manifest)
        self._plans.move_to_end(fingerprint)
        while len(self._plans) > self._size:
            self._plans.popitem(last=False)

    def drop(self, fingerprint: int) -> None:
        """Forget a plan, if it is there."""
        self._plans.pop(fingerprint, None)

    def clear(self) -> None:
        self._plans.clear()
