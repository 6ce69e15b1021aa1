"""safetensors, in Hugging Face's layout: whole tensors in a few files that its tools open.

    model.safetensors                    all tensors; or, beyond a size,
    model-00001-of-00003.safetensors     some of them, and
    model.safetensors.index.json         which file holds which
    common.pt, <key>.objects/            the common state and objects (see backends/object_files.py)

Ranks write their parts of each tensor to its place, and the coordinator writes the headers at the
end. Any directory or file of this kind is read, and links to files, such as the Hugging Face cache
has. So are directories of files such as ``shard-00001-model-00001-of-00001.safetensors``, in which
each rank of torch DCP has saved its pieces of tensors. No file has the global shapes of these
tensors.
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar

import numpy as np

from megackpt import serialization
from megackpt.backends import object_files, shared_files, weight_maps
from megackpt.backends.base import (
    Backend,
    Finished,
    Layout,
    Properties,
    Source,
    Target,
    write_result,
)
from megackpt.backends.ranges import read_raw
from megackpt.backends.safetensors.headers import (
    FORMATS_OWN,
    METADATA,
    TensorFile,
    arranged,
    joined,
    looks_right,
    piece_offsets,
    read_header,
    refuse_unfit,
)
from megackpt.errors import BackendError, CorruptCheckpoint, NotACheckpoint
from megackpt.planning.box import Box, Int64
from megackpt.planning.manifest import (
    COMMON,
    LoadPlan,
    Location,
    Manifest,
    SavePlan,
    TensorEntry,
    WriteResult,
)
from megackpt.storage import SingleFile, Storage

logger = logging.getLogger("megackpt.backends")

STEM = "model"
WHOLE = f"{STEM}.safetensors"
INDEX = f"{WHOLE}{weight_maps.ENDING}"
_PIECES = "shard-*-model-*-of-*.safetensors"
_NUMBERS = re.compile(r"shard-(\d{1,9})-model-(\d{1,9})-of-(\d{1,9})\.safetensors")
_MAX_GAPS = 8


@dataclass(frozen=True)
class Safetensors(Backend):
    """The backend for safetensors.

    Attributes:
        shards: how many files of about the same size; or else
        max_shard_bytes: how many bytes of tensors a file may have. A larger tensor has a separate
            file.
        index: False leaves out ``megackpt.index``, for a directory that is to be published. Then
            the save has no digests. Such a save replaces no checkpoint, and no save replaces it.
    """

    shards: int | None = None
    max_shard_bytes: int = 5_000_000_000
    index: bool = True

    properties: ClassVar[Properties] = Properties(
        "safetensors", 1, frozenset({1}), whole_tensors=True, follows_links=True
    )

    def __post_init__(self) -> None:
        for option in ("shards", "max_shard_bytes"):
            value = getattr(self, option)
            if value is not None and (type(value) is not int or value < 1):
                raise BackendError(
                    f"{option} is a whole number from 1 on, not {value!r}"
                )
        if type(self.index) is not bool:
            raise BackendError(f"index is True or False, not {self.index!r}")
        properties = replace(type(self).properties, indexed=self.index)
        object.__setattr__(self, "properties", properties)  # see Backend.properties

    def layout(self, ranks: int, manifest: Manifest) -> Layout:  # noqa: ARG002
        """Raises BackendError naming the tensors that the format cannot hold."""
        files = self.arranged(manifest)
        names = [file.name for file in files]
        if names != [WHOLE] or not self.index:
            # Readers prefer a single file to several files with an index, so a foreign single file
            # must not stay. Nor may foreign files be published with the files of this save.
            names += [WHOLE, INDEX]
        for entry in manifest.tensors:
            if entry.meta.is_object:
                names.append(object_files.folder(entry))
        return Layout(names, _places(files))

    def arranged(self, contents: Manifest | SavePlan) -> list[TensorFile]:
        """The tensors over files. Raises as ``layout``."""
        refuse_unfit(contents.tensors)
        tensors = [entry for entry in contents.tensors if not entry.meta.is_object]
        return arranged(tensors, STEM, self.shards, self.max_shard_bytes)

    def write(self, root: Storage, plan: SavePlan, data: Source) -> WriteResult:
        heads = {}
        if root.in_order:
            # Of the tensors of this plan: if other ranks have more, the places do not match.
            heads = {file.name: file.head for file in self.arranged(plan)}
        found = shared_files.write_tensors(root, plan, data, heads)
        for row, number in enumerate(plan.tensor.tolist()):
            entry = plan.tensors[number]
            if entry.meta.is_object:
                box = plan.boxes.row(row, len(entry.meta.shape))
                found[row] = object_files.write_object(
                    root, entry, box, data.blocks(row)
                )
        return write_result(plan, found)

    def finish(self, root: Storage, manifest: Manifest) -> Finished:
        files = self.arranged(manifest)
        places = _places(files)
        merged, several = shared_files.merge_pieces(manifest, places)
        manifest = shared_files.compute_digests(root, merged, several)
        for file in files:
            if root.in_order and file.places:
                continue  # written with its head
            with root.update(file.name) as updater:
                updater.write_at(0, [memoryview(file.head)])
        keys = object_files.key_files(manifest.tensors)
        if files[0].name == WHOLE:
            # A file without tensors has no chunk.
            names = tuple(dict.fromkeys((*manifest.files, WHOLE)))
            return Finished(replace(manifest, files=names), keys)
        total = sum(place.length for place in places.values())
        weight_map = {key: place.file for key, place in places.items()}
        index = {INDEX: weight_maps.emit({"total_size": total}, weight_map)}
        return Finished(manifest, keys | index)

    def decoded_bytes(self, manifest: Manifest) -> Int64:
        # The metadata of a header becomes a blob when it is read.
        common = [entry.is_common for entry in manifest.tensors]
        noted = np.array(common, np.int64) * (manifest.encoding == "noted")
        return noted[manifest.chunks.tensor]

    def recognises(self, root: Storage) -> bool:
        root = root.following()
        index, files = _files_in(root)
        return weight_maps.recognises(root, index, files, looks_right)

    def read_manifest(self, root: Storage) -> Manifest:
        root = root.following()
        index, files = _files_in(root)
        if not index and not files:
            raise NotACheckpoint(
                f"{root.location} has no safetensors file, or several and no index of them"
            )
        weight_map: dict[str, str] = {}
        if index:
            weight_map, _ = weight_maps.read(root, index)
            files = list(dict.fromkeys(weight_map.values()))
        found: list[tuple[TensorEntry, Box, Location]] = []
        noted = []
        for file in files:
            contents = read_header(root, file)
            where = f"{root.location}/{file}"
            offsets = piece_offsets(contents, where)
            is_piece = fnmatch.fnmatchcase(file, _PIECES)
            if is_piece and not offsets and contents.tensors:
                raise CorruptCheckpoint(f"{where} does not say which pieces it holds")
            if (is_piece and isinstance(root, SingleFile)) or (
                not is_piece and any(map(any, offsets.values()))
            ):
                raise NotACheckpoint(
                    f"{where} holds one rank's pieces of tensors, without the others: open the "
                    "directory that torch DCP has saved, with the files of all ranks"
                )
            for entry, place in contents.tensors:
                shape = entry.meta.shape
                offset = offsets.get(entry.key, (0,) * len(shape))
                found.append((entry, Box(offset, shape), place))
            if contents.metadata.keys() - FORMATS_OWN:
                noted.append(file)
        if not index:
            found = joined(found)
            _check_names(root.location, fnmatch.filter(files, _PIECES))
        if index:
            held = [(entry.key, place.file) for entry, _, place in found]
            weight_maps.check(f"{root.location}/{index}", weight_map, held)
        if not isinstance(root, SingleFile):
            found += object_files.objects_in(root)
        # Without a common state: the author's notes, from the first file that has some.
        if any(entry.is_common for entry, _, _ in found):
            noted = []
        if noted:
            found.append((COMMON, Box((), ()), Location(noted[0], 0, 0)))
        name = self.properties.name, self.properties.version
        manifest = shared_files.manifest_from_files(root, found, name)
        tables = (*files, *object_files.key_files(manifest.tensors))
        if index:
            tables += (index,)
        encoding = "raw"
        if noted:
            encoding = "noted"
        return replace(manifest, encoding=encoding, tables=tables)

    def read(self, root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
        root = root.following()
        raw = self.decoded_bytes(plan.manifest)[plan.chunk] == 0
        read_raw(root, plan.take(raw), into, verify)
        for item in plan.take(~raw).rows():
            noted = read_header(root, item.chunk.location.file).metadata
            into.blob(item.target, serialization.dump({METADATA: noted}))


def _check_names(location: str, pieces: Sequence[str]) -> None:
    """See by the names of files with pieces whether some are missing.

    A gap is only a warning: torch DCP writes no file for a rank, or a number, without tensors.
    Raises CorruptCheckpoint for files of several saves.
    """
    matches = map(_NUMBERS.fullmatch, pieces)
    numbers = [tuple(map(int, match.groups())) for match in matches if match]
    counts = {count for _, _, count in numbers}
    if len(counts) > 1:
        raise CorruptCheckpoint(
            f"{location} holds files of several saves: {min(pieces)}, and others that end on "
            f"'-of-' {sorted(counts)}. Move away those of other saves"
        )
    shards = {shard for shard, _, _ in numbers}
    parts = {part for _, part, _ in numbers}
    gaps = []
    for kind, found, last in (("shard", shards, shards), ("model", parts, counts)):
        missing = (n for n in range(1, max(last, default=0) + 1) if n not in found)
        gaps += [f"{kind}-{n:05}" for n in islice(missing, _MAX_GAPS)]
    if gaps:
        logger.warning(
            "%s has no file %s: if a rank wrote one, tensors are missing or cut off",
            location,
            ", ".join(gaps),
        )


def _places(files: Sequence[TensorFile]) -> dict[str, Location]:
    places: dict[str, Location] = {}
    for file in files:
        places.update(file.places)
    return places


def _files_in(root: Storage) -> tuple[str, list[str]]:
    """The index of several files, or else the one file that is meant (in a list; or none).

    Where there are several, the one that transformers takes: it looks for the one file first.
    """
    names = root.list()
    if isinstance(root, SingleFile):
        return "", names
    if WHOLE in names:
        return "", [WHOLE]
    indices = fnmatch.filter(names, f"*.safetensors{weight_maps.ENDING}")
    if INDEX in indices:
        return INDEX, []
    if len(indices) == 1:
        return indices[0], []
    files = fnmatch.filter(names, "*.safetensors")
    pieces = fnmatch.filter(files, _PIECES)
    if indices:
        return "", []
    if pieces or len(files) == 1:
        return "", pieces or files
    return "", []
