"""What FSDP2, HSDP and tensor-parallel models hold: their DTensors, declared as shards by mesh and placements.

What else torch DCP takes for shards is declared by ``checkpointable``.
Nothing is asked of other ranks. Keys are those of torch DCP: names joined by ".".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, product
from operator import mul
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from megackpt import tree
from megackpt.adapters.checkpointable import ShardedCheckpointable, follows_methods
from megackpt.errors import ShardingError
from megackpt.state import (
    FactoryBuildFn,
    FactoryMergeFn,
    LocalNonpersistentObject,
    ReplicaId,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.state.storable import is_checkpointable, is_distributed
from megackpt.torch_versions import order_of_cuts, strides_are_cut_at_once

Run = tuple[int, int]  # start and length, along one axis of the whole tensor
Cut = tuple[int, int]  # dimension of the mesh, and factor of its strided shard, else 1

DECLARED = (ShardedBase, LocalNonpersistentObject)
REPLICATED = ("nothing", "tensors", "all")


def sharded(
    state_dict: dict[Any, Any],
    prefix: str = "",
    *,
    replicated: str = "tensors",
    among: DeviceMesh | Iterable[int] | None = None,
) -> ShardedStateDict:
    """Declare the tensors of any state dict for ``save`` and ``load``: of a model, an optimizer, or both, nested as
    you like.

    What ``module.state_dict()``, ``optimizer.state_dict()`` or torch's ``get_state_dict`` give becomes a sharded state
    dict: DTensors (FSDP2, HSDP, tensor parallelism) become the shards that this rank holds, plain tensors become copies
    that all ranks hold and one of them writes, and every other value is common state. The state dict is not changed,
    and no data is copied. Keys are those of torch DCP: the names on the way to a tensor, joined by ".". Not collective.

    What torch DCP takes for a shard by protocol is one here: a plain tensor with ``global_shape``, ``global_offsets``,
    ``local_offsets`` and ``local_sizes`` (torch 2.15's CheckpointableTensor), and what has ``__create_write_items__``,
    ``__create_chunk_list__`` and ``__get_tensor_shard__``. Of equal chunks of several ranks one is stored.

    ``load`` fills the tensors of the state dict in place, on their device, and returns a state dict of the same
    tensors, with the common state as it was stored. Hand that to ``optimizer.load_state_dict``, which takes numbers
    such as learning rates from it; the parameters of a module are filled already. An optimizer that has not made a step
    has no tensors to ask for: torch's ``get_state_dict`` makes them.

    Args:
        state_dict: dicts and lists of anything, walked into at any depth. Tensors in tuples and in objects are not
            declared. What is declared already, a ShardedTensor for instance, stays.
        prefix: stands before every key.
        replicated: what, of all that is no DTensor, is stored under a key of its own, from one of the ranks that
            hold it: "tensors" (the rest is common state, of which rank 0's is kept; so are tensors without dimensions
            in lists and ``param_groups``), "all" (as torch DCP stores it: then DCP finds every key it would have
            written), or "nothing".
        among: the ranks (of the world) that hold this state, each key a piece or a copy, or their mesh; None = all
            ranks. Of a pipeline, the ranks of this stage; of a part on a mesh without rank 0, that mesh; for a save
            with ``process_group=``, the ranks of that group.

    Returns:
        A new sharded state dict: the same dicts and lists, with declarations in the places of tensors.

    Raises:
        ShardingError: here for a ``state_dict`` that is no dict and for other arguments that cannot be right. ``save``
            and ``load`` raise it on all ranks for tensors that cannot be stored: Partial DTensors, local tensors that
            are not what the placements say, sparse and quantized tensors, shards by protocol that contradict
            themselves.

    Example::

        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        megackpt.save(megackpt.sharded(state), "run/step_100")

        loaded = megackpt.load(megackpt.sharded(state), "run/step_100")  # fills the model in place
        optimizer.load_state_dict(loaded["optimizer"])
        step = loaded["step"]
    """
    if not isinstance(state_dict, dict):
        raise ShardingError(
            f"a state dict is expected, not a {type(state_dict).__name__}"
        )
    if replicated not in REPLICATED:
        raise ShardingError(f"replicated is one of {REPLICATED}, not {replicated!r}")
    rank, holders = _ranks(among)
    copy = holders.index(rank) if rank in holders else len(holders)
    result: ShardedStateDict = tree.copied(state_dict)
    copies: dict[
        DeviceMesh, int
    ] = {}  # which one of those on equal meshes this is: 0 on the first holder's
    todo: list[tuple[str, Any, bool]] = [(prefix, result, False)]
    while todo:
        above, branch, listed = todo.pop()
        listed = listed or isinstance(branch, list)
        for name, leaf in list(tree.items(branch)):
            key = f"{above}{name}"
            grouped = listed or str(name).startswith(
                "param_groups."
            )  # flatten_optimizer_state_dict's
            if tree.is_branch(leaf) and not _is_value(leaf):
                todo.append((f"{key}.", leaf, listed))
            elif isinstance(leaf, DTensor) and not follows_methods(leaf):
                mesh = leaf.device_mesh
                if mesh not in copies:
                    copies[mesh] = 0 if holders[0] in mesh.mesh else copy
                branch[name] = ShardedDTensor(key, leaf, (copies[mesh], _copy(leaf)))
            elif is_checkpointable(leaf):
                branch[name] = ShardedCheckpointable(key, leaf)
            elif is_distributed(leaf):
                continue  # FSDP1's: refused where it is met, with the way
            elif (
                replicated == "tensors"
                and grouped
                and isinstance(leaf, torch.Tensor)
                and not leaf.dim()
            ):
                continue  # a learning rate, say, which is a number in the next run
            elif isinstance(leaf, torch.Tensor) and replicated != "nothing":
                branch[name] = ShardedTensor.from_rank_offsets(
                    key, leaf, replica_id=copy
                )
            elif replicated == "all" and not isinstance(leaf, DECLARED):
                branch[name] = ShardedObject(key, leaf, (), (), copy)
    return result


def _ranks(among: DeviceMesh | Iterable[int] | None) -> tuple[int, list[int]]:
    """This rank, and all that hold the state, in order."""
    alone = not (dist.is_available() and dist.is_initialized())
    rank, world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    if isinstance(among, DeviceMesh):
        among = among.mesh.flatten().tolist()
    ranks: object = (
        range(world) if among is None else among
    )  # callers without a type checker give anything
    holders = set(ranks) if isinstance(ranks, Iterable) else set()
    if not holders or any(type(r) is not int or not 0 <= r < world for r in holders):
        raise ShardingError(
            f"`among` is a DeviceMesh, or some of the {world} ranks by number, not {among!r}"
        )
    return rank, sorted(holders)


def _is_value(node: Any) -> bool:
    """A list without tensors and dicts, which torch DCP stores as one object."""
    return isinstance(node, list) and all(
        _is_value(x)
        if isinstance(x, list)
        else not isinstance(x, (dict, torch.Tensor, *DECLARED))
        and not is_checkpointable(x)
        for x in node
    )


def _copy(tensor: DTensor) -> int:
    """Number of this copy among those of the mesh."""
    mesh, number = tensor.device_mesh, 0
    for size, place, placement in zip(
        mesh.shape, mesh.get_coordinate() or (), tensor.placements, strict=False
    ):
        number = number * size + place if isinstance(placement, Replicate) else number
    return number


@dataclass
class ShardedDTensor(ShardedTensorFactory):
    """A DTensor, stored as the boxes that this rank holds of it; loaded, it is the DTensor itself again."""

    build_fn: FactoryBuildFn = field(init=False, repr=False)
    merge_fn: FactoryMergeFn = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.build_fn, self.merge_fn = pieces, self._filled

    def _filled(self, _: Any) -> Any:
        """What it is now: its local tensor was filled in place."""
        return self.data


def pieces(
    key: str, tensor: DTensor, replica_id: ReplicaId, _: slice | None = None
) -> Any:
    """The boxes of a DTensor on this rank as ShardedTensors, views of its local tensor.

    A box each, but where several placements cut one axis there may be more. Of a mesh that this rank is not part
    of it holds nothing, and keeps what it has.
    """
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return LocalNonpersistentObject(tensor)
    with torch.no_grad():
        local = tensor.to_local().detach()
    layout = (
        tuple(tensor.shape),
        tuple(mesh.shape),
        tuple(place),
        tensor.placements,
        tuple(local.shape),
    )
    try:
        axes = runs(*layout, order_of_cuts(tensor))
    except ShardingError as error:
        raise ShardingError(f"{key!r}: {error}") from error
    expected = tuple(map(_length, axes))
    if tuple(local.shape) != expected:
        raise ShardingError(
            f"{key!r}: the local tensor of shape {tuple(local.shape)} is not the piece of {tuple(tensor.shape)} that "
            f"{tensor.placements} give the rank at {tuple(place)} of a mesh of {tuple(mesh.shape)}, {expected}: nobody "
            "can tell where it lies. Distribute it as torch does (distribute_tensor), or declare its parts yourself"
        )
    if local.is_meta:
        raise ShardingError(
            f"{key!r} is on the meta device: materialise it first, by module.to_empty(device=...)"
        )
    return [
        _piece(key, tensor, replica_id, local, box)
        for box in product(*map(_placed, axes))
    ]


def _placed(axis: list[Run]) -> list[tuple[int, int, int]]:
    """(start in the whole, start in the local tensor, length) of each run."""
    at, placed = 0, []
    for start, length in axis:
        placed.append((start, at, length))
        at += length
    return placed


def _piece(
    key: str,
    tensor: DTensor,
    replica_id: ReplicaId,
    local: torch.Tensor,
    box: Sequence[tuple[int, int, int]],
) -> ShardedTensor:
    data = local
    for axis, (_, at, length) in enumerate(box):
        data = data.narrow(axis, at, length)
    offset = tuple(start for start, _, _ in box)
    return ShardedTensor(
        key,
        data,
        data.dtype,
        tuple(data.shape),
        tuple(tensor.shape),
        offset,
        None,
        replica_id,
    )


@lru_cache(maxsize=4096)
def runs(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    place: tuple[int, ...],
    placements: tuple[Placement, ...],
    local: tuple[int, ...],
    order: tuple[int, ...] | None = None,
) -> list[list[Run]]:
    """For each axis of a tensor the runs of indices that the rank at ``place`` of the mesh holds; at least one.

    As torch lays it out: the dimensions of the mesh cut one after the other (in ``order``), each what those before it
    have left, into pieces of one size with the smaller one and the empty ones at the end; a strided shard is one piece
    of each of ``split_factor`` such pieces (``strides_are_cut_at_once`` tells how these are cut). Of strided shards it
    makes two layouts (``_decoded``). ``local``, the local tensor's shape, tells which it is; FSDP2's own where that
    fits. Raises ShardingError for placements that are no place, and on some ranks at least where sizes anywhere on the
    mesh would mislead.
    """
    if len(placements) != len(mesh):
        raise ShardingError(
            f"{placements} are not one placement for each dimension of a mesh of {mesh}"
        )
    cuts: list[list[Cut]] = [[] for _ in shape]
    for dim in order or range(len(mesh)):
        placement = placements[dim]
        if isinstance(placement, (Shard, _StridedShard)):
            if not 0 <= placement.dim < len(shape):
                raise ShardingError(
                    f"it is {placement!r} over dimension {dim} of its mesh: a tensor of shape {shape} lacks this axis"
                )
            if mesh[dim] > 1:
                cuts[placement.dim].append(
                    (dim, int(getattr(placement, "split_factor", 1)))
                )
        elif not isinstance(placement, Replicate):
            raise ShardingError(
                f"it is {placement!r} over dimension {dim} of its mesh: what ranks hold of it are not yet its values. "
                "Redistribute it first: tensor.redistribute(placements=...), with Shard or Replicate there"
            )
    axes = []
    for size, parts, length in zip(
        shape, map(tuple, cuts), (*local, *shape), strict=False
    ):
        decoded = parts if order else _decoded(parts, mesh)
        straight, held = (
            _held(size, parts, mesh, place),
            _held(size, decoded, mesh, place),
        )
        fits = length == _length(held)
        if straight != held and not (fits and _of_fsdp2(decoded)):
            anywhere, everywhere = _alike(size, parts, mesh)
            if everywhere if fits else anywhere:
                raise ShardingError(
                    f"of {placements} over a mesh of {mesh} torch makes two layouts, which the sizes of the local "
                    f"tensors do not tell apart along an axis of {size}: nobody can tell where they lie. Distribute it "
                    "with plain Shard placements (distribute_tensor), not with these"
                )
        axes.append(held if fits else straight)
    return axes


def _decoded(parts: tuple[Cut, ...], mesh: tuple[int, ...]) -> tuple[Cut, ...]:
    """The same cuts in the order that torch reads from their factors: into how many pieces others had cut before.

    FSDP2 cuts so what tensor and expert parallelism have left, and ``redistribute`` and ``full_tensor`` take it so;
    ``distribute_tensor`` cuts from left to right. In pieces of one size it comes to the same. A factor that tells no
    such number is a cut of its own.
    """
    order: list[Cut] = []
    for dim, factor in reversed(parts):
        made = list(accumulate((mesh[earlier] for earlier, _ in order), mul, initial=1))
        plain = factor in made
        order.insert(made.index(factor) if plain else 0, (dim, 1 if plain else factor))
    return tuple(order)


def _of_fsdp2(order: tuple[Cut, ...]) -> bool:
    """Whether all but the last go from left to right: FSDP2's own cut comes after those that were there."""
    return all(factor == 1 for _, factor in order) and list(order[:-1]) == sorted(
        order[:-1]
    )


@lru_cache(maxsize=4096)
def _alike(
    size: int, parts: tuple[Cut, ...], mesh: tuple[int, ...]
) -> tuple[bool, bool]:
    """Whether the two layouts give any place of the mesh as many indices, but others; and whether all as many."""
    decoded, cutting = _decoded(parts, mesh), {dim for dim, _ in parts}
    both = [
        (_held(size, parts, mesh, place), _held(size, decoded, mesh, place))
        for place in product(
            *(range(count if dim in cutting else 1) for dim, count in enumerate(mesh))
        )
    ]
    as_many = [(one, other) for one, other in both if _length(one) == _length(other)]
    return any(one != other for one, other in as_many), len(as_many) == len(both)


def _held(
    size: int, parts: tuple[Cut, ...], mesh: tuple[int, ...], place: tuple[int, ...]
) -> list[Run]:
    """What these cuts, one after the other, leave of an axis at one place of the mesh."""
    held = [(0, size)]
    for dim, factor in parts:
        held = _cut(held, factor, mesh[dim], place[dim])
    return held


def _length(held: list[Run]) -> int:
    return sum(length for _, length in held)


def _cut(held: list[Run], factor: int, count: int, number: int) -> list[Run]:
    """Of the indices held, piece ``number`` of ``count`` of each of ``factor`` pieces."""
    taken: list[Run] = []
    size = _length(held)
    for part in range(factor):
        if strides_are_cut_at_once():
            low, high = _chunk(size, factor * count, part * count + number)
        else:
            start, stop = _chunk(size, factor, part)
            low, high = (start + end for end in _chunk(stop - start, count, number))
        for begin, length in held:
            first, last = max(low, 0), min(high, length)
            if first < last and taken and sum(taken[-1]) == begin + first:
                taken[-1] = (taken[-1][0], taken[-1][1] + last - first)
            elif first < last:
                taken.append((begin + first, last - first))
            low, high = low - length, high - length
    return taken or [(0, 0)]


def _chunk(size: int, count: int, number: int) -> Run:
    """Where piece ``number`` begins and where it ends, as torch.chunk cuts."""
    step = -(-size // count)
    return min(step * number, size), min(step * number + step, size)
