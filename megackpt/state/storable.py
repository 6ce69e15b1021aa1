"""Which tensors and objects can be stored: dtypes by name, blobs, and advice on the rest."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

from megackpt import serialization, tree
from megackpt.errors import CorruptCheckpoint, ShardingError
from megackpt.planning.manifest import ITEMSIZE, OBJECT

_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name
    for name in ITEMSIZE
    if name != OBJECT and hasattr(torch, name)
}
SHARDED = (
    "megackpt.sharded(state_dict) declares the DTensors in its dicts and lists, and what follows "
    "one of torch DCP's protocols for shards (FSDP1 makes DTensors where it is given a "
    "device_mesh)"
)
SHARD_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""Attributes of a plain tensor that torch DCP, from 2.15 on, takes for a shard."""
SHARD_METHODS = (
    "__create_write_items__",
    "__create_chunk_list__",
    "__get_tensor_shard__",
)
"""Methods of an object that gives torch DCP its chunks (``_Checkpointable``)."""
_LEAVE_OUT = (
    "leave it out, or wrap it in a LocalNonpersistentObject, and it is not saved"
)
_PLAIN_DEPTH = 32
_PLAIN_VALUES = 4096
"""Limits of plain values: containers in one another, and values in all."""
_SHOWN = 12  # steps of a path
_LOOKED = 1000
"""Parts of a container that are tried one by one, to find parts that cannot be saved."""
_DECLARED = ("ShardedBase", "LocalNonpersistentObject")
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16". Raises ShardingError for a dtype that cannot be stored."""
    problem = dtype_problem(dtype)
    if problem:
        raise ShardingError(problem)
    return _NAMES[dtype]


def dtype_named(name: str) -> torch.dtype:
    """ "bfloat16" -> torch.bfloat16. Raises ShardingError if this torch lacks the dtype."""
    if name not in DTYPES:
        raise ShardingError(f"dtype {name!r} is unknown to torch {torch.__version__}")
    return DTYPES[name]


def dtype_problem(dtype: Any) -> str:
    """Why tensors of this dtype cannot be stored; empty if they can."""
    if dtype in _NAMES:
        return ""
    if not isinstance(dtype, torch.dtype):
        return f"`dtype` must be a torch.dtype, not {dtype!r}"
    if str(dtype).startswith(("torch.qu", "torch.qi")):
        return (
            f"quantized data ({dtype}) cannot be stored; store data.dequantize(), or int_repr() "
            "and scales"
        )
    return (
        f"{dtype} cannot be stored (its elements are smaller than a byte); store "
        "data.view(torch.uint8)"
    )


def layout_problem(layout: torch.layout) -> str:
    """Why no tensor of this layout can be stored; empty where one can."""
    if layout is torch.strided:
        return ""
    return (
        f"sparse data ({layout}) cannot be stored; store data.to_dense(), or the indices and "
        "values of data.coalesce() as two tensors"
    )


def data_problem(data: Any, dtype: torch.dtype, local_shape: tuple[int, ...]) -> str:
    """Why ``data`` cannot be stored as a tensor of this dtype and shape; empty where it can."""
    if not isinstance(data, torch.Tensor):
        return (
            f"data must be a torch.Tensor, not {type(data).__name__}; other values go into a "
            "ShardedObject"
        )
    if type(data) not in (torch.Tensor, torch.nn.Parameter):
        foreign = _foreign_tensor(data)
        if foreign:
            return foreign
    if data.is_nested:
        return (
            "nested data cannot be stored; store its parts, or data.to_padded_tensor(0) and "
            "the lengths"
        )
    if problem := layout_problem(data.layout):
        return problem
    if data.dtype != dtype:
        return f"Data dtype should match `dtype` attribute ({data.dtype} and {dtype})"
    if tuple(data.shape) != tuple(local_shape):
        return (
            f"Data shape should match `local_shape` attribute ({tuple(data.shape)} and "
            f"{local_shape})"
        )
    return ""


def is_distributed(x: Any) -> bool:
    """Is this a DTensor, torch's ShardedTensor, or a shard by one of torch DCP's protocols?

    Attributes decide: torch.distributed.tensor may not be imported, and older versions of torch
    lack the protocols.
    """
    return _is_distributed_class(type(x)) or bool(shard_attributes(x))


def _is_distributed_class(kind: type) -> bool:
    return issubclass(kind, torch.Tensor) and (
        hasattr(kind, "placements") or hasattr(kind, "local_shards")
    )


def shard_attributes(x: Any) -> list[str]:
    """The SHARD_METHODS that it has, and for a tensor the SHARD_FIELDS.

    A part of a protocol counts: this is a shard, though one that cannot be stored. A tensor itself
    is checked, as Megatron-FSDP sets the methods on instances. The class of any other object is
    checked, so that no ``__getattr__`` runs.
    """
    if not isinstance(x, torch.Tensor):
        return [name for name in SHARD_METHODS if hasattr(type(x), name)]
    found = [name for name in SHARD_METHODS if hasattr(x, name)]
    return found + shard_fields(x)


def shard_fields(x: Any) -> list[str]:
    """The SHARD_FIELDS of a tensor, other than methods (as torch's LocalShardsWrapper has)."""
    if not isinstance(x, torch.Tensor):
        return []
    return [name for name in SHARD_FIELDS if not callable(getattr(x, name, len))]


def place_problem(data: Any, whole: tuple[int, ...]) -> str:
    """Why ``data``, which has an attribute ``global_shape``, is not a shard of ``whole``."""
    said = getattr(data, "global_shape", None)
    if said is None or callable(said) or tuple(said) == tuple(whole):
        return ""
    shapes = f"a shard of {tuple(said)}, and is declared as one of {tuple(whole)}"
    return f"data says by its global_shape that it is {shapes}; {SHARDED}"


def distributed_name(x: Any) -> str:
    """The name of a distributed value in messages."""
    kind = type(x).__name__
    if _is_distributed_class(type(x)):
        return kind
    return f"{kind} with {', '.join(shard_attributes(x))} (a shard to torch DCP)"


def is_declared(x: Any, *kinds: type) -> bool:
    """Is this a declaration (of one of these classes, if any are given)?

    Classes are compared by name, so that Megatron-Core's classes are found. Taken for common state,
    their objects would be saved from one rank only.
    """
    names = {base.__name__ for base in type(x).__mro__}
    return not names.isdisjoint(_DECLARED) and (
        not kinds or any(kind.__name__ in names for kind in kinds)
    )


def is_stateful(x: Any) -> bool:
    """Is this an object with a state, such as a module, and not the state?"""
    return hasattr(type(x), "load_state_dict") or isinstance(x, DataLoader)


def _foreign_tensor(data: torch.Tensor) -> str:
    """Why a tensor of this class has no plain bytes to store; empty if it has."""
    kind = type(data)
    if _is_distributed_class(kind) or not set(SHARD_METHODS).isdisjoint(dir(kind)):
        return (
            f"data is a {kind.__name__}, distributed itself; {SHARDED}, or declare "
            "data.to_local() at its place"
        )
    if data.is_nested or data.layout is not torch.strided:
        return ""
    if hasattr(data, "__tensor_flatten__"):
        return (
            f"data is a {kind.__module__}.{kind.__qualname__}, which wraps other tensors by no "
            "known rule; give one to megackpt.register_tensor_subclass, declare its tensors one "
            "by one, or store data.dequantize() if it has that"
        )
    if kind.dequantize is not torch.Tensor.dequantize:
        return f"quantized data (a {kind.__name__}) cannot be stored; store data.dequantize()"
    return ""


class _Sharded(Exception):
    """A shard within a value that is being pickled."""


def _refuse_sharded(x: Any) -> None:
    if is_distributed(x):
        raise _Sharded(
            f"a {distributed_name(x)}, of which one rank's part would be stored; {SHARDED}"
        )
    if is_declared(x):
        name = getattr(x, "key", "")
        raise _Sharded(
            f"a {type(x).__name__} ({name!r}), which is lost there; only dicts and lists of a "
            "state are walked into"
        )
    if isinstance(x, torch.Tensor) and hasattr(type(x), "__tensor_flatten__"):
        raise _Sharded(
            f"a {type(x).__qualname__}, which wraps other tensors; "
            "megackpt.sharded(state_dict) declares it"
        )


def pickled(what: str, value: Any) -> bytes:
    """The blob of an object.

    Raises ShardingError, with the path in dicts and lists, for values that cannot be pickled,
    and for DTensors and declared shards at any depth.
    """
    if _is_plain(value):
        return serialization.dump(value)
    try:
        return _dumped(value)
    except _Sharded as error:
        where = _where(value, _dumped)
        raise ShardingError(f"{what}{where and where + ','} holds {error}") from None
    except (
        Exception
    ) as error:  # pickling calls the code of the values, which may raise anything
        raise ShardingError(
            f"{what} cannot be pickled{_where(value, _dumped)}: {type(error).__name__}: {error} "
            f"({_LEAVE_OUT})"
        ) from error


def loadable(what: str, value: Any) -> tuple[bytes, list[str]]:
    """The blob of an object, and a text for each class that a load must be given in ``trusted``.

    Raises ShardingError as ``pickled`` does, and for values that a load refuses, whatever is
    trusted.
    """
    blob = pickled(what, value)
    if _is_plain(value):
        return blob, []
    try:
        return blob, serialization.check(blob)
    except CorruptCheckpoint as error:
        raise ShardingError(
            f"{what} could be saved, but never loaded{_where(value, _checked)}: {error} "
            f"({_LEAVE_OUT})"
        ) from error


def _is_plain(value: Any) -> bool:
    """Is this a small value of Python's plain types? A load gives such a value back, unchecked.

    The pickle of any other value is checked, which takes much longer.
    """
    todo = [(0, value)]
    for depth, node in todo:  # grows; a value that contains itself reaches a limit
        if depth > _PLAIN_DEPTH or len(todo) > _PLAIN_VALUES:
            return False
        kind = type(node)
        if kind is dict:
            if not all(type(key) is str and key.isascii() for key in node):
                return False
            todo += [(depth + 1, child) for child in node.values()]
        elif kind is list:
            todo += [(depth + 1, child) for child in node]
        elif kind is str:
            if not node.isascii():
                return False
        elif kind is int:
            if abs(node) >= 2**63:
                return False
        elif kind not in (bool, float, type(None)):
            return False
    return True


def _dumped(value: Any) -> bytes:
    return serialization.dump(value, _refuse_sharded)


def _checked(value: Any) -> None:
    serialization.check(_dumped(value))


def _where(value: Any, check: Callable[[Any], object]) -> str:
    """ ", at PATH" of the innermost part of a value for which ``check`` raises; "" if it is all."""
    path: list[Any] = []
    while len(path) < _SHOWN:  # a value may contain itself
        for key, part in itertools.islice(_inside(value), _LOOKED):
            try:
                check(part)
            except Exception:  # noqa: BLE001 - the error of the whole value is reported
                path.append(key)
                value = part
                break
        else:
            break
    if path:
        return f", at {tree.show(tuple(path))}"
    return ""


def _inside(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, list | tuple | deque):
        return enumerate(value)
    if not isinstance(value, dict):
        if isinstance(value, type):
            value = {}
        else:
            value = getattr(value, "__dict__", {})
    items: Iterable[tuple[Any, Any]] = value.items()
    return items
