"""What one rank asks to be saved, checked by itself: the state taken apart, declared, and told by a fingerprint."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import torch

from megackpt import tree
from megackpt.adapters.param_groups import HeldGroup, held_groups
from megackpt.backends.base import Backend, in_format
from megackpt.distributed import Group, attempt, domain_of
from megackpt.errors import ShardingError
from megackpt.planning.cache import fingerprint
from megackpt.planning.manifest import Declarations
from megackpt.planning.save_plan import SavePolicy
from megackpt.saver.notices import check_common_size
from megackpt.state import (
    Extracted,
    ShardedObject,
    ShardedTensor,
    bundled,
    declare,
    loadable,
    object_groups,
    pickled,
)
from megackpt.strategies import Strategy

logger = logging.getLogger("megackpt.saver")

Held = torch.Tensor | Callable[[], bytes]

CONTENT_METADATA = "content_metadata"
COMMON = "the common state"
_KEPT = 2**26  # bytes of pickled objects that a rank keeps from the check to the write
_TRAVELS = 2**18  # bytes of a group's hyperparameters that a rank tells the coordinator


def _compact(leaf: Any) -> Any:
    """A view of a larger tensor as a tensor of its own, or all of the larger one would be stored."""
    if (
        type(leaf) in (torch.Tensor, torch.nn.Parameter)
        and leaf.layout is torch.strided
        and not leaf.is_quantized
        and not leaf.is_meta
    ):
        if leaf.untyped_storage().nbytes() <= leaf.numel() * leaf.element_size():
            return leaf
        if type(leaf) is torch.nn.Parameter:
            return torch.nn.Parameter(leaf.detach().clone(), leaf.requires_grad)
        return leaf.clone()
    return leaf


def itself(common: Any) -> Any:
    return common


def _view(compare: Callable[[Any], Any], common: Any) -> Any:
    """What ranks compare of the common state. Where the caller's function fails, that is logged: all is compared then,
    as the outcome is no more than a warning."""
    # The function gets containers of its own: what it takes out is saved all the same.
    made = attempt(lambda: compare(tree.copied(common)))
    if made.error is None:
        return made.value
    logger.warning(
        "the common state is compared as it is: preprocess_common_before_consistancy_check failed (%s: %s)",
        type(made.error).__name__,
        made.error,
    )
    return common


def _told_apart(backend: Backend) -> str | None:
    """Its class and all that it holds, which may decide where things are to be; None where it cannot be pickled."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=4)  # the same wherever this is compared
    pickler.fast = True  # equal values look alike, be they one object or several
    dumped = attempt(lambda: pickler.dump(backend))
    if dumped.error is not None:
        kind = type(backend).__qualname__
        logger.debug(
            "no plan is used again: this %s cannot be pickled: %s", kind, dumped.error
        )
        return None
    return buffer.getvalue().hex()


@dataclass(frozen=True, eq=False)
class Request:
    """What this rank asks to be saved, checked by itself."""

    directory: str
    backend: Backend
    format: str  # name and version
    policy: SavePolicy
    overwrite: bool
    shards: Sequence[ShardedTensor | ShardedObject]
    common: Mapping[str, Any]
    checked: bool  # validate what ranks declare and hold
    compared: Any  # then: the view of the common state that ranks compare
    declared: Declarations
    fingerprint: int | None  # None: nothing tells when a plan could be used again
    staging_memory: int | None = None  # bytes; None: the default
    groups: Mapping[str, HeldGroup] = field(
        default_factory=dict
    )  # of an optimizer's parameters
    blobs: dict[int, bytes] = field(
        default_factory=dict
    )  # row -> an object that has been pickled already
    wanted: list[str] = field(
        default_factory=list
    )  # what loads will have to be told to trust, in words

    @classmethod
    def of(
        cls,
        extracted: Extracted,
        directory: str,
        strategy: Strategy,
        group: Group,
        *,
        content_metadata: Mapping[str, Any] | None = None,
        compare: Callable[[Any], Any] | None = itself,
        overwrite: bool = True,
        allow_large_common_state: bool = False,
    ) -> Request:
        if group.is_coordinator and not allow_large_common_state:
            check_common_size(extracted.common, directory)
        common: dict[Any, Any] = tree.dict_list_map_outplace(_compact, extracted.common)
        if content_metadata is not None:
            if not isinstance(content_metadata, Mapping):
                raise ShardingError(
                    f"content_metadata must be a dict, not {content_metadata!r}"
                )
            common[CONTENT_METADATA] = {
                k: v for k, v in content_metadata.items() if k != "dp_cp_group"
            }
        declared = declare(
            extracted.shards,
            rank=group.rank,
            domain=domain_of(strategy.dedup_group),
            common=group.is_coordinator,
            saving=True,
        )
        backend = strategy.make_writer()
        policy = SavePolicy(balance=strategy.balance)
        compared = None if compare is None else _view(compare, common)
        named = f"{backend.name} {backend.version}"
        checked, options = compare is not None, _told_apart(backend)
        what = f"{named} {backend.encoding} {in_format(backend, policy)} {group.size} {checked} {options}"
        request = cls(
            directory,
            backend,
            named,
            policy,
            overwrite,
            extracted.shards,
            common,
            checked,
            compared,
            declared,
            None if options is None else fingerprint(declared, what),
            strategy.staging_memory,
            held_groups(extracted.factories),
        )
        request.judge()
        return request

    def judge(self) -> None:
        """Pickle the objects of which this rank holds the main replica, on the coordinator also the common state.

        What is small enough is kept, to be written. Raises ShardingError for what no load would give back.
        """
        room, judged = _KEPT, set[int]()
        shards = [
            *self.shards,
            None,
        ]  # None: the common state, which only the coordinator declares
        for row in np.flatnonzero(self.declared.main).tolist():
            if row in judged or isinstance(shards[row], ShardedTensor):
                continue
            blob, wanted = loadable(*self._object(row))
            self.wanted.extend(wanted)
            alike = self._bundles.get(row, [row])
            judged.update(alike)
            if len(blob) <= room:
                room -= len(blob)
                self.blobs.update(dict.fromkeys(alike, blob))

    def vote_on_groups(self, *, abstain: bool) -> list[int]:
        """Two numbers whose least of all ranks are opposites exactly if the groups of all that vote are alike; others
        abstain, if they may: they have no parameter of any group."""
        if abstain and not any(group.needed for group in self.groups.values()):
            return [2**63 - 1] * 2
        texts = sorted(
            (place, sorted(group.texts.items())) for place, group in self.groups.items()
        )
        told = int.from_bytes(blake2b(repr(texts).encode(), digest_size=7).digest())
        return [told, -told]

    def needed(self) -> dict[str, HeldGroup]:
        """The groups of which this rank has parameters, with their values if these are small enough to travel."""
        needed = {}
        for place, group in self.groups.items():
            if group.needed:
                values = pickled(place, tree.lookup(self.common, group.path))
                needed[place] = replace(
                    group, values=values if len(values) <= _TRAVELS else b""
                )
        return needed

    def store(self, groups: Mapping[tree.Path, bytes]) -> None:
        """Groups in place of this rank's own, as other ranks have pickled them."""
        for path, values in groups.items():
            found = torch.load(
                io.BytesIO(values), map_location="cpu", weights_only=False
            )
            tree.lookup(self.common, path[:-1])[path[-1]] = found
            self.blobs.pop(len(self.shards), None)

    def let_go(self) -> Request:
        """Without the caller's data, of which a copy has been made."""
        return replace(self, shards=(), common={}, compared=None, blobs={})

    def held(self) -> list[Held]:
        """For each row of ``declared``: its tensor, or what makes its blob."""
        rows = [
            cast(torch.Tensor, shard.data)
            if isinstance(shard, ShardedTensor)
            else partial(self._blob, row)
            for row, shard in enumerate(self.shards)
        ]
        return [*rows, partial(self._blob, len(self.shards))]

    def _blob(self, row: int) -> bytes:
        return self.blobs.get(row) or loadable(*self._object(row))[0]

    def _object(self, row: int) -> tuple[str, Any]:
        """What a row that is no tensor is called, and its value."""
        if row == len(self.shards):
            return COMMON, dict(self.common)
        shard = cast(ShardedObject, self.shards[row])
        group = self._bundles.get(row, [])
        return f"the object {shard.unique_key!r}", bundled(
            shard, [self.shards[i].data for i in group]
        )

    @cached_property
    def _bundles(self) -> Mapping[int, Sequence[int]]:
        return object_groups(self.shards)
