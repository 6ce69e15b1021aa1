"""Values as messages between ranks: a JSON text, and behind it the bytes of arrays.

A message runs no code that it names. It makes plain values, arrays of numbers, and objects of the
classes that ``_SENT`` lists or ``allow`` names. Any other object is a blob of
``megackpt.serialization``, which loads plain data, and classes in
``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from enum import Enum
from functools import cache
from importlib import import_module
from itertools import chain
from typing import Any

import numpy as np

from megackpt import errors, limits, serialization
from megackpt.distributed.messages import Payload, join, split
from megackpt.errors import CheckpointingException
from megackpt.planning.manifest.declarations import (
    TensorEntry,
    pack_table,
    unpack_table,
)

COMPRESSED_BYTES = 1 << 20
"""Larger broadcasts are compressed. Rank 0 sends the manifest of a load to each of its children,
and each of them sends it on."""

_SENT = """
megackpt.adapters.param_groups HeldGroup
megackpt.distributed.failures Failure
megackpt.distributed.group _ErrorReply
megackpt.loader.comparison CompareRequest
megackpt.loader.load_operation _RankRequest
megackpt.manager.keep_rules KeepRules
megackpt.manager.local.drain DrainSettings DrainStatus
megackpt.manager.local.drain_records Mark Record
megackpt.manager.local.restore MergedSave PieceTable
megackpt.manager.local.pieces LocalSave Piece PieceFiles
megackpt.checkpoint.run_directory Step
megackpt.planning.box Box Boxes _received
megackpt.planning.exchange_plan ExchangePlan Transfers
megackpt.planning.manifest Chunks Location Manifest SavePlan TensorValues WriteResult
megackpt.planning.manifest.declarations Declarations ShardId TensorEntry TensorMeta
megackpt.saver.audit AuditPolicy RankReplicas
megackpt.saver.save_operation _RankReply _RankRequest
megackpt.distributed.wire_format _torch_value
torch Size dtype layout memory_format
torch.distributed.checkpoint.filesystem _StorageInfo
torch.distributed.checkpoint.metadata ChunkStorageMetadata MetadataIndex TensorProperties
torch.distributed.checkpoint.planner BytesIOWriteData SavePlan TensorWriteData
torch.distributed.checkpoint.planner WriteItem WriteItemType
torch.distributed.checkpoint.storage WriteResult
"""
"""Module, and its classes and functions that a message may call. Each takes plain data only."""

_CALLED = {
    f"{module}.{name}": (module, name)
    for module, *names in map(str.split, _SENT.strip().splitlines())
    for name in names
}


def allow(module: str, *names: str) -> None:
    """Let messages call these classes or functions too. Each takes plain data only."""
    _CALLED.update({f"{module}.{name}": (module, name) for name in names})


_ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, CheckpointingException)
}
_PLAIN = frozenset((type(None), bool, int, float, str))
_TAGS = {list: "[", tuple: "(", dict: "{", set: "s", frozenset: "f"}
_MAKERS = {tag: kind for kind, tag in _TAGS.items()}
_DTYPE = re.compile("[<>|][biufc][0-9]{1,2}")


def pack(value: object) -> bytes:
    """The message of a value. CheckpointingException if no rank could read it."""
    buffers: list[Any] = []
    described = _describe(value, buffers)
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":"))
    return join([text.encode("utf-8", "surrogatepass"), *buffers])


def unpack(message: Payload, rank: int = 0) -> Any:
    """The value of a message of this rank.

    CheckpointingException if it is damaged, or makes objects that are not allowed.
    """
    try:
        if message[:1] == b"x":  # of zlib; no other message begins so
            stream = zlib.decompressobj()
            message = stream.decompress(message, limits.CONTROL_MESSAGE_BYTES)
            if not stream.eof:
                raise ValueError(
                    f"it ends too early, or has more than {limits.CONTROL_MESSAGE_BYTES} bytes"
                )
        text, *buffers = split(message)
        return _make(json.loads(str(text, "utf-8", "surrogatepass")), iter(buffers))
    except Exception as error:
        raise CheckpointingException(
            f"a message of rank {rank} cannot be read: {type(error).__name__}: {error}"
        ) from error


def compress(message: bytes) -> bytes:
    """The message, compressed if it is large. Columns of numbers shrink to a tenth."""
    return zlib.compress(message, 1) if len(message) > COMPRESSED_BYTES else message


def _describe(value: Any, buffers: list[Any]) -> Any:
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if kind in _TAGS:
        parts = [*(chain.from_iterable(value.items()) if kind is dict else value)]
        kinds = {*map(type, parts)}
        if kinds <= _PLAIN:
            return [_TAGS[kind], *parts]
        if kind is tuple and kinds == {TensorEntry}:
            buffers.append(pack_table(value))
            return ["t"]
        if kind is list and len(kinds) == 1 and _name(*kinds):
            # Columns: torch's plans are lists of some thousand small objects.
            names, rows = zip(*map(_taken_apart, parts), strict=True)
            columns = [[*column] for column in zip(*rows, strict=True)]
            return ["#", names[0], *(_describe(c, buffers) for c in columns)]
        return [_TAGS[kind], *(_describe(part, buffers) for part in parts)]
    if kind is bytes:
        buffers.append(value)
        return ["b"]
    if _name(kind):
        name, arguments = _taken_apart(value)
        return [name, *(_describe(part, buffers) for part in arguments)]
    if isinstance(value, np.generic) or kind is np.ndarray:
        array = np.asarray(value)
        if _DTYPE.fullmatch(array.dtype.str):
            buffers.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            tag = "a" if kind is np.ndarray else "n"
            return [tag, array.dtype.str, *array.shape]
    if kind is type and value in _ERRORS.values():
        return ["e", value.__name__]
    if kind in _ERRORS.values():
        _, arguments = value.__reduce__()[:2]
        return ["r", kind.__name__, *(_describe(part, buffers) for part in arguments)]
    blob = serialization.dump(value)
    if serialization.check(blob):
        raise CheckpointingException(
            f"ranks cannot send one another a {kind.__module__}.{kind.__qualname__}: it is, or "
            "holds, an object of a class that is not trusted. If you trust every process that "
            "reaches the job's store, call torch.serialization.add_safe_globals([the class]) on "
            "all ranks"
        )
    buffers.append(blob)
    return ["o"]


@cache
def _name(function: Any) -> str:
    """The name of a class or function in ``_CALLED``; "" for any other object."""
    name = f"{function.__module__}.{function.__qualname__}"
    return name if name in _CALLED else ""


def _taken_apart(value: Any) -> tuple[str, Any]:
    """The name of a class or function, and the arguments with which it makes an equal object."""
    kind: Any = type(value)
    if kind.__module__ == "torch" and kind.__name__ != "Size":
        return _name(_torch_value), [str(value)]
    if "__reduce__" in vars(kind):
        function, arguments = value.__reduce__()
        return _name(function), arguments
    if isinstance(value, tuple):
        return _name(kind), value
    if isinstance(value, Enum):
        return _name(kind), [value.value]
    return _name(kind), [getattr(value, name) for name in _field_names(kind)]


@cache
def _field_names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind) if field.init]


def _make(described: Any, buffers: Iterator[memoryview]) -> Any:
    if type(described) is not list:
        return described
    tag, *parts = described
    values = [
        part if type(part) is not list else _make(part, buffers) for part in parts
    ]
    if tag == "{":
        return dict(zip(values[::2], values[1::2], strict=True))
    if tag in _MAKERS:
        return _MAKERS[tag](values)
    if tag == "#":
        return [*map(_function(values[0]), *values[1:])]
    if tag == "t":
        return unpack_table(bytes(next(buffers)))
    if tag == "b":
        return bytes(next(buffers))
    if tag == "a":
        return _array(next(buffers), *values)
    if tag == "n":
        return _array(next(buffers), *values)[()]
    if tag == "e":
        return _ERRORS[values[0]]
    if tag == "r":
        return _ERRORS[values[0]](*values[1:])
    if tag == "o":
        return serialization.load(bytes(next(buffers)))
    return _function(tag)(*values)


def _array(buffer: memoryview, dtype: str, *shape: int) -> Any:
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"an array of {dtype!r}")
    array = np.ndarray(shape, dtype, buffer)
    if array.nbytes != len(buffer):
        raise ValueError(f"an array of {len(buffer)} bytes has the shape {shape}")
    # A copy, which is aligned, and does not keep the message.
    return array.copy()


@cache
def _torch_value(name: str) -> Any:
    """A dtype, layout or memory format."""
    import torch

    # Not getattr: torch imports some of its modules when they are asked for.
    found = vars(torch)[name.removeprefix("torch.")]
    if not isinstance(found, torch.dtype | torch.layout | torch.memory_format):
        raise ValueError(f"{name} is no value")
    return found


@cache
def _function(name: str) -> Callable[..., Any]:
    module, attribute = _CALLED[name]
    found: Callable[..., Any] = getattr(import_module(module), attribute)
    return found
