"""The corpus: named ways to spoil a healthy checkpoint, and what a reader should then say.

Each maker gets a Place with a fresh copy of a healthy checkpoint (see healthy.py) and breaks it. Nothing of this is
kept in the repository: ``build`` makes the directories anew.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from megackpt.checkpoint.index import START
from megackpt.storage import digest
from tests.hostile import healthy
from tests.hostile.pickles import (
    BOMBS,
    GADGETS,
    QUIET,
    RUNNING,
    archive,
    slipped,
    whole,
)

STEP = "iter_0000001"


@dataclass(frozen=True)
class Place:
    """Where a case stands: its checkpoint, a folder beside that nobody may look into, a file that must not appear."""

    home: Path

    @property
    def folder(self) -> Path:
        return self.home / "run" / STEP

    @property
    def outside(self) -> Path:
        return self.home / "outside"

    @property
    def witness(self) -> Path:
        return self.home / "witness"

    def get(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        (self.folder / name).write_bytes(data)

    def json(self, name: str, change: Callable[[Any], Any]) -> None:
        """Change a document; what ``change`` returns, if anything, takes its place."""
        document = json.loads(self.get(name))
        changed = change(document)
        self.put(name, json.dumps(document if changed is None else changed).encode())

    def table(self, change: Callable[[Any], None]) -> None:
        """Change what .metadata says."""
        table = healthy.table(self.folder)
        change(table)
        self.put(".metadata", pickle.dumps(table, 4))

    def index(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the head of megackpt.index, and have its digest right."""
        data = self.get("megackpt.index")
        magic, version, length = struct.unpack_from("<8sII", data)
        head = json.loads(data[START : START + length])
        change(head)
        told = json.dumps(head).encode()
        body = (
            struct.pack("<8sII", magic, version, len(told))
            + told
            + data[START + length : -16]
        )
        self.put("megackpt.index", body + digest(body))


@dataclass(frozen=True)
class Case:
    """A way to spoil checkpoints of one kind.

    ``tells``: what some reader's error must match; "" where the damage is harmless, so that all that is read is right.
    ``linked``: the format follows links to regular files. ``long``: for the campaign only.
    """

    name: str
    kind: str
    spoil: Callable[[Place], object]
    tells: str = ""
    linked: bool = False
    long: bool = False


CASES: dict[str, Case] = {}


def add(
    name: str, kind: str, spoil: Callable[[Place], object], tells: str = "", **more: Any
) -> None:
    name = f"{kind}: {name}"
    if name in CASES:
        raise KeyError(name)
    CASES[name] = Case(name, kind, spoil, tells, **more)


def build(base: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Make these cases below ``base``; what the readers are to be told of each (see readers.py).

    Under the name of a kind: the healthy checkpoint itself.
    """
    kinds = {CASES[name].kind for name in names}
    found: dict[str, dict[str, Any]] = {}
    about: dict[str, dict[str, Any]] = {}
    for kind in sorted(kinds):
        original = base / "healthy" / kind
        original.parent.mkdir(exist_ok=True, parents=True)
        healthy.MAKERS[kind][1](original)
        about[kind] = healthy.told(kind, original)
    for number, name in enumerate([*sorted(kinds), *names]):
        kind = CASES[name].kind if name in CASES else name
        place = Place(base / f"{number:04}")
        shutil.copytree(base / "healthy" / kind, place.folder)
        place.outside.mkdir()
        (place.outside / "secret").write_bytes(b"secret" * 1000)
        if name in CASES:
            CASES[name].spoil(place)
        found[name] = {
            **about[kind],
            "checkpoint": str(place.folder),
            "outside": str(place.outside),
        }
    return found


# Pickles ------------------------------------------------------------------------------------------------------------


def metadata(place: Place, body: bytes) -> None:
    place.put(".metadata", whole(body))


def state(name: str) -> Callable[[Place, bytes], None]:
    return lambda place, body: place.put(name, slipped(place.get(name), body))


def one(name: str) -> Callable[[Place, bytes], None]:
    return lambda place, body: place.put(name, archive(whole(b"]" + body + b"a")))


def recorded(
    key: MetadataIndex, data: Callable[[bytes], bytes]
) -> Callable[[Place, bytes], None]:
    def spoil(place: Place, body: bytes) -> None:
        place.put("__9_0.distcp", data(body))
        info = _StorageInfo("__9_0.distcp", 0, len(data(body)))
        place.table(lambda table: table.storage_data.update({key: info}))

    return spoil


def legacy(body: bytes) -> bytes:
    """What torch wrote before it wrote archives: pickles one after the other."""
    start = healthy.record(torch.ones(4, 4), _use_new_zipfile_serialization=False)
    return start[: start.index(b"\x80\x02ctorch._utils")] + whole(body) + bytes(64)


FIRST = MetadataIndex("w", torch.Size([0, 0]))
SLOTS: Mapping[str, tuple[str, Callable[[Place, bytes], None]]] = {
    ".metadata": ("dcp", metadata),
    "common.pt": ("dcp", state("common.pt")),
    "object": (
        "dcp",
        recorded(
            MetadataIndex("rng/shard_0_2"), lambda b: archive(whole(b"]" + b + b"a"))
        ),
    ),
    "tensor": ("dcp", recorded(FIRST, lambda b: archive(whole(b)))),
    "tensor of old": ("dcp", recorded(FIRST, legacy)),
    "layout C's .metadata": ("layout C", metadata),
    "layout C's common state": (
        "layout C",
        recorded(
            MetadataIndex("common_state/shard_0_1"),
            lambda b: archive(whole(b"]" + b + b"a")),
        ),
    ),
    "flattened .metadata": ("flattened", metadata),
    "zarr common.pt": ("zarr", state("common.pt")),
    "zarr object": ("zarr", one("rng.objects/shard_0_2.pt")),
    "old zarr common.pt": ("megatron zarr", state("common.pt")),
    "old zarr object": ("megatron zarr", one("rng_state/shard_0.0_1.2.pt")),
    "safetensors common.pt": ("safetensors", state("common.pt")),
    "safetensors object": ("safetensors", one("rng.objects/shard_0_2.pt")),
    "torch file": ("torch", state("model.pt")),
    "bin": ("bins", state("pytorch_model-00002-of-00002.bin")),
}
"""Every place where a pickle stands: kind of checkpoint, and how to put one there. (Ours with an index: see below.)"""
UNTRUSTED = (
    r"not trusted|was not run|may not be called|which no checkpoint's table|[Uu]nsupported|unknown pickle opcode"
    r"|cannot read the record|sets the state of|not a dict of attributes|damaged|no persistent|a persistent id"
    r"|of a class of its own|of another class"
)


def code(slot: str, name: str, **more: Any) -> None:
    kind, put = SLOTS[slot]

    def spoil(place: Place) -> None:
        body = (
            RUNNING[name](f"touch {place.witness}") if name in RUNNING else QUIET[name]
        )
        put(place, body)

    # A record of what torch wrote before archives is not unpickled.
    tells = "or is something else" if slot == "tensor of old" else UNTRUSTED
    add(f"{name} in the {slot}", kind, spoil, tells, **more)


for _slot in SLOTS:
    for _number, _name in enumerate((*RUNNING, *QUIET)):
        in_turn = _slot in (".metadata", "common.pt") and (
            _slot == ".metadata"
        ) == bool(_number % 2)
        code(_slot, _name, long=not (in_turn or _name == "os.system"))
    for _number, (_name, _body) in enumerate(BOMBS.items()):
        in_turn = _slot == (".metadata", "common.pt", "torch file")[_number % 3]
        add(
            f"{_name} in the {_slot}",
            SLOTS[_slot][0],
            partial(lambda put, body, place: put(place, body), SLOTS[_slot][1], _body),
            ".",
            long=not in_turn,
        )
for _name, _body in GADGETS.items():
    add(_name, "dcp", partial(lambda body, p: metadata(p, body), _body), ".")
add(
    "code in a common state that the index holds to account",
    "ours",
    lambda p: state("common.pt")(p, RUNNING["os.system"](f"touch {p.witness}")),
    r"common\.pt",
)
for _value in (None, 5, [1, 2], "text"):
    add(
        f"a common state that is {_value!r}",
        "dcp",
        lambda p, v=_value: torch.save(v, p.folder / "common.pt"),
        "not a dict",
    )

# Names --------------------------------------------------------------------------------------------------------------

LEADING = (
    "../../outside/secret",
    "/absolute",
    "a/../../../outside/secret",
    "..",
    "",
    "w\0x",
    "x" * 5000,
)


def named_by(place: Place, path: str) -> str:
    return str(place.outside / "secret") if path == "/absolute" else path


def lead(place: Place, path: str) -> None:
    def change(table: Any) -> None:
        for info in table.storage_data.values():
            info.relative_path = named_by(place, path)

    place.table(change)


def map_to(name: str) -> Callable[[Place, str], None]:
    return lambda place, path: place.json(
        name, lambda d: d["weight_map"].update(w=named_by(place, path))
    )


def small_to(place: Place, path: str) -> None:
    place.index(
        lambda head: head["small"].update({named_by(place, path): [6000, "00" * 16]})
    )


def file_to(place: Place, path: str) -> None:
    """A name of a data file in the index: of the same length, for its text is counted."""
    data = place.get("megackpt.index")
    name = b"__0_0.distcp"
    other = named_by(place, path).encode()[: len(name)].ljust(len(name), b"x")
    body = data[:-16].replace(name, other)
    place.put("megackpt.index", body + digest(body))


_INSIDE = (
    r"two chunks of 'w' begin|File name too|not a file inside|leads out|(no|not a) name of a file|not there|names files"
    r"|empty|bytes instead|missing"
)
for _path in LEADING:
    _shown = repr(_path)[:30]
    add(
        f"a record at {_shown}",
        "dcp",
        partial(lambda path, p: lead(p, path), _path),
        _INSIDE,
    )
    for _kind, _index in (
        ("safetensors", "model.safetensors.index.json"),
        ("bins", "pytorch_model.bin.index.json"),
    ):
        add(
            f"a weight map to {_shown}",
            _kind,
            partial(lambda put, path, p: put(p, path), map_to(_index), _path),
            _INSIDE,
        )
    add(
        f"an index's small file {_shown}",
        "ours",
        partial(lambda path, p: small_to(p, path), _path),
        _INSIDE,
    )
for _path in ("../../../../", "/absolute", "a/../../x/y"):
    add(
        f"an index's file {_path}",
        "ours",
        partial(lambda path, p: file_to(p, path), _path),
        _INSIDE,
    )
add(
    "members of ../",
    "torch",
    lambda p: p.put(
        "model.pt", p.get("model.pt").replace(b"model/data", b"../../data")
    ),
    "member|recognised|no data.pkl|no torch.save",
)
add(
    "a separator that leads out",
    "zarr",
    lambda p: p.json(
        "w/zarr.json",
        lambda d: d.update(
            chunk_key_encoding={
                "name": "default",
                "configuration": {"separator": "/../../"},
            }
        ),
    ),
    r"w/zarr\.json",
)
add(
    "a key that leads out",
    "zarr",
    lambda p: p.json("w/zarr.json", lambda d: d["attributes"].update(key=["../x"])),
    r"w/zarr\.json.*key",
)

# Things that are no files -------------------------------------------------------------------------------------------


def link(place: Place, name: str) -> None:
    """The thing itself moves outside; where it was is a link to it."""
    moved = place.outside / Path(name).name
    shutil.move(place.folder / name, moved)
    (place.folder / name).symlink_to(moved)


def instead(make: Callable[[Path], object]) -> Callable[[Place, str], None]:
    def spoil(place: Place, name: str) -> None:
        path = place.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)

    return spoil


def listening(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


_NODES: Mapping[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "folder": os.mkdir,
    "socket": listening,
    "loop": lambda path: path.symlink_to(path.name),
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("nothing"),
}
_FILES = {
    "dcp": (".metadata", "common.pt", "metadata.json", "__0_0.distcp"),
    "ours": ("megackpt.index", "common.pt"),
    "zarr": (
        "metadata.json",
        "common.pt",
        "w/zarr.json",
        "w/c.0.0",
        "rng.objects/shard_0_2.pt",
    ),
    "megatron zarr": (
        "rng_state/shard_0.0_1.2.pt",
        "misc.uint8/.zarray",
        "misc.uint8/0",
    ),
    "safetensors": (
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "common.pt",
    ),
    "torch": ("model.pt",),
    "bins": ("pytorch_model-00001-of-00002.bin",),
}
_NO_FILE = (
    r"(no|not a) directory|Too many levels|(no|not a) regular file|missing|no file|"
    r"is not a distributed|not there|lacks|tells of|lists"
)
_number = 0
for _kind, _names in _FILES.items():
    for _name in _names:
        for _what, _make in _NODES.items():
            _number += 1
            add(
                f"{_name} is a {_what}",
                _kind,
                partial(lambda put, name, p: put(p, name), instead(_make), _name),
                "" if _name == "metadata.json" and _kind == "dcp" else _NO_FILE,
                long=_number % 7 != 0,
                linked=_kind == "safetensors",
            )
        add(
            f"{_name} is a link",
            _kind,
            partial(lambda name, p: link(p, name), _name),
            # Without metadata.json what has a .metadata is stock DCP's, and the same.
            ""
            if _kind == "safetensors" or (_kind, _name) == ("dcp", "metadata.json")
            else _NO_FILE,
            linked=_kind == "safetensors",
        )
for _kind, _name in (
    ("zarr", "w"),
    ("zarr", "rng.objects"),
    ("megatron zarr", "misc.uint8"),
    ("megatron zarr", "rng_state"),
    ("safetensors", "rng.objects"),
):
    # An object or an array that is a link as a whole is not there at all, and what asks for it is told so.
    add(
        f"the folder {_name} is a link",
        _kind,
        partial(lambda name, p: link(p, name), _name),
        _NO_FILE + "|Unexpected keys",
        linked=_kind
        == "megatron zarr",  # the names behind it tell a tensor from a tokenizer
    )
add(
    "the whole is a link",
    "dcp",
    lambda p: (p.folder.rename(p.home / "run" / "real"), p.folder.symlink_to("real")),
)
if os.geteuid() == 0:
    add(
        "a chunk is the device /dev/zero",
        "zarr",
        lambda p: instead(lambda path: os.mknod(path, 0o020666, os.makedev(1, 5)))(
            p, "w/c.0.0"
        ),
        _NO_FILE,
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

# Files that end too soon, or hold a bit that is another ------------------------------------------------------------


def cut(name: str, keep: float) -> Callable[[Place], None]:
    def spoil(place: Place) -> None:
        data = place.get(name)
        place.put(
            name,
            data[
                : int(keep)
                if keep >= 1
                else max(len(data) - 1, 0)
                if keep < 0
                else int(len(data) * keep)
            ],
        )

    return spoil


_CUT = {
    **_FILES,
    "zarr shards": ("w/c.0.0",),
    "zarr zstd": ("w/c.0.0",),
    "zarr blosc": ("w/c.0.0",),
}
_number = 0
for _kind, _names in _CUT.items():
    for _name in _names:
        for _keep in (0, 1, 0.5, -1):
            _number += 1
            add(
                f"{_name} cut at {'all but one' if _keep < 0 else _keep}",
                _kind,
                cut(_name, _keep),
                # The index ends with a line break. A metadata.json without a format is another
                # program's, and what has a .metadata is stock DCP's, and the same.
                ""
                if (_keep < 0 and _name.endswith(".index.json"))
                or (_kind, _name) == ("dcp", "metadata.json")
                else ".",
                long=_number % 3 != 0,
            )

# Files that disagree ------------------------------------------------------------------------------------------------


def other(kind: str, *names: str) -> Callable[[Place], None]:
    """These files of another checkpoint."""

    def spoil(place: Place) -> None:
        with_other = place.home / "other"
        healthy.TENSORS["w"].add_(1)
        try:
            healthy.MAKERS[kind][1](with_other)
        finally:
            healthy.TENSORS["w"].sub_(1)
        for name in names:
            shutil.copy(with_other / name, place.folder / name)
        shutil.rmtree(with_other)

    return spoil


def flip(name: str, at: int) -> Callable[[Place], None]:
    def spoil(place: Place) -> None:
        data = bytearray(place.get(name))
        data[at] ^= 4
        place.put(name, bytes(data))

    return spoil


def config(**fields: Any) -> Callable[[Place], None]:
    return lambda p: p.json("metadata.json", lambda d: d.update(fields))


add(
    "the index of another",
    "ours",
    other("ours", "megackpt.index"),
    r"digest|not those that were saved|damaged",
)
add(
    "the .metadata of another",
    "ours",
    other("dcp", ".metadata"),
    r"\.metadata.*(digest|bytes instead)",
)
add("the data of another", "ours", other("ours", "__0_0.distcp"), "damaged|not those")
add("the common state of another kind", "ours", other("zarr", "common.pt"), r"")
add("a bit of data", "ours", flip("__0_0.distcp", 1000), "damaged")
add("a bit of the index", "ours", flip("megackpt.index", 100), "digest|head|column")
add("an index of a version to come", "ours", flip("megackpt.index", 8), "version")
add(
    "the index of zarr",
    "ours",
    other("zarr with index", "megackpt.index"),
    r"missing|names it|holds",
)
add(
    "the index of torch_dist",
    "zarr with index",
    other("ours", "megackpt.index"),
    r"missing|names it|holds",
)
add(
    "torch_dist's metadata.json",
    "zarr",
    config(sharded_backend="torch_dist", sharded_backend_version=1),
    "metadata",
)
add(
    "zarr's metadata.json",
    "dcp",
    config(sharded_backend="zarr", sharded_backend_version=2),
    ".",
)
add("a group that tells of more arrays", "zarr",
    lambda p: p.json("zarr.json", lambda d: d["attributes"]["megackpt"].update(arrays=7)),
    "lists 7 arrays")  # fmt: skip
add(
    "an array that is gone",
    "zarr",
    lambda p: shutil.rmtree(p.folder / "b"),
    "lists 2 arrays",
)
add(
    "a chunk that is gone",
    "zarr",
    lambda p: (p.folder / "w/c.0.0").unlink(),
    "lacks the chunk",
)
add(
    "a file that is gone",
    "dcp",
    lambda p: (p.folder / "__1_0.distcp").unlink(),
    r"__1_0\.distcp",
)
add(
    "a file that is gone",
    "ours",
    lambda p: (p.folder / "__0_0.distcp").unlink(),
    r"__0_0\.distcp",
)
add("no .metadata", "dcp", lambda p: (p.folder / ".metadata").unlink(), r"\.metadata")
add(
    "nothing at all", "dcp", lambda p: [f.unlink() for f in p.folder.iterdir()], "empty"
)
add("a weight map of another file", "safetensors",
    lambda p: p.json("model.safetensors.index.json", lambda d: d["weight_map"].update(dict.fromkeys(
        d["weight_map"], "model-00001-of-00002.safetensors"))), "disagrees|is not in")  # fmt: skip
add("a weight map with a tensor more", "safetensors",
    lambda p: p.json("model.safetensors.index.json", lambda d: d["weight_map"].update(
        x="model-00001-of-00002.safetensors")), "'x' is not in")  # fmt: skip
add("two indexes", "safetensors",
    lambda p: (p.put("other.safetensors.index.json", p.get("model.safetensors.index.json")),
               (p.folder / "model.safetensors.index.json").rename(p.folder / "third.safetensors.index.json")),
    "recognised|several")  # fmt: skip
add("objects of two shapes", "zarr", lambda p: shutil.copy(
    p.folder / "rng.objects/shard_0_2.pt", p.folder / "rng.objects/shard_0_3.pt"), "one object's shards")  # fmt: skip
for _name, _change in {
    "an encoding that is none": lambda h: h.update(encoding="zip"),
    "columns beyond its end": lambda h: h["columns"]["start"].__setitem__(0, 1 << 40),
    "text of 2^60": lambda h: h.update(text=[1 << 60, 0]),
    "text of minus one": lambda h: h.update(text=[-1, 0]),
    "a number of axes that is huge": lambda h: h.update(axes=1 << 40),
    "dtypes that are none": lambda h: h.update(dtypes=["os.system"] * len(h["dtypes"])),
    "no columns": lambda h: h.update(columns={}),
    "a format that is none": lambda h: h.update(backend=["nothing", 1]),
    "a version of its format to come": lambda h: h.update(backend=["torch_dist", 999]),
    "a save's id that is a number": lambda h: h.update(save_id=5),
    "a small file's digest of one byte": lambda h: h["small"].update(
        {"common.pt": [5, "00"]}
    ),
}.items():
    add(f"an index with {_name}", "ours", partial(lambda change, p: p.index(change), _change),
        r"megackpt\.index|head|nothing|version")  # fmt: skip
add("an index of writers of number 2^30", "ours", lambda p: p.index(
    lambda h: h["columns"].update(writer=[h["columns"]["writer"][0], 0, 1 << 30, 1, 0])))  # fmt: skip

# Documents ----------------------------------------------------------------------------------------------------------

_DEEP = b"[" * 100_000
_TEXTS: Mapping[str, bytes] = {
    "nothing": b"",
    "an empty dict": b"{}",
    "a list": b"[1, 2]",
    "null": b"null",
    "nested deeply": _DEEP,
    "dicts nested deeply": b'{"a":' * 100_000,
    "not UTF-8": b'{"sharded_backend": "\xff\xfe"}',
    "a number of 5,000 digits": b'{"sharded_backend": "zarr", "sharded_backend_version": '
    + b"9" * 5000
    + b"}",
    "NaN": b'{"sharded_backend": "zarr", "sharded_backend_version": NaN}',
    "no JSON": b"<html>not found</html>",
    "spaces of 20 MiB": b" " * (20 << 20),
}
_DOCUMENTS = {
    "dcp": "metadata.json",
    "zarr": "w/zarr.json",
    "megatron zarr": "misc.uint8/.zarray",
    "safetensors": "model.safetensors.index.json",
    "bins": "pytorch_model.bin.index.json",
}
_number = 0
for _kind, _file in _DOCUMENTS.items():
    for _name, _text in _TEXTS.items():
        _number += 1
        # A metadata.json that names no format is another program's, and hides no .metadata.
        _tells = "" if _kind == "dcp" and _name != "NaN" else "."
        add(f"{_file} of {_name}", _kind, partial(lambda file, data, p: p.put(file, data), _file, _text), _tells,
            long=_number % 2 != 0)  # fmt: skip
for _name, _spoil in {
    "of no format": config(sharded_backend="os"),
    "whose format is a list": config(sharded_backend=["torch_dist"]),
    "of version 1e400": lambda p: p.put(
        "metadata.json", b'{"sharded_backend":"zarr","sharded_backend_version":1e400}'
    ),
    "of version true": config(sharded_backend_version=True),
    "of version -1": config(sharded_backend_version=-1),
    "of version 2^200": config(sharded_backend_version=1 << 200),
    "that says it twice": lambda p: p.put(
        "metadata.json", b'{"sharded_backend": "zarr", "sharded_backend": "torch_dist"}'
    ),
}.items():
    add(
        f"metadata.json {_name}",
        "dcp",
        _spoil,
        "" if "true" in _name or "twice" in _name else ".",
    )


def array(**fields: Any) -> Callable[[Place], None]:
    return lambda p: p.json("w/zarr.json", lambda d: d.update(fields))


def grid(*chunk: Any) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}


for _name, _fields in {
    "a shape over 2^63": {"shape": [1 << 40, 1 << 40], "chunk_grid": grid(1 << 40, 1 << 40)},
    "a shape of 10^19": {"shape": [10**19, 4]},
    "a negative shape": {"shape": [-8, 4]},
    "a shape of texts": {"shape": ["8", "4"]},
    "a shape of floats": {"shape": [8.0, 4.0]},
    "a shape of booleans": {"shape": [True, 4]},
    "a shape of one dimension more": {"shape": [8, 4, 1]},
    "a shape of 4 TiB": {"shape": [1 << 38, 4]},
    "100,000 axes": {"shape": [1] * 100_000, "chunk_grid": grid(*[1] * 100_000)},
    "a trillion chunks": {"shape": [1 << 40, 4], "chunk_grid": grid(1, 4)},
    "chunks of nothing": {"chunk_grid": grid(0, 4)},
    "chunks of minus one": {"chunk_grid": grid(-1, 4)},
    "chunks beyond memory": {"chunk_grid": grid(1 << 50, 4)},
    "chunks over 2^63": {"chunk_grid": grid(1 << 40, 1 << 40)},
    "an irregular grid": {"chunk_grid": {"name": "rectilinear", "configuration": {}}},
    "a dtype that is none": {"data_type": "object"},
    "a dtype that is a dict": {"data_type": {"name": "struct"}},
    "codecs that are none": {"codecs": []},
    "codecs that are unknown": {"codecs": [{"name": "exec", "configuration": {"code": "1"}}]},
    "codecs that are no list": {"codecs": {"bytes": 1}},
    "zstd of level 10^9": {"codecs": [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 10**9}}]},
    "zarr's format 4": {"zarr_format": 4},
    "the type of a group": {"node_type": "group"},
    "something that must be understood": {"storage_transformers": [{"name": "x"}]},
    "a fill value that is code": {"fill_value": "__import__('os')"},
    "attributes that are a list": {"attributes": [1]},
}.items():  # fmt: skip
    add(
        f"an array with {_name}",
        "zarr",
        array(**_fields),
        r"zarr\.json|'w'|/w describes|w/c.0.0",
    )
for _name, _fields in {
    "a shape over 2^63": {"shape": [1 << 63], "chunks": [1 << 63]},
    "a negative shape": {"shape": [-8]},
    "chunks of nothing": {"chunks": [0]},
    "an order that is none": {"order": "X"},
    "a dtype of objects": {"dtype": "|O"},
    "a filter of pickles": {"filters": [{"id": "pickle", "protocol": 5}]},
    "a compressor that is none": {"compressor": {"id": "os"}},
    "a separator that leads out": {"dimension_separator": "/../"},
}.items():
    add(f"an old array with {_name}", "megatron zarr", partial(
        lambda fields, p: p.json("misc.uint8/.zarray", lambda d: d.update(fields)), _fields),
        r"misc\.uint8|zarr")  # fmt: skip

# Chunks -------------------------------------------------------------------------------------------------------------


def zstd_bomb(size: int) -> bytes:
    """A frame of blocks that each repeat one byte 128 KiB: four bytes for each."""
    frame = b"\x28\xb5\x2f\xfd" + b"\xe0" + struct.pack("<Q", size)
    blocks, block = size >> 17, 1 << 17
    return frame + b"".join(
        struct.pack("<I", block << 3 | 1 << 1 | (number == blocks - 1))[:3] + b"\0"
        for number in range(blocks)
    )


def crc_ended(data: bytes) -> bytes:
    import google_crc32c

    return data + google_crc32c.value(data).to_bytes(4, "little")


def shard_of(
    *index: tuple[int, int], crc: int | None = None
) -> Callable[[Place], None]:
    return lambda p: p.put("w/c.0.0", healthy.shard(list(index), crc))


def gzipped(place: Place) -> None:
    array(codecs=[{"name": "bytes", "configuration": {"endian": "little"}},
                  {"name": "gzip", "configuration": {"level": 5}}])(place)  # fmt: skip
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    place.put(
        "w/c.0.0",
        b"".join(
            [*(packer.compress(bytes(1 << 20)) for _ in range(1024)), packer.flush()]
        ),
    )


_GOOD = [(36 * i, 36) for i in range(4)]
for _kind, _name, _spoil in (
    ("zarr", "a crc32c that is wrong", flip("w/c.0.0", -1)),
    ("zarr", "a bit that is wrong", flip("w/c.0.0", 20)),
    ("zarr", "a byte too many", lambda p: p.put("w/c.0.0", p.get("w/c.0.0") + b"x")),
    ("zarr zstd", "a bomb of 4 GiB", lambda p: p.put("w/c.0.0", crc_ended(zstd_bomb(4 << 30)))),
    ("zarr zstd", "a bomb that hides", lambda p: p.put("w/c.0.0", crc_ended(zstd_bomb(1 << 30)))),
    ("zarr zstd", "a size that lies", lambda p: p.put("w/c.0.0", crc_ended(zstd_bomb(1 << 20)[:13]))),
    ("zarr zstd", "no zstd", lambda p: p.put("w/c.0.0", crc_ended(b"PK\3\4" * 9))),
    ("zarr blosc", "a bomb of 2 GiB", lambda p: p.put(
        "w/c.0.0", crc_ended(p.get("w/c.0.0")[:4] + struct.pack("<I", 0x7FFFFFEF) + p.get("w/c.0.0")[8:-4]))),
    ("zarr blosc", "a compressed size that lies", lambda p: p.put(
        "w/c.0.0", crc_ended(p.get("w/c.0.0")[:12] + struct.pack("<I", 0x7FFFFFEF) + p.get("w/c.0.0")[16:-4]))),
    ("zarr blosc", "a block size that lies", lambda p: p.put(
        "w/c.0.0", crc_ended(p.get("w/c.0.0")[:8] + b"\xff" * 4 + p.get("w/c.0.0")[12:-4]))),
    ("zarr", "gzip of 1 GiB", gzipped),
    ("zarr shards", "an index beyond the end", shard_of(*_GOOD[:3], (1 << 40, 36))),
    ("zarr shards", "an index of 2^64 - 2", shard_of(*_GOOD[:3], ((1 << 64) - 2, 36))),
    ("zarr shards", "an index that overflows", shard_of(*_GOOD[:3], ((1 << 63) + 8, (1 << 63) + 8))),
    ("zarr shards", "an index with a hole", shard_of(*_GOOD[:3], ((1 << 64) - 1, (1 << 64) - 1))),
    ("zarr shards", "an index of chunks on one another", shard_of(*_GOOD[:3], (20, 36))),
    ("zarr shards", "an index of lengths that are none", shard_of(*_GOOD[:3], (108, 35))),
    ("zarr shards", "an index whose crc32c is wrong", shard_of(*_GOOD, crc=5)),
    ("zarr shards", "nothing but its index", lambda p: p.put("w/c.0.0", p.get("w/c.0.0")[-68:])),
):  # fmt: skip
    add(f"a chunk with {_name}", _kind, _spoil, r"'w'|w/c.0.0|w/zarr\.json")

# safetensors --------------------------------------------------------------------------------------------------------


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Place], None]:
    def spoil(place: Place) -> None:
        data = place.get("model.safetensors")
        length = int.from_bytes(data[:8], "little")
        document = json.loads(data[8 : 8 + length])
        found = change(document)
        told = found if isinstance(found, bytes) else json.dumps(document).encode()
        place.put(
            "model.safetensors",
            len(told).to_bytes(8, "little") + told + data[8 + length :],
        )

    return spoil


def length_of(number: int) -> Callable[[Place], None]:
    return lambda p: p.put(
        "model.safetensors",
        number.to_bytes(8, "little") + p.get("model.safetensors")[8:],
    )


_ENTRY = b'{"dtype":"F32","shape":[8,4],"data_offsets":[0,128]}'
for _name, _spoil in {
    "of 2^63 bytes": length_of(1 << 63),
    "of 2^64 - 1 bytes": length_of((1 << 64) - 1),
    "of no bytes": length_of(0),
    "that ends too soon": length_of(20),
    "beyond the file": length_of(1 << 20),
    "of 99 MB": lambda p: (length_of(99_000_000)(p), os.truncate(p.folder / "model.safetensors", 1 << 30)),
    "not UTF-8": header(lambda _: b'{"\xff": ' + _ENTRY + b"}"),
    "with a name twice": header(lambda _: b'{"w": ' + _ENTRY + b', "w": ' + _ENTRY + b"}"),
    "with a field twice": header(lambda _: b'{"w": {"dtype":"F32",' + _ENTRY[1:] + b"}"),
    "nested deeply": header(lambda _: b'{"w": ' + b'{"a":' * 100_000),
    "with a number of 5,000 digits": header(lambda _: b'{"w": {"dtype":"F32","shape":[' + b"9" * 5000 + b"]}}"),
    "that is a list": header(lambda _: b"{}"),
    "with tensors on one another": header(lambda h: h["b"].update(data_offsets=[0, 12])),
    "with a hole": header(lambda h: h["b"].update(data_offsets=[200, 212])),
    "with offsets backwards": header(lambda h: h["w"].update(data_offsets=[128, 0])),
    "with negative offsets": header(lambda h: h["w"].update(data_offsets=[-128, 0])),
    "with offsets beyond": header(lambda h: h["w"].update(data_offsets=[1 << 62, (1 << 62) + 128])),
    "with offsets that are floats": header(lambda h: h["w"].update(data_offsets=[0.0, 128.0])),
    "with a shape over 2^63": header(lambda h: h["w"].update(shape=[1 << 40, 1 << 40])),
    "with a shape of zero and 2^62": header(lambda h: h["w"].update(shape=[0, 1 << 62, 1 << 62], data_offsets=[0, 0])),
    "with a negative shape": header(lambda h: h["w"].update(shape=[-8, -4])),
    "with another shape": header(lambda h: h["w"].update(shape=[8, 5])),
    "with 100 dimensions": header(lambda h: h["w"].update(shape=[1] * 100)),
    "with a dtype that is none": header(lambda h: h["w"].update(dtype="OBJ")),
    "with notes that are numbers": header(lambda h: h.update(__metadata__={"a": 5})),
    "with a tensor that is a number": header(lambda h: h.update(w=5)),
    "with a lone surrogate": header(lambda _: b'{"\\ud800": ' + _ENTRY + b"}"),
}.items():  # fmt: skip
    add(
        f"a header {_name}",
        "one safetensors",
        _spoil,
        r"model\.safetensors|recognised|Unexpected keys",
    )

# Holes --------------------------------------------------------------------------------------------------------------


def hole(name: str, size: int = 1 << 40) -> Callable[[Place], None]:
    return lambda p: os.truncate(p.folder / name, size)


for _kind, _name, _tells in (
    ("dcp", ".metadata", r"\.metadata"),
    ("dcp", "common.pt", r"common\.pt"),
    ("dcp", "metadata.json", ""),  # so large a one is another program's
    ("dcp", "__0_0.distcp", ""),  # what is behind the records nobody asks for
    ("ours", "megackpt.index", r"megackpt\.index"),
    ("ours", "common.pt", ""),  # the index says how much of it counts
    ("zarr", "w/zarr.json", r"w/zarr\.json"),
    ("zarr", "zarr.json", r"zarr\.json"),
    ("zarr", "w/c.0.0", r"w/c.0.0"),
    ("zarr", "rng.objects/shard_0_2.pt", r"rng"),
    ("zarr shards", "w/c.0.0", r"w/c.0.0"),
    ("zarr zstd", "w/c.0.0", r"w/c.0.0"),
    ("zarr blosc", "w/c.0.0", r"w/c.0.0"),
    ("one safetensors", "model.safetensors", r"model\.safetensors"),
    ("safetensors", "model.safetensors.index.json", r"index\.json"),
    ("torch", "model.pt", r"model\.pt|recognised"),
):
    add(f"{_name} of a TiB that is a hole", _kind, hole(_name), _tells)


def in_every_run() -> list[str]:
    """A part of the corpus: every fourth of the short ones, and those that once went wrong."""
    short = [name for name, case in CASES.items() if not case.long]
    return sorted({*short[::4], *(name for name in short if name in WENT_WRONG)})


WENT_WRONG = frozenset((
    "dcp: no chunks",  # the tensor was left out
    "dcp: zarr's metadata.json",  # taken for an empty zarr group
    "megatron zarr: misc.uint8/.zarray is a link",  # the tensor was left out
    "megatron zarr: the folder misc.uint8 is a link",  # likewise
    "megatron zarr: rng_state/shard_0.0_1.2.pt cut at all but one",  # told without any file's name
    "zarr blosc: w/c.0.0 of a TiB that is a hole",  # tensorstore ended the process
    "zarr zstd: w/c.0.0 of a TiB that is a hole",
    "zarr: common.pt is a link",  # the common state was left out
))  # fmt: skip
