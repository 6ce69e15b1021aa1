"""Reading foreign ``.metadata``: only torch's and Megatron's classes, as inert records.

Source of names: torch.distributed.checkpoint (metadata, filesystem, planner) and, for the
additions of Megatron-Core up to 0.15, megatron.core.dist_checkpointing.strategies.torch.
"""

from __future__ import annotations

import posixpath
from functools import partial
from typing import Any

from megackpt.errors import CorruptCheckpoint, UntrustedClass
from megackpt.serialization.unpickler import Rule, charge_items, charge_keys, unpickle

_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    # Where torch had them up to 2.2.
    "torch.distributed._shard.sharded_tensor.metadata": (
        "TensorProperties",
        "MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint.planner": (
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
    ),
    "torch.distributed.tensor.placement_types": (
        "Shard",
        "Replicate",
        "Partial",
        "_StridedShard",
    ),
    "megatron.core.dist_checkpointing.strategies.torch": (
        "MCoreSavePlan",
        "MCoreMetadata",
    ),
}
_DIMENSIONS = 64


class Record:
    """An object of a known class: the class's name and what the pickle sets as its state."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = None

    def field(self, name: str, default: Any = None) -> Any:
        if type(self.state) is not dict:
            return default
        return self.state.get(name, default)


def _make(kind: str, *_: Any) -> Record:
    if kind == "MCoreMetadata":
        return Record("Metadata")
    return Record(kind)


def _build(record: Record, state: Any) -> None:
    record.state = state


class Size(tuple[int, ...]):
    """A torch.Size whose numbers are known to be some."""

    __slots__ = ()


def checked_size(numbers: Any = ()) -> Size:
    """Raise CorruptCheckpoint for numbers that are no size of a tensor."""
    sane = len(numbers) <= _DIMENSIONS
    for number in numbers[:_DIMENSIONS]:
        sane = sane and type(number) is int and 0 <= number < 1 << 63
    if not sane:
        raise CorruptCheckpoint("it holds a size that no tensor has")
    return Size(numbers)


def _path(*parts: str) -> str:
    return posixpath.join("", *parts)


def _layout(name: Any) -> str:
    if type(name) is not str:
        raise CorruptCheckpoint("it names a layout by something that is not a text")
    return name


def _find(module: str, name: str) -> Rule:
    kind, _, member = name.partition(".")
    if kind in _RECORDS.get(module, ()) and "." not in member:
        if member:  # of an enum, as Python 3.11.0 to 3.11.3 names it
            return Rule(_make(kind))
        # A new list, for a value that no other rule has.
        return Rule([module, name], partial(_make, name), _build)
    if module == "torch" and name == "Size":
        return Rule(checked_size, checked_size)
    if module == "torch":
        return Rule(name)  # a dtype; its name is checked where it is used
    if (module, name) == ("torch.serialization", "_get_layout"):
        return Rule(_layout, _layout)
    # Python 3.13 names the second of these modules.
    if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
        return Rule(_path, _path)
    if (module, name) == ("collections", "OrderedDict"):
        return Rule(dict, dict, charge=charge_keys)
    if (module, name) == ("builtins", "set"):
        return Rule(set, set, charge=charge_items)
    raise UntrustedClass(
        f".metadata names {module}.{name}, which no checkpoint's table of contents needs: "
        "it was not run, and the checkpoint was not read"
    )


def read_metadata(data: bytes) -> Record:
    """The Metadata record of a ``.metadata`` file. Raises CorruptCheckpoint or UntrustedClass."""
    root: object = unpickle(data, _find)
    if not isinstance(root, Record) or root.kind != "Metadata":
        raise CorruptCheckpoint(".metadata holds no Metadata of torch DCP")
    if type(root.state) is not dict:
        raise CorruptCheckpoint(".metadata holds a Metadata without fields")
    return root
