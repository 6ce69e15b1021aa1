"""DTensors (FSDP2, HSDP, tensor parallelism) as shards, by their mesh and placements.

Shards by other protocols of torch DCP are in ``checkpointable``. No function here communicates.
Keys have the form of torch DCP: names joined by ".".
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from functools import lru_cache
from itertools import accumulate, product
from operator import mul
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from megackpt import tree
from megackpt.adapters.checkpointable import declare_checkpointable, has_methods
from megackpt.errors import ShardingError
from megackpt.state import (
    FilledFactory,
    LocalNonpersistentObject,
    PerRank,
    ReplicaId,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
)
from megackpt.state.storable import is_distributed, is_stateful, shard_attributes
from megackpt.state.tensor_subclasses import PLAIN
from megackpt.torch_versions import cutting_order, strides_are_cut_at_once

Shape = tuple[int, ...]
Run = tuple[int, int]
"""Start and length, along one axis of the whole tensor."""
Cut = tuple[int, int]
"""Dimension of the mesh, and factor of its strided shard (1: a plain shard)."""

thread_rank: ContextVar[tuple[int, int] | None] = ContextVar("rank", default=None)
"""Rank and number of ranks, where ranks are threads; None: torch.distributed has both."""

DECLARED = (ShardedBase, LocalNonpersistentObject)
Replicated = Literal["nothing", "tensors", "all"]


def sharded(
    state_dict: dict[Any, Any],
    prefix: str = "",
    *,
    replicated: Replicated = "tensors",
    among: DeviceMesh | Iterable[int] | None = None,
) -> ShardedStateDict:
    """Declare the tensors of any state dict for ``save`` and ``load``.

    ``state_dict`` is a module's, an optimizer's, or the result of torch's ``get_state_dict``,
    nested at will. DTensors (FSDP2, HSDP, tensor parallelism) become the shards that this rank
    holds. Plain tensors become replicas that all ranks hold and one of them writes. Other values
    are common state. The state dict is not changed, and no data is copied. Keys have the form of
    torch DCP: the names on the way to a tensor, joined by ".". Not collective.

    Tensors and objects that torch DCP takes for shards by protocol are declared as shards, too:
    plain tensors with ``global_shape``, ``global_offsets``, ``local_offsets`` and ``local_sizes``
    (torch 2.15's CheckpointableTensor), and objects with ``__create_write_items__``,
    ``__create_chunk_list__`` and ``__get_tensor_shard__``. If several ranks have equal chunks, one
    chunk is stored.

    ``load`` fills the tensors of the state dict in place, on their device, and returns a state dict
    of the same tensors, with the common state as it was stored. Give that to
    ``optimizer.load_state_dict``, which takes numbers such as learning rates from it. The
    parameters of a module are filled already. An optimizer that has not made a step has no tensors
    to load into: torch's ``get_state_dict`` makes them.

    Args:
        state_dict: dicts and lists, at any depth. Tensors in tuples and in objects are not
            declared. A PerRank is a value of each rank. Existing declarations, such as a
            ShardedTensor, stay.
        prefix: put before every key.
        replicated: which unsharded values are stored under a separate key, by one of the ranks that
            hold them. "tensors": tensors, except tensors without dimensions in lists and in
            ``param_groups``; all other values are common state, which rank 0 stores. "all": the
            values that torch DCP would store, so that DCP finds every key that it would have
            written. "nothing".
        among: the ranks (of the world) that hold this state, or their mesh; None = all ranks. For
            a pipeline, the ranks of this stage; for a part on a mesh without rank 0, that mesh;
            for a save with ``process_group=``, the ranks of that group.

    Returns:
        A new sharded state dict: the same dicts and lists, with declarations in place of tensors.

    Raises:
        ShardingError: if ``state_dict`` is not a dict, or another argument is invalid. For tensors
            that cannot be stored, ``save`` and ``load`` raise it on all ranks: Partial DTensors,
            local tensors that do not fit the placements, sparse and quantized tensors, shards by
            protocol that contradict themselves.

    Example::

        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        megackpt.save(megackpt.sharded(state), "run/step_100")

        loaded = megackpt.load(megackpt.sharded(state), "run/step_100")  # fills the model in place
        optimizer.load_state_dict(loaded["optimizer"])
        step = loaded["step"]
    """
    if not isinstance(state_dict, dict):
        raise ShardingError(
            f"a state dict is expected, not a {type(state_dict).__name__}: "
            f"net.state_dict(), and not {state_dict!r:.60}"
        )
    if replicated not in get_args(Replicated):
        raise ShardingError(
            f"replicated is one of {get_args(Replicated)}, not {replicated!r}"
        )
    replica, holders = holders_of(among)
    result: ShardedStateDict = tree.copied(state_dict)
    # Several meshes may hold the same state: the mesh of the first holder has replica 0.
    mesh_replica: dict[DeviceMesh, int] = {}
    todo: list[tuple[str, Any, bool]] = [(prefix, result, False)]
    while todo:
        above, branch, in_list = todo.pop()
        in_list = in_list or isinstance(branch, list)
        for name, leaf in list(tree.items(branch)):
            key = f"{above}{name}"
            if tree.is_branch(leaf) and not _is_plain_list(leaf):
                todo.append((f"{key}.", leaf, in_list))
            elif isinstance(leaf, DTensor) and not has_methods(leaf):
                mesh = leaf.device_mesh
                if mesh not in mesh_replica:
                    mesh_replica[mesh] = 0 if holders[0] in mesh.mesh else replica
                number = mesh_replica[mesh], _replica(leaf)
                branch[name] = FilledFactory(key, leaf, pieces, number)
            elif isinstance(leaf, PerRank):
                branch[name] = ShardedObject(
                    key, leaf.value, (len(holders),), (replica,)
                )
            elif shard_attributes(leaf):
                branch[name] = declare_checkpointable(key, leaf)
            elif is_distributed(leaf):
                pass  # FSDP1's tensors: save and load refuse them, with advice.
            elif isinstance(leaf, torch.Tensor):
                # torch's flatten_optimizer_state_dict makes keys "param_groups.NAME.lr".
                grouped = in_list or str(name).startswith("param_groups.")
                # A learning rate may be a tensor in this run, and a number in the next.
                is_number = replicated == "tensors" and grouped and not leaf.dim()
                if replicated != "nothing" and not is_number:
                    branch[name] = ShardedTensor.from_rank_offsets(
                        key, leaf, replica_id=replica
                    )
            elif (
                replicated == "all"
                and not isinstance(leaf, DECLARED)
                and not is_stateful(leaf)
            ):
                branch[name] = ShardedObject(key, leaf, (), (), replica)
    return result


def holders_of(among: DeviceMesh | Iterable[int] | None) -> tuple[int, list[int]]:
    """This rank's number among the ranks that hold the state, and these ranks, in order.

    A rank that does not hold the state gets the number of holders.
    """
    rank, world = 0, 1
    if (thread := thread_rank.get()) is not None:
        rank, world = thread
    elif dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
        world = dist.get_world_size()
    ranks: object = among  # Callers without a type checker pass anything.
    if among is None:
        ranks = range(world)
    elif isinstance(among, DeviceMesh):
        ranks = among.mesh.flatten().tolist()
    if isinstance(ranks, Iterable):
        holders = set(ranks)
    else:
        holders = set()
    if not holders or any(type(r) is not int or not 0 <= r < world for r in holders):
        raise ShardingError(
            f"`among` is a DeviceMesh, or some of the {world} ranks by number, not {among!r}"
        )
    ordered = sorted(holders)
    return (ordered.index(rank) if rank in holders else len(ordered)), ordered


def _is_plain_list(node: Any) -> bool:
    """Whether it is a list without tensors and dicts, which torch DCP stores as one object."""
    if not isinstance(node, list):
        return False
    for item in node:
        if isinstance(item, list):
            if not _is_plain_list(item):
                return False
        elif isinstance(
            item, (dict, torch.Tensor, PerRank, *DECLARED)
        ) or shard_attributes(item):
            return False
    return True


def _replica(tensor: DTensor) -> int:
    """This rank's number among the replicas on the mesh."""
    mesh = tensor.device_mesh
    number = 0
    place = mesh.get_coordinate() or ()
    for size, index, placement in zip(
        mesh.shape, place, tensor.placements, strict=False
    ):
        if isinstance(placement, Replicate):
            number = number * size + index
    return number


def pieces(
    key: str,
    tensor: DTensor,
    replica_id: ReplicaId,
    *_: Any,
) -> Any:
    """The boxes of a DTensor on this rank as ShardedTensors, views of its local tensor.

    One box, or more where several placements cut the same axis. On a rank outside of its mesh a
    DTensor is not declared.
    """
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return LocalNonpersistentObject(tensor)
    with torch.no_grad():
        local = tensor.to_local().detach()
    try:
        axes = runs(
            tuple(tensor.shape),
            tuple(mesh.shape),
            tuple(place),
            tensor.placements,
            tuple(local.shape),
            cutting_order(tensor),
        )
    except ShardingError as error:
        raise ShardingError(f"{key!r}: {error}") from error
    expected = tuple(map(_length, axes))
    if tuple(local.shape) != expected:
        raise ShardingError(
            f"{key!r}: the local tensor of shape {tuple(local.shape)} is not the piece of "
            f"{tuple(tensor.shape)} that {tensor.placements} give the rank at {tuple(place)} of a "
            f"mesh of {tuple(mesh.shape)}, {expected}: its place is unknown. Distribute it as "
            "torch does (distribute_tensor), or declare its parts yourself"
        )
    if local.is_meta:
        raise ShardingError(
            f"{key!r} is on the meta device: materialise it first, by module.to_empty(device=...)"
        )
    parts: list[tuple[Shape, torch.Tensor]] = [((), local)]
    if type(local) not in PLAIN and max(map(len, axes), default=1) > 1:
        raise ShardingError(
            f"{key!r}: {tensor.placements} give this rank several pieces of a "
            f"{type(local).__qualname__}, which wraps other tensors: only one can be declared"
        )
    for axis, held in enumerate(axes):
        if len(held) == 1:
            parts = [((*offset, held[0][0]), data) for offset, data in parts]
            continue
        cut = []
        lengths = [length for _, length in held]
        for offset, data in parts:
            views = torch.split(data, lengths, axis)
            for run, part in zip(held, views, strict=True):
                cut.append(((*offset, run[0]), part))
        parts = cut
    whole = tuple(tensor.shape)
    return [
        ShardedTensor(
            key, data, data.dtype, tuple(data.shape), whole, offset, None, replica_id
        )
        for offset, data in parts
    ]


@lru_cache(maxsize=4096)
def runs(
    shape: Shape,
    mesh: Shape,
    place: Shape,
    placements: tuple[Placement, ...],
    local: Shape,
    order: tuple[int, ...] | None = None,
) -> list[list[Run]]:
    """For each axis of a tensor the runs of indices held by the rank at ``place`` of the mesh.

    The layout is torch's. The dimensions of the mesh cut the axis one by one, in ``order``. Each
    dimension cuts the pieces of the dimension before it into pieces of equal size, with a smaller
    piece and empty pieces at the end. A strided shard is one piece of each of ``split_factor`` such
    pieces. torch makes two layouts with strided shards (``_fsdp2_cuts``); the shape ``local`` of
    the local tensor shows which one it is. FSDP2's is taken where both fit.

    Raises ShardingError for placements without a layout, and, on some ranks at least, where the
    local shapes of all ranks fit both layouts.
    """
    if len(placements) != len(mesh):
        raise ShardingError(
            f"{placements} are not one placement for each dimension of a mesh of {mesh}"
        )
    cuts: list[list[Cut]] = [[] for _ in shape]
    for dim in order or range(len(mesh)):
        placement = placements[dim]
        over = f"it is {placement!r} over dimension {dim} of its mesh"
        if isinstance(placement, (Shard, _StridedShard)):
            if not 0 <= placement.dim < len(shape):
                raise ShardingError(
                    f"{over}: a tensor of shape {shape} lacks this axis"
                )
            if mesh[dim] > 1:
                factor = int(getattr(placement, "split_factor", 1))
                cuts[placement.dim].append((dim, factor))
        elif not isinstance(placement, Replicate):
            raise ShardingError(
                f"{over}: what ranks hold of it are not yet its values. Redistribute it first: "
                "tensor.redistribute(placements=...), with Shard or Replicate there"
            )
    axes = []
    for axis, size in enumerate(shape):
        parts = tuple(cuts[axis])
        fsdp2_parts = parts
        if not order:
            fsdp2_parts = _fsdp2_cuts(parts, mesh)
        held = _held(size, parts, mesh, place)
        fsdp2_held = _held(size, fsdp2_parts, mesh, place)
        length = size
        if axis < len(local):
            length = local[axis]
        fits = length == _length(fsdp2_held)
        if held != fsdp2_held and not (fits and _is_fsdp2(fsdp2_parts)):
            some_equal, all_equal = _same_lengths(size, parts, mesh)
            if all_equal if fits else some_equal:
                raise ShardingError(
                    f"of {placements} over a mesh of {mesh} torch makes two layouts, and the "
                    f"sizes of the local tensors fit both, along an axis of {size}. "
                    "Distribute it with plain Shard placements (distribute_tensor), not with these"
                )
        axes.append(fsdp2_held if fits else held)
    return axes


def _fsdp2_cuts(parts: tuple[Cut, ...], mesh: Shape) -> tuple[Cut, ...]:
    """The same cuts in the order that torch reads from their factors.

    A factor is the number of pieces that earlier cuts have made. FSDP2, ``redistribute`` and
    ``full_tensor`` mean this order; ``distribute_tensor`` cuts from left to right. With pieces of
    equal size both orders give the same layout. Any other factor is a separate cut.
    """
    order: list[Cut] = []
    for dim, factor in reversed(parts):
        sizes = (mesh[earlier] for earlier, _ in order)
        counts = list(accumulate(sizes, mul, initial=1))
        if factor in counts:
            order.insert(counts.index(factor), (dim, 1))
        else:
            order.insert(0, (dim, factor))
    return tuple(order)


def _is_fsdp2(cuts: tuple[Cut, ...]) -> bool:
    """Whether all cuts but the last go from left to right: FSDP2 cuts last."""
    others = list(cuts[:-1])
    return all(factor == 1 for _, factor in cuts) and others == sorted(others)


@lru_cache(maxsize=4096)
def _same_lengths(
    size: int,
    parts: tuple[Cut, ...],
    mesh: Shape,
) -> tuple[bool, bool]:
    """Whether both layouts have equal lengths: on a rank with other indices; on all ranks."""
    fsdp2_parts = _fsdp2_cuts(parts, mesh)
    cutting = {dim for dim, _ in parts}
    # Dimensions of the mesh that do not cut the axis need only one index.
    ranges = [range(n if dim in cutting else 1) for dim, n in enumerate(mesh)]
    some_equal = False
    all_equal = True
    for place in product(*ranges):
        held = _held(size, parts, mesh, place)
        fsdp2_held = _held(size, fsdp2_parts, mesh, place)
        if _length(held) != _length(fsdp2_held):
            all_equal = False
        elif held != fsdp2_held:
            some_equal = True
    return some_equal, all_equal


def _held(
    size: int,
    parts: tuple[Cut, ...],
    mesh: Shape,
    place: Shape,
) -> list[Run]:
    """The part of an axis that these cuts, one by one, leave at one place of the mesh."""
    held = [(0, size)]
    for dim, factor in parts:
        # The held indices are cut into ``factor`` pieces, and each of these into mesh[dim]. One
        # stays.
        count = mesh[dim]
        number = place[dim]
        left = _length(held)
        taken: list[Run] = []
        for part in range(factor):
            if strides_are_cut_at_once():
                low, high = _chunk(left, factor * count, part * count + number)
            else:
                start, stop = _chunk(left, factor, part)
                low, high = _chunk(stop - start, count, number)
                low += start
                high += start
            # low and high count held indices: take these from each run in turn.
            for begin, length in held:
                first = max(low, 0)
                last = min(high, length)
                if first < last and taken and sum(taken[-1]) == begin + first:
                    taken[-1] = (taken[-1][0], taken[-1][1] + last - first)
                elif first < last:
                    taken.append((begin + first, last - first))
                low -= length
                high -= length
        held = taken or [(0, 0)]
    return held


def _length(held: list[Run]) -> int:
    return sum(length for _, length in held)


def _chunk(
    size: int,
    count: int,
    number: int,
) -> tuple[int, int]:
    """Start and stop of piece ``number``, as torch.chunk cuts."""
    step = -(-size // count)
    return min(step * number, size), min(step * number + step, size)
