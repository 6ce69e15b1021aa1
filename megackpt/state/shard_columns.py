"""Shards as Declarations: validated, frozen, in the columns that planning works on."""

from __future__ import annotations

import io
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch

from megackpt.errors import (
    CorruptCheckpoint,
    MismatchError,
    ShardingError,
    join_truncated,
)
from megackpt.planning.box import Boxes, Int64, padded
from megackpt.planning.manifest import (
    COMMON_KEY,
    ITEMSIZE,
    NOMINAL_OBJECT,
    OBJECT,
    Declarations,
    ReplicaId,
    TensorEntry,
    TensorMeta,
    key_problem,
    size_problem,
    table_of,
)
from megackpt.state.storable import dtype_name
from megackpt.state.tensor_subclasses import InnerTensor
from megackpt.state.values import ShardedObject, ShardedTensor

Shard = ShardedTensor | ShardedObject
Shape = tuple[int, ...]


_recent: deque[tuple[Any, Declarations]] = deque(maxlen=2)
"""Declarations that a save and a load of the same structure reuse, each with its structure."""


class _Row(NamedTuple):
    """A declaration without its key: plain ints, with the prepended axes in ``shape``."""

    whole: Shape
    dtype: str
    offset: Shape
    shape: Shape
    replica: ReplicaId
    flexible: bool
    nbytes: int


def declare(
    shards: Sequence[Shard],
    *,
    rank: int,
    domain: int = 0,
    common: bool = False,
    common_replica: ReplicaId = 0,
    saving: bool = False,
) -> Declarations:
    """The shards that this rank holds or wants, as columns: row i is ``shards[i]``.

    ``domain`` numbers the group of ranks in which one replica may be written for another. With
    ``common`` a last row, of replica ``common_replica``, declares the common state. With
    ``saving`` each shard must have data that can be read (not None, not on the meta device).
    Objects of one rank that share a unique key go into one blob (see ``object_groups``).
    Raises ShardingError with the problems of all shards.
    """
    keys: list[str] = [shard.key for shard in shards]
    rows: list[_Row] = []
    kinds: list[int] = []
    # Tensors that differ in their keys alone share a row: of the many tensors of a model only the
    # first of each kind is validated. Each object has a separate row.
    known: dict[Any, int] = {}
    problems: list[str] = []
    wrapped: list[InnerTensor] = []
    for shard in shards:
        try:
            traits = _traits(shard)
            if traits is None and isinstance(shard, InnerTensor):
                wrapped.append(shard)
            try:
                kind = known.get(traits, len(rows))
            except TypeError:  # something in it has no hash
                traits = None
                kind = len(rows)
            if kind == len(rows):
                rows.append(_row(shard, saving))
                if traits is not None:
                    known[traits] = kind
            kinds.append(kind)
        except ShardingError as error:
            problems.append(str(error))
        except TypeError as error:  # values of a wrong type fail in arithmetic
            problems.append(
                f"{shard.key!r}: sizes, offsets and replica ids must be ints ({error})\n"
                f"  declared: {shard!r}"
            )
    if problems:
        raise ShardingError(
            join_truncated(problems, separator="\n", others="more shards")
        )
    if common:
        keys.append(COMMON_KEY)
        kinds.append(len(rows))
        rows.append(
            _Row((), OBJECT, (), (), _replica(common_replica), False, NOMINAL_OBJECT)
        )
    facts: tuple[tuple[str, str], ...] = ()
    if wrapped:
        facts = _facts(wrapped, shards)
    structure = rank, domain, rows, kinds, keys, facts
    for known_structure, declarations in tuple(_recent):
        if known_structure == structure:
            return declarations
    made = _columns(keys, rows, np.array(kinds, np.int64), rank, domain)
    made = replace(made, facts=facts)
    _recent.append((structure, made))
    return made


def _facts(
    wrapped: Sequence[InnerTensor], shards: Sequence[Shard]
) -> tuple[tuple[str, str], ...]:
    """What the tensors say that others wrap. Raises ShardingError for keys with two meanings."""
    owners = {shard.facts[0][0] for shard in wrapped}
    inner = {shard.key for shard in wrapped}
    for shard in shards:
        if shard.key in owners or (
            shard.key in inner and not isinstance(shard, InnerTensor)
        ):
            raise ShardingError(
                f"{shard.key!r} is the key of a tensor, and of a tensor that wraps others or of a "
                "part of one: give one of them another key"
            )
    facts: dict[str, str] = {}
    for name, text in (fact for shard in wrapped for fact in shard.facts):
        if facts.setdefault(name, text) != text:
            raise ShardingError(
                f"parts of one tensor differ in {name!r}: {facts[name]} and {text}. Its parts were "
                "quantised apart: quantise the tensor, and cut it then"
            )
    return tuple(facts.items())


def _traits(shard: Shard) -> tuple[Any, ...] | None:
    """All attributes but the key that decide on a tensor's row and its validity.

    None if further attributes may decide: then each such shard is validated.
    """
    if type(shard) is not ShardedTensor or type(shard.key) is not str or not shard.key:
        return None  # a subclass may validate differently
    if key_problem(shard.key):
        return None
    data = shard.data
    if data is None:
        held: tuple[Any, ...] = ()
    elif type(data) not in (torch.Tensor, torch.nn.Parameter) or data.is_nested:
        return None
    else:
        held = (
            data.dtype,
            data.shape,
            data.layout,
            data.is_meta,
            is_cut(data),
            getattr(data, "global_shape", None),
        )
    return (
        held, shard.dtype, shard.local_shape, shard.global_shape, shard.global_offset,
        shard.axis_fragmentations, shard.replica_id, shard.prepend_axis_num,
        shard.allow_shape_mismatch, shard.flattened_range,
    )  # fmt: skip


def _row(shard: Shard, saving: bool) -> _Row:
    """Raises ShardingError for a contradiction, and for sizes and keys that no index can hold."""
    shard.validate_metadata_integrity()
    whole = _ints(shard.global_shape)
    offset = _ints(shard.global_offset)
    dtype = OBJECT
    shape = (1,) * len(whole)
    flexible = False
    problem = ""
    if isinstance(shard, ShardedTensor):
        dtype = dtype_name(shard.dtype)
        shape = (1,) * shard.prepend_axis_num + _ints(shard.local_shape)
        flexible = bool(shard.allow_shape_mismatch)
        nbytes = math.prod(shape) * ITEMSIZE[dtype]
        if saving and shard.data is None:
            problem = "the shard has no data to save (data is None)"
        elif saving and shard.data is not None and shard.data.is_meta:
            problem = (
                "data on the meta device has no values to save; materialise it first, e.g. "
                "module.to_empty(device=...) and an initialisation"
            )
        elif shard.data is not None and is_cut(shard.data):
            problem = (
                "the tensor's storage has fewer bytes than the tensor: it was freed or cut "
                "(untyped_storage().resize_); gather or allocate the tensor first"
            )
    else:
        nbytes = NOMINAL_OBJECT
        data = shard.data
        if isinstance(data, io.BytesIO) and not data.closed:
            data = data.getbuffer()
        if isinstance(data, (bytes, bytearray, memoryview)):
            nbytes = memoryview(data).nbytes
    problem = problem or size_problem(whole, dtype) or size_problem(shape, dtype)
    if saving:
        problem = problem or key_problem(shard.key)
    if problem:
        raise ShardingError(f"{shard.key!r}: {problem}\n  declared: {shard!r}")
    replica = _replica(shard.replica_id)
    return _Row(whole, dtype, offset, shape, replica, flexible, nbytes)


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether the tensor spans bytes beyond its storage, as after the storage was freed."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False  # it may have no storage
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return False
    end = tensor.storage_offset() + tensor.numel()
    if not tensor.is_contiguous():
        end = tensor.storage_offset() + 1
        for size, step in zip(tensor.shape, tensor.stride(), strict=True):
            end += (size - 1) * step
    return end * tensor.element_size() > tensor.untyped_storage().nbytes()


def _ints(values: Sequence[int]) -> Shape:
    return tuple(map(index, values))


def _replica(replica_id: Any) -> ReplicaId:
    if isinstance(replica_id, (tuple, list)):
        return _ints(replica_id)
    return index(replica_id)


def _columns(
    keys: list[str], rows: list[_Row], kinds: Int64, rank: int, domain: int
) -> Declarations:
    """The rows that ``kinds`` numbers, one for each key."""
    metas, meta = table_of(TensorMeta(row.whole, row.dtype) for row in rows)
    replicas, replica = table_of(row.replica for row in rows)
    # A pair of a key and a number is compared faster than a TensorEntry.
    tensors, number = table_of(zip(keys, meta[kinds].tolist(), strict=True))
    boxes = Boxes(
        padded([row.offset for row in rows], 0),
        padded([row.shape for row in rows], 1),
    )
    return Declarations(
        tuple(TensorEntry(key, metas[kind]) for key, kind in tensors),
        number,
        boxes.take(kinds),
        replicas,
        replica[kinds],
        np.array([row.flexible for row in rows], np.bool_)[kinds],
        np.array([row.nbytes for row in rows], np.int64)[kinds],
        np.full(len(kinds), rank, np.int32),
        (domain,),
    )


def object_groups(shards: Sequence[Shard]) -> dict[int, list[int]]:
    """For the row of each ShardedObject: all rows with its unique key, itself included, in order.

    Row i is element ``groups[i].index(i)`` of the blob that they share.
    """
    rows: dict[str, list[int]] = {}
    for i, shard in enumerate(shards):
        if not isinstance(shard, ShardedTensor):
            rows.setdefault(shard.unique_key, []).append(i)
    return {i: group for group in rows.values() for i in group}


def bundled(shard: ShardedObject, values: list[Any]) -> Any:
    """The content of an object's blob: in Megatron's form, the list of values with its unique key.

    The blob of an object without a grid (global shape ()) holds the value, as torch DCP stores it.
    """
    if shard.global_shape:
        return values
    return values[0]


def unbundled(shard: ShardedObject, content: Any, position: int) -> Any:
    """The value of one object out of the content of its blob; a single value serves all.

    Raises CorruptCheckpoint if the blob holds no such list, MismatchError if it holds several
    values, but fewer than this rank asks for.
    """
    if not shard.global_shape:
        return content
    if not isinstance(content, list) or not content:
        raise CorruptCheckpoint(
            f"{shard.unique_key!r}: the stored object should be a list of values, not a "
            f"{type(content).__name__}"
        )
    if 1 < len(content) <= position:
        raise MismatchError(
            f"{shard.unique_key!r} is asked for {position + 1} times on a rank, and "
            f"{len(content)} values are stored: ask for it as often as it was declared"
        )
    return content[position if len(content) > 1 else 0]
