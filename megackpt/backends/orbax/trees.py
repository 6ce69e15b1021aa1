"""The items of a checkpoint, and the tree of an item: which of its leaves are arrays, and the rest.

Source of the format: orbax-checkpoint 0.12.8, ``_src/metadata/tree.py`` (``_METADATA``),
``_src/serialization/type_handlers.py`` (strings), ``aggregate_handlers.py`` (``checkpoint``, which
orbax wrote before ``_METADATA``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megackpt.backends.orbax.msgpack_arrays import Inline, unpack
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.manifest import Location
from megackpt.storage import Storage

MANIFEST = "manifest.ocdbt"
AGGREGATE = "checkpoint"
"""Leaves of a tree in one file of msgpack."""
STEP = "_CHECKPOINT_METADATA"
TREE = "_METADATA"

_STRINGS = "_strings.json"
UNFINISHED = ".orbax-checkpoint-tmp"
"""In the name of a save that is running, or died."""
PROCESS = "ocdbt.process_"
"""A folder of what one process has written. The manifest above it merges all of them."""
_PLACEHOLDER = "PLACEHOLDER://"
_EMPTY: dict[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": ()}
_EMPTY["NamedTuple"] = ()
_MOST_ITEMS = 64
_DOCUMENT_BYTES = 1 << 27
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


class Item(NamedTuple):
    """A tree that was saved under a name in the checkpoint. ``path`` ends with "/", or is ""."""

    name: str
    path: str
    ocdbt: bool


@dataclass
class Tree:
    """The leaves of an item, by the names that orbax gives them: keys, joined with dots.

    ``arrays`` is None if nothing but the names of the arrays' files tells which arrays there are.
    ``complete``: the writer stored the chunks that consist of fill values, too.
    """

    arrays: dict[str, str] | None = None
    """Name -> its path in the tree, for messages."""
    inline: dict[str, Inline] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    complete: bool = False
    file: str = TREE
    """The document that has the leaves."""


def find_items(root: Storage) -> list[Item]:
    """The items of a checkpoint, or the one item that the directory itself is."""
    names = root.list()
    if {TREE, MANIFEST} & {*names} or (AGGREGATE in names and _has_msgpack(root, "")):
        return [Item("", "", MANIFEST in names)]
    found: list[Item] = []
    if STEP not in names and len(names) > _MOST_ITEMS:
        return found  # as of zarr: a folder of many arrays, which nobody wants to look through
    for name in names:
        if root.size(name) is not None or name.startswith(PROCESS):
            continue
        inside = root.list(name)
        if UNFINISHED in name or (STEP in inside and STEP not in names):
            continue  # a checkpoint of its own, beside other ones
        if {TREE, MANIFEST} & {*inside} or _has_msgpack(root, f"{name}/"):
            found.append(Item(name, f"{name}/", MANIFEST in inside))
    return found


def _has_msgpack(root: Storage, path: str) -> bool:
    """Does AGGREGATE begin with a map? Programs of TensorFlow have a text file of this name."""
    first = bytearray(1)
    if root.size(f"{path}{AGGREGATE}"):
        with root.open(f"{path}{AGGREGATE}") as reader:
            reader.read_into(0, [memoryview(first)])
    return first[0] >> 4 == 8 or first[0] in (0xDE, 0xDF)


def read_tree(root: Storage, item: Item) -> Tree:
    """Raises CorruptCheckpoint for documents that are damaged, and for two leaves of one name."""
    tree = Tree()
    # By the list: a document that is a link has no size, and is an error.
    names = root.list(item.path.rstrip("/"))
    if TREE in names:
        tree.arrays = {}
        _read_metadata(root, item, tree, tree.arrays)
    if AGGREGATE in names and _has_msgpack(root, item.path):
        if tree.arrays is None:
            tree.arrays = {}
            tree.file = AGGREGATE
        _read_aggregate(root, item, tree, tree.arrays)
    return tree


def _document(root: Storage, name: str) -> Any:
    try:
        return json.loads(root.get(name, _DOCUMENT_BYTES))
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{root.location}/{name} is missing") from error
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"{root.location}/{name} is damaged: {error}"
        ) from error


def _read_metadata(
    root: Storage, item: Item, tree: Tree, arrays: dict[str, str]
) -> None:
    document = _document(root, item.path + TREE)
    try:
        tree.complete = document.get("store_array_data_equal_to_fill_value") is True
        leaves: dict[str, tuple[str, str]] = {}
        for path, entry in document["tree_metadata"].items():
            name = ".".join([part["key"] for part in entry["key_metadata"]])
            if name in leaves:
                raise CorruptCheckpoint(
                    f"{root.location}/{item.path}{TREE}: the leaves {leaves[name][0]} and {path} "
                    f"have one name, {name!r}: orbax has stored one of them only"
                )
            leaves[name] = path, entry["value_metadata"]["value_type"]
        for name, (path, kind) in leaves.items():
            if kind in _EMPTY:
                tree.values[name] = _EMPTY[kind]
            elif kind != "string":
                arrays[name] = path
        texts = [name for name, (_, kind) in leaves.items() if kind == "string"]
    except _DAMAGE as error:
        raise CorruptCheckpoint(
            f"{root.location}/{item.path}{TREE} does not describe a tree of orbax: {error!r}"
        ) from error
    if texts:
        strings = _document(root, item.path + _STRINGS)
        for name in texts:
            tree.values[name] = _pointed(root, item, strings, name)


def _pointed(root: Storage, item: Item, strings: Any, name: str) -> str:
    """The string at the JSON pointer ``/name``."""
    for part in name.split("/"):
        token = part.replace("~1", "/").replace("~0", "~")
        strings = strings.get(token) if isinstance(strings, dict) else None
    if isinstance(strings, str):
        return strings
    raise CorruptCheckpoint(
        f"{root.location}/{item.path}{_STRINGS} has no text of the leaf {name!r}"
    )


def _read_aggregate(
    root: Storage, item: Item, tree: Tree, arrays: dict[str, str]
) -> None:
    file = item.path + AGGREGATE
    found = dict[str, tuple[str, ...]]()
    for path, value in _leaves(unpack(root, file), ()):
        name = ".".join(path)
        if name in found:
            raise CorruptCheckpoint(
                f"{root.location}/{file}: the leaves {found[name]} and {path} have one name, "
                f"{name!r}"
            )
        found[name] = path
        if isinstance(value, str) and value.startswith(_PLACEHOLDER):
            arrays[name] = str(path)
            continue
        arrays.pop(name, None)
        if isinstance(value, Inline):
            tree.inline[name] = value
        elif isinstance(value, Location):
            raise BackendError(
                f"{root.location}/{file}: the leaf {name!r} is of bytes, and no array"
            )
        else:
            tree.values[name] = value


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, list | tuple) and not isinstance(value, Inline):
        value = dict(enumerate(value)) or value
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for key, part in value.items():
        yield from _leaves(part, (*path, str(key)))
