"""Cases of the corpus: names that lead out of the checkpoint, links and special files."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megackpt.storage import digest
from tests.hostile.cases.place import Place, add

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
FILES = {
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
    "zero2": (
        "mp_rank_00_model_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ),
    "zero3": ("zero_pp_rank_1_mp_rank_00_model_states.pt",),
    "universal": ("zero/w/fp32.pt", "zero/optimizer_state.pt"),
    "deepspeed run": ("latest",),
}
_NO_FILE = (
    r"(no|not a) directory|Too many levels|(no|not a) regular file|missing|no file|"
    r"is not a distributed|not there|lacks|tells of|lists"
)
_number = 0
for _kind, _names in FILES.items():
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
