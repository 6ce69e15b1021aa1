"""What a format is: four verbs over planning's values and a storage. Plug-ins implement exactly this."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

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
)
from megackpt.planning.save_plan import SavePolicy, plan_save
from megackpt.storage import Storage

CONFIG = "metadata.json"
_CONFIG_BYTES = 1 << 20  # a larger file of this name is not a format's
THREADS = 2
"""With which a rank reads, or writes: a host has several ranks."""


class Source(Protocol):
    """The data of the rows of a SavePlan, on the host. Rows may be asked for in any order, from any thread."""

    def blocks(self, row: int) -> Iterator[memoryview]:
        """The row's raw C-order bytes (for an object: its blob) in consecutive pieces.

        Every piece but the last is a multiple of DIGEST_BLOCK long. A piece is valid until the next one of
        the same row is asked for: staging memory is bounded and reused. A format holds the last pieces of several
        rows at a time, so that small ones are written together: some MiB, no more.
        """


class Target(Protocol):
    """Where the rows of a rank's wanted declarations go. Used from several threads, on disjoint regions."""

    def open(self, target: int, box: Box) -> NDArray[Any]:
        """A writable array of ``box.shape`` for this region; may be strided.

        Its items are unsigned integers of as many bytes (16: complex128), whatever they mean.
        """

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        """The region is filled: hand it on (to a device, or converted) where the array was not the place itself."""

    def blob(self, target: int, data: bytes) -> None:
        """The bytes of an object."""


@dataclass(frozen=True)
class Rewriting:
    """A Target that gets objects in another form: what ``change`` makes of a row and its blob."""

    into: Target
    change: Callable[[int, bytes], bytes]

    def open(self, target: int, box: Box) -> NDArray[Any]:
        return self.into.open(target, box)

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        self.into.close(target, box, filled)

    def blob(self, target: int, data: bytes) -> None:
        self.into.blob(target, self.change(target, data))


@dataclass(frozen=True, eq=False)
class Finished:
    """What ``Backend.finish`` leaves to be done: the manifest of what is stored now, and the small files to put.

    ``files``: name -> content, the last file last. Empty for formats whose data files are complete by
    themselves: then megackpt's own index is the file that completes the directory.
    """

    manifest: Manifest
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointingConfig:
    """The content of ``metadata.json``: which format, in Megatron's words.

    Source: megatron-core 0.16, ``dist_checkpointing/core.py``, which refuses a file with any other field; 0.19
    writes the first two only.
    """

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


def read_config(root: Storage) -> CheckpointingConfig | None:
    """What ``metadata.json`` says. Unknown fields are ignored, as by Megatron >= 0.19.

    None where there is none, or one that names no format: other programs have files of this name, too. Raises
    CorruptCheckpoint where it names a format in a way that makes no sense.
    """
    size = root.size(CONFIG)
    if size is None or size > _CONFIG_BYTES:
        return None
    try:
        fields = json.loads(root.get(CONFIG, limit=_CONFIG_BYTES))
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or "sharded_backend" not in fields:
        return None
    name, version = fields["sharded_backend"], fields.get("sharded_backend_version", 1)
    if not isinstance(name, str) or not isinstance(version, int):
        raise CorruptCheckpoint(
            f"{root.location}/{CONFIG} is damaged: {name!r}, {version!r} are no name and version"
        )
    common = (
        fields.get("common_backend", "torch"),
        fields.get("common_backend_version", 1),
    )
    return CheckpointingConfig(name, version, *common)


class Backend(ABC):
    """One format. Instances are cheap, hold options only, and may be used by many saves and loads.

    Their pickle tells them apart: plans are used again for those that pickle alike. Without one, each save is planned.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    reads: ClassVar[Collection[int]]
    """The versions that it can read."""
    gridded: ClassVar[bool] = False
    """True: items are cells of a regular grid, or pieces of such that ranks share (see SavePolicy); False: any box."""
    max_item_bytes: ClassVar[int | None] = None
    """Items are cut below this: the most that is taken into memory, or put into a file, at a time."""
    encoding: str = "raw"
    """What the manifest of a save is to say of its chunks; see Manifest."""
    export_only: ClassVar[bool] = False
    """True: one process has to write everything. ``convert`` does, and ``save`` refuses the format."""
    follows_links: ClassVar[bool] = False
    """May data files be links to files elsewhere? (See Storage.following; for formats that bear no code.)"""

    @property
    def last_file(self) -> str:
        """The file whose appearance is the commit."""
        return CONFIG

    @abstractmethod
    def files(self, ranks: int, manifest: Manifest) -> list[str]:
        """Top-level names that a save by this many ranks may put into the directory: an upper bound.

        They are written down before the save begins, so that the next one may clean up after a dead one.
        """

    def layout(self, manifest: Manifest) -> Mapping[str, Location] | None:  # noqa: ARG002
        """On the coordinator, of a manifest not yet written: the place of each tensor (by key), known beforehand.

        For formats that keep every tensor whole in a file that all ranks write into: ranks find these places
        in ``SavePlan.places``. None: ranks choose places by themselves.
        """
        return None

    def unlisted(self, root: Storage, manifest: Manifest) -> Collection[str]:  # noqa: ARG002
        """Files of the checkpoint of this manifest that the manifest does not name: tables of contents and the like.

        A save that replaces the checkpoint removes them with it, where they are. So nothing may be named that
        could be another's. Full names; not ``metadata.json``. By default what a save by one rank announces.
        """
        return [name for name in self.files(1, manifest) if name != CONFIG]

    @abstractmethod
    def write(self, root: Storage, plan: SavePlan, data: Source) -> WriteResult:
        """On every rank, maybe in a worker: write this rank's rows durably, and tell where each one landed."""

    @abstractmethod
    def finish(self, root: Storage, manifest: Manifest) -> Finished:
        """On the coordinator, when all ranks have written: the format's own table of contents.

        The caller puts the small files that this returns: those in folders first, together, then the others,
        atomically and in their order. What only the coordinator can do to the data (assemble what several ranks
        wrote pieces of) is done here; the returned manifest tells of the chunks as they are then.
        """

    def renewed(
        self,
        files: Mapping[str, bytes],  # noqa: ARG002
        before: str,  # noqa: ARG002
        now: str,  # noqa: ARG002
    ) -> Mapping[str, bytes] | None:
        """The small files of the save ``before``, for the save ``now`` with the same plan, whose chunks lie just there.

        For formats whose ``finish`` depends on nothing else (but for the save's id) and, where it has left a manifest
        as it was, does nothing else. None: ``finish`` has to be called again.
        """
        return None

    def raw_chunks(self, manifest: Manifest) -> Bool:
        """For each chunk of a manifest of this format: are the bytes at its location those of its box?

        The others can only be fetched, and their digests checked, through ``read``.
        """
        return np.full(len(manifest.chunks), manifest.encoding == "raw")

    def lone_file(self, manifest: Manifest) -> str:  # noqa: ARG002
        """The name of the one file that holds all of this manifest, for formats whose files need no directory.

        BackendError where it takes more than one, or the format keeps directories only.
        """
        raise BackendError(f"the format {self.name!r} takes a directory, not one file")

    def decoded(self, manifest: Manifest) -> Int64:
        """For each chunk, the bytes that come into memory when any part of it is read; 0: no more than the part."""
        return np.zeros(len(manifest.chunks), np.int64)

    def config(self) -> dict[str, bytes]:
        """``metadata.json`` and its content, for formats whose ``finish`` ends with it."""
        fields = asdict(CheckpointingConfig(self.name, self.version))
        return {CONFIG: json.dumps(fields).encode()}

    def recognises(self, root: Storage) -> bool:
        """Is a complete checkpoint of this format here? Cheap: looks at names and first bytes only.

        By default: does ``metadata.json`` say so?
        """
        try:
            config = read_config(root)
        except CorruptCheckpoint:
            return False
        return (
            config is not None
            and config.sharded_backend == self.name
            and config.sharded_backend_version in self.reads
        )

    @abstractmethod
    def read_manifest(self, root: Storage) -> Manifest:
        """On the coordinator, for checkpoints without an index: what is stored, by the format's own account."""

    @abstractmethod
    def read(self, root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
        """On every rank: fetch the plan's regions, only the byte ranges needed, straight into the targets.

        With ``verify`` whole digest blocks are read and checked where the manifest has digests. Raises
        CorruptCheckpoint naming key, box, file and block.
        """

    def extended(self, root: Storage) -> Collection[str]:  # noqa: ARG002
        """The keys of objects that only somebody else's code can decode, which the checkpoint names."""
        return ()

    def verify_native(self, root: Storage, manifest: Manifest) -> list[str] | None:  # noqa: ARG002
        """What is wrong with a checkpoint that has no digests, by the format's own checksums; None: it has none."""
        return None


def plan_in_format(
    backend: Backend,
    parts: Sequence[Declarations],
    policy: SavePolicy,
    validate: bool = True,
) -> tuple[list[SavePlan], Manifest]:
    """``plan_save`` as this format needs it: on its grid, with the places that it knows beforehand."""
    plans, manifest = plan_save(parts, in_format(backend, policy), validate)
    places = backend.layout(manifest)
    return plans if places is None else [
        plan.placed(places) for plan in plans
    ], manifest


def in_format(backend: Backend, policy: SavePolicy) -> SavePolicy:
    """The policy as the format completes it."""
    return replace(
        policy,
        gridded=backend.gridded,
        max_item_bytes=policy.max_item_bytes or backend.max_item_bytes,
    )
