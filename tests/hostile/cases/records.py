"""Cases of the corpus: records of torch DCP and zip archives that contradict themselves."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from tests.hostile.cases.objects import FIRST
from tests.hostile.cases.place import Place, add
from tests.hostile.pickles import (
    archive,
)

# Numbers ------------------------------------------------------------------------------------------------------------


def place_of_w(**fields: Any) -> Callable[[Place], None]:
    return lambda p: p.table(lambda t: vars(t.storage_data[FIRST]).update(fields))


class Raw:
    """A torch.Size of numbers that torch would refuse."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __reduce__(self) -> Any:
        return torch.Size, (self.numbers,)


def size_of_w(*numbers: int) -> Callable[[Place], None]:
    return lambda p: p.table(
        lambda t: vars(t.state_dict_metadata["w"]).update(size=Raw(*numbers))
    )


def chunk_of_w(offsets: Any, sizes: Any) -> Callable[[Place], None]:
    def change(table: Any) -> None:
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        table.state_dict_metadata["w"].chunks[0] = chunk
        table.storage_data[MetadataIndex("w", torch.Size(offsets))] = (
            table.storage_data[FIRST]
        )

    return lambda p: p.table(change)


_META = r"\.metadata|distcp|reach|'w'|not covered|no chunk|holes|cannot"
for _name, _spoil in {
    "an offset beyond the file": place_of_w(offset=1 << 40),
    "a negative offset": place_of_w(offset=-8),
    "an offset that is a text": place_of_w(offset="0"),
    "an offset of 2^63": place_of_w(offset=1 << 63),
    "a length of 2^62": place_of_w(length=1 << 62),
    "a negative length": place_of_w(length=-1),
    "offset and length that overflow": place_of_w(offset=(1 << 63) - 8, length=1 << 40),
    "a length that is true": place_of_w(length=True),
    "a record in the middle of another": place_of_w(offset=100, length=1000),
    "two chunks at one place": lambda p: p.table(
        lambda t: t.storage_data.update(
            {MetadataIndex("w", torch.Size([4, 0])): t.storage_data[FIRST]}
        )
    ),
    "a shape over 2^63": size_of_w(1 << 40, 1 << 40),
    "a shape over 2^63 with a zero": size_of_w(0, 1 << 62, 1 << 62),
    "a negative shape": size_of_w(8, -4),
    "a shape of 100 dimensions": size_of_w(*[1] * 100),
    "a shape of 4 TiB": size_of_w(1 << 38, 4),
    "a chunk outside": chunk_of_w((8, 0), (4, 4)),
    "a chunk of negative size": chunk_of_w((0, 0), (-4, 4)),
    "a chunk that overlaps": chunk_of_w((2, 0), (4, 4)),
    "a chunk of other dimensions": chunk_of_w((0,), (4,)),
    "a chunk that is missing": lambda p: p.table(
        lambda t: t.state_dict_metadata["w"].chunks.pop()
    ),
    "no chunks": lambda p: p.table(lambda t: t.state_dict_metadata["w"].chunks.clear()),
    "chunks that are a text": lambda p: p.table(
        lambda t: vars(t.state_dict_metadata["w"]).update(chunks="x")
    ),
    "a dtype by name": lambda p: p.table(
        lambda t: vars(t.state_dict_metadata["w"].properties).update(dtype="float32")
    ),
    "another dtype": lambda p: p.table(
        lambda t: vars(t.state_dict_metadata["w"].properties).update(dtype=torch.int64)
    ),
    "an object with a number without end": lambda p: p.table(
        lambda t: t.state_dict_metadata.update(
            {
                f"x/shard_{'9' * 5000}_{'9' * 5000}": t.state_dict_metadata[
                    "rng/shard_0_2"
                ]
            }
        )
    ),
    "no places": lambda p: p.table(lambda t: vars(t).update(storage_data=None)),
    "a table that is a list": lambda p: p.put(".metadata", pickle.dumps([1, 2])),
}.items():
    add(_name, "dcp", _spoil, "" if _name == "a dtype by name" else _META)

# Archives -----------------------------------------------------------------------------------------------------------


def grown(data: bytes) -> bytes:
    """The directory's first member is said to be enormous, in a zip64 field."""
    at = data.rindex(b"PK\1\2")
    changed = bytearray(data)
    changed[at + 20 : at + 28] = b"\xff" * 8
    return bytes(changed)


def patched(
    magic: bytes, at: int, new: bytes, *, last: bool = False
) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        where = (data.rindex(magic) if last else data.index(magic)) + at
        return data[:where] + new + data[where + len(new) :]

    return change


def doubled(data: bytes) -> bytes:
    """Two members share their bytes: the second is said to begin where the first does."""
    first, second = (
        data.index(b"PK\1\2"),
        data.index(b"PK\1\2", data.index(b"PK\1\2") + 4),
    )
    return data[: second + 42] + data[first + 42 : first + 46] + data[second + 46 :]


_ZIPS: Mapping[str, Callable[[bytes], bytes]] = {
    "of 64 MiB deflated": lambda _: archive(bytes(64 << 20), packed=True),
    "whose directory counts 65535": patched(b"PK\5\6", 8, b"\xff" * 4),
    "whose directory is elsewhere": patched(b"PK\5\6", 16, b"\xff\xff\xff\x7f"),
    "whose member is beyond the end": patched(b"PK\1\2", 42, b"\xff\xff\xff\x7f"),
    "whose members overlap": doubled,
    "with a member of 4 GiB": grown,
    "with an encrypted member": patched(b"PK\1\2", 8, b"\1\0"),
    "with a checksum that is wrong": patched(b"PK\1\2", 16, b"abcd"),
    "with something behind it": lambda data: data + b"x",
    "with a comment": lambda data: data[:-2] + b"\4\0PK\5\6",
    "that is no archive": lambda _: b"PK\3\4" + bytes(1000),
    "that is a tar": lambda _: b"ustar\0" * 200,
    "with a zip64 record that lies": lambda data: (
        data[:-22]
        + struct.pack(
            "<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1 << 60, 1 << 60, 1 << 60, 0
        )
        + struct.pack("<4sLQL", b"PK\6\7", 0, len(data) - 22, 1)
        + data[-22:]
    ),
}
for _number, (_name, _change) in enumerate(_ZIPS.items()):
    for _kind, _file in (("dcp", "common.pt"), ("torch", "model.pt")):
        add(
            f"an archive {_name}",
            _kind,
            partial(
                lambda file, change, p: p.put(file, change(p.get(file))), _file, _change
            ),
            # torch's archives have a zip64 record, which counts.
            ""
            if _name.startswith("whose directory")
            else rf"{_file}|archive|recognised|cut off",
        )
for _kind, _file in (("dcp", "__0_0.distcp"), ("dcp", "__1_0.distcp")):
    add(
        f"{_file} with its directories mixed up",
        _kind,
        partial(
            lambda file, p: p.put(file, p.get(file).replace(b"PK\1\2", b"PK\1\3")),
            _file,
        ),
        r"archive|record|PytorchStreamReader|distcp",
    )
