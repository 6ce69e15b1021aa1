"""Megatron's ``MCoreTensorAwareStateDict``: the state that a manager of local checkpoints saves.

Each local checkpoint is a file of one rank, on the node of the rank, for a restart at the same
parallelism. nvidia-resiliency-ext writes and reads the files, and sends them between nodes. It
pickles this object, and unpickles the object at a load.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megackpt import tree
from megackpt.adapters.megatron import from_megatron
from megackpt.distributed import attempt, group_over, rank_and_size
from megackpt.errors import CheckpointingException, MismatchError, join_truncated
from megackpt.loader.comparison import (
    CompareRequest,
    Comparison,
    LoadRequest,
    judge,
)
from megackpt.megatron.shard_distribution import (
    EXCHANGES,
    ShardDistribution,
    determine_main_replica_uniform_distribution,
    receive_lacking,
    shard_box,
)
from megackpt.megatron.state_parts import (
    _clean_metadata_for_serialization,
    _sharded_tensor_shard_id,
    _ShardId,
    extract_sharded_base,
)
from megackpt.planning import coverage
from megackpt.planning.manifest import (
    Chunks,
    Declarations,
    Manifest,
    digest_rows,
)
from megackpt.planning.strict import StrictHandling, Strictness, parse_strict_flag
from megackpt.state import (
    Extracted,
    ShardedObject,
    ShardedTensor,
    bundled,
    declare,
    extract,
)

if TYPE_CHECKING:
    TensorAwareStateDict = object
else:
    try:
        from nvidia_resiliency_ext.checkpointing.local.base_state_dict import (
            TensorAwareStateDict,
        )
    except ImportError:
        TensorAwareStateDict = object

logger = logging.getLogger("megackpt.megatron")

PARALLEL = "fully_parallel"
ALGORITHMS = ("atomic", PARALLEL)
CONTENT_METADATA = "content_metadata"
Sent = tuple[Declarations, CompareRequest]
"""What a rank sends to rank 0: the shards that it holds, and its request."""


@dataclass(eq=False)
class MCoreTensorAwareStateDict(TensorAwareStateDict):
    """One rank's state. Its tensors can be taken out, sent separately, and inserted again.

    A subclass of nvidia-resiliency-ext's ``TensorAwareStateDict``, where that package is installed.
    Make one by ``from_state_dict``. Methods raise CheckpointingException if they need the tensors
    and the state is hollow, or the reverse.

    Attributes:
        common: the unsharded values. Each rank keeps its values.
        sharded_state_dict: declarations of the sharded part, in their places. A tensor that
            another rank keeps has data None.
    """

    common: dict[Any, Any]
    sharded_state_dict: dict[Any, Any] = field(repr=False)
    _is_hollow: bool = False
    _devices: list[str | None] | None = None
    """By tensor: the type of its first device (None: no data). None: no tensor has moved."""

    @classmethod
    def from_state_dict(
        cls,
        sharded_state_dict: dict[Any, Any],
        algo: str = PARALLEL,
        parallelization_group: Any = None,
        cached_metadata: ShardDistribution | None = None,
    ) -> tuple[MCoreTensorAwareStateDict, ShardDistribution]:
        """The state of this rank, and metadata for later calls. Collective over all ranks.

        The state refers to the caller's tensors, without a copy: see ``copy_tensors_to_cpu``.

        Args:
            algo: "atomic": each rank keeps all tensors that it declares. "fully_parallel": one of
                the ranks that declare a tensor keeps its data, so that all ranks keep about the
                same number of bytes.
            parallelization_group: the ranks that share tensors (None: all ranks).
            cached_metadata: the metadata that an earlier call returned. If it fits on all ranks,
                the declarations are not checked and distributed again.

        Raises ShardingError and CoverageError like a save, CheckpointingException for another
        ``algo``.
        """
        rank, size = rank_and_size(parallelization_group)
        is_parallel = algo == PARALLEL and size > 1

        def made() -> tuple[Extracted, Declarations]:
            _check_name("algo", algo, ALGORITHMS)
            extracted = extract(sharded_state_dict, from_megatron)
            return extracted, declare(extracted.shards, rank=group.rank, saving=True)

        def fits() -> bool:
            names = _with_elements(given.get()[0]).keys()
            if cached_metadata is None or not is_parallel:
                return cached_metadata is not None
            ranks = cached_metadata.all_ranks_for_shard
            return names == {name for name in ranks if rank in ranks[name]}

        with group_over() as group:
            given = attempt(made)
            is_known = group.reduce_broadcast("declare", fits, all)
            if not is_known:
                group.reduce_broadcast(
                    "check",
                    lambda: given.get()[1],
                    lambda parts: coverage.check(Declarations.merge(parts).numbered()),
                )
        extracted, _ = given.get()
        distribution = ShardDistribution({}, set(), {}, {})
        if is_parallel and is_known:
            distribution = cached_metadata or distribution
        elif is_parallel:
            shared = list(_with_elements(extracted).values())
            distribution = (
                determine_main_replica_uniform_distribution(
                    shared, parallelization_group, True
                )
                or distribution
            )
        keepers = distribution.main_rank_for_shard

        def keep(leaf: ShardedTensor | ShardedObject) -> Any:
            kept = copy(leaf)
            if isinstance(kept, ShardedTensor) and kept.data is not None:
                keeper = keepers.get(_sharded_tensor_shard_id(kept), rank)
                is_own = keeper == rank or not kept.data.numel()
                kept.data = kept.data.detach() if is_own else None
            return kept

        sharded, _ = extract_sharded_base(extracted.state)
        common = extracted.common
        if CONTENT_METADATA in common:
            content = _clean_metadata_for_serialization(common[CONTENT_METADATA])
            common[CONTENT_METADATA] = content
        return cls(common, tree.dict_list_map_outplace(keep, sharded)), distribution

    def to_state_dict(
        self,
        sharded_state_dict: dict[Any, Any] | None,
        algo: str = "atomic",
        exchange_algo: str = "broadcast",
        validate_access_integrity: bool = True,
        parallelization_group: Any = None,
        strict: Strictness = StrictHandling.ASSUME_OK_UNEXPECTED,
        return_mismatch_keys: bool = False,
    ) -> Any:
        """The state dict asked for, with the values of this one. Collective over all ranks.

        Values are the tensors of this state. With "fully_parallel", tensors that another rank keeps
        are received into the caller's tensors, or into new tensors. Without a
        ``sharded_state_dict`` the result is the common state.

        Args:
            algo: see ``from_state_dict``.
            exchange_algo: "broadcast", "gather_rounds" or "gather_object".
            validate_access_integrity: check that all ranks ask for every element exactly once.
            parallelization_group: the group of ``from_state_dict``.
            strict: see ``load``.
            return_mismatch_keys: return (state, missing, unexpected), like ``load`` for
                "return_all". Keys that no rank asks for are the same on all ranks.

        Raises MismatchError for keys, shapes or boxes that differ; CheckpointingException if no
        rank of the group keeps a tensor, and for another ``algo`` or ``exchange_algo``.
        """
        is_parallel = algo == PARALLEL
        flag = parse_strict_flag(strict)
        if not sharded_state_dict:
            self._expect(hollow=False)
            return tree.copied(self.common)
        request = LoadRequest(
            "the local checkpoint",
            sharded_state_dict,
            strict=flag,
            validate=validate_access_integrity,
            # Megatron's callers search these texts for keys.
            advise=not StrictHandling.requires_raising(flag),
        )
        leaves = list(tree.nested_values(self.sharded_state_dict))

        def compare() -> tuple[Comparison, Declarations]:
            # The checks are here: all other ranks would wait for a rank that raised earlier.
            _check_name("algo", algo, ALGORITHMS)
            _check_name("exchange_algo", exchange_algo, EXCHANGES)
            self._expect(hollow=False)
            held = declare(leaves, rank=group.rank)
            compared = Comparison.of(request, _manifest([held]), group.rank)
            _check_boxes(leaves, _wanted(compared))
            return compared, held

        def send() -> Sent:
            compared, held = found.get()
            sent = CompareRequest.of(request, compared)
            return held, replace(sent, unexpected=compared.unexpected)

        def decide(parts: Sequence[Sent]) -> set[str]:
            manifest = _manifest([held for held, _ in parts])
            return judge(request, [sent for _, sent in parts], manifest)

        with group_over() as group:
            found = attempt(compare)
            missing = group.reduce_broadcast("compare", send, decide)
        compared, _ = found.get()
        _warn_of_left_out(compared, group.rank)

        exchange = exchange_algo if is_parallel else None
        fill = partial(self._filled, compared, leaves, parallelization_group, exchange)
        filled = attempt(fill)
        with group_over() as group:
            group.reduce_broadcast("exchange", lambda: len(filled.get()), len)
        state = filled.get()
        if not return_mismatch_keys:
            return state
        if flag is StrictHandling.IGNORE_ALL:
            return state, set(), set()
        return state, missing, compared.unexpected

    def _filled(
        self,
        compared: Comparison,
        leaves: Sequence[Any],
        group: Any,
        exchange: str | None,
    ) -> dict[Any, Any]:
        """The state asked for. With an ``exchange``, tensors of other ranks are received."""
        wanted = _wanted(compared)
        kept = [shard for shard in self._tensors() if shard.data is not None]
        tensors = {shard_box(shard): shard.data for shard in kept}
        if exchange is not None:
            asked = [leaf for leaf in wanted if isinstance(leaf, ShardedTensor)]
            tensors |= receive_lacking(kept, asked, group, exchange)
        objects: dict[str, list[Any]] = {}
        for leaf in leaves:
            if isinstance(leaf, ShardedObject):
                objects.setdefault(leaf.unique_key, []).append(leaf.data)
        values: list[Any] = []
        for leaf in wanted:
            if isinstance(leaf, ShardedObject):
                values.append(bundled(leaf, objects[leaf.unique_key]))
            elif shard_box(leaf) in tensors:
                values.append(tensors[shard_box(leaf)])
            else:
                raise CheckpointingException(
                    f"{leaf.key!r}: another rank keeps it, as this state was made with "
                    f"{PARALLEL!r}: give to_state_dict algo={PARALLEL!r} and the same group"
                )
        return compared.restore([*values, self.common])

    @property
    def is_hollow(self) -> bool:
        """Whether the tensors are taken out."""
        return self._is_hollow

    @property
    def common_state_dict(self) -> dict[Any, Any]:
        """The state that is not sharded."""
        return self.common

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that this rank keeps, in a fixed order."""
        self._expect(hollow=False)
        return (shard.data for shard in self._tensors() if shard.data is not None)

    def pop_tensors(self) -> list[torch.Tensor]:
        """Take the tensors out, and return them, contiguous. The state is hollow then."""
        self._expect(hollow=False)
        self._devices = self._origins()
        popped = [tensor.contiguous() for tensor in self.tensors]
        for shard in self._tensors():
            shard.data = None
        self._is_hollow = True
        return popped

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors in, in the order of ``pop_tensors``, on any device.

        Raises CheckpointingException for another number of tensors, or other shapes or dtypes.
        """
        self._expect(hollow=True)
        given = list(tensor_data)
        places = [shard for shard, device in self._places() if device is not None]
        if len(given) != len(places):
            raise CheckpointingException(
                f"insert_tensors got {len(given)} tensors, and {len(places)} were taken out"
            )
        for shard, tensor in zip(places, given, strict=True):
            if tensor.shape != shard.local_shape or tensor.dtype != shard.dtype:
                raise CheckpointingException(
                    f"insert_tensors: {shard.key!r} has shape {tuple(shard.local_shape)} and "
                    f"{shard.dtype}, the tensor given {tuple(tensor.shape)} and {tensor.dtype}"
                )
        for shard, tensor in zip(places, given, strict=True):
            shard.data = tensor
        self._is_hollow = False

    def init_tensors(self) -> None:
        """Put in new tensors without values, each on the device of the one taken out."""
        self._expect(hollow=True)
        for shard, device in self._places():
            if device is not None:
                shard.init_data(device)
        self._is_hollow = False
        self._devices = None

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace the tensors by copies on the CPU, and the rest of the state by copies.

        After this, and a synchronisation of the device if ``non_blocking``, training may change the
        state dict that it gave to ``from_state_dict``.
        """
        self._expect(hollow=False)
        self._devices = self._origins()
        for shard, device in self._places():
            data = shard.data
            if data is not None and data.device.type != "cpu":
                shard.data = data.to("cpu", non_blocking=non_blocking)
            elif data is not None and device == "cpu":
                shard.data = data.clone()
        self.common = tree.dict_list_map_outplace(_copied, self.common)
        for leaf in tree.nested_values(self.sharded_state_dict):
            if isinstance(leaf, ShardedObject):
                leaf.data = _copied(leaf.data)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move the tensors back to the type of device that they had."""
        self._expect(hollow=False)
        for shard, device in self._places():
            if shard.data is not None and device is not None:
                shard.data = shard.data.to(device, non_blocking=non_blocking)
        self._devices = None

    def _expect(self, *, hollow: bool) -> None:
        if self._is_hollow == hollow:
            return
        problem = "holds its tensors: call pop_tensors first"
        if self._is_hollow:
            problem = "is hollow: call insert_tensors or init_tensors first"
        raise CheckpointingException(f"this {type(self).__name__} {problem}")

    def _tensors(self) -> list[ShardedTensor]:
        leaves = tree.nested_values(self.sharded_state_dict)
        return [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]

    def _origins(self) -> list[str | None]:
        if self._devices is not None:
            return self._devices
        tensors = [shard.data for shard in self._tensors()]
        return [None if data is None else data.device.type for data in tensors]

    def _places(self) -> Iterable[tuple[ShardedTensor, str | None]]:
        return zip(self._tensors(), self._origins(), strict=True)


def _with_elements(extracted: Extracted) -> dict[_ShardId, ShardedTensor]:
    """The tensors that ranks share. An empty one may have the id of another shard."""
    found = {}
    for shard in extracted.shards:
        if isinstance(shard, ShardedTensor) and 0 not in shard.local_shape:
            found[_sharded_tensor_shard_id(shard)] = shard
    return found


def _wanted(compared: Comparison) -> list[ShardedTensor | ShardedObject]:
    """The shards to load."""
    return [compared.extracted.shards[number] for number in compared.kept.tolist()]


def _warn_of_left_out(compared: Comparison, rank: int) -> None:
    kept = set(compared.kept.tolist())
    shards = enumerate(compared.extracted.shards)
    left_out = {repr(shard.key) for row, shard in shards if row not in kept}
    if left_out:
        logger.warning(
            "the local checkpoint of rank %d lacks keys that are asked for: %s. Their tensors are "
            "left as they were, and the returned state does not have them",
            rank,
            join_truncated(sorted(left_out), 50, ", "),
        )


def _check_boxes(
    held: Iterable[ShardedTensor | ShardedObject],
    wanted: Iterable[ShardedTensor | ShardedObject],
) -> None:
    """Raise MismatchError for boxes that were not declared on this rank."""
    here: dict[str, list[_ShardId]] = {}
    for shard in held:
        if isinstance(shard, ShardedTensor):
            here.setdefault(shard.key, []).append(shard_box(shard))
    problems = []
    for shard in wanted:
        if isinstance(shard, ShardedTensor) and shard_box(shard) not in here[shard.key]:
            listed = [f"offset {at}, shape {size}" for _, at, size in here[shard.key]]
            _, at, size = shard_box(shard)
            problems.append(
                f"  {shard.key!r}: offset {at}, shape {size}; "
                f"this rank has {join_truncated(listed, 3)}"
            )
    if problems:
        raise MismatchError(
            "these shards are not in the local checkpoint of this rank, which can be loaded only "
            "at the parallelism of its save:\n" + join_truncated(problems, 20, "\n")
        )


def _check_name(option: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        names = " or ".join(map(repr, known))
        raise CheckpointingException(f"{option} is {names}, not {value!r}")


def _manifest(parts: Sequence[Declarations]) -> Manifest:
    """Each shard once, as a chunk without a place."""
    declared = Declarations.merge(parts)
    rows = declared.shards.first
    nowhere = np.zeros(len(rows), np.int64)
    chunks = Chunks(
        declared.tensor[rows],
        declared.boxes.take(rows),
        declared.rank[rows],
        np.full(len(rows), -1, np.int32),
        nowhere,
        declared.nbytes[rows],
        digest_rows(b""),
    )
    return Manifest(declared.tensors, (None,) * len(declared.tensors), chunks)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return deepcopy(value)
