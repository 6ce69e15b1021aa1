"""The allow-list: the globals that a saved object may name, and what each stands for. Lists, never patterns to refuse.

What is here is harmless whatever its arguments: data types of Python, numpy and torch, made through functions
that check what they are given. Classes of Megatron-Core become inert stand-ins.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import io
import math
import pathlib
import re
import signal
import types
import zoneinfo
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch

from megackpt.errors import CorruptCheckpoint, UntrustedClass
from megackpt.serialization import arrays
from megackpt.serialization.rules import Rule, each, first_of_each
from megackpt.serialization.standins import StandIn, StandInClass

_INERT = ("megatron.",)
"""Packages whose classes are known to stand in Megatron's checkpoints."""

_LARGEST = (
    1 << 62
)  # sizes, strides and numbers of elements with which torch does not overflow

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


_PLAIN = (int, float, str, bytes, type(None))
_ZONE = re.compile(r"[A-Za-z0-9_+-]{1,32}(/[A-Za-z0-9_+-]{1,32}){0,4}")


def is_inert(module: str) -> bool:
    """True for modules of Megatron-Core, whose classes become stand-ins."""
    return f"{module}.".startswith(_INERT)


def stand_in(module: str, name: str) -> Rule:
    """The rule of a class that is only named."""
    qualified = f"{module}.{name}"
    called, new = (partial(_make_stand_in, qualified, new) for new in (False, True))
    return Rule(
        StandInClass(qualified),
        called,
        _build_stand_in,
        new,
        shares=True,
        keywords=True,
    )


def _make_stand_in(qualified: str, new: bool, *args: Any, **kwargs: Any) -> StandIn:
    return StandIn(qualified, args, kwargs or None, new)


def _named(kind: Callable[..., Any], qualified: str, *rest: Any) -> Any:
    if type(qualified) is not str or not all(type(args) is tuple for args in rest[:1]):
        raise CorruptCheckpoint(
            "a stand-in has a name that is no text, or arguments that are no tuple"
        )
    return kind(qualified, *rest)


def _build_stand_in(instance: StandIn, state: Any) -> None:
    if isinstance(instance.state, dict) and isinstance(state, dict):
        instance.state.update(state)
    else:
        instance.state = state


def trusted_rule(value: Any) -> Rule:
    """The rule of a class or function that the user vouches for: pickle's own behaviour."""
    new = partial(value.__new__, value) if isinstance(value, type) else None
    call = value if callable(value) else None
    return Rule(value, call, _build_trusted, new, trusted=True, keywords=True)


def _build_trusted(instance: Any, state: Any) -> None:
    if hasattr(instance, "__setstate__"):
        instance.__setstate__(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    for name, value in {**(state or {}), **(slots or {})}.items():
        object.__setattr__(instance, name, value)


def _fields(instance: Any, state: Any) -> None:
    """The state of an object that is nothing but its attributes."""
    names = state if type(state) is dict else (0,)
    if not all(
        type(name) is str and not hasattr(type(instance), name) for name in names
    ):
        raise CorruptCheckpoint(
            f"the state of a {type(instance).__name__} is no dict of attributes"
        )
    vars(instance).update(state)


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise CorruptCheckpoint(f"bytes are pickled in the encoding {encoding!r}")
    return text.encode("latin-1")


def _no_bytes() -> bytes:
    """How protocol 2 writes empty bytes."""
    return b""


def _bytearray(data: bytes | str = b"", encoding: str = "latin-1") -> bytearray:
    if isinstance(data, str):
        return bytearray(_encode(data, encoding.replace("-", "")))
    if type(data) is not bytes:  # a number would allocate
        raise CorruptCheckpoint("a bytearray is made of something that is no bytes")
    return bytearray(data)


def _default_dict(factory: Any = None, items: Any = ()) -> Any:
    if isinstance(factory, StandInClass):
        raise UntrustedClass(
            f"a defaultdict makes its values by {factory.qualified_name}, which is not trusted\n"
            "  hint: if you trust this checkpoint's author, pass that class in trusted=(...) to load"
        )
    # A pickle can only name types of the list above all, and what a user vouches for; and functions of ours.
    ours = getattr(factory, "__module__", "").startswith(
        f"{__package__}."
    ) and not isinstance(factory, type)
    if (factory is not None and not callable(factory)) or ours:
        raise CorruptCheckpoint(f"a defaultdict's factory is {factory!r}")
    return collections.defaultdict(factory, items)


def _counter(counts: Any = ()) -> collections.Counter[Any]:
    if not isinstance(counts, dict | tuple) or (counts and type(counts) is tuple):
        raise CorruptCheckpoint("a Counter is made of something that is no dict")
    return collections.Counter(counts)


def _slice(*bounds: Any) -> slice:
    if not all(
        isinstance(bound, _PLAIN) for bound in bounds
    ):  # containers could be nested by it without end
        raise CorruptCheckpoint("a slice has bounds that are neither numbers nor text")
    return slice(*bounds)


def _decimal(text: str) -> decimal.Decimal:
    if type(text) is not str:
        raise CorruptCheckpoint("a Decimal is made of something that is no text")
    return decimal.Decimal(text)


def _zone(key: str, cached: bool = True) -> zoneinfo.ZoneInfo:  # noqa: ARG001 - zoneinfo's order
    if type(key) is not str or not _ZONE.fullmatch(key):
        raise CorruptCheckpoint("a time zone has a name that no time zone has")
    try:
        return zoneinfo.ZoneInfo(
            key
        )  # the cached one always: each other would take its own memory
    except (KeyError, OSError, ValueError) as error:
        raise CorruptCheckpoint(
            f"this machine does not know the time zone {key!r} (install tzdata): {error}"
        ) from error


def _type_of(value: Any) -> type:
    """How pickle writes the three types that have no name."""
    if value is not None and value is not Ellipsis and value is not NotImplemented:
        raise UntrustedClass(
            "the object calls builtins.type, and nothing of it was loaded"
        )
    return type(value)


def _deque(items: Any = (), size: int | None = None) -> collections.deque[Any]:
    return collections.deque(items, size)


def _bytes_io(*args: Any) -> io.BytesIO:
    if args and (len(args) != 1 or type(args[0]) is not bytes):
        raise CorruptCheckpoint("a BytesIO is made of something that is no bytes")
    return io.BytesIO(*args)


def _bytes_io_state(stream: io.BytesIO, state: Any) -> None:
    content, position, _ = state
    if type(content) is not bytes or type(position) is not int:
        raise CorruptCheckpoint("the state of a BytesIO is no bytes and position")
    stream.__init__(content)  # type: ignore[misc] # pickle's own way of filling it
    stream.seek(position)


def _path(kind: type[pathlib.PurePath], *parts: str) -> pathlib.PurePath:
    if not all(type(part) is str for part in parts):
        raise CorruptCheckpoint("a path has parts that are no text")
    return kind(*parts)


def _slashes(*parts: Any) -> int:
    """What pathlib does for parts: it splits each."""
    return 16 * sum(part.count("/") for part in parts if type(part) is str)


def _layout(name: str) -> torch.layout:
    layout = (
        getattr(torch, name.removeprefix("torch."), None) if type(name) is str else None
    )
    if not isinstance(layout, torch.layout):
        raise CorruptCheckpoint(f"unknown tensor layout {name!r}")
    return layout


def _elements(_: Any, data: Any) -> int:
    """What it costs to check the indices of a sparse tensor."""
    return sum(part.numel() for part in data if isinstance(part, torch.Tensor)) // 512


def _sparse(layout: torch.layout, data: Any) -> torch.Tensor:
    try:
        # On "meta" there are no indices to check: nothing is read there.
        if layout is torch.sparse_coo:
            indices, values, size, *coalesced = data
            tensor = torch.sparse_coo_tensor(
                indices,
                values,
                size,
                device=values.device,
                check_invariants=not values.is_meta,
            )
            return (
                tensor._coalesced_(True)
                if coalesced and coalesced[0] is True
                else tensor
            )
        compressed, plain, values, size = data
        return torch.sparse_compressed_tensor(
            compressed,
            plain,
            values,
            size,
            layout=layout,
            device=values.device,
            check_invariants=not values.is_meta,
        )
    except (
        RuntimeError
    ) as error:  # the invariants: indices that are out of bounds, or not in order
        raise CorruptCheckpoint(
            f"a sparse tensor contradicts itself: {error}"
        ) from error


def _parameter(data: torch.Tensor, requires_grad: bool, hooks: Any) -> Any:  # noqa: ARG001 - torch's order
    if not isinstance(data, torch.Tensor):
        raise CorruptCheckpoint("a Parameter is made of something that is no tensor")
    return torch.nn.Parameter(
        data, requires_grad=_may_require_grad(data, bool(requires_grad))
    )


def _tensor(
    storage: Any, offset: int, size: Any, stride: Any, *rest: Any
) -> torch.Tensor:
    """A plain tensor in a storage that ``load`` made.

    ``rest``: requires_grad, hooks[, dtype][, metadata].
    """
    if not isinstance(storage, torch.TypedStorage):
        raise CorruptCheckpoint("a tensor is made on something that is no storage")
    dtype = (
        rest[2] if len(rest) > 2 and isinstance(rest[2], torch.dtype) else storage.dtype
    )
    size, stride = tuple(size), tuple(stride)
    if len(size) != len(stride) or not all(
        type(n) is int and 0 <= n < _LARGEST for n in (offset, *size, *stride)
    ):
        raise CorruptCheckpoint(
            f"a tensor has the shape {size}, the strides {stride}, the offset {offset!r}"
        )
    if math.prod(max(n, 1) for n in size) >= _LARGEST:
        raise CorruptCheckpoint(f"a tensor has the shape {size}, which is too large")
    last = (
        0
        if 0 in size
        else sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
    )
    # An empty storage would grow.
    if (offset + last) * dtype.itemsize > storage._untyped_storage.nbytes():
        raise CorruptCheckpoint("a tensor reaches beyond its storage")
    # All that can be wrong with the file has been examined: what torch refuses now is no damage.
    flat = torch.empty(0, dtype=dtype, device=storage._untyped_storage.device)
    tensor = flat.set_(storage._untyped_storage, offset, size, stride)
    lazily = rest[-1] if len(rest) > 2 and type(rest[-1]) is dict else {}
    if lazily.get("conj") is True and tensor.is_complex():
        tensor = tensor.conj()
    if lazily.get("neg") is True and dtype != torch.bool:
        tensor = torch._neg_view(tensor)  # lazily, as what was saved
    return tensor.requires_grad_(_may_require_grad(tensor, bool(rest and rest[0])))


def _may_require_grad(tensor: Any, wanted: bool) -> bool:
    if wanted and not (tensor.is_floating_point() or tensor.is_complex()):
        raise CorruptCheckpoint(
            f"a tensor of {tensor.dtype} requires a gradient, which it cannot have"
        )
    return wanted


def _types() -> dict[str, Rule]:
    plain = (int, float, str, bool, list, dict, tuple, object, type(None))
    rules = {f"builtins.{kind.__name__}": Rule(kind) for kind in plain}
    calls: Mapping[str, tuple[Any, Callable[..., Any]]] = {
        "builtins.bytes": (bytes, _no_bytes),
        "builtins.type": (type, _type_of),
        "builtins.bytearray": (bytearray, _bytearray),
        "builtins.complex": (complex, complex),
        "builtins.range": (range, range),
        "builtins.slice": (slice, _slice),
        "_codecs.encode": (_encode, _encode),
        "decimal.Decimal": (decimal.Decimal, _decimal),
        "zoneinfo.ZoneInfo._unpickle": (_zone, _zone),
        "signal.Signals": (signal.Signals, signal.Signals),
        "signal.Handlers": (signal.Handlers, signal.Handlers),
    }
    rules |= {name: Rule(value, call) for name, (value, call) in calls.items()}
    rules |= {
        f"builtins.{kind.__name__}": Rule(kind, kind, keys=each)
        for kind in (set, frozenset)
    }
    rules |= {
        f"builtins.{value!r}": Rule(value) for value in (Ellipsis, NotImplemented)
    }
    rules["zoneinfo.ZoneInfo"] = Rule(zoneinfo.ZoneInfo)
    rules["collections.Counter"] = Rule(
        collections.Counter, _counter, keys=first_of_each
    )
    rules["collections.OrderedDict"] = Rule(
        collections.OrderedDict, collections.OrderedDict, _fields, keys=first_of_each
    )
    rules["collections.defaultdict"] = Rule(
        collections.defaultdict,
        _default_dict,
        empty=dict.clear,
        keys=lambda _=None, items=(): first_of_each(items),
    )
    rules["collections.deque"] = Rule(
        collections.deque, _deque, empty=collections.deque.clear
    )
    rules["argparse.Namespace"] = Rule(argparse.Namespace, argparse.Namespace, _fields)
    rules["types.SimpleNamespace"] = Rule(
        types.SimpleNamespace, types.SimpleNamespace, _fields
    )
    rules["_io.BytesIO"] = rules["io.BytesIO"] = Rule(
        io.BytesIO, _bytes_io, _bytes_io_state, shares=True
    )
    for kind in (dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone):
        rules[f"datetime.{kind.__name__}"] = Rule(kind, kind)
    for path in (
        pathlib.PosixPath,
        pathlib.Path,
        pathlib.PurePosixPath,
        pathlib.PurePath,
    ):
        made = path if issubclass(path, pathlib.Path) else pathlib.PurePosixPath
        rules[f"pathlib.{path.__name__}"] = Rule(
            path, partial(_path, made), work=_slashes
        )
    for name in ("WindowsPath", "PureWindowsPath"):
        rules[f"pathlib.{name}"] = Rule(
            getattr(pathlib, name),
            partial(_path, pathlib.PureWindowsPath),
            work=_slashes,
        )
    rules |= {  # Python 3.11 pickles members of these enums by name
        f"signal.{member.name}": Rule(member)
        for member in (*signal.Signals, *signal.Handlers)
    }
    return rules


def _torch_types() -> dict[str, Rule]:
    rules = {f"torch.{name}": Rule(dtype) for name, dtype in _STORAGES.items()}
    for name in dir(torch):
        value = getattr(torch, name)
        if isinstance(
            value, torch.dtype | torch.layout | torch.memory_format | torch.qscheme
        ):
            rules[f"torch.{name}"] = Rule(value)
    rules["torch.storage.UntypedStorage"] = rules["torch.UntypedStorage"] = Rule(
        torch.uint8
    )
    rules["torch.Size"] = Rule(torch.Size, torch.Size)
    rules["torch.device"] = Rule(torch.device, torch.device)
    rules["torch.Tensor"] = Rule(torch.Tensor)
    rules["torch.nn.parameter.Parameter"] = Rule(torch.nn.Parameter)
    rules["torch.serialization._get_layout"] = Rule(_layout, _layout)
    rules["torch._utils._rebuild_sparse_tensor"] = Rule(
        _sparse, _sparse, work=_elements
    )
    rules["torch._utils._rebuild_parameter"] = Rule(_parameter, _parameter)
    for version in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        rules[f"torch._utils.{version}"] = Rule(_tensor, _tensor)
    return rules


@cache
def known() -> Mapping[str, Rule]:
    """Qualified name -> rule, of everything that loads without anybody's trust."""
    own = {
        f"megackpt.serialization.standins.{kind.__name__}": Rule(
            kind, partial(_named, kind)
        )
        for kind in (StandIn, StandInClass)
    }
    return {**_types(), **arrays.rules(), **_torch_types(), **own}
