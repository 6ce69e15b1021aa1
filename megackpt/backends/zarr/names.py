"""What files of arrays are called; what lies beside them has the names of sidecars.py."""

from __future__ import annotations

from collections.abc import Sequence

from megackpt.backends.object_files import encode_key, folder
from megackpt.planning.manifest import TensorEntry

ARRAY = "zarr.json"
ZARRAY = ".zarray"
"""What describes an array in zarr's version 2, in which Megatron's old format kept it."""

SEPARATOR = "."
"""What stands between the numbers of a cell in the name of its file."""

VERSION = 2
"""Of this format: ours."""
MEGATRON = 1
"""The version of this format that Megatron-Core wrote up to 0.15: read, not written."""


def entry_name(entry: TensorEntry) -> str:
    """The name in the root under which everything of this entry is kept."""
    return folder(entry) if entry.meta.is_object else encode_key(entry.key)


def cell_file(name: str, index: Sequence[int]) -> str:
    """The file of one cell of an array: zarr's default chunk keys, with dots: folders cost as much as files."""
    return f"{name}/{SEPARATOR.join(['c', *map(str, index)])}"


def array_folder(version: int, file: str, entry: TensorEntry) -> str:
    """The folder of the array that a cell's file belongs to."""
    return entry.key if version == MEGATRON else file.partition("/")[0]


def fragments_file(rank: int) -> str:
    """The file in which a rank leaves its pieces of shared cells to be assembled; no array's name begins like it."""
    return f"__fragments_{rank}"
