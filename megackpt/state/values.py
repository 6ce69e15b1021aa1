"""The classes of a sharded state dict: ShardedTensor, ShardedObject, factories, local values.

Names, fields, their order and their meaning follow Megatron-Core's ``dist_checkpointing.mapping``
(0.16). The classes are mutable: the caller may set ``replica_id`` or ``key``. ``declare`` makes
frozen columns of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, Self

import torch

from megackpt.errors import ShardingError
from megackpt.planning.manifest import ReplicaId, unique_key
from megackpt.state.storable import data_problem, dtype_problem, place_problem

StateDict = dict[str, Any]
CommonStateDict = dict[str, Any]
ShardedStateDict = dict[str, Any]
FactoryBuildFn = Callable[[str, Any, ReplicaId, "slice | None"], Any]
FactoryMergeFn = Callable[[Any], Any]

_LARGEST = 1 << 62  # what files keep of a number


class ShardedBase(ABC):
    """One declared piece of state: a key, data, and which copy of the data this is."""

    key: str
    data: Any
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raise ShardingError, with every problem, if the declaration contradicts itself."""

    def without_data(self) -> Self:
        """The same declaration with ``data=None``."""
        narrowed: Any = self  # each derived class is a dataclass
        copy: Self = replace(narrowed, data=None)
        return copy


@dataclass
class ShardedTensor(ShardedBase):
    """A local tensor's place within a global one.

    Shapes and offsets are in elements.

    Attributes:
        local_shape: the shape of ``data``.
        global_shape: with the ``prepend_axis_num`` axes in front (the number of a layer, for
            example), along which the local tensor has extent 1.
        global_offset: in the same axes.
        axis_fragmentations: the number of equal shards along each of these axes; None if the
            shards form no regular grid.
        replica_id: distinguishes copies of one shard. The main replica has 0, or all zeros. By
            convention (pipeline copy, tensor-parallel rank, data-parallel rank).
        allow_shape_mismatch: in a load, cut another stored global shape, or pad it with zeros.
        flattened_range: for old callers; only None is accepted.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """Declare ``data`` as piece ``rank`` of ``fragments`` along each axis named.

        ``rank_offsets`` are triples (axis, rank, fragments). Axes count the prepended ones;
        other axes are not cut. Raises ShardingError for impossible triples or data of another
        type, ValueError for a ``flattened_range``.
        """
        if flattened_range is not None:
            raise ValueError(
                f"{key!r}: flattened_range is not supported; declare the tensor in its own shape"
            )
        if not isinstance(data, torch.Tensor):
            raise ShardingError(
                f"{key!r}: data must be a torch.Tensor, not {type(data).__name__}"
            )
        local = (1,) * prepend_axis_num + tuple(data.shape)
        offset = [0] * len(local)
        fragments = [1] * len(local)
        seen: dict[int, tuple[int, int]] = {}
        for triple in rank_offsets:
            try:
                axis, rank, count = map(index, triple)
            except (TypeError, ValueError):  # not three, or not whole numbers
                axis = -1
                rank = 0
                count = 0
            placed = 0 <= axis < len(local) and 0 <= rank < count
            if not placed or seen.setdefault(axis, (rank, count)) != (rank, count):
                raise ShardingError(
                    f"Invalid rank offsets: {rank_offsets} for key {key!r} of {len(local)} axes, "
                    f"{prepend_axis_num} of them prepended: each must be (axis, rank, "
                    "fragments) with "
                    f"0 <= axis < {len(local)} and 0 <= rank < fragments (ranks count from 0), "
                    "whole numbers, one for an axis"
                )
            offset[axis], fragments[axis] = rank * local[axis], count
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            tuple(size * count for size, count in zip(local, fragments, strict=True)),
            tuple(offset),
            tuple(fragments),
            replica_id,
            prepend_axis_num,
            **init_kwargs,
        )

    @property
    def has_regular_grid(self) -> bool:
        """Do the pieces of all ranks have one shape (``axis_fragmentations`` is not None)?"""
        return self.axis_fragmentations is not None

    def global_slice(self) -> tuple[int | slice, ...]:
        """Indices of this shard in the global tensor: ints for prepended axes, else slices."""
        n = self.prepend_axis_num
        pairs = zip(self.global_offset[n:], self.local_shape, strict=True)
        return (
            *self.global_offset[:n],
            *(slice(start, start + size) for start, size in pairs),
        )

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Number of this shard along each axis.

        Raises ShardingError if an offset is not a multiple of the size.
        """
        local = (1,) * self.prepend_axis_num + tuple(self.local_shape)
        if any(o % s for o, s in zip(self.global_offset, local, strict=True) if s):
            raise ShardingError(f"{self.key!r}: {self._indivisible()}")
        return tuple(
            o // s if s else 0 for o, s in zip(self.global_offset, local, strict=True)
        )

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Largest extent of a piece along each axis (as ``global_shape // axis_fragmentations``).

        Raises ShardingError for irregular grids, and where the division leaves a rest unless
        ``allow_shape_mismatch`` is set.
        """
        if self.axis_fragmentations is None:
            raise ShardingError(
                f"{self.key!r}: an irregular grid (axis_fragmentations=None) has no chunk shape"
            )
        pairs = list(zip(self.global_shape, self.axis_fragmentations, strict=True))
        for size, count in pairs:
            if size % count and not self.allow_shape_mismatch:
                raise ShardingError(
                    f"{self.key!r}: Axis shape ({size}) not divisible by axis fragmentation "
                    f"({count}) in {self.global_shape} over {self.axis_fragmentations}"
                )
        return tuple(size // count for size, count in pairs)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """As ``torch.Tensor.narrow`` along axis ``dim`` of the data, in a list of one.

        Every rank narrows in the same way: the global shape and offset shrink by one ratio. Raises
        ShardingError for irregular grids, and if the ratio leaves a rest.
        """
        dim += len(self.local_shape) if dim < 0 else 0
        if not 0 <= dim < len(self.local_shape):
            raise ShardingError(
                f"{self.key!r}: cannot narrow axis {dim}, which {self.local_shape} lacks"
            )
        axis = dim + self.prepend_axis_num
        size = self.local_shape[dim]
        whole = self.global_shape[axis]
        offset = self.global_offset[axis]
        if not self.has_regular_grid or not size or whole % size or offset % size:
            raise ShardingError(
                f"{self.key!r}: only pieces of a regular grid can be narrowed; along axis {dim} "
                f"the local size is {size}, the global one {whole}, the offset {offset}"
            )
        if not 0 <= start <= start + length <= size:
            raise ShardingError(
                f"{self.key!r}: [{start}:{start + length}] is not within axis {dim} of {size}"
            )
        narrower = replace(
            self,
            data=None if self.data is None else self.data.narrow(dim, start, length),
            local_shape=_with(self.local_shape, dim, length),
            global_shape=_with(self.global_shape, axis, whole // size * length),
            global_offset=_with(self.global_offset, axis, offset // size * length),
        )
        return [narrower]

    def init_data(
        self,
        device: torch.device | str,
        init_fn: Callable[..., torch.Tensor] = torch.empty,
    ) -> None:
        """Make absent data by ``init_fn(local_shape, dtype=, device=)``."""
        if self.data is None:
            self.data = init_fn(self.local_shape, dtype=self.dtype, device=device)

    def validate_metadata_integrity(self) -> None:
        """Raise ShardingError, with every problem, if shapes, dtype, offset and data disagree."""
        local = self.local_shape
        whole = self.global_shape
        offset = self.global_offset
        n = self.prepend_axis_num
        found = _naming_problems(self)
        if self.flattened_range is not None:
            found.append(
                "ShardedTensor.flattened_range is not supported. Declare the tensor in its own "
                "shape."
            )
        if self.data is not None:
            found.append(data_problem(self.data, self.dtype, local))
            found.append(place_problem(self.data, whole[n:]))
        found.append(dtype_problem(self.dtype))
        if len(offset) != len(whole):
            found.append(
                "Global offset dimensions should be equal to global shape dimensions "
                f"({offset} and {whole})"
            )
        if len(local) + n != len(whole):
            fits = len(whole) - len(local)
            found.append(
                "Local shape together with `prepend_axis_num` dimensions should be equal to "
                f"global shape dimensions ({local}, {n} prepended, and {whole})"
                + (f": prepend_axis_num={fits} would fit" if fits >= 0 else "")
            )
        if self.axis_fragmentations is not None and len(
            self.axis_fragmentations
        ) != len(whole):
            found.append(
                f"axis_fragmentations {self.axis_fragmentations} do not fit the global shape "
                f"{whole}"
            )
        if n < 0 or min(*local, *whole, *offset, 0, 0) < 0:
            found.append(
                f"sizes and offsets must not be negative ({local}, {whole}, {offset}, {n} "
                "prepended) (is a rank of -1 in them, of a process outside of the group?)"
            )
        if max(*local, *whole, *offset, 0, 0) > _LARGEST:
            found.append(
                f"sizes and offsets must not exceed 2^62 ({local}, {whole}, {offset})"
            )
        problems = list(filter(None, found))
        regular = not problems and self.axis_fragmentations is not None
        if regular and any(o % s for o, s in zip(offset[n:], local, strict=True) if s):
            problems.append(self._indivisible())
        if problems:
            raise ShardingError(
                f"{self.key!r}: {'; '.join(problems)}\n  declared: {self!r}"
            )

    def _indivisible(self) -> str:
        return (
            f"Global offset ({self.global_offset}) must be divisible by local shape "
            f"({self.local_shape}) in a regular grid; pieces of different sizes need "
            "axis_fragmentations=None"
        )


def _with(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    changed = list(values)
    changed[place] = value
    return tuple(changed)


def _naming_problems(shard: ShardedBase) -> list[str]:
    key: object = shard.key  # callers without a type checker give anything
    if isinstance(key, str) and key:
        return []
    return [f"key must be a text that is not empty, not {key!r}"]


@dataclass
class ShardedObject(ShardedBase):
    """One cell of a grid of Python objects, which is never resharded.

    It is cell ``global_offset`` of ``global_shape``.
    """

    key: str
    data: Any = field(repr=False)
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    @property
    def unique_key(self) -> str:
        """Key and cell, in Megatron's form ``rng_state/shard_0.1_4.2``; or the key."""
        return unique_key(self.key, self.global_offset, self.global_shape)

    @classmethod
    def empty_from_unique_key(
        cls, unique_key: str, replica_id: ReplicaId = 0
    ) -> ShardedObject:
        """The object (without data) that has this ``unique_key``.

        The key itself may hold "/". Old checkpoints wrote a global shape one axis too short:
        its last extent is then -1, unknown. Raises ShardingError for a text of another form.
        """
        key, found, cell = unique_key.rpartition("/shard_")
        try:
            offset, shape = (
                tuple(map(int, part.split("."))) if part else ()
                for part in cell.split("_")
            )
        except ValueError as error:
            raise ShardingError(
                f"{unique_key!r} does not end in '/shard_<offset>_<shape>'"
            ) from error
        if len(shape) == len(offset) - 1:
            shape = (*shape, -1)
        if not found or len(shape) != len(offset):
            raise ShardingError(
                f"{unique_key!r} does not name a cell: offset {offset} of {shape}"
            )
        return cls(key, None, shape, offset, replica_id)

    def validate_metadata_integrity(self) -> None:
        """Raise ShardingError if ``global_offset`` is not a cell of ``global_shape``."""
        problems = _naming_problems(self)
        pairs = zip(self.global_offset, self.global_shape, strict=False)
        if len(self.global_offset) != len(self.global_shape) or any(
            not 0 <= o < s for o, s in pairs
        ):
            problems.append(
                f"offset {self.global_offset} is not a cell of the global shape {self.global_shape}"
            )
        if max(*self.global_shape, 0, 0) > _LARGEST:
            problems.append(f"sizes must not exceed 2^62 ({self.global_shape})")
        if problems:
            raise ShardingError(
                f"{self.key!r}: {'; '.join(problems)}\n  declared: {self!r}"
            )


@dataclass
class ShardedTensorFactory(ShardedBase):
    """State that is stored in another form than it has in memory.

    ``build_fn(key, data, replica_id, flattened_range)`` returns the stored form: a ShardedBase,
    or dicts and lists of them, which may hold further factories. ``merge_fn(loaded)`` returns
    the data for that form, loaded.
    """

    key: str
    data: Any = field(repr=False)
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> Any:
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """Check the key. The product is validated when it is declared."""
        problems = _naming_problems(self)
        if problems:
            raise ShardingError("; ".join(problems))


@dataclass
class FilledFactory(ShardedTensorFactory):
    """State whose shards are views of ``data``. A load fills them, and returns ``data``."""

    merge_fn: FactoryMergeFn = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.merge_fn = (
            self._filled
        )  # not a lambda: a deep copy returns the data of the copy

    def _filled(self, _: Any) -> Any:
        return self.data


class PerRank:
    """A value that each rank has for itself and that is saved, such as the state of a generator.

    ``megackpt.sharded``, and the dicts and objects of a manager, take it. The values of all ranks
    are stored. Each rank loads the value of the rank with its number. ``restore`` of a manager
    takes another number of ranks, too: a rank whose number was not saved gets None.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> str:
        raise TypeError(
            "megackpt.sharded and a manager take a PerRank in dicts and lists, not in others"
        )


class LocalNonpersistentObject:
    """A value that is not saved. A load returns each rank's value to the rank."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        return self.obj

    def __repr__(self) -> str:
        return f"LocalNonpersistentObject({self.obj!r})"
