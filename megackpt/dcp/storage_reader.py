"""``megackpt.dcp.FileSystemReader``: torch DCP's reader of megackpt's and foreign checkpoints."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megackpt import tree
from megackpt.backends.torch_dist import METADATA, TorchDist
from megackpt.backends.torch_dist.foreign_manifest import native_manifest
from megackpt.backends.torch_dist.metadata_reader import (
    Listing,
    check_files,
    read_listing,
)
from megackpt.checkpoint import INDEX, absolute, in_run, open_checkpoint
from megackpt.checkpoint.opening import unreplaced
from megackpt.dcp.item_reader import ItemReader, OpenCheckpoint
from megackpt.dcp.storage_writer import Path, is_checkpoint_path
from megackpt.dcp.torch_metadata import ChunkName, metadata_of, rows_of
from megackpt.distributed import DEFAULT_TIMEOUT, Group
from megackpt.errors import (
    CheckpointingException,
    CheckpointReplaced,
    CorruptCheckpoint,
    NotACheckpoint,
    ShardingError,
)
from megackpt.loader.load_operation import load
from megackpt.loader.load_session import LoadSession
from megackpt.planning.manifest import Manifest
from megackpt.state import ShardedObject
from megackpt.storage import LocalStorage, Storage
from megackpt.torch_versions import DROPS_ERRORS_OF_READERS

_log = logging.getLogger("megackpt.dcp")


class FileSystemReader(StorageReader):
    """Loads through ``torch.distributed.checkpoint.load``: our checkpoints, stock's, Megatron's.

    Only the bytes that the planner asks for are read, several ranges at a time, straight into its
    tensors where their memory allows. ``.metadata`` is unpickled without running code: a planner's
    data in it must be plain values. Objects are unpickled by the planner: torch's planner trusts
    them. Records that went through an extension of torch's are read like stock reads them.

    Args:
        path: the directory of a checkpoint or of a run, whose latest complete step is read. A
            ``checkpoint_id`` given to ``load`` takes its place.
        _extension_registry: torch's extensions that records may have gone through (None: torch's
            default).
        verify: compare the data with the digests of the index, if there is one, which reads whole
            blocks of 1 MiB. False reads the exact ranges.
        timeout: how long the storage may not answer; else StorageError.
    """

    def __init__(
        self,
        path: Path,
        _extension_registry: ExtensionRegistry | None = None,
        *,
        verify: bool = True,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__()
        self.path = path
        self.verify = verify
        self.timeout = timeout
        self._session = self._new_session()
        self.load_id = uuid.uuid4().hex
        self._registry = _extension_registry or ExtensionRegistry()
        self._checkpoint: OpenCheckpoint | None = None

    @property
    def checkpoint_id(self) -> Path:
        """The directory, as it was given."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Whether the path can be a checkpoint's."""
        return is_checkpoint_path(checkpoint_id)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_session": None, "_checkpoint": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._session = self._new_session()

    def _new_session(self) -> LoadSession:
        return LoadSession(self.timeout, f"host {socket.gethostname()!r}")

    def reset(self, checkpoint_id: Path | None = None) -> None:
        if checkpoint_id:
            self.path = checkpoint_id
        self._checkpoint, self.load_id = None, uuid.uuid4().hex
        self._session = self._new_session()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """Open the checkpoint. Later reads are from this one, even if it is replaced meanwhile.

        With ``rank``: only what stock's writer stored for this rank without collectives; torch
        sends no messages then. The metadata has no ``all_local_plans``.
        Raises NotACheckpoint, CorruptCheckpoint or UntrustedClass. torch 2.9 to 2.11 drops these
        errors in ``load``, so with these releases they are logged as warnings, too.
        """
        try:
            self._checkpoint = self._open(kwargs.get("rank"))
            items, listing = self._checkpoint.items, self._checkpoint.listing
            return metadata_of(listing, items, self.load_id)
        except CheckpointingException as error:
            if DROPS_ERRORS_OF_READERS:
                _log.warning("%s: %s", type(error).__name__, error)
            raise

    def set_up_storage_reader(
        self,
        metadata: Metadata,  # noqa: ARG002
        is_coordinator: bool,  # noqa: ARG002
        *args: Any,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        if self._checkpoint is None:  # The caller has the metadata from elsewhere.
            rank = None
            if not kwargs.get("use_collectives", True):
                rank = kwargs.get("rank")
            self._checkpoint = self._open(rank)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._opened().manifest.save_id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: see that all ranks have opened the same checkpoint."""
        self.refuse_different([plan.storage_data for plan in plans])
        return plans

    def refuse_different(self, save_ids: Sequence[str]) -> None:
        """CheckpointReplaced unless all ranks have opened the same save."""
        if len(set(save_ids)) > 1:
            raise CheckpointReplaced(
                f"{os.fspath(self.path)} was replaced while it was being opened; ranks see the "
                f"saves {sorted(map(str, set(save_ids)))}: load again. If it happens again, is the "
                "directory shared between all hosts?"
            )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        future: Future[None] = Future()
        try:
            checkpoint = self._opened()

            reader = ItemReader(checkpoint, planner, self._registry, self.verify)
            self._session.read_by(
                checkpoint.storage, checkpoint.manifest, lambda: reader.read(plan)
            )
            future.set_result(None)
        except Exception as error:  # noqa: BLE001 - raised by the caller
            future.set_exception(error)  # type: ignore[arg-type] # torch's annotation
        return future

    def perform(self, state: Any, into: dict[str, Any], group: Group) -> None:
        """Load as ``megackpt.load`` does, by declarations of the state dict."""
        try:
            loaded = load(
                state,
                os.fspath(self.path),
                TorchDist(),
                validate_access_integrity=False,
                strict="raise_unexpected",
                verify=self.verify,
                process_group=group,
                timeout=self.timeout,
            )
        except CorruptCheckpoint as error:
            # torch's planner trusts all objects, and an index does not name their extensions.
            items = self._open(None).items.values()
            is_encoded = any(item.place.through for item in items)
            if is_encoded or type(error) is not CorruptCheckpoint:
                raise ShardingError(str(error)) from error
            raise
        paths = flatten_state_dict(into)[1]
        for path, leaf in tree.walk(state):
            if isinstance(leaf, ShardedObject):
                # As torch's planner does: its paths have the str of each key.
                set_element(into, paths[leaf.key], tree.lookup(loaded, path))

    def _open(self, rank: int | None) -> OpenCheckpoint:
        name = f"opening {os.fspath(self.path)}"
        return self._session.call(name, self._found, rank)

    def _found(self, rank: int | None) -> OpenCheckpoint:
        alive = self._session.alive
        _, found = in_run(self.path, partial(_open, rank=rank, moved=alive), alive)
        return found

    def _opened(self) -> OpenCheckpoint:
        if self._checkpoint is None:
            raise CheckpointingException(
                "read_metadata or set_up_storage_reader opens a checkpoint: call it first"
            )
        return self._checkpoint


def _open(
    directory: Path, rank: int | None, moved: Callable[[], object]
) -> OpenCheckpoint:
    """Open by ``.metadata``; with a rank, by the metadata that it wrote without collectives."""
    if rank is None:
        # Without an index the files have no common id: check that they were not being removed.
        storage, listing, indexed = unreplaced(
            directory,
            partial(_find, directory, moved),
            lambda found: found[2] is not None,
            moved=moved,
        )
    else:
        file = f"__{rank}{METADATA}"
        storage, indexed = _folder_of_rank(directory, file, moved), None
        listing = read_listing(storage, file)
    tensors, listed = listing.tensors, list(listing)
    check_files(storage, listed)
    items = {}
    for item in listed:
        name: ChunkName = item.name, item.box.offset
        if tensors[item.name].is_object:
            name = item.name, None
        items[name] = item
    manifest = indexed or native_manifest(tensors, listed)
    return OpenCheckpoint(storage, listing, items, manifest, rows_of(manifest))


def _find(
    directory: Path, moved: Callable[[], object], storage: Storage
) -> tuple[Storage, Listing, Manifest | None]:
    """The manifest is None without an index."""
    manifest = None
    if storage.size(INDEX) is not None:
        opened = open_checkpoint(directory, moved=moved)
        storage, manifest = opened.storage, opened.manifest
    if storage.size(METADATA) is None:
        raise NotACheckpoint(
            f"{storage.called} is a checkpoint, but not one of torch DCP's (it has no "
            f"{METADATA}): megackpt.load reads it, megackpt.convert makes one of it"
        )
    return storage, read_listing(storage, METADATA), manifest


def _folder_of_rank(directory: Path, name: str, moved: Callable[[], object]) -> Storage:
    """Where a rank of stock's writer saved ``name`` without collectives.

    Refused where the metadata of all ranks is present: all other ranks would use that metadata, and
    wait for this rank.
    """
    try:
        storage = LocalStorage(absolute(directory), moved=moved)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotACheckpoint(
            f"{directory} is not a directory, so it holds no {name}"
        ) from error
    if storage.size(name) is None or storage.size(METADATA) is not None:
        raise NotACheckpoint(
            f"{directory} holds no {name} without a {METADATA} beside it"
        )
    return storage
