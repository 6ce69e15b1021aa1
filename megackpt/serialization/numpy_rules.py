"""Rules for numpy's dtypes, scalars and arrays. They check each before numpy makes it."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from megackpt.errors import CorruptCheckpoint
from megackpt.serialization.unpickler import Rule

_DTYPE = re.compile(r"[<>|=]?(?:[?bBhHiIlLqQefdgFDGO]|[biufcSUV]\d{1,6}|[mM]8|O8|O4)")
_UNITS = re.compile("[YMWDhms]|[munpfa]s|generic")


def _dtype(code: Any, align: Any = False, copy: Any = False) -> np.dtype[Any]:  # noqa: ARG001
    if type(code) is not str or not _DTYPE.fullmatch(code):
        raise CorruptCheckpoint(f"a numpy dtype {code!r} is not plain")
    return np.dtype(np.dtype(code), copy=True)  # a copy, because its state is set next


def _set_dtype(dtype: np.dtype[Any], state: Any) -> None:
    """Set the state of an equal dtype that numpy made, not the state in the file."""
    # The rest: alignment, flags, and the unit of times.
    version, order, subarray, names, fields, size, *rest = state
    plain = version in (3, 4) and order in ("<", ">", "|", "=")
    sizes = (dtype.itemsize,) if dtype.kind in "SUV" else (-1, dtype.itemsize)
    if plain and dtype.kind in "mM":
        # The last item of a time's state: (any, (unit, how many of them, 1, 1)).
        unit, count, *_ = rest[-1][1]
        if type(unit) is bytes:
            unit = unit.decode("ascii")
        known = type(unit) is str and _UNITS.fullmatch(unit)
        if not known or type(count) is not int or not 0 < count < 1 << 31:
            raise CorruptCheckpoint(f"a numpy time has the unit {count} {unit!r}")
        code = f"{order}{dtype.kind}8"
        if unit != "generic":
            code += f"[{count}{unit}]"
        alike = np.dtype(code)
    elif plain and dtype.kind == "V" and names is not None:
        # A structure of fields, none of them a structure itself.
        if type(names) is not tuple or type(fields) is not dict:
            raise CorruptCheckpoint("a numpy structure has no fields")
        layout: dict[str, Any] = {"names": list(names), "itemsize": size}
        layout |= {"formats": [], "offsets": []}
        for name in names:
            part, offset = fields[name]
            layout["formats"].append(_field(part))
            layout["offsets"].append(offset)
        alike = np.dtype(layout, align=bool(rest[1] & 128))  # type: ignore[call-overload]
    elif plain and dtype.kind == "V" and subarray is not None:
        part, shape = subarray
        if _field(part).subdtype is not None or not _is_shape(shape):
            raise CorruptCheckpoint("a numpy field is an array that is not plain")
        alike = np.dtype((_field(part), shape))
    elif plain and names is fields is subarray is None and size in sizes:
        alike = dtype.newbyteorder(order)
    else:
        raise CorruptCheckpoint("the state of a numpy dtype is not plain")
    if alike.itemsize != dtype.itemsize:
        raise CorruptCheckpoint(
            f"a numpy dtype of {dtype.itemsize} bytes has a state of {alike.itemsize}"
        )
    dtype.__setstate__(alike.__reduce__()[2])  # type: ignore[attr-defined]


def _field(part: Any) -> np.dtype[Any]:
    """A dtype for a field."""
    if not isinstance(part, np.dtype) or part.names is not None or part.hasobject:
        raise CorruptCheckpoint("a numpy structure has a field that is not plain")
    # A copy: the pickle may later change its dtype to a dtype that contains itself.
    return np.dtype(part, copy=True)


def _whole(part: Any) -> np.dtype[Any]:
    """A dtype for an array or a scalar."""
    if not isinstance(part, np.dtype) or part.subdtype is not None:
        raise CorruptCheckpoint("a numpy array has no dtype, or one for fields only")
    return np.dtype(part, copy=True)


def _is_shape(shape: Any) -> bool:
    if type(shape) is not tuple or len(shape) > 64:
        return False
    return all(type(extent) is int and extent >= 0 for extent in shape)


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
    """An array without elements, as numpy pickles it: these come with its state."""
    if kind is not np.ndarray:
        raise CorruptCheckpoint("a numpy array is of another class")
    return np.empty((0,), np.int8)


def _set_array(array: np.ndarray[Any, Any], state: Any) -> None:
    version, shape, dtype, fortran, data = state
    dtype = _whole(dtype)
    if not _is_shape(shape):
        raise CorruptCheckpoint("the state of a numpy array has no shape")
    if type(data) is str:
        data = data.encode("latin-1")
    length = math.prod(shape)
    fits = isinstance(data, bytes) and len(data) == length * dtype.itemsize
    if dtype.hasobject:
        fits = isinstance(data, list) and len(data) == length
    if not fits:
        raise CorruptCheckpoint(
            f"a numpy array of shape {shape} and dtype {dtype} comes with other data"
        )
    # numpy takes no np.bool here.
    array.__setstate__((version, shape, dtype, bool(fortran), data))  # type: ignore[arg-type]


def rules() -> dict[str, Rule]:
    """Qualified name to rule."""
    found = {
        "numpy.ndarray": Rule(np.ndarray),
        "numpy.dtype": Rule(np.dtype, _dtype, _set_dtype),
    }
    for package in ("numpy.core.multiarray", "numpy._core.multiarray"):
        found[f"{package}._reconstruct"] = Rule(_array, _array, _set_array)
        found[f"{package}.scalar"] = Rule(_scalar, _scalar)
    for kind in set(np.sctypeDict.values()) - {np.void}:
        found[f"numpy.{kind.__name__}"] = Rule(kind)
    for name in np.dtypes.__all__:
        found[f"numpy.dtypes.{name}"] = Rule(getattr(np.dtypes, name))
    return found
