"""Functions for ``sharded_state_dict()``: parameters and buffers of modules as ShardedTensors.

Names and signatures are Megatron-Core's. Megatron asks its global ``parallel_state`` for this
rank's place. These functions take it as arguments: ``tp_group`` and ``dp_cp_group`` are process
groups (objects with ``rank()`` and ``size()``), or a ParallelLayout, which has both places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from megackpt import tree
from megackpt.errors import ShardingError
from megackpt.state import (
    ReplicaId,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    is_declared,
)

RankOffset = tuple[int, int, int]
"""Axis (prepended ones count), rank, fragments."""


class ProcessGroupLike(Protocol):
    """A process group, as far as it is used here."""

    def rank(self) -> int: ...

    def size(self) -> int: ...


@dataclass(frozen=True)
class ParallelLayout:
    """This rank's place in each dimension of parallelism: its number and the dimension's size.

    tp = tensor, cp = context, dp = data, pp = pipeline; ``tp * cp * dp * pp`` ranks in all. For
    expert layers the ``tp * cp * dp`` ranks of a stage are divided again, into etp (expert tensor)
    x ep (expert) x edp (expert data).
    """

    tp_rank: int = 0
    tp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    edp_rank: int = 0
    edp_size: int = 1

    @classmethod
    def of(
        cls,
        rank: int,
        *,
        tp: int = 1,
        cp: int = 1,
        dp: int = 1,
        pp: int = 1,
        ep: int = 1,
        etp: int | None = None,
    ) -> ParallelLayout:
        """The place of global rank ``rank``, in Megatron's default order "tp-cp-ep-dp-pp".

        Tensor-parallel neighbours are neighbouring ranks, then context, then data, then pipeline.
        For expert layers the ranks of a stage are numbered in the order etp (default: tp), ep, edp;
        edp is what remains.
        Raises ShardingError for a rank outside the world and for sizes that do not divide it.
        """
        if etp is None:
            etp = tp
        stage = tp * cp * dp
        if min(tp, cp, dp, pp, ep, etp) < 1 or not 0 <= rank < stage * pp:
            raise ShardingError(
                f"rank {rank} is not in a world of tp={tp} x cp={cp} x dp={dp} x pp={pp}"
            )
        if stage % (etp * ep):
            raise ShardingError(
                f"expert layers cannot cut the {stage} ranks of a stage (tp={tp} x cp={cp} x "
                f"dp={dp}) into etp={etp} x ep={ep}"
            )
        pp_rank, place = divmod(rank, stage)
        outer, tp_rank = divmod(place, tp)
        dp_rank, cp_rank = divmod(outer, cp)
        outer, etp_rank = divmod(place, etp)
        edp_rank, ep_rank = divmod(outer, ep)
        edp = stage // (etp * ep)
        dense = (tp_rank, tp, cp_rank, cp, dp_rank, dp, pp_rank, pp)
        return cls(*dense, etp_rank, etp, ep_rank, ep, edp_rank, edp)

    @property
    def dp_cp_rank(self) -> int:
        """Number among the ranks that hold the same dense parameters."""
        return self.dp_rank * self.cp_size + self.cp_rank

    @property
    def dp_cp_size(self) -> int:
        return self.dp_size * self.cp_size

    @property
    def experts(self) -> ParallelLayout:
        """The place for expert layers: etp as tp, edp as cp and dp."""
        return replace(
            self,
            tp_rank=self.etp_rank,
            tp_size=self.etp_size,
            cp_rank=0,
            cp_size=1,
            dp_rank=self.edp_rank,
            dp_size=self.edp_size,
        )


GroupOrLayout = ProcessGroupLike | ParallelLayout | None


def _place(
    key: str, kind: str, group: GroupOrLayout, other: GroupOrLayout
) -> tuple[int, int]:
    """This rank's number in its group of a kind ("tp" or "dp_cp"), and the group's size.

    ``other``: the group of the second kind; a layout serves for both.
    """
    if group is None and isinstance(other, ParallelLayout):
        group = other
    if isinstance(group, ParallelLayout):
        return getattr(group, f"{kind}_rank"), getattr(group, f"{kind}_size")
    if group is not None:
        return group.rank(), group.size()
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ShardingError(
            f"{key!r}: {kind}_group is needed to know which part this rank has; give a process "
            "group, or ParallelLayout.of(rank, tp=..., dp=..., pp=...) for both groups"
        )
    return 0, 1


def make_tp_sharded_tensor_for_checkpoint(
    tensor: torch.Tensor,
    key: str,
    tp_axis: int = 0,
    replica_id: ReplicaId | None = None,
    prepend_offsets: Sequence[RankOffset] = (),
    tp_group: GroupOrLayout = None,
    dp_cp_group: GroupOrLayout = None,
    **kwargs: Any,
) -> ShardedTensor:
    """A tensor that the tensor-parallel ranks cut evenly along ``tp_axis`` (of ``tensor`` itself).

    ``prepend_offsets``: (axis, rank, fragments) of axes to put in front, numbered from 0. The
    default replica id is (0, 0, data-parallel rank). ``kwargs`` go to
    ``ShardedTensor.from_rank_offsets``.
    """
    tp_rank, tp_size = _place(key, "tp", tp_group, dp_cp_group)
    if replica_id is None:
        replica_id = (0, 0, _place(key, "dp_cp", dp_cp_group, tp_group)[0])
    prepended = len(prepend_offsets)
    return ShardedTensor.from_rank_offsets(
        key,
        tensor,
        *prepend_offsets,
        (prepended + tp_axis, tp_rank, tp_size),
        replica_id=replica_id,
        prepend_axis_num=prepended,
        **kwargs,
    )


def _replica_of_copy(
    key: str,
    tp_group: GroupOrLayout,
    dp_cp_group: GroupOrLayout,
) -> ReplicaId:
    """(0, tensor-parallel rank, data-parallel rank)."""
    tp_rank, _ = _place(key, "tp", tp_group, dp_cp_group)
    return 0, tp_rank, _place(key, "dp_cp", dp_cp_group, tp_group)[0]


def make_sharded_tensor_for_checkpoint(
    tensor: torch.Tensor,
    key: str,
    prepend_offsets: Sequence[RankOffset] = (),
    replica_id: ReplicaId | None = None,
    tp_group: GroupOrLayout = None,
    dp_cp_group: GroupOrLayout = None,
    **kwargs: Any,
) -> ShardedTensor:
    """A tensor that every tensor-parallel rank holds whole.

    The default replica id is (0, tensor-parallel rank, data-parallel rank). See
    ``make_tp_sharded_tensor_for_checkpoint`` for the arguments.
    """
    if replica_id is None:
        replica_id = _replica_of_copy(key, tp_group, dp_cp_group)
    return ShardedTensor.from_rank_offsets(
        key,
        tensor,
        *prepend_offsets,
        replica_id=replica_id,
        prepend_axis_num=len(prepend_offsets),
        **kwargs,
    )


def get_extra_state_offsets(
    sharded_offsets: Iterable[RankOffset],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(global shape, offset) of a ShardedObject from (axis, rank, fragments) triples.

    ((1,), (0,)) for none.

    Raises ShardingError unless the axes are 0, 1, ... without a gap.
    """
    ordered = sorted(sharded_offsets)
    if [axis for axis, _, _ in ordered] != list(range(len(ordered))):
        raise ShardingError(
            f"axes of an object's offsets must be 0, 1, ... without a gap: {ordered}"
        )
    if not ordered:
        return (1,), (0,)
    return tuple(size for _, _, size in ordered), tuple(rank for _, rank, _ in ordered)


def make_sharded_object_for_checkpoint(
    obj: Any,
    key: str,
    sharded_offsets: Sequence[RankOffset] = (),
    replica_id: ReplicaId | None = None,
    tp_group: GroupOrLayout = None,
    dp_cp_group: GroupOrLayout = None,
    **kwargs: Any,
) -> ShardedObject:
    """An object, such as a module's extra state: one for each cell of ``sharded_offsets``.

    The default replica id is (0, tensor-parallel rank, data-parallel rank).
    """
    if replica_id is None:
        replica_id = _replica_of_copy(key, tp_group, dp_cp_group)
    shape, offset = get_extra_state_offsets(sharded_offsets)
    return ShardedObject(key, obj, shape, offset, replica_id, **kwargs)


def make_sharded_tensors_for_checkpoint(
    state_dict: Mapping[str, Any],
    prefix: str,
    tensor_parallel_layers_axis_map: Mapping[str, int] | None = None,
    sharded_offsets: Sequence[RankOffset] = (),
    extra_state_suffix: str = "_extra_state",
    tp_group: GroupOrLayout = None,
    dp_cp_group: GroupOrLayout = None,
) -> ShardedStateDict:
    """Declare the entries of a module's ``state_dict(keep_vars=True)``, by key.

    Entries in ``tensor_parallel_layers_axis_map`` are sharded along the axis given there; all
    remaining entries are replicated. Entries whose name ends in ``extra_state_suffix`` become
    ShardedObjects. ``sharded_offsets``: the axes to prepend to each.
    """
    axes = tensor_parallel_layers_axis_map or {}
    groups: dict[str, Any] = {"tp_group": tp_group, "dp_cp_group": dp_cp_group}
    result: ShardedStateDict = {}
    for name, value in state_dict.items():
        key = f"{prefix}{name}"
        if name.endswith(extra_state_suffix):
            result[key] = make_sharded_object_for_checkpoint(
                value, key, sharded_offsets, **groups
            )
        elif name in axes:
            result[key] = make_tp_sharded_tensor_for_checkpoint(
                value, key, axes[name], prepend_offsets=sharded_offsets, **groups
            )
        else:
            result[key] = make_sharded_tensor_for_checkpoint(
                value, key, sharded_offsets, **groups
            )
    return result


def sharded_state_dict_default(
    module: torch.nn.Module,
    prefix: str = "",
    sharded_offsets: Sequence[RankOffset] = (),
    metadata: Mapping[str, Any] | None = None,
    tp_group: GroupOrLayout = None,
) -> ShardedStateDict:
    """``module.sharded_state_dict(prefix, sharded_offsets, metadata)``, or a default.

    By default the module's direct parameters and buffers are replicated, and its children are
    declared one by one, so a container (nn.Sequential) of tensor-parallel layers is declared
    right. The data-parallel group is ``metadata["dp_cp_group"]``.
    """
    declare = cast(
        "Callable[..., ShardedStateDict] | None",
        getattr(module, "sharded_state_dict", None),
    )
    if declare is not None:
        return declare(
            prefix=prefix, sharded_offsets=sharded_offsets, metadata=metadata
        )
    children: dict[str, torch.nn.Module] = {}
    if any(hasattr(child, "sharded_state_dict") for child in module.modules()):
        # Not named_children(), which gives a shared child under one of its names only.
        own_children = module._modules.items()
        children = {name: child for name, child in own_children if child is not None}
    own = {
        name: value
        for name, value in module.state_dict(keep_vars=True).items()
        if name.partition(".")[0] not in children
    }
    dp_cp_group = (metadata or {}).get("dp_cp_group")
    result = make_sharded_tensors_for_checkpoint(
        own,
        prefix,
        {},
        sharded_offsets,
        tp_group=tp_group,
        dp_cp_group=dp_cp_group,
    )
    for name, child in children.items():
        result |= sharded_state_dict_default(
            child, f"{prefix}{name}.", sharded_offsets, metadata, tp_group
        )
    return result


def _rename(sharded_state_dict: Any, new_key: Callable[[str], str]) -> None:
    """Set ``new_key(key)`` as key of each ShardedBase once, also of Megatron's class."""
    found = {}
    for leaf in tree.nested_values(sharded_state_dict):
        if is_declared(leaf, ShardedBase):
            found[id(leaf)] = leaf, new_key(leaf.key)
    for shard, key in found.values():
        shard.key = key


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Put ``prefix`` before the key of every ShardedBase, in place. Keys of the dict stay."""
    _rename(sharded_state_dict, lambda key: f"{prefix}{key}")


def replace_prefix_for_sharding(
    sharded_state_dict: ShardedStateDict,
    old_prefix: str,
    new_prefix: str,
) -> None:
    """Replace the prefix of the key of every ShardedBase, in place.

    Raises ValueError, before anything is changed, if one has another prefix.
    """

    def new_key(key: str) -> str:
        if not key.startswith(old_prefix):
            raise ValueError(f"Expected {key} to begin with prefix {old_prefix}")
        return new_prefix + key.removeprefix(old_prefix)

    _rename(sharded_state_dict, new_key)


def apply_prefix_mapping(
    sharded_state_dict: ShardedStateDict, prefix_map: Mapping[str, str]
) -> None:
    """Replace prefixes of the keys of every ShardedBase, in place: the first that fits, if any."""

    def new_key(key: str) -> str:
        for old, new in prefix_map.items():
            if key.startswith(old):
                return new + key.removeprefix(old)
        return key

    _rename(sharded_state_dict, new_key)
