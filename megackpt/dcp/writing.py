"""One rank's part of a save through torch DCP: its items, resolved one by one, as records in its files."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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
from megackpt.dcp.memory import PLAIN, Resolved
from megackpt.errors import CheckpointingException, StorageError
from megackpt.planning import manifest as planned
from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import ITEMSIZE, TensorEntry, TensorMeta
from megackpt.staging.source import TensorSource, byte_view, resolved, synchronize
from megackpt.state.storable import place_problems
from megackpt.storage import Storage, unsafe_names

_OURS = ".megackpt-"


@dataclass(frozen=True)
class Ticket:
    """What the coordinator tells a rank by way of its plan: which save this is, and the files that it may make.

    Planners that cache plans hand an old one to ``write_data``, with the ticket of an old save. The new one has
    come all the same: it counts where it arrives, at unpickling.
    """

    directory: str
    save_id: str
    rank: int
    files: tuple[str, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.directory, self.save_id, self.rank, self.files)

    def __deepcopy__(self, _memo: Any) -> Ticket:
        return self

    def arrive(self) -> None:
        _newest[self.directory, self.rank] = self


_newest: dict[tuple[str, int], Ticket] = {}


def _arrived(*fields: Any) -> Ticket:
    ticket = Ticket(*fields)
    ticket.arrive()
    return ticket


def ticket_of(plan: SavePlan, directory: str, rank: int | None) -> Ticket:
    """The ticket of the save that is going on to this directory."""
    told = plan.storage_data if isinstance(plan.storage_data, Ticket) else None
    own = rank if rank is not None else told.rank if told else 0
    found = _newest.pop((directory, own), None)
    if found is None:
        other = (
            f"; it tells of {told.directory} instead"
            if told and told.directory != directory
            else ""
        )
        raise CheckpointingException(
            f"rank {own} was not told of a save to {directory} by the coordinator's plan{other}: all ranks must name "
            "the same checkpoint_id and use this writer, and the planner must not drop a plan's storage_data"
        )
    return found


class Written(NamedTuple):
    """Where one item landed: its record, and within it the bytes that the digests are of.

    ``dtype``: that of a record which is the archive of a plain tensor, with the elements at ``start``; empty for
    bytes as they came.
    """

    file: str
    start: int
    length: int
    digests: bytes
    dtype: str
    around: tuple[int, int]  # bytes of the record before and after those
    through: tuple[str, ...]

    def info(self) -> _StorageInfo:
        """What stock's reader looks for."""
        before, after = self.around
        through = list(self.through) or None
        return _StorageInfo(
            self.file, self.start - before, before + self.length + after, through
        )


class Resolver(Protocol):
    """What is asked for the data of items, which must stay as they are while other items are asked for."""

    def resolve_data(self, item: WriteItem, /) -> Resolved: ...


def settle_all() -> None:
    """Wait for what this thread has asked its device to do: other threads are about to touch it."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()


def write_items(
    root: Storage,
    ticket: Ticket,
    plan: SavePlan,
    source: Resolver,
    transforms: Sequence[_StorageWriterTransforms],
) -> list[WriteResult]:
    """Write the items of a plan durably, one thread to a file. Errors name rank, file and item.

    ``transforms`` are asked in turn: the first that sends an item through extensions counts.
    """
    sizes = [_size(item) for item in plan.items]
    parts = [
        [plan.items[row] for row in rows]
        for rows in spread(sizes, len(ticket.files))
        if rows
    ]
    part = _Part(root, ticket.rank, source, transforms)
    with ThreadPoolExecutor(max(len(parts), 1), "megackpt-write") as pool:
        jobs = [
            pool.submit(part.write, *job)
            for job in zip(ticket.files, parts, strict=False)
        ]
    errors = [
        error
        for job in jobs
        if (error := job.exception()) and not isinstance(error, _Stopped)
    ]
    if errors:
        raise errors[0]
    return [result for job in jobs for result in job.result()]


class _Stopped(Exception):
    """Another thread of this rank has failed."""


class _Part:
    """What the threads of one rank share."""

    def __init__(
        self,
        root: Storage,
        rank: int,
        source: Resolver,
        transforms: Sequence[_StorageWriterTransforms],
    ) -> None:
        self._root = root
        self._rank = rank
        self._source = source
        self._transforms = [
            t
            for t in transforms
            if type(t) is not _StorageWriterTransforms or t.extensions
        ]
        self._asking = threading.Lock()  # planners are not made for threads
        self._failed = threading.Event()

    def write(self, name: str, items: Sequence[WriteItem]) -> list[WriteResult]:
        """One file."""
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
                    results.append(self._item(records, name, item))
                at = ""
                records.end()
            return results
        except _Stopped:
            raise
        except BaseException as error:
            self._failed.set()
            kind = (
                type(error)
                if isinstance(error, CheckpointingException)
                else CheckpointingException
            )
            told = (
                str(error)
                if kind is type(error)
                else f"{type(error).__name__}: {error}"
            )
            kind = StorageError if isinstance(error, OSError) else kind
            raise kind(
                f"rank {self._rank} cannot write {self._root.location}/{name}{at}: {told}"
            ) from error

    def _item(self, records: Records, name: str, item: WriteItem) -> WriteResult:
        with self._asking:
            data, through = self._resolved(item)
        if isinstance(data, torch.Tensor):
            synchronize([data])
            dtype, shape = str(data.dtype).removeprefix("torch."), tuple(data.shape)
            landed = records.tensor(
                dtype, shape, _blocks(data, TensorMeta(shape, dtype))
            )
            head, tail = frame(dtype, shape)
            around = len(head), len(tail)
        else:
            landed = records.blob(iter([memoryview(data)]))
            dtype, around = "", (0, 0)
        written = Written(name, *landed, dtype, around, through)
        return WriteResult(item.index, landed.length + sum(around), written)

    def _resolved(
        self, item: WriteItem
    ) -> tuple[torch.Tensor | bytes, tuple[str, ...]]:
        """A plain tensor, or bytes as they are to stand in the file and the extensions that they went through."""
        data = self._source.resolve_data(item)
        if not isinstance(data, torch.Tensor | io.BytesIO):
            raise CheckpointingException(
                f"the planner resolves it to {type(data)}, which is no tensor or BytesIO"
            )
        if isinstance(data, torch.Tensor):
            _check_shape(item, data)
        buffer = _Kept()
        stream: Any = buffer
        through: Sequence[str] = ()
        for transforms in self._transforms:
            stream, through = transforms.transform_save_stream(item, buffer)
            if through:
                break
        if not through:
            stream = buffer
            if isinstance(data, io.BytesIO):
                return data.getvalue(), ()
            if _is_plain(item, data):
                return data, ()
        if isinstance(data, io.BytesIO):
            stream.write(data.getvalue())
        else:
            torch.save(_compact(data), stream)
        stream.close()
        return buffer.getvalue(), tuple(through)


class _Kept(io.BytesIO):
    """What extensions write into, and close."""

    def close(self) -> None:
        """Stay readable."""


def _size(item: WriteItem) -> int:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return -1
    return (
        item.tensor_data.chunk.sizes.numel()
        * item.tensor_data.properties.dtype.itemsize
    )


def _check_shape(item: WriteItem, data: torch.Tensor) -> None:
    wanted = None if item.tensor_data is None else tuple(item.tensor_data.chunk.sizes)
    if tuple(data.shape) != wanted:
        raise CheckpointingException(
            f"the planner resolves it to {tuple(data.shape)}, and has planned {wanted}"
        )
    problems = (
        []
        if item.tensor_data is None
        else place_problems(data, tuple(item.tensor_data.size))
    )
    if problems:
        raise CheckpointingException(
            f"{problems[0]} (torch {torch.__version__} may not know the protocol)"
        )


def _is_plain(item: WriteItem, data: torch.Tensor) -> bool:
    """Can its elements be written as they are? All else is pickled by torch, as by stock's writer."""
    name = str(data.dtype).removeprefix("torch.")
    dense = data.layout is torch.strided and not data.is_quantized and name in ITEMSIZE
    as_planned = (
        item.tensor_data is not None and item.tensor_data.properties.dtype == data.dtype
    )
    return type(data) in PLAIN and dense and as_planned


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, and without the rest of a larger storage, which torch.save would save too."""
    host = tensor.detach().cpu()
    dense = type(host) is torch.Tensor and host.layout is torch.strided
    return (
        host.clone()
        if dense and host.untyped_storage().nbytes() != host.nbytes
        else host
    )


def _blocks(tensor: torch.Tensor, meta: TensorMeta) -> Iterator[memoryview]:
    value = resolved(tensor)
    if value.is_cpu and value.is_contiguous():
        return iter([byte_view(value)])
    whole, row = Boxes.of([Box.whole(meta.shape)]), np.zeros(1, np.int32)
    one = planned.SavePlan(0, (TensorEntry("", meta),), (None,), row, whole, row)
    return TensorSource(one, [value], whole).blocks(0)


def named_files(
    file_name: Callable[[int, int], str],
    ranks: int,
    files: int,
    reserved: Sequence[str],
) -> list[tuple[str, ...]]:
    """The files of each rank, by the hook. Raises CheckpointingException for names that are not safe or not unique."""
    seen: dict[str, str] = dict.fromkeys(reserved, "the checkpoint's own")
    names: list[tuple[str, ...]] = []
    for rank in range(ranks):
        names.append(tuple(file_name(rank, number) for number in range(files)))
        for number, name in enumerate(names[-1]):
            call = f"file_name({rank}, {number})"
            if not _is_file_name(name):
                raise CheckpointingException(
                    f"{call} gives {name!r}, which cannot be a file of the checkpoint"
                )
            if name in seen:
                raise CheckpointingException(
                    f"{call} gives {name!r}, as {seen[name]}: names must be unique"
                )
            seen[name] = call
    return names


def _is_file_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and not unsafe_names([name])
        and not name.startswith(_OURS)
    )
