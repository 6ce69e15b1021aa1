"""What a pickle may say of numpy: dtypes, scalars and arrays, each checked before numpy is asked to make it."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from megackpt.errors import CorruptCheckpoint
from megackpt.serialization.rules import Rule

_DTYPE = re.compile(r"[<>|=]?(?:[?bBhHiIlLqQefdgFDGO]|[biufcSUV]\d{1,6}|[mM]8|O8|O4)")
_UNITS = (
    "Y",
    "M",
    "W",
    "D",
    "h",
    "m",
    "s",
    "ms",
    "us",
    "ns",
    "ps",
    "fs",
    "as",
    "generic",
)


def _dtype(code: Any, align: Any = False, copy: Any = False) -> np.dtype[Any]:  # noqa: ARG001 - numpy's order
    if type(code) is not str or not _DTYPE.fullmatch(code):
        raise CorruptCheckpoint(f"a numpy dtype {code!r} is of no plain kind")
    return np.dtype(np.dtype(code), copy=True)  # a copy, for its state is set next


def _set_dtype(dtype: np.dtype[Any], state: Any) -> None:
    """The state is not set as it is told, but as numpy tells it of an equal dtype that is made by ordinary means."""
    version, order, subarray, names, fields, size, *rest = (
        state  # alignment, flags, and what times are counted in
    )
    sizes = (dtype.itemsize,) if dtype.kind in "SUV" else (-1, dtype.itemsize)
    if version not in (3, 4) or order not in ("<", ">", "|", "="):
        raise CorruptCheckpoint("the state of a numpy dtype is of no plain kind")
    if dtype.kind in "mM":
        alike = _time(f"{order}{dtype.kind}8", rest[-1])
    elif dtype.kind == "V" and names is not None:
        alike = _structure(names, fields, size, rest[1])
    elif dtype.kind == "V" and subarray is not None:
        alike = _repeated(*subarray)
    elif names is fields is subarray is None and size in sizes:
        alike = dtype.newbyteorder(order)
    else:
        raise CorruptCheckpoint("the state of a numpy dtype is of no plain kind")
    if alike.itemsize != dtype.itemsize:
        raise CorruptCheckpoint(
            f"a numpy dtype of {dtype.itemsize} bytes is said to have {alike.itemsize}"
        )
    dtype.__setstate__(alike.__reduce__()[2])  # type: ignore[attr-defined]


def _time(code: str, about: Any) -> np.dtype[Any]:
    """datetime64 or timedelta64. ``about``: (metadata, (unit, how many of them, 1, 1))."""
    unit, count, *_ = about[1]
    unit = unit.decode("ascii") if type(unit) is bytes else unit
    if unit not in _UNITS or type(count) is not int or not 0 < count < 1 << 31:
        raise CorruptCheckpoint(f"a numpy time is counted in {count} {unit!r}")
    return np.dtype(code if unit == "generic" else f"{code}[{count}{unit}]")


def _structure(names: Any, fields: Any, size: Any, flags: Any) -> np.dtype[Any]:
    """Fields side by side, none of them a structure itself."""
    if (
        type(names) is not tuple
        or type(fields) is not dict
        or not all(name in fields for name in names)
    ):
        raise CorruptCheckpoint("a numpy structure does not tell its fields")
    formats = [_simple(fields[name][0]) for name in names]
    offsets = [offset for _, offset in map(fields.__getitem__, names)]
    layout = {
        "names": list(names),
        "formats": formats,
        "offsets": offsets,
        "itemsize": size,
    }
    return np.dtype(layout, align=bool(flags & 128))  # type: ignore[call-overload,no-any-return]


def _repeated(part: Any, shape: Any) -> np.dtype[Any]:
    """What a field is that holds an array."""
    if _simple(part).subdtype is not None or not _is_shape(shape):
        raise CorruptCheckpoint("a numpy field is an array of no plain kind")
    return np.dtype((_simple(part), shape))


def _simple(part: Any) -> np.dtype[Any]:
    """A dtype for a field: a copy, for the pickle may yet change its own, and must not tie loops with it."""
    if not isinstance(part, np.dtype) or part.names is not None or part.hasobject:
        raise CorruptCheckpoint("a numpy structure has a field of no plain kind")
    return np.dtype(part, copy=True)


def _whole(part: Any) -> np.dtype[Any]:
    """A dtype for an array or a scalar."""
    if not isinstance(part, np.dtype) or part.subdtype is not None:
        raise CorruptCheckpoint(
            "a numpy array is of no dtype, or of one that only fields can have"
        )
    return np.dtype(part, copy=True)


def _is_shape(shape: Any) -> bool:
    return (
        type(shape) is tuple
        and len(shape) <= 64
        and all(type(n) is int and n >= 0 for n in shape)
    )


def _scalar(dtype: Any, data: Any = b"") -> Any:
    dtype = _whole(dtype)
    if type(data) is str:
        data = data.encode("latin-1")
    if dtype.hasobject or type(data) is not bytes or len(data) != dtype.itemsize:
        raise CorruptCheckpoint("a numpy scalar's bytes do not fit its dtype")
    return np.frombuffer(data, dtype)[0]


def _array(
    kind: Any = np.ndarray,
    shape: Any = (0,),  # noqa: ARG001
    code: Any = b"b",  # noqa: ARG001
) -> np.ndarray[Any, Any]:
    if kind is not np.ndarray:
        raise CorruptCheckpoint("a numpy array is of a class of its own")
    return np.empty((0,), np.int8)  # what it holds comes as its state


def _set_array(array: np.ndarray[Any, Any], state: Any) -> None:
    version, shape, dtype, fortran, data = state
    dtype = _whole(dtype)
    if not _is_shape(shape):
        raise CorruptCheckpoint("the state of a numpy array is none")
    count = math.prod(shape)
    expected, given = (
        (list, count) if dtype.hasobject else (bytes, count * dtype.itemsize)
    )
    if type(data) is str:
        data = data.encode("latin-1")
    if type(data) is not expected or len(data) != given:
        raise CorruptCheckpoint(
            f"a numpy array of shape {shape} and dtype {dtype} comes with other data"
        )
    array.__setstate__((version, shape, dtype, bool(fortran), data))  # type: ignore[arg-type] # takes no np.bool


def _empty(array: np.ndarray[Any, Any]) -> None:
    if array.dtype.hasobject:
        array.fill(None)


def rules() -> dict[str, Rule]:
    """Qualified name -> rule."""
    found = {"numpy.ndarray": Rule(np.ndarray)}
    found["numpy.dtype"] = Rule(np.dtype, _dtype, _set_dtype)
    for package in ("numpy.core.multiarray", "numpy._core.multiarray"):
        found[f"{package}._reconstruct"] = Rule(
            _array, _array, _set_array, empty=_empty
        )
        found[f"{package}.scalar"] = Rule(_scalar, _scalar)
    for kind in sorted(
        {kind for kind in np.sctypeDict.values() if kind is not np.void}, key=str
    ):
        found[f"numpy.{kind.__name__}"] = Rule(kind)
    for name in np.dtypes.__all__:
        found[f"numpy.dtypes.{name}"] = Rule(getattr(np.dtypes, name))
    return found
