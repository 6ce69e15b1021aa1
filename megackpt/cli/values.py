"""Objects in text: one line for each value that is in them, or a tree; and what JSON can hold of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megackpt.cli.answers import Block, Cell, Line, Table, shaped

_SHORT = 100
"""Characters of a value on a terminal."""


def facts(value: Any) -> Any:
    """A value for JSON: tensors and arrays by dtype and shape, what JSON does not know by its repr."""
    match value:
        case dict():
            return {str(key): facts(item) for key, item in value.items()}
        case list():
            return [facts(item) for item in value]
        case None | bool() | int() | float() | str():
            return value
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return {"dtype": _dtype(value), "shape": list(value.shape)}
    return said(value)


def said(value: Any) -> str:
    """A value in one line."""
    if value is ...:
        return "-"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        what = (
            f"{type(value).__name__.lower()} of {_dtype(value)}, {shaped(value.shape)}"
        )
        few = value.ndim <= 1 and value.shape != () and value.shape[0] <= 8
        return f"{what}: {value.tolist()}" if few or not value.ndim else what
    if isinstance(value, bytes | bytearray | memoryview) and len(value) > _SHORT:
        return f"{len(value)} bytes"
    return repr(value)


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def blocks(value: Any, pretty: bool) -> Iterator[Block]:
    """``path = value`` for each value in a tree of dicts and lists; on a terminal, the tree."""
    if value is None:
        yield Line.of("no common state")
    elif not pretty:
        yield from (
            Line.of(f"{path} = {said(leaf)}") for path, leaf in _leaves(value, "")
        )
    else:
        yield _tree(value)


def _tree(value: Any) -> Table:
    rows, depths = [], []
    for depth, label, leaf in _branches(value, 0):
        text = "" if leaf is None else said(*leaf)
        rows.append(
            [
                Cell(label),
                Cell(text if len(text) <= _SHORT else f"{text[:_SHORT]}...", "cyan"),
            ]
        )
        depths.append(depth)
    return Table(("common state", "value"), rows, depths=depths)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict | list) or not value:
        yield path or ".", value
        return
    for key, item in _parts(value):
        step = (
            f"[{key!r}]"
            if not isinstance(key, str) or not key.isidentifier()
            else f".{key}"
            if path
            else key
        )
        yield from _leaves(item, path + step)


def _branches(value: Any, depth: int) -> Iterator[tuple[int, str, tuple[Any] | None]]:
    for key, item in _parts(value):
        name = key if isinstance(key, str) else f"[{key}]"
        simple = isinstance(item, list) and not any(
            isinstance(part, dict | list) for part in item
        )
        if isinstance(item, dict | list) and item and not simple:
            kind = item.get("<class>") if isinstance(item, dict) else None
            yield depth, f"{name} ({kind})" if kind else name, None
            yield from _branches(item, depth + 1)
        else:
            yield depth, name, (item,)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    yield from value.items() if isinstance(value, Mapping) else enumerate(value)
