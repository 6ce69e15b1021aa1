"""Megatron's ``exchange_utils`` and the functions of ``strategies.fully_parallel``.

``megackpt.save`` and ``load`` plan this themselves. These functions are for custom strategies, and
for programs that call the functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch

from megackpt import tree
from megackpt.distributed import attempt, group_over, rank_and_size
from megackpt.errors import CheckpointingException
from megackpt.megatron import torch_messages as messages
from megackpt.megatron.state_parts import (
    _sharded_object_id,
    _sharded_tensor_shard_id,
    _ShardId,
)
from megackpt.state import ShardedTensor, is_declared, is_main_replica

T = TypeVar("T")
Tensors = dict[_ShardId, torch.Tensor]


class ShardDistribution(NamedTuple):
    """Which rank of a process group saves or loads each shard. Ranks are those in the group."""

    main_rank_for_shard: dict[_ShardId, int]
    shards_in_this_group: set[_ShardId]
    shard_to_metadata: dict[_ShardId, ShardedTensor]
    all_ranks_for_shard: dict[_ShardId, list[int]]


def distribute_shards_to_ranks(
    shard_to_ranks: Mapping[T, list[int]],
    shard_to_size: Mapping[T, int],
    num_ranks: int,
    cross_parallelization_group_loads: set[T],
) -> dict[T, int]:
    """Assign each shard to the least loaded of its ranks (the lowest of several).

    The order: shards of ``cross_parallelization_group_loads`` last, few ranks first, large shards
    first, then by id. It is the same on all ranks.
    """

    def order(shard: Any) -> tuple[Any, ...]:
        is_crossing = shard in cross_parallelization_group_loads
        return is_crossing, len(shard_to_ranks[shard]), -shard_to_size[shard], shard

    loads = [0] * num_ranks
    assigned = {}
    for shard in sorted(shard_to_ranks, key=order):
        rank = min(shard_to_ranks[shard], key=lambda rank: (loads[rank], rank))
        assigned[shard] = rank
        loads[rank] += shard_to_size[shard]
    return assigned


def _tensors(sharded_state_dict: Any) -> list[ShardedTensor]:
    leaves = tree.nested_values(sharded_state_dict)
    return [leaf for leaf in leaves if is_declared(leaf, ShardedTensor)]


def determine_main_replica_uniform_distribution(
    sharded_state_dict: Any, parallelization_group: Any, ignore_groups: bool = False
) -> ShardDistribution | None:
    """Distribute the shards of all ranks of a group (None: all ranks). Collective over it.

    ``ignore_groups``: also distribute shards whose main replica is in another group, as a load
    needs them. None for a group of one rank.
    """
    _, size = rank_and_size(parallelization_group)
    if size <= 1:
        return None
    own = [shard.without_data() for shard in _tensors(sharded_state_dict)]
    ranks: dict[_ShardId, list[int]] = {}
    metadata: dict[_ShardId, ShardedTensor] = {}
    mains = set()
    for rank, shards in enumerate(messages.gather_all(own, parallelization_group)):
        for shard in shards:
            name = _sharded_tensor_shard_id(shard)
            ranks.setdefault(name, []).append(rank)
            metadata.setdefault(name, shard)
            if is_main_replica(shard.replica_id):
                mains.add(name)
    if not ignore_groups:
        ranks = {name: those for name, those in ranks.items() if name in mains}
    sizes = {
        name: math.prod(metadata[name].local_shape) * metadata[name].dtype.itemsize
        for name in ranks
    }
    assigned = distribute_shards_to_ranks(ranks, sizes, size, ranks.keys() - mains)
    return ShardDistribution(assigned, set(ranks), metadata, ranks)


def distribute_main_replicas_with_precomputed_distribution(
    sharded_state_dict: Any,
    parallelization_group: Any,
    precomputed_distribution: ShardDistribution | None,
) -> None:
    """Set ``replica_id`` in place: 0 of shards that the distribution assigns to this rank, else 1.

    A group of one rank keeps its shards unchanged. Raises ValueError for None in a larger group.
    """
    rank, size = rank_and_size(parallelization_group)
    if size <= 1:
        return
    if precomputed_distribution is None:
        raise ValueError(
            "precomputed_distribution must be not None for a group of several ranks"
        )
    mains = precomputed_distribution.main_rank_for_shard
    for shard in _tensors(sharded_state_dict):
        shard.replica_id = int(mains.get(_sharded_tensor_shard_id(shard)) != rank)


@torch.no_grad()
def exchange_loaded_tensors_broadcast(
    loaded_tensors: Tensors,
    unloaded_shards: Mapping[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution,
    parallelization_group: Any = None,
) -> Tensors:
    """Broadcast each shard that several ranks need, from the rank that has loaded it.

    Returns the tensors that this rank has loaded, and the tensors that it has received into the
    data of ``unloaded_shards`` or into new tensors.
    """
    rank, _ = rank_and_size(parallelization_group)
    device = messages.message_device(parallelization_group)
    result = dict(loaded_tensors)
    for name, source in shard_distribution.main_rank_for_shard.items():
        if len(shard_distribution.all_ranks_for_shard[name]) == 1:
            continue
        if source == rank:
            tensor = result[name]
        elif name in unloaded_shards:
            shard = unloaded_shards[name]
            shard.init_data(device)
            tensor = result[name] = cast(torch.Tensor, shard.data)
        else:
            other = shard_distribution.shard_to_metadata[name]
            tensor = torch.empty(other.local_shape, dtype=other.dtype, device=device)
        messages.broadcast(tensor, source, parallelization_group)
    return result


exchange_loaded_tensors_gather_rounds = exchange_loaded_tensors_broadcast
"""Megatron's name of another algorithm for the same result."""


def _gather_loaded(loaded: Mapping[Any, Any], group: Any) -> dict[Any, Any]:
    parts = messages.gather_all(loaded, group)
    result = {name: value for part in parts for name, value in part.items()}
    if len(result) != sum(map(len, parts)):
        raise CheckpointingException("Duplicate shard ids loaded by different ranks")
    return result


def exchange_loaded_tensors_gather_object(
    loaded_tensors: Tensors,
    unloaded_shards: Mapping[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution | None = None,
    parallelization_group: Any = None,
) -> Tensors:
    """Gather the loaded tensors of all ranks of the group by pickles, in every rank's memory."""
    packed = {}
    for name, tensor in loaded_tensors.items():
        # As bytes, because torch does not unpickle every dtype. It pickles a view with all its
        # storage.
        compact = tensor.detach().clone(memory_format=torch.contiguous_format)
        octets = compact.reshape(-1).view(torch.uint8)
        packed[name] = octets, tensor.dtype, tensor.shape
    result = {}
    for name, (octets, dtype, shape) in _gather_loaded(
        packed, parallelization_group
    ).items():
        result[name] = octets.view(dtype).reshape(shape)
    return result


EXCHANGES = {
    "broadcast": exchange_loaded_tensors_broadcast,
    "gather_rounds": exchange_loaded_tensors_gather_rounds,
    "gather_object": exchange_loaded_tensors_gather_object,
}
"""The exchanges of ``exchange_by_distribution``, by name."""


def exchange_loaded_objects_gather_object(loaded_objects: Any) -> dict[Any, Any]:
    """The objects that all ranks have loaded. Collective over all ranks.

    Raises CheckpointingException if two ranks have loaded the same object.
    """
    return _gather_loaded(loaded_objects, None)


def exchange_by_distribution(
    loaded_tensors: Tensors,
    unloaded_shards: Mapping[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution,
    parallelization_group: Any = None,
    exchange_algo: Literal["broadcast", "gather_rounds", "gather_object"] = "broadcast",
) -> Tensors:
    """One of the three exchanges, by name. NotImplementedError for another name."""
    if exchange_algo not in EXCHANGES:
        raise NotImplementedError(f"Unrecognized gather algorithm: {exchange_algo}")
    run = EXCHANGES[exchange_algo]
    return run(
        loaded_tensors, unloaded_shards, shard_distribution, parallelization_group
    )


def shard_box(shard: ShardedTensor) -> _ShardId:
    """Key, offset and shape: an empty shard may have the key and offset of another one."""
    return shard.key, tuple(shard.global_offset), tuple(shard.local_shape)


def receive_lacking(
    kept: Iterable[ShardedTensor],
    wanted: Iterable[ShardedTensor],
    process_group: Any,
    algorithm: Any,
) -> Tensors:
    """The wanted tensors that this rank does not keep, by box. Collective over the group.

    The lowest rank that keeps a tensor sends it, whatever the distribution was at the save. It is
    received into the wanted shard's data, or into a new tensor if the data is absent, on the meta
    device or of another dtype. The result omits tensors that no rank keeps.
    """
    rank, _ = rank_and_size(process_group)
    own = {shard_box(shard): shard for shard in kept}
    lacking = {shard_box(shard): shard for shard in wanted}
    lacking = {name: lacking[name] for name in lacking if name not in own}
    described = {name: shard.without_data() for name, shard in own.items()}
    parts = messages.gather_all((described, list(lacking)), process_group)
    keepers: dict[_ShardId, int] = {}
    metadata: dict[_ShardId, ShardedTensor] = {}
    for number, (shards, _) in enumerate(parts):
        for name in shards:
            keepers.setdefault(name, number)
            metadata.setdefault(name, shards[name])
    ranks: dict[_ShardId, list[int]] = {}
    for number, (_, names) in enumerate(parts):
        for name in names:
            if name in keepers:
                ranks.setdefault(name, [keepers[name]]).append(number)
    if not ranks:
        return {}
    sources = {name: keepers[name] for name in ranks}
    sent = {}
    for name, source in sources.items():
        if source == rank:
            sent[name] = cast(torch.Tensor, own[name].data)
    places = {}
    for name in lacking.keys() & ranks.keys():
        data = lacking[name].data
        if data is not None and (data.is_meta or data.dtype != metadata[name].dtype):
            data = None
        places[name] = replace(metadata[name], data=data)
    distribution = ShardDistribution(sources, set(ranks), metadata, ranks)
    result = exchange_by_distribution(
        sent, places, distribution, process_group, algorithm
    )
    return {name: result[name] for name in places}


def load_and_exchange(
    load: Any,
    state: Any,
    directory: Any,
    distribution: ShardDistribution,
    process_group: Any,
    algorithm: Any,
) -> Any:
    """Load the shards and objects whose replica id is main on this rank, and exchange them.

    Collective. An error of any rank's ``load`` is raised on all ranks, before they exchange.
    """
    tensors: dict[Any, Any] = {}
    objects: dict[Any, Any] = {}
    others: dict[Any, Any] = {}
    for leaf in tree.nested_values(state):
        mine = is_main_replica(leaf.replica_id)
        if is_declared(leaf, ShardedTensor):
            (tensors if mine else others)[_sharded_tensor_shard_id(leaf)] = leaf
        elif mine:
            objects[_sharded_object_id(leaf)] = leaf

    def read() -> tuple[Any, Any]:
        return load(objects, directory), load(tensors, directory)

    loaded = attempt(read)
    with group_over() as group:
        group.reduce_broadcast("read", lambda: len(loaded.get()), len)
    found = _gather_loaded(loaded.get()[0], None)
    found |= exchange_by_distribution(
        loaded.get()[1], others, distribution, process_group, algorithm
    )

    def fill(leaf: Any) -> Any:
        name: Any
        if is_declared(leaf, ShardedTensor):
            name = _sharded_tensor_shard_id(leaf)
        else:
            name = _sharded_object_id(leaf)
        if name not in found:
            raise CheckpointingException(
                f"Missing shards after fully parallel loading: {name}"
            )
        return found[name]

    return tree.dict_list_map_outplace(fill, state)
