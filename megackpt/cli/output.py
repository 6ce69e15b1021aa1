"""Prints the answer of a command. JSON and text have the same fields.

In text a field is a line, and a list of records a table.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from typing import Any

from megackpt.events import format_size
from megackpt.progress_line import is_open

_MAX_VALUE_LENGTH = 200
_SIZES = ("bytes", "shared", "bytes_read", "resumed")
_VALUES = ("a", "b")
"""Fields of differences with values from checkpoints, which may be lists of dicts themselves."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """The answer of a command, and its exit status.

    ``text`` replaces ``data`` where the answer is printed as text.
    """

    data: Record
    status: int = 0
    text: Record | None = None


def print_answer(answer: Answer, as_json: bool) -> None:
    """Print to stdout. A process may have no stdout."""
    if not is_open(sys.stdout):
        return
    if as_json:
        print(json.dumps(to_json(answer.data), indent=2, allow_nan=False))
    else:
        for line in text_lines(answer.text or answer.data):
            print(line)
    sys.stdout.flush()


def print_error(text: str) -> None:
    """Print a message to stderr. The exit status reports the error, too, so this may fail."""
    if not is_open(sys.stderr):
        return
    with suppress(OSError):
        for line in text.split("\n"):
            print(escape(line), file=sys.stderr)


def text_lines(data: Record) -> Iterator[str]:
    """The fields as lines and tables. No line is cut or wrapped."""
    for name, value in data.items():
        if is_dataclass(value):
            value = [value]
        if _is_table(value):
            yield from _table_lines(name, [_fields(record) for record in value])
        elif isinstance(value, list | tuple):
            for item in value:
                for line in str(item).split("\n"):
                    yield f"{name}: {escape(line)}"
        elif value != {}:
            for path, leaf in _leaves(value, name):
                yield f"{escape(path)}: {_format(name, leaf)}"


def _table_lines(name: str, records: Sequence[Record]) -> Iterator[str]:
    """A table, and below it the tables that are in its records."""
    nested: set[str] = set()
    for record in records:
        for column, value in record.items():
            if column not in _VALUES and _is_table(value):
                nested.add(column)
    columns = [
        column
        for column in records[0]
        if column not in nested and any(record[column] != [] for record in records)
    ]
    rows = [[column.upper() for column in columns]]
    rows += [[_format(c, record[c]) for c in columns] for record in records]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    yield ""
    yield f"{name}:"
    for row in rows:
        line = ""
        for column, cell, width in zip(columns, row, widths, strict=True):
            if type(records[0][column]) in (int, float):
                cell = cell.rjust(width)
            line += cell.ljust(width + 2)
        yield line.rstrip()
    for record, row in zip(records, rows[1:], strict=True):
        for column, value in record.items():
            if column in nested and value:
                inner = [_fields(item) for item in value]
                yield from _table_lines(f"{row[0]}, {column}", inner)


def _fields(value: Any) -> Any:
    """A dataclass or named tuple as a mapping; any other value as it is."""
    if is_dataclass(value) and not isinstance(value, type):
        return vars(value)
    if hasattr(value, "_asdict"):
        return value._asdict()
    return value


def _is_table(value: Any) -> bool:
    """Whether it is a list of records."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return isinstance(_fields(value[0]), Mapping) and not hasattr(value, "_asdict")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Path and value of each leaf in nested records and lists: ``args.betas[0]``, 0.9."""
    value = _fields(value)
    if not isinstance(value, dict | list) or not value:
        yield path, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(key, str) and key.isidentifier():
            yield from _leaves(item, f"{path}.{key}")
        else:
            yield from _leaves(item, f"{path}[{key!r}]")


def _format(name: str, value: Any) -> str:
    """The value of a field in one line."""
    given, value = value, _fields(value)
    if value is None:
        text = "-"
    elif value is ...:
        text = "absent"
    elif isinstance(value, bool):
        text = "no"
        if value:
            text = "yes"
    elif name in _SIZES:
        text = format_size(value)
    elif name == "saved":
        text = format_age(value)
    elif name == "metrics":
        text = " ".join(f"{metric}={value[metric]:.9g}" for metric in value) or "-"
    elif isinstance(value, float):
        text = f"{value:.9g}"
    elif value is not given:
        text = " ".join(_format(field, item) for field, item in value.items())
    elif name == "digests" and value:
        text = value[0] if len(value) == 1 else f"{value[0]} +{len(value) - 1}"
    elif isinstance(value, list | tuple) and name not in _VALUES:
        text = str(list(value))
    elif isinstance(value, str):
        text = value
    else:
        text = one_line(value)
        if len(text) > _MAX_VALUE_LENGTH:
            text = f"{text[:_MAX_VALUE_LENGTH]}... ({len(text)} characters)"
    return escape(text)


def to_json(value: Any) -> Any:
    """A value that JSON can hold.

    NaN and infinities become text, tensors their dtype and shape, dataclasses and named tuples
    objects (without fields that are ``...``), other types their repr.
    """
    value = _fields(value)
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(k): to_json(v) for k, v in value.items() if v is not ...}
        case list() | tuple() | set() | frozenset():
            return [to_json(item) for item in value]
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return {"dtype": _dtype_name(value), "shape": list(value.shape)}
    return one_line(value)


def one_line(value: Any) -> str:
    """A value in one line; large tensors and bytes by their size."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        shape = "x".join(map(str, value.shape)) or "scalar"
        text = f"{type(value).__name__.lower()} of {_dtype_name(value)}, {shape}"
        if value.ndim == 0 or (value.ndim == 1 and value.shape[0] <= 8):
            text += f": {value.tolist()}"
        return text
    if isinstance(value, bytes | bytearray | memoryview) and len(value) > 100:
        return f"{len(value)} bytes"
    return repr(value)


def _dtype_name(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def escape(text: str) -> str:
    """Escape line breaks and all characters that could control a terminal."""
    if text.isprintable():
        return text
    escaped = ""
    for character in text:
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        escaped += character
    return escaped


def format_age(moment: float) -> str:
    """The time since ``moment`` (seconds since 1970; 0: unknown), in the largest unit that fits."""
    if not moment:
        return "-"
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
