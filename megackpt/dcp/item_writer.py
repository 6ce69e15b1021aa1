"""One rank's part of a save through torch DCP: its items, resolved one by one, as records."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import (
    _StorageInfo,
    _StorageWriterTransforms,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from megackpt import tree
from megackpt.backends.archives import frame
from megackpt.backends.torch_dist.distcp_writer import Records, spread
from megackpt.distributed.wire_format import allow
from megackpt.errors import CheckpointingException, ShardingError, StorageError
from megackpt.planning.manifest import Location
from megackpt.staging.devices import resolved, synchronize
from megackpt.staging.source import pieces, storage_error
from megackpt.state.storable import dtype_name, dtype_problem, place_problem
from megackpt.storage import Storage, unsafe_names

Resolved = torch.Tensor | io.BytesIO
Resolve = Callable[[WriteItem], Resolved]
"""Gives the data of an item. It stays as it is while further items are resolved."""

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_OWN_PREFIX = ".megackpt-"


@dataclass(frozen=True)
class Assignment:
    """The save and the files of one rank, which the coordinator sends in ``plan.storage_data``."""

    directory: str
    save_id: str
    rank: int
    files: tuple[str, ...]
    places: Mapping[str, Location] = field(default_factory=dict)
    """Location of each tensor in the files that all ranks write into, by key."""

    def __deepcopy__(self, _memo: Any) -> Assignment:
        return self

    @property
    def prefix(self) -> str:
        """For stock's writers, to which a planner may pass a plan that it has cached."""
        return f"__{self.rank}_"


def assignment_of(plan: SavePlan, directory: str, rank: int | None) -> Assignment:
    """The assignment of a rank for a save to this directory. ``rank`` is None in torch 2.8."""
    sent: object = _sent_plan(plan).storage_data
    if (
        not isinstance(sent, Assignment)
        or sent.directory != directory
        or rank not in (None, sent.rank)
    ):
        raise CheckpointingException(
            f"rank {rank or 0} received no plan for a save to {directory}: all ranks must name "
            "the same checkpoint_id and use this writer, and the planner must keep a plan's "
            "storage_data"
        )
    return sent


def _sent_plan(plan: SavePlan) -> SavePlan:
    """The plan that the coordinator has sent to this rank for this save.

    A planner that caches plans makes an old plan of it, with the assignment of an old save. The
    sessions of ``install`` put the new assignment into the old plan. torch keeps the new plan in
    a variable of its function, which calls the writer, and passes it to nobody.
    """
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_globals.get("__name__") == state_dict_saver.__name__:
            sent = frame.f_locals.get("central_plan")
            if isinstance(sent, SavePlan):
                return sent
        frame = frame.f_back
    return plan


class StoredItem(NamedTuple):
    """Where one item was written."""

    info: _StorageInfo
    """The record, for stock's reader."""
    start: int
    length: int
    """The bytes in the record that the digests are of."""
    digests: bytes
    dtype: str = ""
    """Of a plain tensor; empty for records that hold other bytes."""


allow(__name__, "Assignment", "StoredItem")


def stable_resolver(planner: SavePlanner) -> Resolve:
    """Resolves items to memory that stays as it is while further items are resolved.

    A planner may convert all its items in one buffer, and several threads write items. So memory
    that is not the state dict's is copied.
    """
    state = getattr(planner, "state_dict", None)
    if not isinstance(state, dict):
        state = {}

    def resolve_item(item: WriteItem) -> Resolved:
        data = resolve(planner, item)
        if isinstance(data, torch.Tensor):
            if not is_plain(data):
                return data  # It is pickled before the next item is resolved.
            address = data.untyped_storage().data_ptr()
            for tensor in local_tensors(state.get(item.index.fqn)):
                if tensor.untyped_storage().data_ptr() == address:
                    return data
        return copy_to_host(data)

    return resolve_item


def resolve(planner: SavePlanner, item: WriteItem) -> Resolved:
    """The data of an item. CheckpointingException if they are not what was planned."""
    data: object = planner.resolve_data(item)
    if isinstance(data, io.BytesIO):
        return data
    if not isinstance(data, torch.Tensor):
        raise CheckpointingException(
            f"the planner resolves it to {type(data)}, not to a tensor or BytesIO"
        )
    planned = item.tensor_data
    if planned is None or data.shape != planned.chunk.sizes:
        raise CheckpointingException(
            f"the planner resolves it to shape {tuple(data.shape)}, and planned "
            f"{planned and tuple(planned.chunk.sizes)}"
        )
    problem = place_problem(data, tuple(planned.size))
    if problem:
        raise CheckpointingException(
            f"{problem} (torch {torch.__version__} may not know the protocol)"
        )
    return data


def copy_to_host(data: Resolved) -> Resolved:
    """A copy in new host memory."""
    if isinstance(data, io.BytesIO):
        return io.BytesIO(data.getvalue())
    return data.detach().to("cpu", copy=True)


def local_tensors(value: object) -> list[torch.Tensor]:
    """The plain tensors of this rank in a value of a state dict."""
    if not isinstance(value, torch.Tensor):
        return []
    if hasattr(value, "local_shards"):  # torch's ShardedTensor
        return [shard.tensor for shard in value.local_shards()]
    local = value
    if hasattr(value, "to_local"):
        local = value.to_local()
    if is_plain(local):
        return [local]
    return []


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is its elements."""
    return type(tensor) in _PLAIN_TYPES and tensor.layout is torch.strided


def is_wrapper(value: object) -> bool:
    """Whether it, or the local tensor of a DTensor, wraps other tensors, by a class not torch's."""
    kind = type(getattr(value, "_local_tensor", value))
    is_torchs = kind.__module__.startswith("torch.")
    return hasattr(kind, "__tensor_flatten__") and not is_torchs


def refuse_wrappers(state_dict: Any) -> None:
    """ShardingError for tensors that wrap others: a planner would pickle one rank's part."""
    for value in filter(is_wrapper, tree.nested_values(state_dict)):
        raise ShardingError(
            f"a {type(value).__qualname__} wraps other tensors. Without a planner of your own it "
            "is saved by the rule of its class: see megackpt.register_tensor_subclass"
        )


class ReadStorages:
    """The storages of tensors whose memory is being written."""

    def __init__(self) -> None:
        self._held: list[tuple[str, torch.UntypedStorage, int, int]] = []

    def blocks(self, name: str, tensor: torch.Tensor) -> Iterator[memoryview]:
        """The elements in C order, in blocks of host memory."""
        synchronize([tensor])
        value = resolved(tensor)
        storage = value.untyped_storage()
        self._held.append((name, storage, storage.data_ptr(), storage.nbytes()))
        return pieces(value)

    def check(self) -> None:
        """Everything is written but the rest of the last tensor. ShardingError if the storage of a
        tensor was freed or resized meanwhile.
        """
        for name, storage, *before in self._held:
            if [storage.data_ptr(), storage.nbytes()] != before:
                raise storage_error(name)
        del self._held[:-1]


class ItemWriter:
    """Writes the items of one rank durably, one thread for each file.

    ``transforms`` are called in order; the first that passes an item through extensions counts.
    Errors name the rank, the file and the item.

    ``TorchDist.write`` takes a plan that lists the dtype of each row. The form of an item is known
    only when the planner has resolved it: a tensor of another dtype or class than planned is
    pickled, and a planner may reuse the memory for the next item. A plan of all forms would call
    the planner twice, or hold copies of all items.
    """

    def __init__(
        self,
        root: Storage,
        assignment: Assignment,
        resolve: Resolve,
        transforms: Sequence[_StorageWriterTransforms],
    ) -> None:
        self._root = root
        self._assignment = assignment
        self._resolve_data = resolve
        self._transforms = transforms
        self._resolving = threading.Lock()  # Planners are not thread-safe.
        self._failed = False

    def write(self, items: Sequence[WriteItem]) -> list[WriteResult]:
        files = self._assignment.files
        bins = spread([_size(item) for item in items], len(files))
        jobs = []
        with ThreadPoolExecutor(len(files), "megackpt-write") as pool:
            for name, rows in zip(files, bins, strict=True):
                if rows:
                    part = [items[row] for row in rows]
                    jobs.append(pool.submit(self._write_file, name, part))
        results = []
        for job in jobs:
            results += job.result()
        return results

    def _write_file(self, name: str, items: Sequence[WriteItem]) -> list[WriteResult]:
        """The results. After an error of another thread, which its job raises, some only."""
        results = []
        at = ""
        try:
            with self._root.create(name) as writer:
                writer.expect(sum(max(_size(item), 0) for item in items))
                storages = ReadStorages()
                records = Records(writer, storages.check)
                for item in items:
                    if self._failed:
                        break
                    at = f" at {item.index.fqn!r}"
                    results.append(self._write_item(records, storages, name, item))
                at = ""
                records.end()
        except BaseException as error:
            self._failed = True
            kind, text = CheckpointingException, f"{type(error).__name__}: {error}"
            if isinstance(error, CheckpointingException):
                kind, text = type(error), str(error)
            elif isinstance(error, OSError):
                kind = StorageError
            file = f"{self._root.location}/{name}"
            rank = self._assignment.rank
            raise kind(f"rank {rank} cannot write {file}{at}: {text}") from error
        return results

    def _write_item(
        self, records: Records, storages: ReadStorages, name: str, item: WriteItem
    ) -> WriteResult:
        output = _OpenBytesIO()
        stream: Any = output
        extensions: list[str] = []
        with self._resolving:
            data = self._resolve_data(item)
            for transforms in self._transforms:
                stream, extensions = transforms.transform_save_stream(item, output)
                if extensions:
                    break
            if isinstance(data, io.BytesIO):
                stream.write(data.getvalue())
            elif extensions or not is_storable(item, data):
                host = data.detach().cpu()
                # torch.save would store all of a larger storage.
                if is_plain(host) and host.untyped_storage().nbytes() != host.nbytes:
                    host = host.clone()
                torch.save(host, stream)
                data = output
            stream.close()
        if isinstance(data, io.BytesIO):
            record, dtype = records.blob(iter([output.getbuffer()])), ""
            descriptors = list(extensions) or None
            info = _StorageInfo(name, record.start, record.length, descriptors)
        else:
            dtype, shape = dtype_name(data.dtype), tuple(data.shape)
            blocks = storages.blocks(item.index.fqn, data)
            record = records.tensor(dtype, shape, blocks)
            head, tail = map(len, frame(dtype, shape))
            info = _StorageInfo(name, record.start - head, head + record.length + tail)
        return WriteResult(item.index, info.length, StoredItem(info, *record, dtype))


class _OpenBytesIO(io.BytesIO):
    """Stays readable when an extension closes it."""

    def close(self) -> None:
        pass


def _size(item: WriteItem) -> int:
    """Bytes of a tensor; -1 for an object."""
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return -1
    data = item.tensor_data
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


def is_storable(item: WriteItem, data: torch.Tensor) -> bool:
    """Whether the elements are written as they are. torch pickles other tensors, as in stock."""
    planned = item.tensor_data
    return (
        is_plain(data)
        and not dtype_problem(data.dtype)
        and planned is not None
        and planned.properties.dtype == data.dtype
    )


def name_files(
    file_name: Callable[[int, int], str],
    ranks: int,
    files: int,
    reserved: Sequence[str],
) -> list[tuple[str, ...]]:
    """The files of each rank. CheckpointingException for unsafe or repeated names."""
    seen = dict.fromkeys(reserved, "the checkpoint's own")
    names = []
    for rank in range(ranks):
        own = []
        for number in range(files):
            name: Any = file_name(rank, number)
            call = f"file_name({rank}, {number})"
            safe = isinstance(name, str) and not unsafe_names([name])
            if not safe or name.startswith(_OWN_PREFIX):
                raise CheckpointingException(
                    f"{call} gives {name!r}, which cannot be a file of the checkpoint"
                )
            if name in seen:
                raise CheckpointingException(
                    f"{call} gives {name!r}, as {seen[name]}: names must be unique"
                )
            seen[name] = call
            own.append(name)
        names.append(tuple(own))
    return names
