"""The allow-list: the globals that a saved object may name, and the rule for each.

Everything here is harmless with any arguments: data types of Python, numpy and torch, made by
functions that check their arguments. Classes of Megatron-Core and DeepSpeed become inert
``StandIn`` objects.
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
from collections.abc import Callable, Mapping, Sequence
from enum import EnumType
from functools import cache, partial
from typing import Any

import torch

from megackpt.errors import CorruptCheckpoint, UntrustedClass
from megackpt.serialization import numpy_rules
from megackpt.serialization.archive import STORAGES, Archive
from megackpt.serialization.pickle_limits import Budget
from megackpt.serialization.standins import StandIn, StandInClass
from megackpt.serialization.trust import (
    current_name,
    is_unsafe,
    refusal,
    trusted_globals,
)
from megackpt.serialization.unpickler import (
    Find,
    Persistent,
    Rule,
    charge_items,
    charge_keys,
)

_LARGEST = 1 << 62
"""A bound on sizes, strides and numbers of elements with which torch does not overflow."""
_ZONE = re.compile(r"[A-Za-z0-9_+-]{1,32}(/[A-Za-z0-9_+-]{1,32}){0,4}")


def finder(trusted: Sequence[Any] = (), stand_ins: bool = False) -> Find:
    """The ``Find`` of ``megackpt.serialization.load``."""
    vouched = trusted_globals(trusted)

    def find(module: str, name: str) -> Rule:
        module, name = current_name(module, name)
        full = f"{module}.{name}"
        if full in vouched and not is_unsafe(module, name):
            # The user trusts it, so it is called as pickle itself would.
            value = vouched[full]
            if isinstance(value, type):
                new = partial(value.__new__, value)
                return Rule(value, value, _build_trusted, new, trusted=True)
            if callable(value):
                return Rule(value, value, _build_trusted, trusted=True)
            return Rule(value, trusted=True)
        rule = known_rules().get(full)
        if rule is not None:
            return rule
        # A member of an enum that is trusted or known.
        owner, _, member = full.rpartition(".")
        kind: Any = vouched.get(owner)
        if kind is None and owner in known_rules():
            kind = known_rules()[owner].value
        if isinstance(kind, EnumType) and member in kind.__members__:
            return Rule(kind.__members__[member])
        if stand_ins or stands_in(module):
            return _stand_in_rule(full)
        raise UntrustedClass(refusal(module, name))

    return find


def stands_in(module: str) -> bool:
    """True for modules of Megatron-Core and DeepSpeed: their classes become stand-ins."""
    return module.partition(".")[0] in ("megatron", "deepspeed")


def _stand_in_rule(qualified: str) -> Rule:
    def make(new: bool, *args: Any, **kwargs: Any) -> StandIn:
        return StandIn(qualified, args, kwargs or None, new)

    def build(instance: StandIn, state: Any) -> None:
        if isinstance(instance.state, dict) and isinstance(state, dict):
            instance.state.update(state)
        else:
            instance.state = state

    return Rule(
        StandInClass(qualified),
        partial(make, False),
        build,
        partial(make, True),
        by_reference=True,
    )


def _build_trusted(instance: Any, state: Any) -> None:
    if hasattr(instance, "__setstate__"):
        instance.__setstate__(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    for name, value in {**(state or {}), **(slots or {})}.items():
        object.__setattr__(instance, name, value)


def _set_attributes(instance: Any, state: Any) -> None:
    """The state of an object that has only attributes."""
    names = state if type(state) is dict else (None,)
    for name in names:
        # An attribute with the name of a method would hide it.
        if type(name) is not str or hasattr(type(instance), name):
            raise CorruptCheckpoint(
                f"the state of a {type(instance).__name__} is not a dict of attributes"
            )
    vars(instance).update(state)


def _checked(make: Callable[..., Any], *kinds: type) -> Callable[..., Any]:
    """A constructor that takes arguments of these types only."""

    def call(*args: Any) -> Any:
        for arg in args:
            if not isinstance(arg, kinds):
                raise CorruptCheckpoint(
                    f"a {make.__name__} is made of a {type(arg).__name__}"
                )
        return make(*args)

    return call


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise CorruptCheckpoint(f"bytes are pickled in the encoding {encoding!r}")
    return text.encode("latin-1")


def _bytearray(data: bytes | str = b"", encoding: str = "latin-1") -> bytearray:
    if isinstance(data, str):
        return bytearray(_encode(data, encoding.replace("-", "")))
    if type(data) is not bytes:  # a number would allocate
        raise CorruptCheckpoint("a bytearray is not made of bytes")
    return bytearray(data)


def _default_dict(factory: Any = None, items: Any = ()) -> Any:
    if isinstance(factory, StandInClass):
        raise UntrustedClass(
            f"a defaultdict makes its values by {factory.qualified_name}, which is not trusted\n"
            "  hint: if you trust this checkpoint's author, pass that class in trusted=(...) to "
            "load"
        )
    # A pickle can name only types of this list, trusted globals, and the functions of this
    # package that replace some globals. The last cannot be factories.
    ours = getattr(factory, "__module__", "").startswith(f"{__package__}.")
    refused = ours and not isinstance(factory, type)
    if refused or not (factory is None or callable(factory)):
        raise CorruptCheckpoint(f"a defaultdict's factory is {factory!r}")
    return collections.defaultdict(factory, items)


def _zone(key: str, cached: bool = True) -> zoneinfo.ZoneInfo:  # noqa: ARG001 - zoneinfo's order
    if type(key) is not str or not _ZONE.fullmatch(key):
        raise CorruptCheckpoint("a time zone has a name that no time zone has")
    try:
        # Always the cached object: each new object would take memory.
        return zoneinfo.ZoneInfo(key)
    except (KeyError, OSError, ValueError) as error:
        raise CorruptCheckpoint(
            f"this machine does not know the time zone {key!r} (install tzdata): {error}"
        ) from error


def _type_of(value: Any) -> type:
    """Pickle writes the three types without a name by this call."""
    if value is None or value is Ellipsis or value is NotImplemented:
        return type(value)
    raise UntrustedClass("the object calls builtins.type, and nothing of it was loaded")


def _set_bytes_io(stream: io.BytesIO, state: Any) -> None:
    content, position, _ = state
    if type(content) is not bytes or type(position) is not int:
        raise CorruptCheckpoint("the state of a BytesIO is not bytes and position")
    stream.__init__(content)  # type: ignore[misc] # pickle itself fills it so
    stream.seek(position)


def _charge_path(budget: Budget, *parts: Any) -> None:
    """pathlib keeps a string for each part of a path."""
    for part in parts:
        if type(part) is str:
            budget.spend(16 * part.count("/"))


def _layout(name: str) -> torch.layout:
    found = None
    if type(name) is str:
        found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise CorruptCheckpoint(f"unknown tensor layout {name!r}")
    return found


def _charge_sparse(budget: Budget, _: Any, data: Any) -> None:
    """torch checks all indices of a sparse tensor."""
    for part in data:
        if isinstance(part, torch.Tensor):
            budget.spend(part.numel() // 512)


def _sparse(layout: torch.layout, data: Any) -> torch.Tensor:
    try:
        if layout is torch.sparse_coo:
            indices, values, size, *coalesced = data
            tensor = torch.sparse_coo_tensor(
                indices,
                values,
                size,
                device=values.device,
                check_invariants=not values.is_meta,  # "meta" has no indices
            )
            if coalesced and coalesced[0] is True:
                tensor = tensor._coalesced_(True)
            return tensor
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
    except RuntimeError as error:  # indices that are out of bounds, or not in order
        raise CorruptCheckpoint(
            f"a sparse tensor contradicts itself: {error}"
        ) from error


def _parameter(data: torch.Tensor, requires_grad: bool, hooks: Any) -> Any:  # noqa: ARG001
    if not isinstance(data, torch.Tensor):
        raise CorruptCheckpoint("a Parameter is not made of a tensor")
    return torch.nn.Parameter(
        data, requires_grad=_checked_grad(data, bool(requires_grad))
    )


def parse_storage_id(persistent_id: tuple[Any, ...]) -> tuple[Any, str, int]:
    """dtype, name and number of elements of ("storage", dtype, name, device, number)."""
    tag, dtype, name, _, count = persistent_id
    if tag != "storage" or type(name) is not str or type(count) is not int or count < 0:
        raise CorruptCheckpoint("a pickle refers to a storage in an unknown way")
    return dtype, name, count


def make_storage(octets: torch.Tensor, dtype: torch.dtype) -> torch.TypedStorage:
    """The storage of a uint8 tensor, as one of another dtype."""
    return torch.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=octets.untyped_storage(), dtype=dtype, _internal=True
    )


def storages(archive: Archive, read: bool = True) -> Persistent:
    """Gives the storages in an archive. Tensors share them as they did when they were saved.

    Without ``read`` they are on the device "meta".
    """
    found: dict[str, torch.TypedStorage] = {}

    def get(persistent_id: tuple[Any, ...]) -> torch.TypedStorage:
        dtype, name, count = parse_storage_id(persistent_id)
        if name in found:
            return found[name]
        member = archive.members.get(f"data/{name}")
        if member is None:
            raise CorruptCheckpoint(f"the storage {name!r} of a tensor is missing")
        known = isinstance(dtype, torch.dtype)
        if not known or count * dtype.itemsize != member.size:
            raise CorruptCheckpoint(
                f"the storage {name!r} holds {member.size} bytes, not {count} of {dtype}"
            )
        if read and member.size:
            content = bytearray(archive.content(f"data/{name}"))
            octets = torch.frombuffer(content, dtype=torch.uint8)
        else:
            device = "cpu" if read else "meta"
            octets = torch.empty(member.size, dtype=torch.uint8, device=device)
        found[name] = make_storage(octets, dtype)
        return found[name]

    return get


def rebuild_tensor(
    storage: Any, offset: int, size: Any, stride: Any, *rest: Any
) -> torch.Tensor:
    """A plain tensor in a storage that ``load`` made.

    ``rest``: requires_grad, hooks[, dtype][, metadata].
    """
    if not isinstance(storage, torch.TypedStorage):
        raise CorruptCheckpoint("a tensor is made without a storage")
    dtype = storage.dtype
    if len(rest) > 2 and isinstance(rest[2], torch.dtype):
        dtype = rest[2]
    size, stride = tuple(size), tuple(stride)
    valid = len(size) == len(stride)
    for number in (offset, *size, *stride):
        valid = valid and type(number) is int and 0 <= number < _LARGEST
    if not valid or math.prod(max(n, 1) for n in size) >= _LARGEST:
        raise CorruptCheckpoint(
            f"a tensor has the shape {size}, the strides {stride}, the offset {offset!r}"
        )
    end = offset
    if 0 not in size:
        for number, step in zip(size, stride, strict=True):
            end += (number - 1) * step
        end += 1
    # torch would enlarge an empty storage.
    if end * dtype.itemsize > storage._untyped_storage.nbytes():
        raise CorruptCheckpoint("a tensor reaches beyond its storage")
    # From here on an error of torch is not damage of the file.
    flat = torch.empty(0, dtype=dtype, device=storage._untyped_storage.device)
    tensor = flat.set_(storage._untyped_storage, offset, size, stride)
    lazy = {}
    if len(rest) > 2 and type(rest[-1]) is dict:
        lazy = rest[-1]
    if lazy.get("conj") is True and tensor.is_complex():
        tensor = tensor.conj()
    if lazy.get("neg") is True and dtype != torch.bool:
        tensor = torch._neg_view(tensor)
    return tensor.requires_grad_(_checked_grad(tensor, bool(rest and rest[0])))


def _checked_grad(tensor: Any, wanted: bool) -> bool:
    if wanted and not (tensor.is_floating_point() or tensor.is_complex()):
        raise CorruptCheckpoint(
            f"a tensor of {tensor.dtype} requires a gradient, which it cannot have"
        )
    return wanted


@cache
def known_rules() -> Mapping[str, Rule]:
    """Qualified name to rule, for everything that loads without trust."""
    rules = {**_python_rules(), **numpy_rules.rules()}
    for dtype, storage in STORAGES.items():
        rules[f"torch.{storage}Storage"] = Rule(getattr(torch, dtype))
    data = torch.dtype | torch.layout | torch.memory_format | torch.qscheme
    for name, value in vars(torch).items():
        if isinstance(value, data):
            rules[f"torch.{name}"] = Rule(value)
    rules |= {
        "torch.UntypedStorage": Rule(torch.uint8),
        "torch.storage.UntypedStorage": Rule(torch.uint8),
        "torch.Size": Rule(torch.Size, torch.Size),
        "torch.device": Rule(torch.device, torch.device),
        "torch.Tensor": Rule(torch.Tensor),
        "torch.nn.parameter.Parameter": Rule(torch.nn.Parameter),
        "torch.serialization._get_layout": Rule(_layout, _layout),
        "torch._utils._rebuild_sparse_tensor": Rule(
            _sparse, _sparse, charge=_charge_sparse
        ),
        "torch._utils._rebuild_parameter": Rule(_parameter, _parameter),
    }
    for version in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        rules[f"torch._utils.{version}"] = Rule(rebuild_tensor, rebuild_tensor)
    # The second name is in blobs of earlier versions.
    for module in (StandIn.__module__, "megackpt.objects.standins"):
        rules[f"{module}.StandIn"] = Rule(StandIn, StandIn)
        rules[f"{module}.StandInClass"] = Rule(
            StandInClass, _checked(StandInClass, str)
        )
    return rules


def _python_rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for kind in (int, float, str, bool, list, dict, tuple, object, type(None)):
        rules[f"builtins.{kind.__name__}"] = Rule(kind)
    for value in (Ellipsis, NotImplemented):
        rules[f"builtins.{value!r}"] = Rule(value)
    for group in (set, frozenset):
        rules[f"builtins.{group.__name__}"] = Rule(group, group, charge=charge_items)
    for time in (dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone):
        rules[f"datetime.{time.__name__}"] = Rule(time, time)
    rules |= {
        # Protocol 2 writes empty bytes by a call.
        "builtins.bytes": Rule(bytes, lambda: b""),
        "builtins.type": Rule(type, _type_of),
        "builtins.bytearray": Rule(bytearray, _bytearray),
        "builtins.complex": Rule(complex, complex),
        "builtins.range": Rule(range, range),
        # Containers as bounds would allow any depth of nesting.
        "builtins.slice": Rule(
            slice, _checked(slice, int, float, str, bytes, type(None))
        ),
        "_codecs.encode": Rule(_encode, _encode),
        "decimal.Decimal": Rule(decimal.Decimal, _checked(decimal.Decimal, str)),
        "zoneinfo.ZoneInfo": Rule(zoneinfo.ZoneInfo),
        "zoneinfo.ZoneInfo._unpickle": Rule(_zone, _zone),
        "signal.Signals": Rule(signal.Signals, signal.Signals),
        "signal.Handlers": Rule(signal.Handlers, signal.Handlers),
        "collections.Counter": Rule(
            collections.Counter,
            _checked(collections.Counter, dict),
            charge=charge_keys,
        ),
        "collections.OrderedDict": Rule(
            collections.OrderedDict,
            collections.OrderedDict,
            _set_attributes,
            charge=charge_keys,
        ),
        "collections.defaultdict": Rule(
            collections.defaultdict,
            _default_dict,
            charge=lambda budget, _=None, items=(): charge_keys(budget, items),
        ),
        "collections.deque": Rule(collections.deque, collections.deque),
        "io.BytesIO": Rule(
            io.BytesIO, _checked(io.BytesIO, bytes), _set_bytes_io, by_reference=True
        ),
    }
    rules["_io.BytesIO"] = rules["io.BytesIO"]
    for space in (argparse.Namespace, types.SimpleNamespace):
        name = f"{space.__module__}.{space.__name__}"
        rules[name] = Rule(space, space, _set_attributes)
    for name in (
        "Path",
        "PosixPath",
        "PurePath",
        "PurePosixPath",
        "WindowsPath",
        "PureWindowsPath",
    ):
        path = made = getattr(pathlib, name)
        if "Windows" in name:
            made = pathlib.PureWindowsPath
        elif name.startswith("Pure"):
            made = pathlib.PurePosixPath
        rules[f"pathlib.{name}"] = Rule(path, _checked(made, str), charge=_charge_path)
    for member in (*signal.Signals, *signal.Handlers):
        # Python 3.11 pickles members of these enums by name.
        rules[f"signal.{member.name}"] = Rule(member)
    return rules
