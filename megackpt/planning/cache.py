"""A fingerprint of a rank's declarations, and a cache of the plans made for them."""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha1
from itertools import count
from typing import Any
from uuid import NAMESPACE_OID, uuid5
from weakref import WeakKeyDictionary

import numpy as np

from megackpt.planning.manifest import Declarations, Manifest, SavePlan
from megackpt.planning.unchanged import StepBefore

_FLOATS = "float", "bfloat", "complex"
_COUNTER = 16
"""Bytes of a tensor that may be a counter, such as the step of an optimizer."""
_LAST_NUMBER = re.compile(r"\d+(?=\D*$)")


@lru_cache(maxsize=2)  # of declarations that are reused
def fingerprint(declared: Declarations, extra: str = "") -> int:
    """A number of 63 bits that changes with anything that a plan depends on.

    ``extra`` is what the declarations lack: the strategy, its policy, and the number of ranks,
    but not the directory. The same in every process and on every machine.
    """
    table: tuple[object, ...] = extra, declared.tensors, declared.replica_ids
    table += declared.domains, *declared.facts
    text = json.dumps(table, ensure_ascii=False)
    hasher = sha1(text.encode("utf-8", "surrogatepass"), usedforsecurity=False)
    for column in (
        declared.tensor,
        declared.boxes.offset,
        declared.boxes.shape,
        declared.replica,
        declared.flexible,
        declared.nbytes,
        declared.rank,
    ):
        hasher.update(
            repr(column.shape).encode() + np.ascontiguousarray(column).tobytes()
        )
    return int.from_bytes(hasher.digest()[:8], "little") >> 1


@dataclass(frozen=True, slots=True, eq=False)
class CachedPlan:
    """A rank's part of an earlier planning round.

    ``first_id`` is the id of the save that made it, the same on all ranks. Only the coordinator has
    ``manifest``. ``audit`` is the rank's and rank 0's part of the saver's audit. ``differed``: the
    common state of this rank differed from rank 0's in that round. ``steps``: see ``Reuse``.
    """

    first_id: str
    plan: SavePlan
    manifest: Manifest | None = None
    audit: tuple[Any, Any] = (None, None)
    differed: bool = False
    _uses: Iterator[int] = field(default_factory=count)
    steps: list[StepBefore] = field(default_factory=list)

    def next_save_id(self) -> str:
        """The id (hex) of one more save with this plan, unique also among threads.

        Ranks derive the same id exactly if they hold the same round and used it equally often.
        """
        return uuid5(NAMESPACE_OID, f"{self.first_id} {next(self._uses)}").hex


@dataclass(frozen=True, eq=False)
class PlanCache:
    """The plans of the last few different declarations of one rank, by fingerprint."""

    size: int = 4
    _plans: OrderedDict[int, CachedPlan] = field(default_factory=OrderedDict)
    _saves: Counter[int | None] = field(default_factory=Counter)
    _weights: OrderedDict[str, tuple[str, bytes]] = field(default_factory=OrderedDict)

    def turn(self, fingerprint: int | None) -> int:
        """How many saves of these declarations have started before, for audits that take turns."""
        self._saves[fingerprint] += 1
        return self._saves[fingerprint] - 1

    def get(self, fingerprint: int) -> CachedPlan | None:
        """The plan made for these declarations, or None."""
        if fingerprint in self._plans:
            self._plans.move_to_end(fingerprint)
        return self._plans.get(fingerprint)

    def put(self, fingerprint: int, plan: CachedPlan) -> None:
        """Keep the plan of a new planning round."""
        self._plans[fingerprint] = plan
        self._plans.move_to_end(fingerprint)
        if len(self._plans) > self.size:
            self._plans.popitem(last=False)

    def step_with_equal_weights(self, directory: str, manifest: Manifest) -> str:
        """On rank 0: the step that was saved before this one, if it has equal weights; else "".

        Weights are the chunks of floating-point tensors of more than ``_COUNTER`` bytes. Steps are
        directories whose paths differ in their last number.
        """
        chunks = manifest.chunks
        floats = [tensor.meta.dtype.startswith(_FLOATS) for tensor in manifest.tensors]
        is_weight = np.array(floats, np.bool_)[chunks.tensor]
        rows = np.flatnonzero(is_weight & (chunks.length > _COUNTER))
        if not len(rows) or not len(chunks.digests):
            return ""
        digests = chunks.digests[chunks.blocks(rows)].tobytes()
        found = sha1(digests, usedforsecurity=False).digest()
        run = _LAST_NUMBER.sub("", directory)
        before, digest = self._weights.pop(run, ("", b""))
        self._weights[run] = directory, found
        if len(self._weights) > self.size:
            self._weights.popitem(last=False)
        return before if found == digest and before != directory else ""


_caches: WeakKeyDictionary[Hashable, PlanCache] = WeakKeyDictionary()


def cache_of(group: Hashable) -> PlanCache:
    """The cache of the ranks that save and load together; forgotten with them."""
    return _caches.setdefault(group, PlanCache())


def forget() -> None:
    """Clear the caches in a forked process, whose saves must not have the ids of its parent's."""
    _caches.clear()
