"""One torch.save file: whole tensors, objects and the common state, as plain ``torch.load`` opens them.

    model.pt    {key: tensor, ..., "megackpt.state": {name: blob as a uint8 tensor}}; see members.py

A format for export: one process, that of a conversion, writes the whole file. Reads any file of
torch.save's, by its path, also nested states and views; and the ``pytorch_model.bin`` of Hugging
Face's directories. No pickle is run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from megackpt.backends import object_files, shared_files, weight_maps
from megackpt.backends.archives import Checked, Member, aligned_start
from megackpt.backends.base import (
    Backend,
    Finished,
    Layout,
    Properties,
    Source,
    Target,
)
from megackpt.backends.ranges import read_raw
from megackpt.backends.torch_file import contents, members
from megackpt.errors import BackendError, CorruptCheckpoint, NotACheckpoint
from megackpt.planning.box import Box, Int64
from megackpt.planning.manifest import (
    COMMON,
    OBJECT,
    Bool,
    LoadPlan,
    Location,
    Manifest,
    SavePlan,
    TensorEntry,
    TensorMeta,
    WriteResult,
)
from megackpt.storage import SingleFile, Storage, digest_blocks

_BIN = "pytorch_model.bin"


class TorchFile(Backend):
    """No options."""

    properties: ClassVar[Properties] = Properties(
        "torch", 1, frozenset({1}), whole_tensors=True, export_only=True
    )

    def layout(self, ranks: int, manifest: Manifest) -> Layout:  # noqa: ARG002 - always one file
        """Raises BackendError for names that the file could not tell apart."""
        members.object_names(manifest)
        return Layout([members.NAME], members.tensor_locations(manifest))

    def unlisted_files(self, root: Storage, manifest: Manifest) -> Collection[str]:
        index, _ = _files_in(root)
        return [index] if index else [] if manifest.files else [members.NAME]

    def write(self, root: Storage, plan: SavePlan, data: Source) -> WriteResult:
        """Write the tensors where ``layout`` puts them, then the objects. The plan is of everything."""
        found = shared_files.write_tensors(root, plan, data)
        located = [place for place in plan.places or () if place is not None]
        end = max((place.start + place.length for place in located), default=0)
        objects = [
            row
            for row, number in enumerate(plan.tensor.tolist())
            if plan.tensors[number].meta.is_object
        ]
        with root.update(members.NAME) as updater:
            for number, row in enumerate(objects, len(located)):
                # An object comes after all others, because its size is known only now.
                blob = b"".join(data.blocks(row))
                start = aligned_start(
                    Member(members.payload_name(number), len(blob), end)
                )
                updater.write_at(start, [memoryview(blob)])
                end = start + len(blob)
                place = Location(members.NAME, start, len(blob))
                found[row] = shared_files.Written(
                    place, digest_blocks(memoryview(blob))
                )
        return shared_files.result(plan, found)

    def finish(self, root: Storage, manifest: Manifest) -> Finished:
        """Read every payload once, for digests and for the checksums of the archive."""
        manifest, _ = shared_files.merge_pieces(
            manifest, members.tensor_locations(manifest)
        )
        every = np.arange(len(manifest.chunks), dtype=np.int64)
        manifest, checksums = shared_files.compute_digests(
            root, manifest, every, crc=True
        )
        members.write_archive(root, manifest, checksums)
        return Finished(manifest)

    def raw_chunks(self, manifest: Manifest) -> Bool:
        # What lies otherwise than in C order, or is no blob yet, has no bytes of its own in the manifest.
        chunks = manifest.chunks
        is_object = np.array(
            [entry.meta.is_object for entry in manifest.tensors], np.bool_
        )[chunks.tensor]
        made: Bool = (chunks.length == 0) & (is_object | (chunks.boxes.volume > 0))
        return ~made if manifest.encoding == "native" else np.ones_like(made)

    def decoded_bytes(self, manifest: Manifest) -> Int64:
        itemsize = np.array(
            [entry.meta.itemsize for entry in manifest.tensors], np.int64
        )
        sizes: Int64 = manifest.chunks.boxes.volume * itemsize[manifest.chunks.tensor]
        return np.where(self.raw_chunks(manifest), 0, sizes)

    def recognises(self, root: Storage) -> bool:
        index, files = _files_in(root)
        if index:
            return weight_maps.looks_right(root, index)
        try:
            with root.open(files[0]) as reader:
                return contents.looks_right(reader)
        except (IndexError, CorruptCheckpoint, FileNotFoundError):
            return False

    def read_manifest(self, root: Storage) -> Manifest:
        index, files = _files_in(root)
        if not index and not files:
            raise NotACheckpoint(
                f"{root.location} has no torch.save file of a name that is known"
            )
        told = weight_maps.read(root, index) if index else {}
        held = {
            file: contents.held_in(root, file)
            for file in files or dict.fromkeys(told.values())
        }
        if index:
            keys = [(key, file) for file, part in held.items() for key in part.tensors]
            weight_maps.check(f"{root.location}/{index}", told, keys)
        return self._manifest(root, held)

    def _manifest(self, root: Storage, held: Mapping[str, contents.Held]) -> Manifest:
        found = [shard for file, part in held.items() for shard in _shards(file, part)]
        rests = [file for file, part in held.items() if part.rest]
        if len(rests) + sum(entry.is_common for entry, _, _, _ in found) > 1:
            raise BackendError(
                f"{root.location}: {' and '.join(rests)} hold more than tensors, and there is one common state only: "
                "save what is no tensor in one place"
            )
        # What is no tensor becomes a blob when it is read.
        found += [
            (COMMON, Box((), ()), Location(file, held[file].pickle, 0), True)
            for file in rests
        ]
        manifest = shared_files.manifest_from_files(
            root,
            [(entry, box, place) for entry, box, place, _ in found],
            (self.properties.name, self.properties.version),
        )
        made = np.array([made for _, _, _, made in found], np.bool_)
        length = np.where(made, 0, manifest.chunks.length)
        encoding = "native" if made.any() else "raw"
        return replace(
            manifest, chunks=replace(manifest.chunks, length=length), encoding=encoding
        )

    def read(self, root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
        raw = self.raw_chunks(plan.manifest)[plan.chunk]
        read_raw(root, plan.take(raw), into, verify)
        for item in plan.take(~raw).rows():
            if item.entry.meta.is_object:
                into.blob(
                    item.target, contents.common_blob(root, item.chunk.location.file)
                )
            else:
                contents.read_view(root, item, into)

    def verify_native(self, root: Storage, manifest: Manifest) -> list[str] | None:
        problems, unchecked = [], False
        for name in manifest.files:
            try:
                with root.open(name) as reader:
                    whole = Checked(reader, 0, reader.size)
                    problems += [
                        f"{problem}: {root.location}/{name}"
                        for problem in whole.damage()
                    ]
                    unchecked = unchecked or whole.unchecked
            except (CorruptCheckpoint, FileNotFoundError) as error:
                problems.append(f"{root.location}/{name}: {error}")
        return None if unchecked and not problems else problems


def _shards(
    file: str, held: contents.Held
) -> Iterator[tuple[TensorEntry, Box, Location, bool]]:
    """The tensors and objects of one file. True: there are no bytes that are just this; the place is its pickle's."""
    for key, found in held.tensors.items():
        meta, place = TensorMeta(found.shape, found.dtype), held.places[key]
        size = math.prod(meta.shape) * meta.itemsize
        yield (
            TensorEntry(key, meta),
            Box.whole(meta.shape),
            place or Location(file, held.pickle, size),
            place is None,
        )
    for name, place in held.objects.items():
        entry, box = _named(name)
        yield entry, box, place, False


def _named(name: str) -> tuple[TensorEntry, Box]:
    """The object that ``unique_key`` calls so, and which shard of it this is."""
    key, _, cell = name.rpartition("/")
    offset, shape = object_files.parse_shard(f"{cell}.pt") or ((), ())
    return TensorEntry(key if shape else name, TensorMeta(shape, OBJECT)), Box(
        offset, (1,) * len(offset)
    )


def _files_in(root: Storage) -> tuple[str, list[str]]:
    """The index of several files, or else the one file that is meant (in a list; or none)."""
    names = root.list()
    if isinstance(root, SingleFile):
        return "", names
    if members.NAME in names:
        return "", [members.NAME]
    # Where the same weights are there as safetensors, too, they are read from these.
    if any(name.endswith(".safetensors") for name in names):
        return "", []
    index = _BIN + weight_maps.ENDING
    return (index, []) if index in names else ("", [_BIN] if _BIN in names else [])
