"""One rank's part of a save through torch DCP: its items, resolved one by one, as records."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import (
    _StorageInfo,
    _StorageWriterTransforms,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megackpt.backends.torch_dist.distcp_writer import Records, spread
from megackpt.backends.torch_dist.record_frame import frame
from megackpt.errors import CheckpointingException, StorageError
from megackpt.planning import manifest as planned
from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import ITEMSIZE, TensorEntry, TensorMeta
from megackpt.staging.source import TensorSource, byte_view, resolved, synchronize
from megackpt.state.storable import place_problem
from megackpt.storage import Storage, unsafe_names

Resolved = torch.Tensor | io.BytesIO

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_OWN_PREFIX = ".megackpt-"


@dataclass(frozen=True)
class Assignment:
    """The save and the files of one rank, which the coordinator sends in ``plan.storage_data``.

    Planners that cache plans pass an old plan to ``write_data``, with the assignment of an old
    save. The new one was unpickled nevertheless: so the one that counts is the latest that was
    unpickled in this process.
    """

    directory: str
    save_id: str
    rank: int
    files: tuple[str, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.directory, self.save_id, self.rank, self.files)

    def __deepcopy__(self, _memo: Any) -> Assignment:
        return self

    def receive(self) -> None:
        _received[self.directory, self.rank] = self


_received: dict[tuple[str, int], Assignment] = {}


def _unpickled(*fields: Any) -> Assignment:
    assignment = Assignment(*fields)
    assignment.receive()
    return assignment


def take_assignment(
    plan: SavePlan,
    directory: str,
    rank: int | None,
) -> Assignment:
    """The latest assignment that this rank received for this directory."""
    sent = plan.storage_data if isinstance(plan.storage_data, Assignment) else None
    if rank is None:
        rank = sent.rank if sent else 0
    found = _received.pop((directory, rank), None)
    if found is None:
        other = ""
        if sent and sent.directory != directory:
            other = f", but for {sent.directory}"
        raise CheckpointingException(
            f"rank {rank} received no plan for a save to {directory}{other}: all ranks must name "
            "the same checkpoint_id and use this writer, and the planner must keep a plan's "
            "storage_data"
        )
    return found


@dataclass(frozen=True, slots=True)
class StoredItem:
    """Where one item was written."""

    file: str
    start: int
    length: int
    """The bytes that the digests are of. A record may have more, before and after."""
    digests: bytes
    dtype: str = ""
    """Of a plain tensor; empty for records that hold other bytes."""
    header: int = 0
    footer: int = 0
    extensions: tuple[str, ...] = ()

    def storage_info(self) -> _StorageInfo:
        """The record, for stock's reader."""
        return _StorageInfo(
            self.file,
            self.start - self.header,
            self.header + self.length + self.footer,
            list(self.extensions) or None,
        )


class Resolver(Protocol):
    """The part of a SavePlanner that is used while writing."""

    def resolve_data(self, item: WriteItem, /) -> Resolved: ...


class KeptResolver:
    """Resolves items to memory that stays as it is while further items are resolved.

    A planner may convert all its items in one buffer. What is not memory of the state dict is
    copied, as items are written by several threads.
    """

    def __init__(self, planner: Resolver) -> None:
        self._planner = planner
        state = getattr(planner, "state_dict", None)
        self._state: dict[str, Any] = state if isinstance(state, dict) else {}

    def resolve_data(self, item: WriteItem) -> Resolved:
        data = self._planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            if not is_plain(data):
                return data  # It is pickled before the next item is resolved.
            address = data.untyped_storage().data_ptr()
            for tensor in local_tensors(self._state.get(item.index.fqn)):
                if tensor.untyped_storage().data_ptr() == address:
                    return data
        return copy_to_host(data)


def copy_to_host(data: Resolved) -> Resolved:
    """A copy in new host memory. Data of other types are refused when they are written."""
    if isinstance(data, io.BytesIO):
        return io.BytesIO(data.getvalue())
    given: Any = data
    copy: Resolved = given
    if hasattr(given, "detach"):
        copy = given.detach().to("cpu", copy=True)
    return copy


def local_tensors(value: object) -> list[torch.Tensor]:
    """The plain tensors of this rank in a value of a state dict."""
    if not isinstance(value, torch.Tensor):
        return []
    if hasattr(value, "local_shards"):  # torch's ShardedTensor
        return [shard.tensor for shard in value.local_shards()]
    local = value.to_local() if hasattr(value, "to_local") else value
    return [local] if is_plain(local) else []


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is its elements."""
    return type(tensor) in _PLAIN_TYPES and tensor.layout is torch.strided


def synchronize_stream() -> None:
    """Wait for the current CUDA stream: other threads are about to read the tensors."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()


class ItemWriter:
    """Writes the items of one rank durably, one thread for each file.

    ``transforms`` are called in order; the first that passes an item through extensions counts.
    Errors name the rank, the file and the item.
    """

    def __init__(
        self,
        root: Storage,
        assignment: Assignment,
        resolver: Resolver,
        transforms: Sequence[_StorageWriterTransforms],
    ) -> None:
        self._root = root
        self._assignment = assignment
        self._resolver = resolver
        # torch's own class without extensions does nothing.
        self._transforms = [
            each
            for each in transforms
            if type(each) is not _StorageWriterTransforms or each.extensions
        ]
        self._resolving = threading.Lock()  # Planners are not thread-safe.
        self._failed = threading.Event()

    def write(self, items: Sequence[WriteItem]) -> list[WriteResult]:
        files = self._assignment.files
        bins = spread([_size(item) for item in items], len(files))
        jobs = []
        with ThreadPoolExecutor(len(files), "megackpt-write") as pool:
            for name, rows in zip(files, filter(None, bins), strict=False):
                own = [items[row] for row in rows]
                jobs.append(pool.submit(self._write_file, name, own))
        for job in jobs:
            error = job.exception()
            if error is not None and not isinstance(error, _Stopped):
                raise error
        return [result for job in jobs for result in job.result()]

    def _write_file(self, name: str, items: Sequence[WriteItem]) -> list[WriteResult]:
        at = ""
        try:
            results = []
            with self._root.create(name) as writer:
                writer.expect(sum(max(_size(item), 0) for item in items))
                records = Records(writer)
                for item in items:
                    if self._failed.is_set():
                        raise _Stopped
                    at = f" at {item.index.fqn!r}"
                    results.append(self._write_item(records, name, item))
                at = ""
                records.end()
            return results
        except _Stopped:
            raise
        except BaseException as error:
            self._failed.set()
            text = f"{type(error).__name__}: {error}"
            kind: type[CheckpointingException] = CheckpointingException
            if isinstance(error, CheckpointingException):
                kind, text = type(error), str(error)
            elif isinstance(error, OSError):
                kind = StorageError
            file = f"{self._root.location}/{name}"
            rank = self._assignment.rank
            raise kind(f"rank {rank} cannot write {file}{at}: {text}") from error

    def _write_item(
        self,
        records: Records,
        name: str,
        item: WriteItem,
    ) -> WriteResult:
        with self._resolving:
            data, extensions = self._resolve(item)
        if isinstance(data, bytes):
            place = records.blob(iter([memoryview(data)]))
            stored = StoredItem(name, *place, extensions=extensions)
        else:
            synchronize([data])
            dtype, shape = str(data.dtype).removeprefix("torch."), tuple(data.shape)
            place = records.tensor(dtype, shape, _blocks(data, dtype))
            head, tail = frame(dtype, shape)
            stored = StoredItem(name, *place, dtype, len(head), len(tail))
        size = stored.header + stored.length + stored.footer
        return WriteResult(item.index, size, stored)

    def _resolve(self, item: WriteItem) -> tuple[torch.Tensor | bytes, tuple[str, ...]]:
        """A plain tensor, or the bytes to write and the extensions that they went through."""
        data = self._resolver.resolve_data(item)
        if not isinstance(data, Resolved):
            raise CheckpointingException(
                f"the planner resolves it to {type(data)}, not to a tensor or BytesIO"
            )
        if isinstance(data, torch.Tensor):
            _check_shape(item, data)
        output = _OpenBytesIO()
        stream: Any = output
        extensions: Sequence[str] = ()
        for transforms in self._transforms:
            stream, extensions = transforms.transform_save_stream(item, output)
            if extensions:
                break
        if not extensions:
            if isinstance(data, io.BytesIO):
                return data.getvalue(), ()
            if _is_storable(item, data):
                return data, ()
            stream = output
        if isinstance(data, io.BytesIO):
            stream.write(data.getvalue())
        else:
            torch.save(_compact(data), stream)
        stream.close()
        return output.getvalue(), tuple(extensions)


class _Stopped(Exception):
    """Another thread of this rank failed."""


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


def _check_shape(item: WriteItem, data: torch.Tensor) -> None:
    expected = item.tensor_data and tuple(item.tensor_data.chunk.sizes)
    if tuple(data.shape) != expected or item.tensor_data is None:
        raise CheckpointingException(
            f"the planner resolves it to shape {tuple(data.shape)}, and planned {expected}"
        )
    problem = place_problem(data, tuple(item.tensor_data.size))
    if problem:
        raise CheckpointingException(
            f"{problem} (torch {torch.__version__} may not know the protocol)"
        )


def _is_storable(item: WriteItem, data: torch.Tensor) -> bool:
    """Whether the elements are written as they are. torch pickles other tensors, as in stock."""
    name = str(data.dtype).removeprefix("torch.")
    if not is_plain(data) or data.is_quantized or name not in ITEMSIZE:
        return False
    planned = item.tensor_data
    return planned is not None and planned.properties.dtype == data.dtype


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, without the rest of a larger storage: torch.save would store it."""
    host = tensor.detach().cpu()
    if type(host) is not torch.Tensor or host.layout is not torch.strided:
        return host
    return host if host.untyped_storage().nbytes() == host.nbytes else host.clone()


def _blocks(tensor: torch.Tensor, dtype: str) -> Iterator[memoryview]:
    """The elements in C order, in blocks of host memory."""
    value = resolved(tensor)
    if value.is_cpu and value.is_contiguous():
        return iter([byte_view(value)])
    shape = tuple(tensor.shape)
    whole, row = Boxes.of([Box.whole(shape)]), np.zeros(1, np.int32)
    entry = TensorEntry("", TensorMeta(shape, dtype))
    plan = planned.SavePlan(0, (entry,), (None,), row, whole, row)
    return TensorSource(plan, [value], whole).blocks(0)


def name_files(
    file_name: Callable[[int, int], str],
    ranks: int,
    files: int,
    reserved: Sequence[str],
) -> list[tuple[str, ...]]:
    """The files of each rank. CheckpointingException for unsafe or repeated names."""
    seen = dict.fromkeys(reserved, "the checkpoint's own")
    names: list[tuple[str, ...]] = []
    for rank in range(ranks):
        own = tuple(file_name(rank, number) for number in range(files))
        names.append(own)
        for number, name in enumerate(own):
            call = f"file_name({rank}, {number})"
            given: object = name
            if (
                not isinstance(given, str)
                or unsafe_names([given])
                or given.startswith(_OWN_PREFIX)
            ):
                raise CheckpointingException(
                    f"{call} gives {name!r}, which cannot be a file of the checkpoint"
                )
            if name in seen:
                raise CheckpointingException(
                    f"{call} gives {name!r}, as {seen[name]}: names must be unique"
                )
            seen[name] = call
    return names
