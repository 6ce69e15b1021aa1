"""Members of enums are pickled by class and value, whatever the release of Python."""

from __future__ import annotations

import copyreg
import sys
from enum import Enum, Flag
from typing import Any

ENUMS_BY_NAME = sys.version_info < (3, 11, 4)
"""Python pickles a member of an enum as a call of getattr, and a combination of flags as calls of ``operator.or_``."""

_PYTHONS_OWN = frozenset((Enum.__reduce_ex__, Flag.__reduce_ex__))


def enum_by_value(value: Any) -> Any:
    """For ``Pickler.reducer_override``: what Python 3.11.4 and newer write of a member of an enum.

    NotImplemented for all else, and for enums that say themselves, or by copyreg, how they are pickled.
    """
    by_python = isinstance(value, Enum) and type(value).__reduce_ex__ in _PYTHONS_OWN
    if by_python and type(value) not in copyreg.dispatch_table:
        return type(value), (value._value_,)
    return NotImplemented
