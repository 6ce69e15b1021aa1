"""The table of contents that a save ends with: the small files that make a directory of cells a zarr group."""

from __future__ import annotations

import json
from typing import Any

from megackpt.backends.zarr.documents import EXOTIC, Packing, array_document
from megackpt.backends.zarr.layout import grid_of
from megackpt.backends.zarr.names import ARRAY, VERSION, entry_name
from megackpt.planning.manifest import Manifest

_CONSOLIDATED = (
    10_000  # arrays; a longer list would cost every reader more than it saves
)
_LINE = "import megackpt.zarr_dtypes"  # what zarr-python needs to hear before it knows the exotic data types


def contents(manifest: Manifest, packing: Packing) -> dict[str, bytes]:
    """The small files of a checkpoint, but for metadata.json: every array's zarr.json, and the group's."""
    files: dict[str, bytes] = {}
    documents: dict[str, Any] = {}
    for entry, grid in zip(manifest.tensors, manifest.grids, strict=True):
        name, (shape, dtype) = entry_name(entry), entry.meta
        if not entry.meta.is_object:
            document = json.loads(
                array_document(shape, dtype, grid_of(shape, grid), packing)
            )
            hint = {"megackpt": _LINE} if dtype in EXOTIC else {}
            document["attributes"] = {"key": entry.key, **hint}
            # xarray opens no array without names. It takes axes of one name to be of one length, in the whole group.
            document["dimension_names"] = [
                f"{name}.dim_{axis}" for axis in range(len(shape))
            ]
            documents[name] = document
            files[f"{name}/{ARRAY}"] = _encoded(documents[name])
    files[ARRAY] = _encoded(_group(manifest, documents))
    return files


def _group(manifest: Manifest, documents: dict[str, Any]) -> dict[str, Any]:
    """The group's zarr.json.

    Consolidated metadata lets zarr-python list the arrays without stumbling over our other files. It would keep
    zarr-python from opening the group at all where an array's data type is not known to it.
    """
    about: dict[str, Any] = {"version": VERSION, "arrays": len(documents)}
    group: dict[str, Any] = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"megackpt": about},
    }
    if not EXOTIC.isdisjoint(entry.meta.dtype for entry in manifest.tensors):
        about["zarr-python"] = _LINE
    elif len(documents) <= _CONSOLIDATED:
        group["consolidated_metadata"] = {
            "kind": "inline",
            "must_understand": False,
            "metadata": documents,
        }
    return group


def _encoded(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()
