"""Checkpoints of torch_checkpointing: for each rank and item a torch.save file of the rank's part.

    metadata.pkl       plain dicts: item -> path of a tensor -> its sharding, and the ranks with it
    model_0.pt, ...    what rank 0 has of the item ``model``

A tensor has the name ``model.layers.0.weight``. All else in the file of a rank is an object with
the name of the file (``optimizer_0``), because only the ranks know whether it is the same on all. A
file of an item that ``metadata.pkl`` does not describe is such an object with all of its content.

Source: torch_checkpointing 0.1.1, ``distributed_metadata.py``, ``dtensor_metadata.py``,
``default_metadata.py``, ``checkpoint_layout.py``.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

from megackpt import limits
from megackpt.backends import torch_reader
from megackpt.backends.base import Properties, ReadOnlyBackend
from megackpt.errors import BackendError, CorruptCheckpoint, join_truncated
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    COMMON_KEY,
    OBJECT,
    Location,
    Manifest,
    TensorEntry,
    TensorMeta,
)
from megackpt.serialization.unpickler import unpickle
from megackpt.storage import Storage

logger = logging.getLogger("megackpt.backends")

METADATA = "metadata.pkl"
_VERSION = "2.0"
_KIND = "TorchSerialization"
_DIMENSIONS = 64
_START = 4096
"""Bytes. The first key of the metadata of an item is in the first bytes of the file."""


class TorchCheckpointing(torch_reader.TorchReader, ReadOnlyBackend):
    """No options."""

    properties: ClassVar[Properties] = Properties(
        "torch_checkpointing", 2, frozenset({2}), read_only=True
    )
    local_parts = True

    def name_in_file(self, key: str) -> str:
        return _name_in_file(key)

    def recognises(self, root: Storage) -> bool:
        size = root.size(METADATA)
        if not size:
            return False
        start = bytearray(min(_START, size))
        with root.open(METADATA) as reader:
            reader.read_into(0, [memoryview(start)])
        return start.startswith(b"\x80") and b"nested_path_to_metadata" in start

    def read_manifest(self, root: Storage) -> Manifest:
        where = f"{root.location}/{METADATA}"
        data = root.get(METADATA, limits.TORCH_PICKLE_BYTES)
        try:
            described = unpickle(data, _refuse)
        except CorruptCheckpoint as error:
            raise CorruptCheckpoint(f"{where}: {error}") from error
        try:
            version = described["version"]
            if version != _VERSION:
                raise BackendError(f"{where} has version {version!r}, not {_VERSION}")
            found = list(_contents(root, described))
        except (
            KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError
        ) as error:  # fmt: skip
            raise CorruptCheckpoint(f"{where} is damaged: {error!r}") from error
        name = self.properties.name, self.properties.version
        manifest = torch_reader.manifest_of(root, found, name)
        return replace(manifest, tables=(METADATA,))


def _refuse(module: str, name: str) -> Any:
    raise CorruptCheckpoint(f"it names {module}.{name}, and has plain values only")


def _contents(
    root: Storage, described: Mapping[str, Any]
) -> Iterator[torch_reader.Shard]:
    """The shards of tensors and objects. Raises BackendError for kinds that cannot be read."""
    world = described["world_size"]
    unread = set(root.list()) - {METADATA}
    known = set[str]()
    for item, content in described["metadata"].items():
        files: dict[int, dict[str, torch_reader.Shard]] = {}
        layouts = content["rank_to_layout_info"]
        if len(layouts) != world or [*layouts] != [*range(len(layouts))]:
            raise ValueError(
                f"{item!r} does not have the ranks of a world of {world!r}"
            )
        for rank, layout in layouts.items():
            file = _file_of_rank(root, item, rank, layout)
            if root.size(file) is None:
                continue  # a rank may lack an item
            if file in known:
                raise CorruptCheckpoint(
                    f"{root.location}/{file} is the file of several ranks, says {METADATA}"
                )
            known.add(file)
            unread.discard(file.partition("/")[0])
            files[rank] = {}
            shards, _ = torch_reader.read_contents(root, file, local_parts=True)
            for shard in shards:
                files[rank][shard.entry.key] = shard
                if shard.entry.is_common:
                    yield shard._replace(entry=_object(file))
        names = {COMMON_KEY}
        for text, groups in content["nested_path_to_metadata"].items():
            path = [item, *map(str, json.loads(text))]
            names.add(_name_in_file(".".join(path)))
            yield from _shards(root, ".".join(path), groups, files)
        unknown = set().union(*files.values()) - names
        if unknown:
            raise BackendError(
                f"{root.location}: {METADATA} does not describe tensors in the files of {item!r}: "
                f"{join_truncated(sorted(unknown), 5, ', ')}"
            )
    others = []
    for file in sorted(unread):
        size = root.size(file)
        if not file.endswith(".pt"):
            others.append(file)
        elif size is None:
            raise CorruptCheckpoint(f"{root.location}/{file} is not a regular file")
        else:
            place = Location(file, 0, size)
            yield torch_reader.Shard(_object(file), Box((), ()), place, True)
    if others:
        logger.warning(
            "%s: %s does not describe these files, which are not read: %s",
            root.location,
            METADATA,
            join_truncated(others, 8, ", "),
        )


def _file_of_rank(
    root: Storage, item: str, rank: int, layout: Mapping[str, Any] | None
) -> str:
    """The name of a rank's file of an item. Raises BackendError if no torch.save wrote the file."""
    if layout is None:
        return f"{item}_{rank}.pt"
    file: str = layout["file_path"]
    kind = layout["serialization_format"]["type"]
    if kind != _KIND:
        raise BackendError(
            f"{root.location}/{file} has the form {kind}: only {_KIND} is read"
        )
    return file


def _object(file: str) -> TensorEntry:
    return TensorEntry(file.removesuffix(".pt"), TensorMeta((), OBJECT))


def _shards(
    root: Storage,
    key: str,
    groups: Sequence[Mapping[str, Any]],
    files: Mapping[int, Mapping[str, torch_reader.Shard]],
) -> Iterator[torch_reader.Shard]:
    """The different shards of a tensor. Ranks with the same box have the same values."""
    seen = set[Box]()
    for group in groups:
        sharding = group["sharding_metadata"]
        shape = tuple(sharding["data"]["global_shape"])
        if len(shape) > _DIMENSIONS:
            raise ValueError(f"{key!r} has {len(shape)} dimensions")
        meta = TensorMeta(shape, sharding["data"]["dtype"].removeprefix("torch."))
        for rank, box in _boxes(key, sharding, group["ranks"]):
            if box in seen or not (box.volume or 0 in shape):
                continue
            seen.add(box)
            shard = files.get(rank, {}).get(_name_in_file(key))
            found = shard and shard.entry.meta
            if shard is None or found != TensorMeta(box.shape, meta.dtype):
                raise CorruptCheckpoint(
                    f"{root.location}: the file of rank {rank} should have {box} of {key!r} of "
                    f"{meta.dtype}, says {METADATA}, and has {found}"
                )
            yield shard._replace(entry=TensorEntry(key, meta), box=box)
    if not seen:
        raise ValueError(f"no rank has {key!r}")


def _name_in_file(key: str) -> str:
    return key.partition(".")[2] or torch_reader.SINGLE


def _boxes(
    key: str, sharding: Mapping[str, Any], ranks: Sequence[int]
) -> Iterator[tuple[int, Box]]:
    """Each rank's box of a tensor. Raises BackendError for a sharding without one box a rank."""
    data = sharding["data"]
    if sharding["type"] == "default_tensor_v1":
        starts = data["local_offsets"]
        if len(starts) != 1 or any(starts[0]):
            raise BackendError(
                f"{key!r}: a rank's tensor has several shards, or more than its shard: that is "
                "not read"
            )
        box = Box(tuple(data["global_offsets"][0]), tuple(data["local_sizes"][0]))
        yield from ((rank, box) for rank in ranks)
        return
    if sharding["type"] != "DTensorShardingMetadata":
        raise BackendError(f"{key!r}: its sharding {sharding['type']!r} is not known")
    mesh = data["mesh_spec"]["mesh_shape"]
    placements = data["placements"]
    cuts: list[tuple[int, int]] = []  # dimension of the mesh, axis
    for dim, placement in reversed(list(enumerate(placements))):
        kind = placement["type"]
        if kind == "Replicate":
            continue
        axis = placement.get("dim")
        after = [mesh[later] for later, cut in cuts if cut == axis]
        # A strided shard cuts what the shards of later dimensions have left.
        if kind == "StridedShard" and placement["split_factor"] == math.prod(after):
            cuts.append((dim, axis))
        elif kind == "Shard":
            cuts.insert(0, (dim, axis))
        else:
            raise BackendError(
                f"{key!r} is {placement} over dimension {dim} of a mesh {mesh}: that is not one "
                "box a rank"
            )
    ranks = data["mesh_spec"]["mesh_data"]
    if math.prod(mesh) != len(ranks):
        raise ValueError(f"a mesh of {mesh} has {len(ranks)} ranks")
    for rank, place in zip(ranks, product(*map(range, mesh)), strict=True):
        offset = [0] * len(data["global_shape"])
        size = list(data["global_shape"])
        for dim, axis in cuts:
            step = -(-size[axis] // mesh[dim])
            start = min(place[dim] * step, size[axis])
            offset[axis] += start
            size[axis] = min(step, size[axis] - start)
        yield rank, Box(tuple(offset), tuple(size))
