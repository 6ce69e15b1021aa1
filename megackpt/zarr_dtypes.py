"""bfloat16 and float8 for zarr-python, after ``import megackpt.zarr_dtypes``. Knows no torch.

Also entry points in the group ``zarr.data_type``, which zarr-python 3.4.2 loads, and 3.1.6 only
collects. The names in both versions of zarr are the names that tensorstore writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import ml_dtypes
import numpy as np

# What codecs ask of a data type.
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import ZDType, data_type_registry

try:
    from zarr.errors import DataTypeValidationError  # type: ignore[attr-defined, unused-ignore]
except ImportError:  # zarr 3.1
    from zarr.dtype import DataTypeValidationError

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True)
class _Float(ZDType[Any, Any], HasItemSize):
    """A kind of floating-point numbers that ml_dtypes adds to numpy, under numpy's name."""

    dtype_cls: ClassVar[type[np.dtype[Any]]]
    _zarr_v3_name: ClassVar[str]

    @classmethod
    def _native(cls) -> np.dtype[Any]:
        native: np.dtype[Any] = np.dtype(getattr(ml_dtypes, cls._zarr_v3_name))
        return native

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        if not cls._check_native_dtype(dtype):
            raise DataTypeValidationError(f"{dtype} is not {cls._zarr_v3_name}")
        return cls()

    def to_native_dtype(self) -> np.dtype[Any]:
        return self._native()

    @property
    def item_size(self) -> int:
        return self._native().itemsize

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        if isinstance(data, dict):
            data = data["name"]
        return cls._from_json_v3(data)

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name!r}")
        return cls()

    def to_json(self, zarr_format: int) -> Any:
        if zarr_format == 3:
            return self._zarr_v3_name
        return {"name": self._zarr_v3_name, "object_codec_id": None}

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, int | float | np.number | self._native().type)

    def cast_scalar(self, data: object) -> Any:
        if not self._check_scalar(data):
            raise TypeError(
                f"{data!r} is not a number that can be {self._zarr_v3_name}"
            )
        return self._native().type(data)

    def default_scalar(self) -> Any:
        return self._native().type(0)

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> Any:  # noqa: ARG002
        if isinstance(data, str) and data.startswith("0x"):  # the bits themselves
            bits = np.array(int(data, 16), f"u{self.item_size}")
            return bits.view(self._native())[()]
        if isinstance(data, str):
            data = _WORDS.get(data, data)
        return self.cast_scalar(data)

    def to_json_scalar(self, data: object, *, zarr_format: int) -> float | str:  # noqa: ARG002
        value = float(self.cast_scalar(data))
        for word, meant in _WORDS.items():
            if repr(meant) == repr(value):  # NaN does not equal itself
                return word
        return value


@dataclass(frozen=True, kw_only=True)
class BFloat16(_Float, HasEndianness):
    """numpy has it in the machine's byte order only; zarr's files are little-endian."""

    dtype_cls = type(np.dtype(ml_dtypes.bfloat16))
    _zarr_v3_name = "bfloat16"

    def __post_init__(self) -> None:
        if self.endianness != "little":
            raise DataTypeValidationError(
                f"bfloat16 is read in little-endian order only, not {self.endianness!r}"
            )


def _float8(name: str) -> type[_Float]:
    """The class for one of them: ``Float8E5M2`` for "float8_e5m2"."""
    members = {
        "__module__": __name__,
        "dtype_cls": type(np.dtype(getattr(ml_dtypes, name))),
        "_zarr_v3_name": name,
    }
    return type(f"Float8{name.removeprefix('float8_').upper()}", (_Float,), members)


Float8E4M3FN = _float8("float8_e4m3fn")
Float8E4M3FNUZ = _float8("float8_e4m3fnuz")
Float8E5M2 = _float8("float8_e5m2")
Float8E5M2FNUZ = _float8("float8_e5m2fnuz")
Float8E8M0FNU = _float8("float8_e8m0fnu")

for _kind in (
    BFloat16,
    Float8E4M3FN,
    Float8E4M3FNUZ,
    Float8E5M2,
    Float8E5M2FNUZ,
    Float8E8M0FNU,
):
    data_type_registry.register(_kind._zarr_v3_name, _kind)
