"""Safetensors through torch DCP: a writer and a reader, which ``megackpt.dcp`` exports, too.

The writer makes whole files, from all ranks at once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megackpt.backends.base import Source
from megackpt.backends.safetensors import STEM, Safetensors
from megackpt.backends.safetensors.headers import TensorFile, numbered, refuse_unfit
from megackpt.backends.shared_files import write_tensors
from megackpt.backends.torch_dist.metadata_pickle import Record
from megackpt.backends.torch_dist.metadata_reader import (
    ListedItem,
    Listing,
    RecordPlace,
)
from megackpt.checkpoint import open_checkpoint
from megackpt.dcp import sessions
from megackpt.dcp.item_reader import OpenCheckpoint
from megackpt.dcp.item_writer import (
    Assignment,
    ItemWriter,
    ReadStorages,
    StoredItem,
    is_storable,
)
from megackpt.dcp.storage_reader import FileSystemReader
from megackpt.dcp.storage_writer import FileSystemWriter, Path
from megackpt.dcp.torch_metadata import manifest_of, rows_of
from megackpt.distributed import DEFAULT_TIMEOUT
from megackpt.errors import (
    CheckpointingException,
    CorruptCheckpoint,
    NotACheckpoint,
    join_truncated,
)
from megackpt.planning import manifest as planned
from megackpt.planning.box import Box, Boxes
from megackpt.planning.load_plan import check_whole
from megackpt.planning.manifest import Manifest, TensorEntry, TensorMeta


@dataclass(frozen=True)
class _NumberedFiles(Safetensors):
    """Files with numbers and an index, as torch's writer names them, even where one suffices.

    ``numbers``: key -> number of its file. Without it, all tensors are in one file.
    """

    index: bool = False
    numbers: Mapping[str, int] = field(default_factory=dict)

    def arranged(self, contents: Manifest | planned.SavePlan) -> list[TensorFile]:
        refuse_unfit(contents.tensors)
        parts: dict[int, list[TensorEntry]] = {}
        for entry in contents.tensors:
            parts.setdefault(self.numbers.get(entry.key, 1), []).append(entry)
        return numbered(parts or {1: []}, STEM, max(self.numbers.values(), default=1))


class _PlacedItemWriter(ItemWriter, Source):
    """Writes the items of one rank to their places in files that all ranks write into."""

    def write(self, items: Sequence[WriteItem]) -> list[WriteResult]:
        rank = self._assignment.rank
        if len(self._transforms) > 1:
            raise CheckpointingException(
                f"rank {rank}: safetensors files hold plain tensors, and the planner has "
                "transforms for what is stored"
            )
        self._items = items
        entries = dict.fromkeys(map(_entry, items))
        numbers = {entry: number for number, entry in enumerate(entries)}
        rows = np.array([numbers[_entry(item)] for item in items], np.int32)
        boxes = Boxes.of(map(_box, items))
        grids = (None,) * len(entries)
        plan = planned.SavePlan(rank, tuple(entries), grids, rows, boxes, rows)
        plan = plan.placed(self._assignment.places)
        results = []
        for row, (place, digests) in sorted(
            write_tensors(self._root, plan, self, {}).items()
        ):
            item = items[row]
            info = _StorageInfo(place.file, place.start, place.length)
            dtype = _entry(item).meta.dtype
            stored = StoredItem(info, place.start, place.length, digests, dtype)
            results.append(WriteResult(item.index, place.length, stored))
        return results

    def blocks(self, row: int) -> Iterator[memoryview]:
        """As a Source: the bytes of one item."""
        item = self._items[row]
        storages = ReadStorages()
        try:
            with self._resolving:
                data = self._resolve_data(item)
            if not isinstance(data, torch.Tensor) or not is_storable(item, data):
                raise CheckpointingException(
                    f"the planner resolves it to a {type(data).__name__} of another dtype or layout"
                )
            for block in storages.blocks(item.index.fqn, data):
                yield block
                storages.check()
        except Exception as error:
            raise CheckpointingException(
                f"rank {self._assignment.rank} cannot write {item.index.fqn!r}: "
                f"{type(error).__name__}: {error}"
            ) from error


class HuggingFaceStorageWriter(FileSystemWriter):
    """Saves through torch DCP as a Hugging Face directory, which ``from_pretrained`` opens.

    The ranks write their parts of each tensor to its place in ``model-00001-of-0000N.safetensors``.
    Then ``model.safetensors.index.json`` is written. All files appear in one step. The directory
    has neither ``shard-*`` files nor a folder ``sharded``, so it needs no consolidation::

        import torch
        import torch.distributed.checkpoint as dcp
        from megackpt.dcp import HuggingFaceStorageWriter

        state = {"model.norm.weight": torch.ones(4)}
        dcp.save(state, storage_writer=HuggingFaceStorageWriter("exported"))

    The state dict holds tensors only. A file of the same name in the directory is not replaced.
    Commit, ``async_save`` and errors are the same for FileSystemWriter. Planners that cache plans
    are refused from their second save on.

    Args:
        path: the directory, on a file system. A ``checkpoint_id`` of ``save`` takes its place.
        fqn_to_index_mapping: key -> number of its file, from 1 on. None: one file.
        thread_count: no effect. Two threads of each rank write.
        save_distributed: no effect. All ranks write, and only whole tensors are stored.
        enable_consolidation: no effect. The files in ``path`` are whole.
        thread_count_consolidation: no effect.
        token: only None. The directory is not a repository of the Hub.
        index: write ``megackpt.index``, too: with digests for ``verify``, and such that another
            save with an index replaces the checkpoint.
        overwrite: False = raise CheckpointExists instead of replacing. Without ``index`` the writer
            never replaces a checkpoint.
        timeout: see FileSystemWriter.
    """

    _item_writer = _PlacedItemWriter

    def __init__(
        self,
        path: Path,
        fqn_to_index_mapping: dict[str, int] | None = None,
        thread_count: int = 1,
        save_distributed: bool = False,
        enable_consolidation: bool = False,
        thread_count_consolidation: int = 1,
        *,
        token: str | None = None,
        index: bool = False,
        overwrite: bool = True,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__(
            path, thread_count=thread_count, overwrite=overwrite, timeout=timeout
        )
        self._indexed = index
        if token is not None:
            raise CheckpointingException(
                f"{path} is a directory, which needs no token: save, then upload the directory"
            )
        numbers = fqn_to_index_mapping or {}
        wrong = {k: n for k, n in numbers.items() if type(n) is not int or n < 1}
        if wrong:
            raise CheckpointingException(
                f"fqn_to_index_mapping gives numbers of files, from 1 on, not {wrong!r:.200}"
            )
        self.fqn_to_index_mapping = fqn_to_index_mapping
        self.save_distributed = save_distributed
        self.enable_consolidation = enable_consolidation
        self.thread_count_consolidation = thread_count_consolidation
        self._backend = _NumberedFiles(index=index, numbers=dict(numbers))
        self._entries: dict[TensorEntry, None] = {}

    def _assign(
        self, directory: str, plans: Sequence[SavePlan]
    ) -> tuple[Sequence[str], list[Assignment]]:
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise CheckpointingException(
                "a planner that caches plans does not give this writer all tensors, of which it "
                "computes their places: use a planner without enable_plan_caching"
            )
        items = [item for plan in plans for item in plan.items]
        objects = {item.index.fqn for item in items if item.tensor_data is None}
        self._entries = dict.fromkeys(map(_entry, items))
        keys = Counter(entry.key for entry in self._entries)
        numbers = self.fqn_to_index_mapping
        for wrong, text in (
            (objects, "safetensors files hold tensors, not objects: leave out"),
            ({k for k, n in keys.items() if n > 1}, "ranks have several shapes of"),
            (set(keys).difference(numbers or keys), "fqn_to_index_mapping lacks"),
        ):
            if wrong:
                names = join_truncated([*map(repr, sorted(wrong))], separator=", ")
                raise CheckpointingException(f"{text} {names}")
        layout = self._backend.layout(len(plans), Manifest.of(self._entries, ()))
        places = layout.places or {}
        parts = []
        for rank, plan in enumerate(plans):
            own = {item.index.fqn: places[item.index.fqn] for item in plan.items}
            parts.append(Assignment(directory, self.save_id, rank, (), own))
        return layout.files, parts

    def _contents(
        self,
        directory: Path,  # noqa: ARG002
        metadata: Metadata,
        results: list[list[WriteResult]],
    ) -> tuple[Safetensors, Manifest]:
        manifest = manifest_of(metadata, results, None)
        if set(manifest.tensors) != self._entries.keys():
            raise CheckpointingException(
                "the planner's metadata lists other tensors than its plans"
            )
        check_whole(manifest)
        return self._backend, manifest


class HuggingFaceStorageReader(FileSystemReader):
    """Loads safetensors files of Hugging Face and megackpt, and pieces of the ranks of torch DCP.

    Holes and overlaps of pieces are errors, and so are absent files of pieces. Objects are left
    out.

    Args:
        path: the directory, or one file of whole tensors.
        thread_count: no effect. Several ranges are read at a time.
        verify, timeout: see FileSystemReader.
    """

    def __init__(
        self,
        path: Path,
        thread_count: int = 1,
        *,
        verify: bool = True,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__(path, verify=verify, timeout=timeout)
        self.thread_count = thread_count

    def _found(self, rank: int | None) -> OpenCheckpoint:
        opened = open_checkpoint(self.path, moved=self._session.alive)
        manifest, name = opened.manifest, opened.backend.properties.name
        if name != "safetensors" or rank is not None:
            raise NotACheckpoint(
                f"{os.fspath(self.path)} is a checkpoint of format {name}, and the reader for "
                "safetensors reads what all ranks have saved in that format"
            )
        try:
            check_whole(manifest)
        except CorruptCheckpoint as error:
            raise CorruptCheckpoint(f"{opened.storage.location}: {error}") from error
        record = Record("Metadata")
        record.state = {"state_dict_metadata": {}, "storage_data": {}}
        listing = Listing(record)
        rows = rows_of(manifest)
        items = {}
        for chunk_name, row in rows.items():
            key, meta = manifest.tensors[manifest.chunks.tensor[row]]
            if meta.is_object:
                continue
            listing.tensors[key] = meta
            chunk = manifest.chunk(row)
            at = chunk.location
            place = RecordPlace(at.file, at.start, at.length)
            items[chunk_name] = ListedItem(key, chunk.box, place)
        return OpenCheckpoint(
            opened.storage, listing, items, manifest, rows, opened.backend
        )


sessions.READERS[HuggingFaceStorageWriter] = HuggingFaceStorageReader


def _entry(item: WriteItem) -> TensorEntry:
    shape: tuple[int, ...] = ()
    dtype = planned.OBJECT
    if item.tensor_data is not None:
        shape = tuple(item.tensor_data.size)
        dtype = str(item.tensor_data.properties.dtype).removeprefix("torch.")
    return TensorEntry(item.index.fqn, TensorMeta(shape, dtype))


def _box(item: WriteItem) -> Box:
    if item.tensor_data is None:
        return Box((), ())
    chunk = item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))
