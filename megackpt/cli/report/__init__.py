"""The shard map: one HTML page about a checkpoint, or about the declarations of a save.

The page needs no server and no network. ``map_data`` makes its data, ``page`` puts the data, the
style and the scripts of the folder ``page`` into one file.
"""

from __future__ import annotations

from collections.abc import Sequence

from megackpt.checkpoint import Opened
from megackpt.cli.report.html_page import make_page
from megackpt.cli.report.map_data import declarations_data, manifest_data
from megackpt.planning.manifest import Declarations, Manifest

__all__ = ["shard_map", "shard_map_of_declarations"]


def shard_map(stored: Manifest | Opened, title: str = "") -> str:
    """The page about a checkpoint: which rank wrote each box, and which bytes of a file hold it.

    Holes and overlaps are shown, not raised.

    Args:
        stored: an open checkpoint, or a manifest, also that of a plan whose chunks are in no file.
        title: of the page; by default the name of the checkpoint.
    """
    if not isinstance(stored, Opened):
        return make_page(title or "a checkpoint", manifest_data(stored))
    location = stored.storage.location
    data = manifest_data(stored.manifest)
    data["facts"].append(["in", location])
    data["small"] = [[name, size] for name, (size, _) in sorted(stored.small.items())]
    return make_page(title or location.rstrip("/").rpartition("/")[2], data)


def shard_map_of_declarations(
    declared: Declarations | Sequence[Declarations],
    title: str = "",
    balance: bool = True,
) -> str:
    """The page about a save to come: which ranks hold each box, and which of them will write it.

    Holes, overlaps, boxes out of bounds and contradictions are shown, not raised.

    Args:
        declared: the declarations of all ranks: merged, or one for each rank in rank order.
        title: of the page.
        balance: as in SavePolicy.
    """
    if not isinstance(declared, Declarations):
        declared = Declarations.merge(declared)
    data = declarations_data(declared.numbered(), balance)
    return make_page(title or "a declaration", data)
