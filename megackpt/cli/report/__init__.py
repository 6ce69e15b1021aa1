"""What people look at: the shard map, one self-contained HTML page about a checkpoint or a declaration.

The page needs no server and no network, and runs nothing but its own script. ``contents`` says what is told, in
columns; ``assembling`` puts it into the page, whose text, style and scripts lie in the folder ``page``.
"""

from __future__ import annotations

from collections.abc import Sequence

from megackpt.checkpoint import Opened
from megackpt.cli.report.assembling import page
from megackpt.cli.report.contents import of_declarations, of_manifest
from megackpt.planning.manifest import Declarations, Manifest

__all__ = ["shard_map", "shard_map_of_declarations"]


def shard_map(stored: Manifest | Opened, title: str = "") -> str:
    """The page about a checkpoint: who wrote which box, and which bytes of which file hold it.

    ``stored`` is an open checkpoint, or a manifest alone, be it of a checkpoint or of a plan (whose chunks are in
    no file yet). Holes and overlaps among its chunks are shown, not raised.
    """
    manifest, opened = (
        (stored.manifest, stored) if isinstance(stored, Opened) else (stored, None)
    )
    contents = of_manifest(manifest)
    if opened is not None:
        contents["facts"].append(["in", opened.storage.location])
        contents["small"] = [
            [name, size] for name, (size, _) in sorted(opened.small.items())
        ]
        title = title or opened.storage.location.rstrip("/").rpartition("/")[2]
    return page(title or "a checkpoint", contents)


def shard_map_of_declarations(
    declared: Declarations | Sequence[Declarations],
    title: str = "",
    balance: bool = True,
) -> str:
    """The page about a save to come: who holds which box, and which of them will write it.

    ``declared`` are the declarations of all ranks: merged, or one a rank in rank order. They may be as wrong as
    can be: holes, overlaps, boxes out of bounds and disagreements are what the page is for. ``balance`` as in
    SavePolicy.
    """
    merged = (
        declared if isinstance(declared, Declarations) else Declarations.merge(declared)
    )
    return page(title or "a declaration", of_declarations(merged.numbered(), balance))
