"""The interface between the library and a storage format.

Built-in formats and plug-ins implement the same ``Backend``, and pass the same conformance tests
(``megackpt.testing.BackendSuite``).
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from megackpt import limits
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.box import Box, Int64
from megackpt.planning.manifest import (
    Bool,
    Declarations,
    LoadPlan,
    Location,
    Manifest,
    SavePlan,
    WriteResult,
    digest_rows,
    itemsizes,
    table_of,
)
from megackpt.planning.save_plan import SavePolicy, plan_save
from megackpt.planning.unchanged import StepBefore
from megackpt.storage import Batch, Storage

CONFIG = "metadata.json"
"""The file that names the format of a checkpoint, in Megatron's layout."""

THREADS = 2
"""Threads that one rank reads or writes with. A host has several ranks."""


def run_in_threads(count: int, work: Callable[[Iterator[int]], None]) -> None:
    """Run ``work`` in THREADS threads, which take the numbers below ``count`` from one iterator.

    The first error ends the iterator for all, and is raised.
    """
    numbers = iter(range(count))  # its next() is one step of the interpreter
    if count < 2:
        work(numbers)
        return

    def until_error() -> None:
        try:
            work(numbers)
        except BaseException:
            for _ in numbers:
                pass
            raise

    with ThreadPoolExecutor(THREADS, "megackpt-read") as pool:
        for future in [pool.submit(until_error) for _ in range(THREADS)]:
            future.result()


@cache
def first_user() -> int:
    """The process that first used tensorstore, of this one and the ones it is forked from.

    tensorstore ends a process that is forked from a user of tensorstore, and uses tensorstore.
    """
    return os.getpid()


class Source(Protocol):
    """The data of the rows of a SavePlan, on the host."""

    def blocks(self, row: int) -> Iterator[memoryview]:
        """The row's raw C-order bytes (for an object: its blob), in consecutive blocks.

        Every block but the last is a multiple of DIGEST_BLOCK long. A block is valid until the next
        block of the same row is requested, because staging memory is bounded and reused. Rows may
        be requested in any order and from any thread. A backend may hold the last blocks of several
        rows at a time, to write small ones together: a few MiB at most.
        """

    def views(
        self,
        rows: Sequence[int],
        sizes: Sequence[int],  # noqa: ARG002
    ) -> Sequence[memoryview | None]:
        """For each row its ``sizes`` bytes in C order, in memory that stays.

        None: only ``blocks`` gives the bytes of the row.
        """
        return [None] * len(rows)


class Target(Protocol):
    """The destination of a load. Several threads use it, on disjoint regions."""

    def views(
        self,
        targets: Sequence[int],
        sizes: Sequence[int],  # noqa: ARG002
    ) -> Sequence[memoryview | None]:
        """For each target its ``sizes`` bytes in C order, which the caller fills.

        None: the caller fills the regions of ``open`` instead.
        """
        return [None] * len(targets)

    def open(self, target: int, box: Box) -> NDArray[Any]:
        """A writable array of ``box.shape`` for this region of row ``target``. It may be strided.

        Its items are unsigned integers of the dtype's size (16 bytes: complex128).
        """

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        """The region is filled: copy it to its destination if the array is a staging buffer."""

    def blob(self, target: int, data: bytes) -> None:
        """Take the bytes of an object."""


@dataclass(frozen=True)
class Properties:
    """What the library has to know about a format before it calls it."""

    name: str
    version: int
    """The version that the backend writes."""
    reads: Collection[int]
    """The versions that it reads."""
    gridded: bool = False
    """Rows are cells of a regular grid, or parts of a cell that several ranks share. See
    SavePolicy."""
    whole_tensors: bool = False
    """Each tensor is stored whole, in a file that all ranks write to. See ``Layout.places``."""
    max_item_bytes: int | None = None
    """Rows are cut to at most this many bytes."""
    encoding: str = "raw"
    """"raw": the bytes at the location of a chunk are the elements of its box. "native": only
    ``read`` can decode them."""
    export_only: bool = False
    """One process writes everything: ``convert`` does, ``save`` refuses the format."""
    read_only: bool = False
    """Neither ``save`` nor ``convert`` writes the format. See ReadOnlyBackend."""
    is_delta: bool = False
    """Chunks have what changed since another checkpoint: equal chunks may be other elements."""
    covers: Collection[str] = ()
    """Formats that may recognise a directory of this format, too: this format is meant."""
    follows_links: bool = False
    """Data files may be links to files outside of the directory."""
    reuses: bool = False
    """It has ``write_linking``."""
    indexed: bool = True
    """A save writes our index. False: no file of ours stays in the directory, so there are no
    digests. Such a save replaces no checkpoint, and is not replaced. Object stores always have
    the index."""


@dataclass(frozen=True)
class Layout:
    """Which files a save writes."""

    files: list[str]
    """Files and folders that the save may make in the root of the directory: an upper bound."""
    places: Mapping[str, Location] | None = None
    """Formats of whole tensors: key -> the bytes of the tensor. Ranks find them in
    ``SavePlan.places``."""


@dataclass(frozen=True, eq=False)
class Finished:
    """The result of ``Backend.finish``.

    ``manifest`` describes the chunks as they are stored now. ``files``: name -> content of the
    format's own table of contents. The caller writes them into the staging directory, except for
    the files in ``written``, which ``write`` has made durable.
    """

    manifest: Manifest
    files: Mapping[str, bytes] = field(default_factory=dict)
    written: Collection[str] = ()


@dataclass(frozen=True, eq=False)
class Links:
    """The rows that a save compares with an earlier checkpoint, and the files that it links.

    Attributes:
        rows: for each row of the plan whether it is compared.
        before: what the earlier checkpoint has.
        source: its files; None if it cannot be opened.
        is_raw: whether the chunks are stored as they are.
        refused: why files could not be linked.
        linked: the rows in the files that were linked.
    """

    rows: Bool
    before: StepBefore | None
    source: Storage | None
    is_raw: bool
    refused: list[str] = field(default_factory=list)
    linked: list[int] = field(default_factory=list)

    def link(
        self,
        batch: Batch,
        to: str,
        rows: Sequence[int],
        digests: Callable[[int], bytes],
    ) -> StepBefore | None:
        """The step before, if ``to`` is a link now: all rows of its file have their former digests.

        ``digests`` of a row are the digests that writing it would give.
        """
        before = self.before
        if before is None or self.source is None:
            return None
        chunks = before.bounds[rows]
        if any(digests(row) != before.digests(row) for row in rows):
            return None
        written = before.written
        name = written.files[written.file[chunks[0]]]
        end = int((written.start + written.length)[chunks].max())
        refused = batch.link(self.source, name, to, end * self.is_raw)
        if refused:
            self.refused.append(refused)
            return None
        self.linked.extend(rows)
        return before


WrittenRow = tuple[Location, bytes]
"""Where one row of a plan is, and the digests of its blocks."""


def write_result(plan: SavePlan, written: Mapping[int, WrittenRow]) -> WriteResult:
    """The result of a rank that wrote each row of its plan as one chunk."""
    rows = [written[row] for row in range(len(plan))]
    files, file = table_of(place.file for place, _ in rows)
    return WriteResult.of_rows(
        plan.boxes,
        files,
        file,
        np.array([place.start for place, _ in rows], np.int64),
        np.array([place.length for place, _ in rows], np.int64),
        digest_rows(b"".join(digests for _, digests in rows)),
    )


class Backend(ABC):
    """One storage format.

    An instance holds options only, and serves many saves and loads at the same time. Saves reuse a
    plan if the pickles of their backends are equal. A backend that cannot be pickled plans every
    save.
    """

    properties: ClassVar[Properties]
    """An instance may have its own: options can change the encoding."""

    @abstractmethod
    def layout(self, ranks: int, manifest: Manifest) -> Layout:
        """On the coordinator, after planning: the files of a save by this many ranks.

        ``manifest`` has no locations yet. Raises BackendError, naming the key, for a tensor that
        the format cannot hold.
        """

    @abstractmethod
    def write(self, root: Storage, plan: SavePlan, data: Source) -> WriteResult:
        """On every rank, possibly in a worker process: write the rows of this rank, durably."""

    def write_linking(
        self, root: Storage, plan: SavePlan, data: Source, links: Links
    ) -> WriteResult:
        """As ``write``. Files of ``links.rows`` are linked where that is possible.

        Only called if ``Properties.reuses``.
        """
        raise NotImplementedError(f"{self.properties.name} links no files")

    @abstractmethod
    def finish(self, root: Storage, manifest: Manifest) -> Finished:
        """On the coordinator, when all ranks have written: the format's own table of contents.

        No reader sees the directory yet. Work on data that several ranks share is done here, too.
        """

    @abstractmethod
    def read_manifest(self, root: Storage) -> Manifest:
        """On the coordinator, for a checkpoint without our index: what it holds, and where.

        ``Manifest.tables`` are the files that it was read from. A save that replaces the checkpoint
        removes them with the files of the chunks, so none may belong to another program.
        """

    @abstractmethod
    def read(self, root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
        """On every rank: read the regions of the plan into the target, and only the bytes needed.

        With ``verify``, read whole digest blocks and compare them, if the manifest has digests.
        Raises CorruptCheckpoint naming key, box, file and block.
        """

    def recognises(self, root: Storage) -> bool:
        """Is a complete checkpoint of this format here? Looks at names and first bytes only.

        By default: does ``metadata.json`` name this format?
        """
        try:
            config = read_config(root)
        except CorruptCheckpoint:
            return False
        return (
            config is not None
            and config.sharded_backend == self.properties.name
            and config.sharded_backend_version in self.properties.reads
        )

    def decoded_bytes(self, manifest: Manifest) -> Int64:
        """For each chunk, the bytes of memory that ``read`` takes to decode any part of it.

        0: the bytes at its location are the elements of its box, so code outside of the backend may
        read them. By default 0 for a raw manifest, else the size of the whole chunk.
        """
        chunks = manifest.chunks
        if manifest.encoding == "raw":
            return np.zeros(len(chunks), np.int64)
        itemsize = itemsizes(manifest.tensors)[chunks.tensor]
        sizes: Int64 = chunks.boxes.volume * itemsize
        return np.maximum(1, np.maximum(sizes, chunks.length))

    def verify_native(self, root: Storage, manifest: Manifest) -> list[str] | None:  # noqa: ARG002
        """The problems that the format's own checksums find. None: it has no checksums."""
        return None


class ReadOnlyBackend(Backend):
    """A format of another library: it is loaded and converted, never written.

    ``Properties.read_only`` is True, so no save gets as far as these methods.
    """

    def layout(self, *_: object) -> NoReturn:
        self._refuse()

    def write(self, *_: object) -> NoReturn:
        self._refuse()

    def finish(self, *_: object) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise BackendError(f"{self.properties.name!r} is read, not written")


def plan_for_backend(
    backend: Backend,
    parts: Sequence[Declarations],
    policy: SavePolicy,
    validate: bool = True,
) -> tuple[list[SavePlan], Manifest]:
    """``plan_save`` with the grid, the limits and the places of this format."""
    plans, manifest = plan_save(parts, policy_for_backend(backend, policy), validate)
    if backend.properties.whole_tensors:
        places = backend.layout(len(plans), manifest).places or {}
        plans = [plan.placed(places) for plan in plans]
    return plans, manifest


def policy_for_backend(backend: Backend, policy: SavePolicy) -> SavePolicy:
    """The policy, completed by the format."""
    properties = backend.properties
    return replace(
        policy,
        gridded=properties.gridded,
        max_item_bytes=policy.max_item_bytes or properties.max_item_bytes,
    )


@dataclass(frozen=True)
class CheckpointingConfig:
    """The content of ``metadata.json``: the format, in Megatron's words.

    Source: megatron-core 0.16, ``dist_checkpointing/core.py``. It refuses other fields; 0.19 writes
    the first two only.
    """

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


def config_file(properties: Properties) -> dict[str, bytes]:
    """``metadata.json`` and its content, for formats whose ``finish`` ends with it."""
    config = CheckpointingConfig(properties.name, properties.version)
    return {CONFIG: json.dumps(asdict(config)).encode()}


def read_config(root: Storage) -> CheckpointingConfig | None:
    """The content of ``metadata.json``. Unknown fields are ignored, as by Megatron >= 0.19.

    None if there is no such file, or if it names no format: other programs use the name, too.
    Raises CorruptCheckpoint if the name or the version has the wrong type.
    """
    size = root.size(CONFIG)
    if size is None or size > limits.CONFIG_BYTES:
        return None
    try:
        fields = json.loads(root.get(CONFIG, limit=limits.CONFIG_BYTES))
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or "sharded_backend" not in fields:
        return None
    name = fields["sharded_backend"]
    version = fields.get("sharded_backend_version", 1)
    if not isinstance(name, str) or not isinstance(version, int):
        raise CorruptCheckpoint(
            f"{root.location}/{CONFIG} is damaged: "
            f"{name!r}, {version!r} are not a name and a version"
        )
    return CheckpointingConfig(
        name,
        version,
        fields.get("common_backend", "torch"),
        fields.get("common_backend_version", 1),
    )
