"""The request of one rank for a save: its state, declared and checked without other ranks."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import torch

from megackpt import tree
from megackpt.adapters.megatron import from_megatron
from megackpt.adapters.param_groups import HeldGroup, held_groups
from megackpt.backends.base import Backend, policy_for_backend
from megackpt.checkpoint import absolute
from megackpt.distributed import Group, attempt, domain_of
from megackpt.errors import BackendError, ShardingError
from megackpt.planning.cache import fingerprint
from megackpt.planning.manifest import Declarations
from megackpt.planning.save_plan import SavePolicy
from megackpt.planning.unchanged import UNCHANGED, Reuse
from megackpt.saver.audit import AuditPolicy
from megackpt.saver.common_state import check_size
from megackpt.state import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    bundled,
    declare,
    extract,
    loadable,
    object_groups,
    pickled,
)
from megackpt.strategies import CheckValues, StrategyLike, resolve

logger = logging.getLogger("megackpt.saver")

CONTENT_METADATA = "content_metadata"
COMMON = "the common state"

_KEPT_BLOBS = 2**26
"""Bytes of pickled objects that a rank keeps from the check to the write."""
_SENT_GROUP = 2**18
"""Bytes of the hyperparameters of one parameter group that a rank sends to rank 0."""

Held = torch.Tensor | Callable[[], bytes]


@dataclass(frozen=True, eq=False)
class SaveRequest:
    """The request of this rank for a save. Row i of ``declared`` is ``shards[i]``.

    On rank 0 one more row declares the common state.

    Attributes:
        format: name and version of the format.
        state: the caller's, with factories replaced by their products.
        checked: whether the declarations and the common states of all ranks are validated.
        comparable: gives the view of the common state that ranks compare (None: all of it).
        fingerprint: equal for requests that one plan serves; None if that cannot be known.
        staging_memory: bytes for the copy of an asynchronous save (None: the default).
        audit: the policy for the comparison of shards that several ranks hold.
        check_values: the reaction to values that are NaN or infinite.
        groups: the parameter groups of optimizers, by name or position.
        objects: row of an object -> the rows that share its blob.
        blobs: row -> blob of an object that has been pickled for the check already.
        reuse: if the strategy has ``reuse_unchanged``.
        folders: names of the save beside the names in its layout.
        untrusted: for each class that a load has to be given in ``trusted``, a text.
    """

    directory: str
    backend: Backend
    format: str
    policy: SavePolicy
    overwrite: bool
    state: Mapping[Any, Any]
    shards: Sequence[ShardedTensor | ShardedObject]
    common: Mapping[Any, Any]
    checked: bool
    comparable: Callable[[Any], Any] | None
    declared: Declarations
    fingerprint: int | None
    staging_memory: int | None
    audit: AuditPolicy
    check_values: CheckValues
    groups: Mapping[str, HeldGroup]
    objects: Mapping[int, Sequence[int]]
    blobs: dict[int, bytes]
    untrusted: list[str]
    reuse: Reuse | None = None
    folders: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        state: ShardedStateDict,
        directory: Any,
        strategy: StrategyLike,
        group: Group,
        *,
        content_metadata: Mapping[str, Any] | None = None,
        validate: bool = True,
        comparable: Callable[[Any], Any] | None = None,
        overwrite: bool = True,
        allow_large_common_state: bool = False,
    ) -> SaveRequest:
        """Declare the state and pickle its objects. ``comparable`` gives the view to compare.

        Raises ShardingError for wrong declarations and for objects that no load would give
        back, BackendError for a format that cannot be written.
        """
        extracted = extract(state, from_megatron)
        path = absolute(directory)
        resolved = resolve(strategy)
        if group.is_coordinator and not allow_large_common_state:
            check_size(extracted.common, path)
        common: dict[Any, Any] = tree.dict_list_map_outplace(_compact, extracted.common)
        if content_metadata is not None:
            common[CONTENT_METADATA] = _stored_metadata(content_metadata)
        backend = resolved.make_writer()
        # An indexed format stores an empty common state, too.
        has_common = backend.properties.indexed or bool(common)
        declared = declare(
            extracted.shards,
            rank=group.rank,
            domain=domain_of(resolved.dedup_group),
            common=group.is_coordinator and has_common,
            saving=True,
        )
        if declared.facts and not backend.properties.indexed:
            raise BackendError(
                f"{declared.facts[0][0]!r} wraps other tensors: a format with an index keeps the "
                "record of its class"
            )
        policy = SavePolicy(balance=resolved.balance)
        named = f"{backend.properties.name} {backend.properties.version}"
        reuse = None
        if resolved.reuse_unchanged:
            named += " with reuse_unchanged"
            reuse = Reuse({*resolved.frozen}, resolved.reuse_from, [])
        audit = AuditPolicy(
            resolved.audit,
            resolved.audit_every,
            tuple(resolved.audit_exclude),
            resolved.on_mismatch == "raise",
        )
        number = None
        options = _pickled_options(backend)
        if options is not None:
            planned = policy_for_backend(backend, policy)
            parts = (
                named,
                backend.properties.encoding,
                planned,
                group.size,
                validate,
                audit,
            )
            number = fingerprint(declared, f"{parts} {options}")
        made = cls(
            directory=path,
            backend=backend,
            format=named,
            policy=policy,
            overwrite=overwrite,
            state=extracted.state,
            shards=extracted.shards,
            common=common,
            checked=validate,
            comparable=comparable,
            declared=declared,
            fingerprint=number,
            staging_memory=resolved.staging_memory,
            audit=audit,
            check_values=resolved.check_values,
            groups=held_groups(extracted.factories),
            objects=object_groups(extracted.shards),
            blobs={},
            untrusted=[],
            reuse=reuse,
            folders=() if reuse is None else (UNCHANGED,),
        )
        made._pickle_objects()
        return made

    @cached_property
    def compared(self) -> Any:
        """The view of the common state that ranks compare.

        All of it if the caller's function fails.
        """
        comparable = self.comparable
        if comparable is None:
            return self.common
        # The function may remove entries from its argument; these are saved all the same.
        made = attempt(lambda: comparable(tree.copied(self.common)))
        if made.error is None:
            return made.value
        logger.warning(
            "the common state is compared as it is: "
            "preprocess_common_before_consistancy_check failed (%s: %s)",
            type(made.error).__name__,
            made.error,
        )
        return self.common

    def _pickle_objects(self) -> None:
        """Fill ``blobs`` and ``untrusted``, of objects whose main replica is on this rank.

        Blobs beyond ``_KEPT_BLOBS`` bytes in sum are checked, and pickled again when they are
        written.
        """
        pickled_rows: set[int] = set()
        left = _KEPT_BLOBS
        for row in np.flatnonzero(self.declared.main).tolist():
            is_common = row == len(self.shards)
            is_tensor = not is_common and isinstance(self.shards[row], ShardedTensor)
            if is_tensor or row in pickled_rows:
                continue
            blob, classes = loadable(*self._object(row))
            self.untrusted.extend(classes)
            same_blob = self.objects.get(row, [row])
            pickled_rows.update(same_blob)
            if len(blob) <= left:
                left -= len(blob)
                self.blobs.update(dict.fromkeys(same_blob, blob))

    def group_number(self, *, may_abstain: bool) -> int | None:
        """The same on ranks with equal parameter groups.

        None on a rank without a parameter of any group, which may abstain.
        """
        if may_abstain and not any(group.needed for group in self.groups.values()):
            return None
        texts = sorted(
            (name, sorted(group.texts.items())) for name, group in self.groups.items()
        )
        return digest_number(repr(texts).encode())

    def view_number(self) -> int:
        """The same on ranks with equal views of the common state."""
        return digest_number(pickled(COMMON, self.compared))

    def needed_groups(self) -> dict[str, HeldGroup]:
        """The groups with parameters on this rank; their values, if small enough to send."""
        needed = {}
        for name, group in self.groups.items():
            if group.needed:
                values = pickled(name, tree.lookup(self.common, group.path))
                if len(values) > _SENT_GROUP:
                    values = b""
                needed[name] = replace(group, values=values)
        return needed

    def with_groups(self, groups: Mapping[tree.Path, bytes]) -> SaveRequest:
        """This request with the pickled groups of other ranks in place of this rank's groups."""
        if not groups:
            return self
        common = tree.copied(self.common)
        for path, values in groups.items():
            group = torch.load(
                io.BytesIO(values), map_location="cpu", weights_only=False
            )
            tree.lookup(common, path[:-1])[path[-1]] = group
        self.blobs.pop(len(self.shards), None)
        return replace(self, common=common)

    def held(self) -> list[Held]:
        """For each row of ``declared`` its tensor, or a function that gives its blob."""
        rows: list[Held] = []
        for row, shard in enumerate(self.shards):
            if isinstance(shard, ShardedTensor):
                rows.append(cast(torch.Tensor, shard.data))
            else:
                rows.append(partial(self._blob, row))
        return [*rows, partial(self._blob, len(self.shards))]

    def _blob(self, row: int) -> bytes:
        return self.blobs.get(row) or loadable(*self._object(row))[0]

    def _object(self, row: int) -> tuple[str, Any]:
        """The name, for error texts, and the value of a row of an object or common state."""
        if row == len(self.shards):
            return COMMON, dict(self.common)
        shard = cast(ShardedObject, self.shards[row])
        values = [self.shards[i].data for i in self.objects[row]]
        return f"the object {shard.unique_key!r}", bundled(shard, values)


def _stored_metadata(metadata: Any) -> dict[str, Any]:
    if not isinstance(metadata, Mapping):
        raise ShardingError(f"content_metadata must be a dict, not {metadata!r}")
    stored = dict(metadata)
    stored.pop("dp_cp_group", None)  # Megatron's process group
    return stored


def digest_number(data: bytes) -> int:
    """A number of 56 bits, so that it and its negative fit into 64 bits."""
    return int.from_bytes(blake2b(data, digest_size=7).digest())


def _compact(leaf: Any) -> Any:
    """A copy of a view of a larger tensor: of a view torch would store the whole tensor."""
    plain = type(leaf) in (torch.Tensor, torch.nn.Parameter)
    if not plain or leaf.layout is not torch.strided:
        return leaf
    if leaf.is_quantized or leaf.is_meta:
        return leaf
    if leaf.untyped_storage().nbytes() <= leaf.numel() * leaf.element_size():
        return leaf
    if type(leaf) is torch.nn.Parameter:
        return torch.nn.Parameter(leaf.detach().clone(), leaf.requires_grad)
    return leaf.clone()


def _pickled_options(backend: Backend) -> str | None:
    """The backend's class and attributes, pickled as hex; None if that fails.

    Any of these may decide where the format puts tensors.
    """
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=4)  # one protocol for all Python versions
    pickler.fast = True  # no memo: equal values give equal bytes, shared or not
    dumped = attempt(partial(pickler.dump, backend))
    if dumped.error is not None:
        logger.debug(
            "every save is planned: this %s cannot be pickled: %s",
            type(backend).__qualname__,
            dumped.error,
        )
        return None
    return buffer.getvalue().hex()
