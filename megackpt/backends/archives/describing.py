"""What a pickle of torch's says of tensors: where in which storage they are, without any of their bytes.

Everything else in the pickle is what ``megackpt.serialization`` makes of it; nothing is run.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

from megackpt.backends.archives.writing import plain_strides
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.manifest import ITEMSIZE
from megackpt.serialization.unpickler import Find, Rule, unpickle

_DIMENSIONS = 64
_TOO_MUCH = 1 << 63


class Held(NamedTuple):
    """A storage, by name. ``dtype`` is empty for one of a kind that cannot be read."""

    dtype: str
    name: str
    nbytes: int


class Described(NamedTuple):
    """A tensor: a view of a storage, ``offset`` and ``strides`` in elements.

    ``lazily``: what is still to be done to its elements ("conj", "neg").
    """

    dtype: str
    storage: Held
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    lazily: tuple[str, ...]

    @property
    def is_plain(self) -> bool:
        """Do its elements lie in the storage as they are, one after the other in C order?"""
        axes = zip(self.shape, self.strides, plain_strides(self.shape), strict=True)
        return not self.lazily and (
            0 in self.shape or all(n < 2 or a == b for n, a, b in axes)
        )

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise BackendError(
            "a tensor stands inside of an object that is neither dict nor list"
        )

    @property
    def reach(self) -> int:
        """Elements from its first one to its last one, both counted."""
        steps = zip(self.shape, self.strides, strict=True)
        return 0 if 0 in self.shape else 1 + sum((n - 1) * step for n, step in steps)


class Refused(NamedTuple):
    """A tensor that is no dense one in a storage; ``kind`` is the name of torch's function that makes it."""

    kind: str


def described(pickle: bytes, *, stand_ins: bool = False) -> Any:
    """The value of ``data.pkl``, with a Described (or Refused) in the place of each tensor.

    ``stand_ins``: classes that nobody trusts become stand-ins; otherwise they are UntrustedClass. Raises
    CorruptCheckpoint as ``serialization.load`` does.
    """
    from megackpt.serialization.allowlist import finder  # brings torch

    return unpickle(pickle, partial(_find, finder(stand_ins=stand_ins)), _storage)


def _find(rest: Find, module: str, name: str) -> Rule:
    if module == "torch._utils" and name in (
        "_rebuild_tensor",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
    ):
        return Rule(_tensor, _tensor)
    if module == "torch._utils" and name in (
        "_rebuild_parameter",
        "_rebuild_parameter_with_state",
    ):
        return Rule(_parameter, _parameter)
    if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
        return Rule(_typed, _typed)
    if module in ("torch._utils", "torch._tensor") and name.startswith("_rebuild"):
        refused = partial(_refused, name)
        return Rule(refused, refused)
    return rest(module, name)


def _storage(persistent_id: Any) -> Held:
    """The storage that a pickle refers to: ("storage", kind, name, device, number of elements)."""
    import torch  # here, so that whoever only recognises files goes without

    tag, kind, name, _, count = persistent_id
    if tag != "storage" or type(name) is not str or type(count) is not int or count < 0:
        raise CorruptCheckpoint("a pickle refers to a storage in an unknown way")
    if not isinstance(kind, torch.dtype):
        return Held("", name, 0)
    return Held(str(kind).removeprefix("torch."), name, count * kind.itemsize)


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any
) -> Described | Refused:
    """``rest``: requires_grad, hooks[, dtype][, metadata]."""
    if type(storage) is not Held:
        raise CorruptCheckpoint("a tensor is made on something that is no storage")
    dtype = (
        str(rest[2]).removeprefix("torch.")
        if len(rest) > 2 and type(rest[2]) is not dict
        else storage.dtype
    )
    if dtype not in ITEMSIZE or not storage.dtype:
        return Refused(f"tensor of {dtype or 'a quantized kind'}")
    lazily = rest[-1] if rest and type(rest[-1]) is dict else {}
    found = Described(
        dtype,
        storage,
        offset,
        tuple(shape),
        tuple(strides),
        tuple(k for k in ("conj", "neg") if lazily.get(k)),
    )
    numbers = (offset, *found.shape, *found.strides)
    sane = (
        all(type(n) is int and 0 <= n < _TOO_MUCH for n in numbers)
        and len(found.shape) <= _DIMENSIONS
    )
    if not sane or len(found.shape) != len(found.strides):
        raise CorruptCheckpoint(
            f"a tensor of shape {found.shape[:_DIMENSIONS]} cannot be"
        )
    size = math.prod(max(n, 1) for n in found.shape) * ITEMSIZE[dtype]
    # What has no elements may stand anywhere.
    if size >= _TOO_MUCH or (
        found.reach and (offset + found.reach) * ITEMSIZE[dtype] > storage.nbytes
    ):
        raise CorruptCheckpoint(
            f"a tensor of shape {found.shape} reaches beyond its storage {storage.name!r}"
        )
    return found


def _parameter(data: Any, *_: Any) -> Any:
    if type(data) not in (Described, Refused):
        raise CorruptCheckpoint("a parameter is made of something that is no tensor")
    return data


def _typed(function: Any, _kind: Any, args: Any, _state: Any) -> Any:
    """A tensor with attributes, or of a class of its own."""
    if function not in (_tensor, _parameter, _typed):
        return Refused("tensor of a class of its own")
    return function(*args)


def _refused(name: str, *_: Any, **__: Any) -> Refused:
    return Refused(name)
