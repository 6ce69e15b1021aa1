"""The format hf-xor: a directory for each version, with frames of new bytes XOR old bytes.

slime, miles, SGLang and ModelExpress share it: see docs/delta-format.md.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from megackpt.backends import weight_maps
from megackpt.backends.safetensors import INDEX, WHOLE
from megackpt.backends.safetensors.headers import (
    read_header,
    refuse_unfit,
    tensor_file,
)
from megackpt.backends.zarr.codecs import decompress
from megackpt.errors import (
    BackendError,
    CorruptCheckpoint,
    NotACheckpoint,
    join_truncated,
)
from megackpt.planning.manifest import Location, TensorEntry, TensorMeta
from megackpt.storage import Storage, read_again, read_dense, root_at

Octets = NDArray[np.uint8]
"""The bytes of a tensor in C order, in one dimension."""

_NUMBER = re.compile("[0-9]{1,18}")
_ALGORITHM = "adler32"  # the only one that ModelExpress reads
_VALUES = {
    "delta_encoding": ("xor",),
    "compression_format": ("zstd",),
    "checksum_format": (_ALGORITHM, "xxh3-128"),
}
"""The keys of an index that have values of these kinds only."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: a frame, or the elements. The checksum is that of the elements."""

    meta: TensorMeta
    data: Octets
    checksum: str


def checksum(algorithm: str, data: Octets) -> str:
    """The checksum as the format writes it, of "adler32" or "xxh3-128"."""
    if algorithm == _ALGORITHM:
        return f"{zlib.adler32(data.data):08x}"
    return xxhash.xxh3_128_hexdigest(data.data)


def folder(version: int) -> str:
    """The name of a version's directory."""
    return f"weight_v{version:06}"


def write_file(
    root: Storage, number: int, count: int, stored: Mapping[str, Stored]
) -> dict[str, str]:
    """Write a file of a version durably: ``number``, from 0, of ``count``. Returns tensor -> file.

    Raises BackendError naming the tensors that no safetensors file can hold.
    """
    tensors = [TensorEntry(key, one.meta) for key, one in stored.items()]
    refuse_unfit(tensors)
    name = f"model-{number:05}-of-{count:05}.safetensors"
    checksums = {key: one.checksum for key, one in stored.items()}
    file = tensor_file(name, tensors, checksums)
    with root.create(name) as writer:
        writer.expect(sum(place.length for place in file.places.values()))
        writer.write([memoryview(file.head)])
        for key in file.places:
            writer.write([stored[key].data.data])
    return dict.fromkeys(stored, name)


def write_index(
    root: Storage, files: Mapping[str, str], version: int, base: int | None
) -> None:
    """Make a version visible, when its files are durable. ``files``: tensor -> file.

    ``base`` None: it is a full version.
    """
    metadata = {"checksum_format": _ALGORITHM}
    if base is not None:
        metadata = {key: values[0] for key, values in _VALUES.items()}
        metadata |= {"version": f"{version:06}", "base_version": f"{base:06}"}
    root.put(INDEX, weight_maps.emit(metadata, files))


@dataclass(frozen=True)
class XorVersion:
    """What changed from version ``base`` to version ``version``.

    ``frames``: tensor -> where its frame is, and the checksum of its new bytes. Other tensors did
    not change.
    """

    root: Storage
    version: int
    base: int
    algorithm: str
    frames: Mapping[str, tuple[Location, str]]

    def patch(self, key: str, data: Octets) -> None:
        """Turn a tensor's bytes of the base into the bytes of this version, in place.

        Raises CorruptCheckpoint for a damaged frame, before any change; and if the new bytes are
        not the bytes of the version: then ``data`` is of no use.
        """
        if key not in self.frames:
            return
        place, expected = self.frames[key]
        where = f"{key!r} in {self.root.location}/{place.file}"

        def read() -> Octets:
            with self.root.open(place.file) as reader:
                frame = read_dense(reader, place.start, place.length, where)
            return decompress("zstd", np.frombuffer(frame, np.uint8), len(data), where)

        data ^= read_again(self.root, read)
        found = checksum(self.algorithm, data)
        if found != expected:
            raise CorruptCheckpoint(
                f"{where} gives bytes with the {self.algorithm} {found} instead of {expected}: it "
                f"is damaged, or was not applied to version {self.base}"
            )


def read_version(root: Storage) -> XorVersion | None:
    """The contents of a version's directory. None: a full version, as any Hugging Face directory.

    Raises:
        NotACheckpoint: nothing is there, or the version is not complete.
        CorruptCheckpoint: the index and the files do not match, or are damaged.
        BackendError: an encoding, compression or checksum that megackpt does not read.
    """
    where = f"{root.location}/{INDEX}"
    if root.size(INDEX) is None:
        if root.size(WHOLE) is not None:
            return None
        raise NotACheckpoint(f"{root.location} has no complete version of weights")
    weight_map, metadata = weight_maps.read(root, INDEX)
    if "delta_encoding" not in metadata:
        return None
    for name, known in _VALUES.items():
        if metadata.get(name) not in known:
            raise BackendError(
                f"{where} has the {name} {metadata.get(name)!r}: megackpt reads "
                f"{' or '.join(known)}"
            )
    version, base = (str(metadata.get(key)) for key in ("version", "base_version"))
    if not (_NUMBER.fullmatch(version) and _NUMBER.fullmatch(base)):
        raise CorruptCheckpoint(
            f"{where} has the version {version!r} on base {base!r}, which are not numbers"
        )
    frames = {}
    held = []
    for file in dict.fromkeys(weight_map.values()):
        contents = read_header(root, file)
        for (key, meta), place in contents.tensors:
            held.append((key, file))
            if meta.dtype != "uint8" or len(meta.shape) != 1:
                raise CorruptCheckpoint(
                    f"{key!r} in {root.location}/{file} is {meta.dtype} of shape {meta.shape}, "
                    "and a frame is uint8 of one dimension"
                )
            if key not in contents.metadata:
                raise CorruptCheckpoint(
                    f"{root.location}/{file} has no checksum of {key!r}"
                )
            frames[key] = place, contents.metadata[key]
    weight_maps.check(where, weight_map, held)
    return XorVersion(
        root, int(version), int(base), metadata["checksum_format"], frames
    )


def read_chain(
    place: str | os.PathLike[str], base: int, target: int
) -> list[XorVersion]:
    """The versions below ``place`` that lead from version ``base`` to ``target``, oldest first.

    Raises NotACheckpoint for a version that is missing, and CorruptCheckpoint for versions that do
    not lead to the base; otherwise as ``read_version``.
    """
    chain: list[XorVersion] = []
    number = target
    while number != base:
        where = f"{os.fspath(place)}/{folder(number)}"
        try:
            found = read_version(root_at(where))
        except FileNotFoundError:
            raise NotACheckpoint(
                f"{where} is missing: version {base} does not lead to version {target}"
            ) from None
        if found is None:
            raise CorruptCheckpoint(
                f"version {number} in {place} is a full version, so version {base} does not lead "
                f"to version {target}: begin with version {number}"
            )
        if found.version != number or not base <= found.base < number:
            raise CorruptCheckpoint(
                f"{where} is version {found.version} on base {found.base}, which "
                f"does not lead from version {base} to version {number}"
            )
        chain.insert(0, found)
        number = found.base
    return chain


def write_patched(base: Storage, chain: Sequence[XorVersion], target: Storage) -> None:
    """Write the files of a Hugging Face directory, with the changes of a chain, to ``target``.

    ``base`` is of the version that the chain begins with. A tensor at a time is in memory. Folders
    in ``base`` are not copied.

    Raises CorruptCheckpoint for tensors of the chain that ``base`` does not have.
    """
    missing = dict.fromkeys(key for version in chain for key in version.frames)
    for file in base.list():
        if base.size(file) is None:
            continue
        if not file.endswith(".safetensors"):
            target.put(file, base.get(file))
            continue
        tensors = read_header(base, file).tensors
        with base.open(file) as reader, target.create(file) as writer:
            head = reader.size - sum(place.length for _, place in tensors)
            parts = [(entry.key, place) for entry, place in tensors]
            for key, place in [("", Location(file, 0, head)), *parts]:
                where = f"{key!r} in {base.location}/{file}"
                data = read_dense(reader, place.start, place.length, where)
                for version in chain:
                    version.patch(key, np.frombuffer(data, np.uint8))
                writer.write([memoryview(data)])
                missing.pop(key, None)
    if missing:
        raise CorruptCheckpoint(
            f"{base.location} has no tensor {join_truncated(list(missing), separator=', ')}, which "
            f"version {chain[-1].version} changes"
        )
