"""One torch.save file: whole tensors, objects and the common state, as plain ``torch.load`` reads.

    model.pt    {key: tensor, ..., "megackpt.state": {name: blob as a uint8 tensor}}

A format for export: one process, that of a conversion, writes the whole file; see file_writer.py.
Reads any file of torch.save by its path, also nested states and views, and the
``pytorch_model.bin`` of Hugging Face's directories; see torch_reader.py. No pickle runs code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from megackpt.backends import shared_files, torch_reader, weight_maps
from megackpt.backends.base import (
    Finished,
    Layout,
    Properties,
    Source,
    write_result,
)
from megackpt.backends.torch_file import file_writer
from megackpt.backends.torch_file.file_writer import NAME
from megackpt.errors import BackendError, NotACheckpoint
from megackpt.planning.manifest import (
    Manifest,
    SavePlan,
    WriteResult,
)
from megackpt.storage import SingleFile, Storage

_BIN = "pytorch_model.bin"
_INDEX = _BIN + weight_maps.ENDING


class TorchFile(torch_reader.TorchReader):
    """No options."""

    properties: ClassVar[Properties] = Properties(
        "torch", 1, frozenset({1}), whole_tensors=True, export_only=True
    )

    def layout(self, ranks: int, manifest: Manifest) -> Layout:  # noqa: ARG002 - always one file
        """Raises BackendError for names that the file could not keep apart."""
        file_writer.check_names(manifest)
        return Layout([NAME], file_writer.tensor_locations(manifest))

    def write(self, root: Storage, plan: SavePlan, data: Source) -> WriteResult:
        """Write the archive from front to back. The plan has all of its contents."""
        with root.create(NAME) as writer:
            writer.expect(plan.nbytes)
            return write_result(plan, file_writer.write_archive(writer, plan, data))

    def finish(self, root: Storage, manifest: Manifest) -> Finished:
        locations = file_writer.tensor_locations(manifest)
        merged, several = shared_files.merge_pieces(manifest, locations)
        manifest = shared_files.compute_digests(root, merged, several)
        return Finished(replace(manifest, files=(NAME,)))  # also without any chunk

    def recognises(self, root: Storage) -> bool:
        index, files = _files_in(root)
        return weight_maps.recognises(root, index, files, torch_reader.is_torch_file)

    def read_manifest(self, root: Storage) -> Manifest:
        index, files = _files_in(root)
        if not index and not files:
            raise NotACheckpoint(
                f"{root.location} has no torch.save file of a name that is known"
            )
        weight_map: dict[str, str] = {}
        tables = tuple(files)
        if index:
            weight_map, _ = weight_maps.read(root, index)
            files = list(dict.fromkeys(weight_map.values()))
            tables = (index,)
        found: list[torch_reader.Shard] = []
        for file in files:
            found += torch_reader.read_contents(root, file)[0]
        common = [shard.place.file for shard in found if shard.entry.is_common]
        if index:
            held = [
                (shard.entry.key, shard.place.file)
                for shard in found
                if not shard.entry.meta.is_object
            ]
            weight_maps.check(f"{root.location}/{index}", weight_map, held)
        if len(common) > 1:
            raise BackendError(
                f"{root.location}: {' and '.join(common)} hold more than tensors, and there is "
                "one common state only: save all but tensors in one place"
            )
        name = self.properties.name, self.properties.version
        return replace(torch_reader.manifest_of(root, found, name), tables=tables)


def _files_in(root: Storage) -> tuple[str, list[str]]:
    """The index of several files, or else a list of the one file (or of none)."""
    names = root.list()
    if isinstance(root, SingleFile):
        return "", names
    if NAME in names:
        return "", [NAME]
    # Where the same weights are there as safetensors, too, those are read.
    if any(name.endswith(".safetensors") for name in names):
        return "", []
    if _INDEX in names:
        return _INDEX, []
    return "", [name for name in names if name == _BIN]
